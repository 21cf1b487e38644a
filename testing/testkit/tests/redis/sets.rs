//! Replicated servers: failovers that lose a lock, one that keeps it, a slot of a Cluster that
//! moves while its locks are held, and TLS to all of them.

use std::time::Duration;

use palisade::engine::{Lease, Renewal};
use palisade::fence::{Fence, MemoryFence, Verdict};
use palisade::report::Scope;
use palisade::{Client, ErrorKind, Hold, LossReason, Name};
use palisade_testkit::lab::launch::{self, Running, wire};
use palisade_testkit::lab::trial::{certificates, started};

use super::support::{cycle, fails, soon, until};

/// Sentinels notice a death after a second, agree and promote; on a busy machine that takes a
/// while.
const FAILOVER: Duration = Duration::from_secs(17);

async fn in_time<F: Future>(what: &str, future: F) -> F::Output {
    let done = tokio::time::timeout(FAILOVER, future).await;
    done.unwrap_or_else(|_| panic!("{what} did not happen within {FAILOVER:?}"))
}

/// A client that reaches the new master knows of the switch.
async fn knows_the_new_master(client: &Client) {
    in_time("the new master", async {
        let look = || client.survey(Scope::Line(Name::new("any").unwrap()));
        let brief = Duration::from_millis(300);
        while !matches!(tokio::time::timeout(brief, look()).await, Ok(Ok(_))) {}
    })
    .await;
}

async fn connect(running: &Running) -> Client {
    let url = format!("{}?namespace=", running.url());
    palisade::connect(&url).await.unwrap()
}

fn ask(running: &Running, node: usize, command: &[&str]) -> String {
    wire::redis(running.nodes()[node].port(), command).unwrap_or_else(|why| why)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_that_a_failover_loses_is_told_and_the_next_token_is_greater() {
    let Some(set) = launch::need("redis-sentinel") else {
        return;
    };
    let client = connect(&set).await;
    // The replica receives nothing more, and keeps its data.
    let nowhere = launch::free_port().to_string();
    assert_eq!(ask(&set, 1, &["REPLICAOF", "127.0.0.1", &nowhere]), "OK");
    let mutex = client.mutex("job").ttl(Duration::from_secs(30));
    let hold = mutex.lock().await.unwrap();
    set.nodes()[0].kill().unwrap();
    // A renewal learns it from the new master, long before the deadline.
    let loss = in_time("the loss", hold.lost()).await;
    assert_eq!(loss.reason, LossReason::Taken, "{loss}");
    assert!(!hold.is_valid());
    let next = in_time("the next grant", mutex.lock()).await.unwrap();
    assert_eq!(ask(&set, 1, &["GET", "job"]), next.claim().to_string());
    fenced_off(&next, &hold).await;
}

/// The token of the next holder is greater, so a fence refuses the previous one.
async fn fenced_off(next: &Hold, before: &Hold) {
    let (storage, data) = (MemoryFence::default(), Name::new("data").unwrap());
    for (hold, accepted) in [(next, true), (before, false)] {
        let token = hold.token().into();
        let verdict = storage.write(&data, token, Vec::new()).await.unwrap();
        assert_eq!(
            verdict == Verdict::Accepted,
            accepted,
            "{next:?} {before:?}"
        );
    }
}

/// The same in a Cluster, whose masters agree on the replica that takes over.
#[tokio::test(flavor = "multi_thread")]
async fn a_lock_that_a_failover_of_a_cluster_loses_is_told() {
    let Some(cluster) = launch::need("redis-cluster-replica") else {
        return;
    };
    let client = connect(&cluster).await;
    let is_of_first = |name: &String| {
        let slot = ask(&cluster, 0, &["CLUSTER", "KEYSLOT", name]);
        slot.parse::<u32>().unwrap() < 16_384 / 3
    };
    let mut names = (0..).map(|at| format!("job-{at}"));
    let name = names.find(is_of_first).unwrap();
    let replica = 3;
    let link = || ask(&cluster, replica, &["INFO", "replication"]);
    // With a wrong password for the master, the replica receives nothing more.
    for command in [
        &["CONFIG", "SET", "masterauth", "wrong"][..],
        &["CLIENT", "KILL", "TYPE", "master"],
    ] {
        ask(&cluster, replica, command);
    }
    until("the replica is cut off", async || {
        link().contains("master_link_status:down")
    })
    .await;
    let mutex = client.mutex(name.as_str()).ttl(Duration::from_secs(30));
    let hold = mutex.lock().await.unwrap();
    cluster.nodes()[0].kill().unwrap();
    let loss = in_time("the loss", hold.lost()).await;
    assert_eq!(loss.reason, LossReason::Taken, "{loss}");
    assert!(!hold.is_valid());
    let next = in_time("the next grant", async {
        loop {
            // Meanwhile there is no master.
            if let Ok(next) = mutex.lock().await {
                return next;
            }
        }
    });
    let next = next.await;
    let kept = ask(&cluster, replica, &["GET", &name]);
    assert_eq!(kept, next.claim().to_string());
    fenced_off(&next, &hold).await;
}

/// TLS is used for every server, including those that another one names: no other port is open.
#[tokio::test(flavor = "multi_thread")]
async fn sets_speak_tls_all_the_way() {
    let folder = tempfile::tempdir().unwrap();
    if let Err(why) = certificates(folder.path(), "IP:127.0.0.1") {
        return launch::skip("redis", &why);
    }
    let ca = folder.path().join("ca.pem").display().to_string();
    let settings = ["--tls", folder.path().to_str().unwrap()];
    for (engine, servers, options) in [
        ("redis5", 5, "&restart_guard=off&node_timeout=1s"),
        ("redis-sentinel", 2, ""),
        ("redis-cluster", 3, ""),
    ] {
        let Some(set) = started(engine, &settings) else {
            return;
        };
        assert!(set.url().starts_with("rediss+"), "{}", set.url());
        for server in 0..servers {
            assert_eq!(ask(&set, server, &["CONFIG", "SET", "port", "0"]), "OK");
        }
        let url = format!("{}?tls_ca={ca}{options}", set.url());
        let client = palisade::connect(&url).await.unwrap();
        let other = palisade::connect(&url).await.unwrap();
        for name in ["a", "b", "c", "d", "e", "f"] {
            let hold = client.mutex(name).lock().await.unwrap();
            assert!(other.mutex(name).try_lock().await.unwrap().is_none());
            let mutex = other.mutex(name);
            let wait = tokio::spawn(async move { cycle(&mutex).await });
            hold.release().await.unwrap();
            soon("the next one", wait).await.unwrap();
        }
        for wrong in [url.replace("ca.pem", "other.pem"), set.url().to_owned()] {
            let refused = soon("a refusal", palisade::connect(&wrong)).await;
            let refused = fails(refused, ErrorKind::Config);
            assert!(
                refused.to_string().contains("tls_ca"),
                "{engine}: {refused}"
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_that_was_replicated_survives_and_the_old_master_does_not_count() {
    let Some(set) = launch::need("redis-sentinel") else {
        return;
    };
    let client = connect(&set).await;
    let hold = client
        .mutex("job")
        .ttl(Duration::from_secs(40))
        .lock()
        .await
        .unwrap();
    until("the replica has it", async || {
        ask(&set, 1, &["GET", "job"]) == hold.claim().to_string()
    })
    .await;
    set.nodes()[0].stop().unwrap();
    set.leader_where(|leader| leader == 1).unwrap();
    // It still considers itself the master for some seconds.
    set.nodes()[0].cont().unwrap();
    let other = in_time("another lock", async {
        loop {
            if let Ok(other) = client.mutex("other").lock().await {
                return other;
            }
        }
    });
    let other = other.await;
    assert_eq!(ask(&set, 1, &["GET", "other"]), other.claim().to_string());
    assert!(hold.is_valid(), "it was replicated");
    in_time("the release", hold.release()).await.unwrap();
    assert_eq!(ask(&set, 1, &["EXISTS", "job"]), "0");
}

/// An answer of the old master after the switch, to a request from before it, does not count.
#[tokio::test(flavor = "multi_thread")]
async fn a_late_answer_of_the_old_master_grants_nothing() {
    let Some(set) = launch::need("redis-sentinel") else {
        return;
    };
    let url = format!("{}?namespace=&timeout=25s", set.url());
    let client = palisade::connect(&url).await.unwrap();
    let mutex = client.mutex("late");
    cycle(&mutex).await;
    set.nodes()[0].stop().unwrap();
    let late = tokio::spawn(async move { mutex.lock().await.unwrap() });
    set.leader_where(|leader| leader == 1).unwrap();
    knows_the_new_master(&client).await;
    set.nodes()[0].cont().unwrap();
    let hold = in_time("the grant", late).await.unwrap();
    assert_eq!(ask(&set, 1, &["GET", "late"]), hold.claim().to_string());
}

/// Nor does it renew: the new master may have granted the lock to another.
#[tokio::test(flavor = "multi_thread")]
async fn a_late_answer_of_the_old_master_renews_nothing() {
    let Some(set) = launch::need("redis-sentinel") else {
        return;
    };
    let client = connect(&set).await;
    let ttl = Duration::from_secs(90);
    let hold = client.mutex("kept").ttl(ttl).lock().await.unwrap();
    set.nodes()[0].stop().unwrap();
    let lease = Lease::in_a_test(hold.ticket());
    let engine = client.engine().clone();
    let renewal = tokio::spawn(async move { engine.renew(vec![lease], FAILOVER * 2).await });
    set.leader_where(|leader| leader == 1).unwrap();
    knows_the_new_master(&client).await;
    set.nodes()[0].cont().unwrap();
    let renewed = in_time("an answer", renewal).await.unwrap();
    assert!(matches!(renewed[..], [Renewal::Unknown(_)]), "{renewed:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_moves_takes_its_locks_along() {
    let Some(cluster) = launch::need("redis-cluster") else {
        return;
    };
    let (client, late) = (connect(&cluster).await, connect(&cluster).await);
    let slot = ask(&cluster, 0, &["CLUSTER", "KEYSLOT", "x"]);
    let number: usize = slot.parse().unwrap();
    let from = (0..3).find(|at| number < (at + 1) * 16_384 / 3).unwrap();
    let to = (from + 1) % 3;
    let id = |node| ask(&cluster, node, &["CLUSTER", "MYID"]);
    let (from_id, to_id) = (id(from), id(to));
    let port = cluster.nodes()[to].port().to_string();
    let migrate = |key: &str| {
        let moved = ask(
            &cluster,
            from,
            &["MIGRATE", "127.0.0.1", &port, key, "0", "5000"],
        );
        assert_eq!(moved, "OK", "{key}");
    };
    let lock = |name| client.mutex(name).ttl(Duration::from_secs(3));

    let held = lock("{x}held").lock().await.unwrap();
    let torn = lock("{x}torn").lock().await.unwrap();
    let first = late.mutex("{x}late").lock().await.unwrap();
    let last = first.token();
    first.release().await.unwrap();
    let set = |node, how: &[&str]| {
        let command = [&["CLUSTER", "SETSLOT", &slot], how].concat();
        assert_eq!(ask(&cluster, node, &command), "OK");
    };
    set(to, &["IMPORTING", &from_id]);
    set(from, &["MIGRATING", &to_id]);

    // A line that neither server has is created when the move is over.
    let new = lock("{x}new");
    let new = tokio::spawn(async move { new.lock().await });
    // A line that has moved only in part is waited for (TRYAGAIN).
    migrate("{x}torn");
    let release = tokio::spawn(torn.release());
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!release.is_finished(), "half of a line");
    migrate("{x}torn:palisade");
    soon("the release", release).await.unwrap().unwrap();
    // Renewed before, during (ASK) and after the move.
    tokio::time::sleep(Duration::from_secs(2)).await;
    loop {
        let keys = ask(&cluster, from, &["CLUSTER", "GETKEYSINSLOT", &slot, "100"]);
        match keys.lines().next() {
            Some(key) => migrate(key),
            None => break,
        }
    }
    tokio::time::sleep(Duration::from_secs(3)).await;
    for node in [to, from, 3 - to - from] {
        set(node, &["NODE", &to_id]);
    }
    let new = soon("a new lock", new).await.unwrap().unwrap();
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(
        held.is_valid() && new.is_valid(),
        "locks move with their slot"
    );

    // A client that does not know of the move is redirected (MOVED).
    let again = soon("a grant", late.mutex("{x}late").lock()).await.unwrap();
    assert!(again.token() > last);
    assert!(late.mutex("{x}held").try_lock().await.unwrap().is_none());
    for hold in [held, new, again] {
        soon("a release", hold.release()).await.unwrap();
    }
    let locks = ask(&cluster, to, &["CLUSTER", "COUNTKEYSINSLOT", &slot]);
    assert_ne!(locks, "0", "the lines are there");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_wrong_with_the_url_is_said() {
    let Some(set) = launch::need("redis-sentinel") else {
        return;
    };
    let sentinels = set.url().trim_end_matches("/main");
    for (url, says) in [
        (sentinels.to_owned(), "name of the master"),
        (
            format!("{sentinels}/nobody"),
            "knows no master of this name",
        ),
        (
            format!("redis+cluster://{}", set.nodes()[0].address()),
            "is not in cluster mode",
        ),
    ] {
        let error = palisade::connect(&url).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        assert!(error.to_string().contains(says), "{error}");
    }
}
