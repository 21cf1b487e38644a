//! Several processes: exclusion, death, and one that is stopped.

use palisade::engine::Left;
use palisade::report::Scope;
use palisade::{ErrorKind, Eviction, Outcome};
use rustix::process::Signal;
use tokio::task::JoinHandle;

use super::child::{ROUNDS, Second};
use super::*;

/// What a hand-over may take after the death of a holder: the kernel tells, not the ttl of 30 s.
const AT_ONCE: Duration = Duration::from_secs(5);

#[tokio::test]
async fn processes_that_create_at_once_exclude_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("made/by/them");
    let seconds: Vec<_> = (0..4).map(|_| Second::start(&store, "count")).collect();
    for second in &seconds {
        assert_eq!(second.says(), "done");
    }
    let text = std::fs::read_to_string(store.join("count")).unwrap();
    assert_eq!(text.split_once(' ').unwrap().0, (4 * ROUNDS).to_string());
    seconds.into_iter().for_each(Second::end);
    let left_behind = std::fs::read_dir(store.join("procs")).unwrap().count();
    assert_eq!(left_behind, 0);
}

fn spawn_wait(engine: &SharedEngine, ticket: Ticket) -> JoinHandle<Result<Place>> {
    let engine = engine.clone();
    tokio::spawn(async move { engine.wait(ticket, BootTime::now() + PATIENCE).await })
}

#[tokio::test]
async fn a_killed_holder_is_replaced_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let second = Second::start(dir.path(), "hold");
    let theirs: u64 = second.says().parse().unwrap();
    let engine = open(dir.path()).await;
    let (ticket, sequence) = enter(&engine, claim("door", Ask::Whole)).await;
    assert_eq!(sequence, None);
    let wait = spawn_wait(&engine, ticket);
    // Let it fall asleep; if it has not, the test is easier, not wrong.
    tokio::time::sleep(Duration::from_millis(50)).await;
    let killed = BootTime::now();
    second.signal(Signal::KILL);
    let place = wait.await.unwrap().unwrap();
    let took = BootTime::now().saturating_since(killed);
    let Place::Held { sequence } = place else {
        panic!("{place:?}");
    };
    assert!(sequence > theirs);
    assert!(took < AT_ONCE, "{took:?}");
    println!("hand-over after kill -9: {took:?}");
}

/// The ttl of a claim that is not renewed.
pub(crate) const SHORT: Duration = Duration::from_millis(1500);

#[tokio::test]
async fn a_place_by_lease_outlives_its_killed_process_and_its_waiters_do_not() {
    let dir = tempfile::tempdir().unwrap();
    let before = BootTime::now();
    let second = Second::start(dir.path(), "hold by lease");
    let theirs: u64 = second.says().parse().unwrap();
    let waiting = Second::start(dir.path(), "hold by lease");
    assert_eq!(waiting.says(), "0", "it waits");
    let engine = open(dir.path()).await;
    let (ticket, sequence) = enter(&engine, claim("door", Ask::Whole)).await;
    assert_eq!(sequence, None);
    second.signal(Signal::KILL);
    waiting.signal(Signal::KILL);
    let Place::Held { sequence } = pushed(&engine, &ticket).await else {
        panic!("it is granted");
    };
    let took = BootTime::now().saturating_since(before);
    assert!(took >= SHORT, "granted after {took:?}, within the lease");
    assert!(took < 2 * SHORT, "the dead waiter is passed over: {took:?}");
    assert!(sequence > theirs);
}

#[tokio::test]
async fn the_dead_make_nobody_wait() {
    let (dir, engine) = store().await;
    for role in ["hold", "read"] {
        let second = Second::start(dir.path(), role);
        second.says();
        drop(second);
        // Neither a claim that does not queue, nor one of another capacity.
        let permit = Ask::Part {
            weight: 1,
            capacity: 5,
        };
        let impatient = Claim {
            queue: false,
            ..claim("door", permit)
        };
        let (ticket, sequence) = enter(&engine, impatient).await;
        assert!(sequence.is_some(), "{role}");
        engine.leave(ticket).await.unwrap();
    }
    let second = Second::start(dir.path(), "hold");
    second.says();
    drop(second);
    let lines = engine.survey(Scope::Prefix(String::new())).await.unwrap();
    assert_eq!(lines, []);
}

#[tokio::test]
async fn a_dead_waiter_is_passed_over() {
    let (dir, engine) = store().await;
    let held = hold(&engine, "door").await;
    let second = Second::start(dir.path(), "wait");
    assert_eq!(second.says(), "waiting");
    let (ticket, _) = enter(&engine, claim("door", Ask::Whole)).await;
    drop(second);
    let (place, left) = tokio::join!(pushed(&engine, &ticket), engine.leave(held));
    assert_eq!(left.unwrap(), Left::Done);
    assert!(matches!(place, Place::Held { .. }), "{place:?}");
}

#[tokio::test]
async fn a_waiter_hears_of_the_holder_it_came_to_stand_behind() {
    let (dir, engine) = store().await;
    let holder = Second::start(dir.path(), "hold");
    holder.says();
    let (ahead, _) = enter(&engine, claim("door", Ask::Whole)).await;
    let (ticket, _) = enter(&engine, claim("door", Ask::Whole)).await;
    let wait = spawn_wait(&engine, ticket);
    tokio::time::sleep(Duration::from_millis(50)).await;
    // It slept on `ahead` alone; now only the other process is before it.
    engine.leave(ahead).await.unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    let killed = BootTime::now();
    holder.signal(Signal::KILL);
    let place = wait.await.unwrap().unwrap();
    assert!(matches!(place, Place::Held { .. }), "{place:?}");
    assert!(BootTime::now().saturating_since(killed) < AT_ONCE);
}

#[tokio::test]
async fn a_hold_lives_until_all_who_share_its_sign_of_life_are_gone() {
    let dir = tempfile::tempdir().unwrap();
    let second = Second::start(dir.path(), "guarded");
    let guard = second.says().parse().unwrap();
    let guard = rustix::process::Pid::from_raw(guard).unwrap();
    drop(second);
    let engine = open(dir.path()).await;
    let (ticket, sequence) = enter(&engine, claim("door", Ask::Whole)).await;
    assert_eq!(sequence, None);
    let soon = BootTime::now() + Duration::from_millis(200);
    let place = engine.wait(ticket.clone(), soon).await.unwrap();
    assert_eq!(place, Place::Waiting);
    let wait = spawn_wait(&engine, ticket);
    rustix::process::kill_process(guard, Signal::KILL).unwrap();
    let killed = BootTime::now();
    let place = wait.await.unwrap().unwrap();
    assert!(matches!(place, Place::Held { .. }), "{place:?}");
    assert!(BootTime::now().saturating_since(killed) < AT_ONCE);
}

#[tokio::test]
async fn another_process_is_granted_by_a_push() {
    granted_by_a_push("wait").await;
}

#[tokio::test]
async fn a_runtime_without_io_is_woken_all_the_same() {
    granted_by_a_push("wait without I/O").await;
}

async fn granted_by_a_push(role: &str) {
    let (dir, engine) = store().await;
    let held = hold(&engine, "door").await;
    let second = Second::start(dir.path(), role);
    assert_eq!(second.says(), "waiting");
    let sequence = held.sequence;
    engine.leave(held).await.unwrap();
    assert!(second.says().parse::<u64>().unwrap() > sequence);
}

#[tokio::test]
async fn child_programs_inherit_nothing() {
    let (dir, engine) = store().await;
    let held = hold(&engine, "a").await;
    let (waiter, _) = enter(&engine, claim("a", Ask::Whole)).await;
    // Everything that is opened later is open now: the thread that wakes, and its files.
    let soon = BootTime::now() + Duration::from_millis(20);
    engine.wait(waiter, soon).await.unwrap();
    let listed = std::process::Command::new("ls")
        .args(["-l", "/proc/self/fd"])
        .output();
    let listed = String::from_utf8(listed.unwrap().stdout).unwrap();
    let store = dir.path().canonicalize().unwrap();
    assert!(listed.contains("->"), "{listed}");
    assert!(!listed.contains(store.to_str().unwrap()), "{listed}");
    engine.leave(held).await.unwrap();
}

#[tokio::test]
async fn another_process_hears_that_it_is_evicted() {
    let dir = tempfile::tempdir().unwrap();
    let second = Second::start(dir.path(), "victim");
    let id = second.says();
    let engine = open(dir.path()).await;
    let door = Name::new("door").unwrap();
    assert!(engine.evict(door, id, Eviction::Mark).await.unwrap());
    assert_eq!(second.says(), "evicted");
}

#[tokio::test]
async fn a_process_stopped_in_a_line_makes_that_one_unreachable_and_nothing_is_applied_later() {
    let dir = tempfile::tempdir().unwrap();
    let engine = try_open(dir.path(), "timeout=200ms").await.unwrap();
    let held = hold(&engine, "mine").await;
    let door = hold(&engine, "door").await;
    let second = Second::start(dir.path(), "stop in the line");
    assert_eq!(second.says(), "locked");
    second.wait_stopped();

    let before = BootTime::now();
    let entering = engine.enter(Arc::new(claim("door", Ask::Whole)));
    let leaving = engine.leave(door.clone());
    let (entered, left) = tokio::join!(entering, leaving);
    let took = BootTime::now().saturating_since(before);
    for error in [entered.unwrap_err(), left.unwrap_err()] {
        assert_eq!(error.kind(), ErrorKind::Unreachable);
        assert_eq!(error.outcome(), Outcome::NotApplied);
    }
    assert!(took >= Duration::from_millis(200) && took < Duration::from_secs(5));
    // One that is dropped while it waits for its turn.
    let entering = engine.enter(Arc::new(claim("door", Ask::Whole)));
    let dropped = tokio::time::timeout(Duration::from_millis(20), entering).await;
    assert!(dropped.is_err());
    // Neither other lines nor renewals are in its way.
    let leases = [&held, &door].map(Lease::in_a_test);
    let renewed = engine.renew(leases.into(), Duration::from_secs(2)).await;
    assert!(matches!(renewed[..], [Renewal::Held(_), Renewal::Held(_)]));
    assert_eq!(engine.leave(held).await.unwrap(), Left::Done);
    hold(&engine, "other").await;

    second.signal(Signal::CONT);
    second.end();
    let lines = engine.survey(Scope::Line(door.name.clone())).await.unwrap();
    assert_eq!((lines[0].holders.len(), lines[0].waiters.len()), (1, 0));
    assert_eq!(engine.leave(door).await.unwrap(), Left::Done);
}

/// In a crowd everyone looks every second: who then needs the line's lock keeps the holder from it.
#[tokio::test]
async fn whoever_only_looks_takes_no_lock() {
    let dir = tempfile::tempdir().unwrap();
    let engine = try_open(dir.path(), "timeout=200ms").await.unwrap();
    let door = hold(&engine, "door").await;
    let (waiter, _) = enter(&engine, claim("door", Ask::Whole)).await;
    let second = Second::start(dir.path(), "stop in the line");
    assert_eq!(second.says(), "locked");
    second.wait_stopped();

    let until = BootTime::now() + Duration::from_millis(20);
    let place = engine.wait(waiter.clone(), until).await.unwrap();
    assert_eq!(place, Place::Waiting);
    let lines = engine.survey(Scope::Line(door.name.clone())).await.unwrap();
    assert_eq!((lines[0].holders.len(), lines[0].waiters.len()), (1, 1));

    second.signal(Signal::CONT);
    second.end();
    assert_eq!(engine.leave(door).await.unwrap(), Left::Done);
    assert!(matches!(pushed(&engine, &waiter).await, Place::Held { .. }));
}

/// In a line that is older than a ttl the renewals of others are looked up by whoever stands
/// behind them, and not by everyone at every look.
#[tokio::test]
async fn only_those_are_looked_up_whom_a_claim_waits_for() {
    let (dir, engine) = store().await;
    hold(&engine, "door").await;
    enter(&engine, claim("door", Ask::Whole)).await;
    let second = Second::start(dir.path(), "hold shortly");
    second.says();
    let (behind, _) = enter(&engine, claim("door", Ask::Whole)).await;
    second.signal(Signal::STOP);
    second.wait_stopped();
    // Its ttl is a second.
    tokio::time::sleep(Duration::from_millis(1100)).await;
    // The body of the line: how long it is, and where, says the header.
    let seats = || {
        let text = std::fs::read_to_string(dir.path().join("lines/palisade,door")).unwrap();
        let number = |after: &str| {
            let at = text.find(after).unwrap() + after.len();
            usize::from_str_radix(&text[at..at + 8], 16).unwrap()
        };
        let body = &text[number(" at ")..][..number(" size ")];
        body.lines().count() - 1
    };
    enter(&engine, claim("door", Ask::Whole)).await;
    assert_eq!(seats(), 5, "nobody has asked for its renewals");

    let until = BootTime::now() + Duration::from_millis(20);
    assert_eq!(engine.wait(behind, until).await.unwrap(), Place::Waiting);
    let lines = engine.survey(Scope::Prefix(String::new())).await.unwrap();
    assert_eq!(lines[0].waiters.len(), 3, "it has ended");
    second.signal(Signal::CONT);
    assert_eq!(second.says(), "Lost");
}

/// Whoever is in the store needs its lock no more: only newcomers wait for it.
#[tokio::test]
async fn a_stuck_lock_of_the_store_ends_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let engine = try_open(dir.path(), "timeout=200ms").await.unwrap();
    let held = hold(&engine, "mine").await;
    let second = Second::start(dir.path(), "stop in the lock");
    assert_eq!(second.says(), "locked");
    second.wait_stopped();
    assert!(matches!(renew(&engine, &held).await, Renewal::Held(_)));
    hold(&engine, "other").await;
    assert_eq!(engine.leave(held).await.unwrap(), Left::Done);
    // The same store of this process needs no lock to be opened.
    assert!(try_open(&dir.path().join("."), "").await.is_ok());
}

#[tokio::test]
async fn a_new_process_does_not_hang_behind_a_stopped_one() {
    let dir = tempfile::tempdir().unwrap();
    drop(open(dir.path()).await);
    let second = Second::start(dir.path(), "stop in the lock");
    assert_eq!(second.says(), "locked");
    second.wait_stopped();
    let error = match try_open(dir.path(), "connect_timeout=200ms").await {
        Ok(_) => panic!("the lock is taken"),
        Err(error) => error,
    };
    assert_eq!(error.kind(), ErrorKind::Unreachable);
}

#[tokio::test]
async fn a_client_that_ends_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let url = format!("file:{}", dir.path().display());
    let signs = || std::fs::read_dir(dir.path().join("procs")).unwrap().count();
    let client = palisade::connect(&url).await.unwrap();
    client
        .mutex("door")
        .lock()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    drop(client.mutex("door").lock().await.unwrap());
    assert_eq!(signs(), 1);
    client.close().await;
    assert_eq!(signs(), 0);

    // One that is still in use stays.
    let client = palisade::connect(&url).await.unwrap();
    let hold = client.mutex("door").lock().await.unwrap();
    client.close().await;
    assert!(hold.is_valid() && signs() == 1);
}

#[tokio::test]
async fn whoever_only_looks_makes_no_store() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("a/b");
    let url = format!("file:{}", store.display());
    assert!(palisade::connect_existing(&url).await.unwrap().is_none());
    assert!(!dir.path().join("a").exists());
    drop(palisade::connect(&url).await.unwrap());
    assert!(palisade::connect_existing(&url).await.unwrap().is_some());
    let memory = palisade::connect_existing("memory:").await.unwrap();
    assert!(memory.is_some());
}

#[tokio::test]
async fn what_the_dead_left_is_removed_by_whoever_comes_alone() {
    let dir = tempfile::tempdir().unwrap();
    Second::start(dir.path(), "hold").says();
    std::fs::write(dir.path().join("lines/.new-1"), "half").unwrap();
    let files = || std::fs::read_dir(dir.path().join("lines")).unwrap().count();
    assert_eq!(files(), 2);
    let engine = open(dir.path()).await;
    assert_eq!(files(), 0);
    drop(engine);
}
