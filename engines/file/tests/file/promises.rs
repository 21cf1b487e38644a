//! What a process promises to others by lease, across a reboot: nothing is granted while anyone may
//! rely on it, and no longer than that.

use palisade::engine::Left;
use rustix::process::Signal;

use super::child::Second;
use super::damage::reboot;
use super::processes::SHORT;
use super::*;

const DAY: Duration = Duration::from_secs(24 * 3600);

fn by_lease(name: &str, ttl: Duration) -> Claim {
    Claim {
        ttl,
        ..claim(name, Ask::Whole)
    }
}

async fn gateway(dir: &Path) -> SharedEngine {
    try_open(dir, "ends_with=lease&timeout=200ms")
        .await
        .unwrap()
}

/// The longest ttl that each process has promised, in seconds.
fn promised(dir: &Path) -> Vec<u64> {
    let Ok(files) = std::fs::read_dir(dir.join("promised")) else {
        return Vec::new();
    };
    let read = |file: std::fs::DirEntry| std::fs::read_to_string(file.path()).ok();
    let files = files.filter_map(|file| read(file.unwrap()));
    let number = |text: String| text.split(' ').next().unwrap().parse::<u64>().unwrap();
    let mut all: Vec<u64> = files.map(|text| number(text) / 1_000_000_000).collect();
    all.sort_unstable();
    all
}

async fn until(what: &str, test: impl Fn() -> bool) {
    let deadline = BootTime::now() + PATIENCE;
    while !test() {
        assert!(!deadline.has_passed(), "{what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Waits until someone can be granted; says how long that took.
async fn granted(engine: &SharedEngine) -> Duration {
    let before = BootTime::now();
    let again = Arc::new(claim("after", Ask::Whole));
    while let Err(error) = engine.enter(Arc::clone(&again)).await {
        assert!(error.is_transient(), "{error}");
        assert!(error.to_string().contains("rebooted"), "{error}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    BootTime::now().saturating_since(before)
}

#[tokio::test]
async fn what_was_promised_before_a_reboot_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let engine = try_open(dir.path(), "ends_with=lease").await.unwrap();
    let held = Claim {
        ttl: SHORT,
        ..claim("door", Ask::Whole)
    };
    enter(&engine, held).await;
    drop(engine);
    reboot(dir.path());
    let before = BootTime::now();
    let engine = open(dir.path()).await;
    let again = Arc::new(claim("door", Ask::Whole));
    let refused = engine.enter(Arc::clone(&again)).await.unwrap_err();
    assert!(refused.is_transient(), "{refused}");
    while engine.enter(Arc::clone(&again)).await.is_err() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let took = BootTime::now().saturating_since(before);
    assert!(took >= SHORT, "granted after {took:?}");
}

/// One long claim of anyone, at any time, does not make everyone wait after every boot.
#[tokio::test]
async fn what_nobody_relies_on_is_taken_back() {
    let dir = tempfile::tempdir().unwrap();
    let engine = gateway(dir.path()).await;
    let (long, _) = enter(&engine, by_lease("long", DAY)).await;
    let (other, _) = enter(&engine, by_lease("other", 4 * SHORT)).await;
    assert_eq!(promised(dir.path()), [DAY.as_secs()]);
    // Another process has its own promise, which stays as it is, here because it was killed.
    let second = Second::start(dir.path(), "hold by lease");
    second.says();
    second.signal(Signal::KILL);
    assert_eq!(promised(dir.path()), [1, DAY.as_secs()]);
    assert_eq!(engine.leave(long).await.unwrap(), Left::Done);
    // Long enough for what is taken back to be gone.
    tokio::time::sleep(SHORT).await;
    assert_eq!(promised(dir.path()), [1, DAY.as_secs()], "one is left");
    assert_eq!(engine.leave(other).await.unwrap(), Left::Done);
    until("it is taken back", || promised(dir.path()) == [1]).await;
    // And given again.
    let (again, _) = enter(&engine, by_lease("again", DAY)).await;
    assert_eq!(promised(dir.path()), [1, DAY.as_secs()]);
    assert_eq!(engine.leave(again).await.unwrap(), Left::Done);
    until("it is taken back", || promised(dir.path()) == [1]).await;
    drop((second, engine));
    // The thread that took it back may have the store open for a moment longer.
    let signs = || std::fs::read_dir(dir.path().join("procs")).unwrap().count();
    until("the store is closed", || signs() == 1).await;
    reboot(dir.path());
    let before = BootTime::now();
    granted(&open(dir.path()).await).await;
    let took = BootTime::now().saturating_since(before);
    assert!(took >= SHORT, "{took:?}");
    assert!(took < 4 * SHORT, "{took:?}");
}

/// Its enter was dropped, so it may have a place.
#[tokio::test]
async fn a_claim_in_doubt_keeps_its_promise() {
    let dir = tempfile::tempdir().unwrap();
    let engine = gateway(dir.path()).await;
    let door = hold(&engine, "door").await;
    let second = Second::start(dir.path(), "stop in the line");
    assert_eq!(second.says(), "locked");
    second.wait_stopped();
    let entering = engine.enter(Arc::new(by_lease("door", 2 * SHORT)));
    let dropped = tokio::time::timeout(Duration::from_millis(20), entering).await;
    assert!(dropped.is_err());
    second.signal(Signal::CONT);
    second.end();
    let before = BootTime::now();
    assert_eq!(engine.leave(door).await.unwrap(), Left::Done);
    until("it is taken back", || promised(dir.path()).is_empty()).await;
    assert!(BootTime::now().saturating_since(before) > SHORT);
}

/// A renewal prolongs what a client relies on, even if the claim is then lost.
#[tokio::test]
async fn a_lost_claim_keeps_its_promise_as_long_as_it_was_renewed() {
    let dir = tempfile::tempdir().unwrap();
    let engine = gateway(dir.path()).await;
    let (long, _) = enter(&engine, by_lease("long", 2 * SHORT)).await;
    tokio::time::sleep(SHORT).await;
    assert!(matches!(renew(&engine, &long).await, Renewal::Held(_)));
    let renewed = BootTime::now();
    std::fs::remove_file(dir.path().join("lines/palisade,long")).unwrap();
    assert!(matches!(renew(&engine, &long).await, Renewal::Revoked(_)));
    let (other, _) = enter(&engine, by_lease("other", SHORT)).await;
    assert_eq!(engine.leave(other).await.unwrap(), Left::Done);
    until("it is taken back", || promised(dir.path()).is_empty()).await;
    let took = BootTime::now().saturating_since(renewed);
    assert!(took + Duration::from_millis(50) > 2 * SHORT, "{took:?}");
}

#[tokio::test]
async fn what_was_waited_for_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let second = Second::start(dir.path(), "hold by lease");
    second.says();
    drop(second);
    // Two boots before anyone could be granted: it is waited for from the second one on.
    for _ in 0..2 {
        reboot(dir.path());
        drop(open(dir.path()).await);
        assert_eq!(promised(dir.path()), [1]);
    }
    let engine = open(dir.path()).await;
    granted(&engine).await;
    drop(engine);
    drop(open(dir.path()).await);
    assert_eq!(promised(dir.path()), Vec::<u64>::new());
    reboot(dir.path());
    let took = granted(&open(dir.path()).await).await;
    assert!(took < SHORT, "{took:?}");
}

/// Earlier versions had one file for all processes.
#[tokio::test]
async fn the_promise_of_an_earlier_version_counts_and_is_removed_as_well() {
    for killed_while_moving in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        drop(open(dir.path()).await);
        let name = if killed_while_moving {
            "promised.old"
        } else {
            "promised"
        };
        let nanos = SHORT.as_nanos().to_string();
        std::fs::write(dir.path().join(name), nanos + "\n").unwrap();
        mode(&dir.path().join(name));
        // A new promise beside it.
        let engine = gateway(dir.path()).await;
        enter(&engine, by_lease("short", Duration::from_millis(200))).await;
        assert_eq!(promised(dir.path()), [0, 1]);
        drop(engine);
        reboot(dir.path());
        let engine = open(dir.path()).await;
        let took = granted(&engine).await;
        assert!(took >= SHORT - Duration::from_millis(100), "{took:?}");
        drop(engine);
        drop(open(dir.path()).await);
        assert_eq!(promised(dir.path()), Vec::<u64>::new());
    }
}

fn mode(file: &Path) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(file, std::fs::Permissions::from_mode(0o600)).unwrap();
}
