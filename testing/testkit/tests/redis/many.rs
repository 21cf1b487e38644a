//! Many locks at once, and many runtimes.

use std::time::{Duration, Instant};

use palisade::{ErrorKind, Hold};
use palisade_testkit::lab::proxy::to_client;
use tokio::task::JoinSet;

use super::support::{Server, cycle, fails, line, mutex, soon, until};

/// What is left behind stays for longer than any test waits.
const TTL: Duration = Duration::from_secs(120);

/// Takes `count` locks at the same time.
async fn take(client: &palisade::Client, count: usize, ttl: Duration) -> Vec<Hold> {
    let mut tasks = JoinSet::new();
    for at in 0..count {
        let lock = mutex(client, &format!("many-{at}"), ttl);
        tasks.spawn(async move { lock.lock().await.unwrap() });
    }
    soon("all locks", tasks.join_all()).await
}

/// Requests of many tasks share a connection, and each gets its own answer, even if some meet a key
/// of another type, or a name that is in use.
#[tokio::test]
async fn requests_at_once_have_their_own_answers() {
    const COUNT: usize = 200;
    let server = need!(Server::start());
    let client = server.direct_client("").await;
    server.ask(&["RPUSH", "palisade:list", "x"]);
    server.ask(&["SET", "palisade:theirs", "x", "PX", "60000"]);
    let ours = mutex(&client, "ours", TTL);
    let held = ours.lock().await.unwrap();
    let (list, theirs) = (mutex(&client, "list", TTL), mutex(&client, "theirs", TTL));
    let (holds, list, theirs, ours) = tokio::join!(
        take(&client, COUNT, TTL),
        list.try_lock(),
        theirs.try_lock(),
        ours.try_lock(),
    );
    fails(list, ErrorKind::Unusable);
    assert!(theirs.unwrap().is_none());
    assert!(ours.unwrap().is_none() && held.is_valid());
    for hold in &holds {
        let key = format!("palisade:{}", hold.name());
        assert_eq!(server.ask(&["GET", &key]), hold.claim().to_string());
    }
    let mut tasks = JoinSet::new();
    for hold in holds {
        tasks.spawn(hold.release());
    }
    for released in soon("all releases", tasks.join_all()).await {
        released.unwrap();
    }
    assert_eq!(line(&client, "many-0").await, None);
    assert_eq!(
        server.ask(&["EXISTS", "palisade:many-1", "palisade:many-199"]),
        "0"
    );
}

/// The server is distant: an answer takes more than half of a request's timeout. Free locks don't
/// wait for each other nevertheless.
#[tokio::test]
async fn free_locks_of_a_far_server_do_not_wait_for_each_other() {
    let server = need!(Server::start());
    let client = server.client("timeout=2s").await;
    cycle(&mutex(&client, "warm", TTL)).await;
    let _far = server
        .proxy
        .inject(to_client().delay(Duration::from_millis(1100)));
    let start = Instant::now();
    let holds = take(&client, 64, TTL).await;
    let took = start.elapsed();
    assert!(
        took < Duration::from_secs(20),
        "64 free locks took {took:?}"
    );
    assert!(holds.iter().all(Hold::is_valid));
}

/// Locks that come and go, sometimes few and sometimes many at a time: a task that sends a batch
/// may carry requests of others, and each gets its own answer.
#[tokio::test]
async fn locks_that_come_and_go_have_their_own_answers() {
    let server = need!(Server::start());
    let client = server.direct_client("timeout=10s").await;
    let mut tasks = JoinSet::new();
    for at in 0..24 {
        let lock = mutex(&client, &format!("many-{at}"), TTL);
        tasks.spawn(async move {
            let mut last = None;
            for round in 0..400 {
                let hold = lock.try_lock().await.unwrap().expect("nobody else has it");
                assert!(last < Some(hold.token()), "{last:?} {:?}", hold.token());
                last = Some(hold.token());
                hold.release().await.unwrap();
                // Separated for a moment, so that some requests are sent alone.
                if (round + at) % 7 == 0 {
                    tokio::time::sleep(Duration::from_millis(round as u64 % 5)).await;
                }
            }
        });
    }
    tokio::time::timeout(Duration::from_secs(60), tasks.join_all())
        .await
        .expect("all rounds");
}

/// A name without permission fails, and affects no other lock.
#[tokio::test]
async fn a_name_without_rights_fails_alone() {
    let server = need!(Server::start());
    server.user(&[
        "allchannels",
        "~palisade:many*",
        "~{palisade:many*",
        "+@all",
    ]);
    let url = server
        .direct("")
        .replace("redis://", "redis://locks:hunter2@");
    let client = palisade::connect(&url).await.unwrap();
    let other = mutex(&client, "secret", TTL);
    let (one, two, three, denied) = tokio::join!(
        take(&client, 20, TTL),
        other.try_lock(),
        other.lock_timeout(Duration::from_secs(30)),
        other.try_lock(),
    );
    assert_eq!(one.len(), 20);
    for denied in [two, three, denied] {
        assert_eq!(denied.err().unwrap().kind(), ErrorKind::Denied);
    }
}

/// A caller that is dropped while its request is in flight affects no other request and leaves
/// nothing behind.
#[tokio::test]
async fn a_dropped_caller_costs_the_others_nothing() {
    const COUNT: usize = 60;
    let server = need!(Server::start());
    let client = server.client("timeout=10s").await;
    cycle(&mutex(&client, "warm", TTL)).await;
    let late = server.proxy.inject(
        to_client()
            .label_contains("EVALSHA")
            .delay(Duration::from_millis(300)),
    );
    let mut tasks = [JoinSet::new(), JoinSet::new()];
    for at in 0..COUNT {
        let lock = mutex(&client, &format!("many-{at}"), TTL);
        tasks[(at % 3).min(1)].spawn(async move { lock.try_lock().await });
    }
    let [kept, dropped] = tasks;
    until("an answer", async || late.hits() >= 1).await;
    drop(dropped);
    let holds = soon("the others", kept.join_all()).await;
    drop(late);
    for hold in holds {
        // Tried once: a failed call would be an error here.
        assert!(hold.unwrap().unwrap().is_valid());
    }
    let judge = server.direct_client("").await;
    for at in (0..COUNT).filter(|at| at % 3 != 0) {
        until("an empty line", async || {
            line(&judge, &format!("many-{at}")).await.is_none()
        })
        .await;
    }
}

/// Renewals are batched: those that are due at the same time are sent together.
#[tokio::test]
async fn many_holds_are_renewed_in_few_round_trips() {
    const COUNT: u64 = 2000;
    let ttl = Duration::from_secs(15);
    let server = need!(Server::start());
    let client = server.direct_client("timeout=10s").await;
    let holds = take(&client, COUNT as usize, ttl).await;
    server.ask(&["CONFIG", "RESETSTAT"]);
    // Each renewal extends the key and its record.
    until("two renewals of all", async || {
        server.calls("pexpire") >= 2 * 2 * COUNT
    })
    .await;
    let renewed = server.calls("pexpire") / 2;
    let stats = server.ask(&["INFO", "stats"]);
    let reads = stats
        .lines()
        .find_map(|line| line.strip_prefix("total_reads_processed:"));
    let reads: u64 = reads.unwrap().trim().parse().unwrap();
    // Our own queries take one or two reads each, and the end of their connection one more.
    let reads = reads.saturating_sub(3 * server.calls("info"));
    assert!(reads < renewed / 4, "{reads} reads for {renewed} leases");
    assert!(holds.iter().all(Hold::is_valid));
}

/// A client outlives the runtimes that use it: their connections end with them.
#[test]
fn ended_runtimes_leave_no_descriptors_behind() {
    let server = need!(Server::start());
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let lasting = tokio::runtime::Runtime::new().unwrap();
    let client = lasting.block_on(server.direct_client(""));
    let mut before = 0;
    for round in 0..50 {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let hold = mutex(&client, "short", TTL).lock().await.unwrap();
            hold.release().await.unwrap();
        });
        if round == 0 {
            before = descriptors();
        }
    }
    // Other tests of this process also open and close descriptors.
    let more = descriptors().saturating_sub(before);
    assert!(more < 40, "{more} descriptors more");
}
