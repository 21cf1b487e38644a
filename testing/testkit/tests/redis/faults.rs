//! Losses: of replies, notifications, connections, and the server itself.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use palisade::Patience;
use palisade::engine::Ask;
use palisade_testkit::conformance::Verdict;
use palisade_testkit::engine::EngineUnderTest;
use palisade_testkit::harness;
use palisade_testkit::lab::engines;
use palisade_testkit::lab::launch::{self, table};
use palisade_testkit::lab::proxy::{Direction, to_client};

use super::support::{Server, line, mutex, soon, until, until_one_waits};

const MS: fn(u64) -> Duration = Duration::from_millis;

/// The reply to an enter is lost, a thousand times. Repeated with the same id, there is one grant,
/// the one that is held; anything left behind ends with its ttl.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_reply_to_enter_is_no_second_grant() {
    const LOST: u64 = 1000;
    const CLIENTS: usize = 8;
    let server = need!(Server::start());
    let server = Arc::new(server);
    let ttl = Duration::from_secs(2);
    let eaten = server.proxy.inject(
        to_client()
            .label_contains("EVALSHA")
            .containing("held ")
            .times(LOST)
            .chance(0.5)
            .eat(),
    );
    let eaten = Arc::new(eaten);
    let mut tasks = Vec::new();
    for number in 0..CLIENTS {
        let client = server.client("timeout=40ms").await;
        let judge = server.direct_client("").await;
        let eaten = Arc::clone(&eaten);
        tasks.push(tokio::spawn(async move {
            let name = format!("lost-{number}");
            let lock = client.line(&name, Ask::Whole).ttl(ttl);
            let mut tokens = BTreeSet::new();
            let end = Instant::now() + Duration::from_secs(120);
            while eaten.hits() < LOST {
                assert!(Instant::now() < end, "no progress");
                let Ok(Some(hold)) = lock.acquire(Patience::For(ttl * 2)).await else {
                    continue;
                };
                let shown = line(&judge, &name).await;
                // A valid hold is the one in the line.
                if hold.is_valid() {
                    let holders = shown.unwrap().holders;
                    assert_eq!(holders.len(), 1, "holders of {name}");
                    assert_eq!(holders[0].id, hold.claim().to_string());
                    assert_eq!(holders[0].sequence, Some(hold.token().0));
                }
                assert!(tokens.insert(hold.token()), "a token twice");
                assert_eq!(tokens.last(), Some(&hold.token()), "a token went back");
                // Its reply may also be lost: the keeper then repeats it.
                let _ = hold.release().await;
            }
            (judge, name)
        }));
    }
    for task in tasks {
        let (judge, name) = task.await.unwrap();
        let start = Instant::now();
        until("an empty line", async || {
            line(&judge, &name).await.is_none()
        })
        .await;
        assert!(start.elapsed() < ttl + MS(5000), "an orphan past its ttl");
    }
    assert_eq!(eaten.hits(), LOST);
}

/// The reply to a leave is lost, and another client has the lock when the leave is repeated.
#[tokio::test]
async fn a_leave_asked_again_leaves_the_next_holder_alone() {
    let server = need!(Server::start());
    let client = server.client("timeout=200ms").await;
    let other = server.direct_client("").await;
    // The next one is granted by the leave, long before a lease ends.
    let held = mutex(&client, "left", MS(120_000)).lock().await.unwrap();
    let next = mutex(&other, "left", MS(120_000));
    let waiter = tokio::spawn(async move { next.lock().await });
    let judge = server.direct_client("").await;
    until_one_waits(&judge, "left").await;
    let lost = server.proxy.inject(
        to_client()
            .label_contains("EVALSHA")
            .containing(" left\r\n")
            .once()
            .eat(),
    );
    let released = held.release().await;
    assert!(released.is_err(), "the reply was lost");
    let next = soon("the next grant", waiter).await.unwrap().unwrap();
    assert_eq!(lost.hits(), 1);
    // The keeper repeats the leave, and learns that the claim is gone.
    until("the second leave", async || {
        server
            .proxy
            .seen()
            .iter()
            .filter(|seen| seen.direction == Direction::ToClient)
            .count()
            > 0
            && server.ask(&["GET", "palisade:left"]) == next.claim().to_string()
            && client_left_twice(&server)
    })
    .await;
    assert!(next.is_valid());
    let holders = line(&judge, "left").await.unwrap().holders;
    assert_eq!(holders[0].id, next.claim().to_string());
    next.release().await.unwrap();
}

/// Whether two requests with the same label, the leave's, went to the server through the proxy.
fn client_left_twice(server: &Server) -> bool {
    let seen = server.proxy.seen();
    let labels: Vec<_> = seen
        .iter()
        .filter(|seen| seen.direction == Direction::ToEngine)
        .filter_map(|seen| seen.label.clone())
        .filter(|label| label.starts_with("EVALSHA"))
        .collect();
    // The enter, the leave whose reply is lost, and the repeated leave on the keeper's connection;
    // renewals have another label.
    labels
        .iter()
        .any(|label| labels.iter().filter(|other| *other == label).count() == 2)
}

/// Every notification is lost: the next in line re-checks by itself, within a second.
#[tokio::test]
async fn without_messages_the_lock_is_handed_over_within_a_second() {
    let server = need!(Server::start());
    let (one, two) = (server.client("").await, server.client("").await);
    let lost = server
        .proxy
        .inject(to_client().push().label("message").eat());
    let mut hold = mutex(&one, "passed", MS(30_000)).lock().await.unwrap();
    let mut times = Vec::new();
    for round in 0..6 {
        let next = mutex(
            if round % 2 == 0 { &two } else { &one },
            "passed",
            MS(30_000),
        );
        let waiter = tokio::spawn(async move { (next.lock().await.unwrap(), Instant::now()) });
        let judge = server.direct_client("").await;
        until_one_waits(&judge, "passed").await;
        let left = Instant::now();
        hold.release().await.unwrap();
        let (next, at) = soon("the grant", waiter).await.unwrap();
        times.push(at - left);
        hold = next;
    }
    // Most of them, because a busy machine may delay some.
    times.sort_unstable();
    assert!(times[3] <= MS(1000), "handed over after {times:?}");
    assert!(lost.hits() >= 6, "{} messages were lost", lost.hits());
}

/// Existing connections go silent, and new ones are served: one renewal is lost, and the next, on
/// another connection, keeps a short lease alive.
#[tokio::test]
async fn silent_connections_cost_no_hold() {
    let server = need!(Server::start());
    let client = server.client("").await;
    let holds = [
        mutex(&client, "silent", MS(3000)).lock().await.unwrap(),
        mutex(&client, "silent too", MS(3000)).lock().await.unwrap(),
    ];
    for _ in 0..3 {
        server.proxy.silence();
        let silent = Instant::now();
        let lost = async {
            tokio::join!(holds[0].lost(), holds[1].lost());
        };
        // Longer than the leases last without renewal.
        let lost = tokio::time::timeout(MS(4500), lost).await;
        assert!(
            lost.is_err(),
            "lost {:?} after the silence",
            silent.elapsed()
        );
        assert!(holds.iter().all(|hold| hold.is_valid()));
    }
}

/// When the key of `name` expires, according to the server.
fn key_ends(server: &Server, name: &str) -> Instant {
    let before = Instant::now();
    let left: u64 = server
        .ask(&["PTTL", &format!("palisade:{name}")])
        .parse()
        .unwrap();
    before + MS(left)
}

#[tokio::test]
async fn a_cut_connection_is_a_loss_before_the_key_ends() {
    let server = need!(Server::start());
    let client = server.client("").await;
    let hold = mutex(&client, "cut", MS(1500)).lock().await.unwrap();
    server.proxy.refuse();
    server.proxy.cut_all();
    let ends = key_ends(&server, "cut");
    soon("the loss", hold.lost()).await;
    assert!(Instant::now() < ends, "told after the key had ended");
    assert_eq!(
        server.ask(&["GET", "palisade:cut"]),
        hold.claim().to_string()
    );
    assert!(!hold.is_valid());
}

#[tokio::test]
async fn a_frozen_server_is_a_loss_before_the_key_ends() {
    let server = need!(Server::start());
    let client = server.client("").await;
    let hold = mutex(&client, "frozen", MS(1500)).lock().await.unwrap();
    let ends = key_ends(&server, "frozen");
    server.running.nodes()[0].stop().unwrap();
    soon("the loss", hold.lost()).await;
    let told = Instant::now();
    server.running.nodes()[0].cont().unwrap();
    assert!(told < ends, "told after the key had ended");
    assert!(!hold.is_valid());
}

/// A short disconnect costs neither the hold nor the waiter's place, and notifications work again.
#[tokio::test]
async fn after_a_reconnect_the_hold_lives_and_messages_are_heard() {
    let server = need!(Server::start());
    let (one, two) = (server.client("").await, server.client("").await);
    let hold = mutex(&one, "kept", MS(3000)).lock().await.unwrap();
    let next = mutex(&two, "kept", MS(3000));
    let waiter = tokio::spawn(async move { (next.lock().await.unwrap(), Instant::now()) });
    let judge = server.direct_client("").await;
    until_one_waits(&judge, "kept").await;
    let before = line(&judge, "kept").await.unwrap().waiters[0].id.clone();
    server.proxy.cut_all();
    tokio::time::sleep(MS(3500)).await;
    assert!(hold.is_valid(), "the hold was lost");
    let channel = format!("palisade:wake:{}", channel_of(&server, "kept", &before));
    until("the subscription", async || {
        server.ask(&["PUBSUB", "NUMSUB", &channel]).contains('1')
    })
    .await;
    assert_eq!(line(&judge, "kept").await.unwrap().waiters[0].id, before);
    hold.release().await.unwrap();
    let (next, _) = soon("the grant", waiter).await.unwrap();
    next.release().await.unwrap();
}

/// A notification from the past, or one without a token, only makes the waiter read; that of its
/// grant saves the read.
#[tokio::test]
async fn only_the_message_of_its_grant_is_a_grant() {
    let server = need!(Server::start());
    let client = server.direct_client("").await;
    let judge = server.direct_client("").await;
    let mut requests = Vec::new();
    // The first in line re-checks twice a second, perhaps also during a hand-over.
    for _ in 0..10 {
        let hold = mutex(&client, "told", MS(30_000)).lock().await.unwrap();
        let next = mutex(&client, "told", MS(30_000));
        let waiter = tokio::spawn(async move { next.lock().await.unwrap() });
        until_one_waits(&judge, "told").await;
        let id = line(&judge, "told").await.unwrap().waiters[0].id.clone();
        let channel = format!("palisade:wake:{}", channel_of(&server, "told", &id));
        for message in [format!("{id} {}", hold.token().0), id] {
            server.ask(&["CONFIG", "RESETSTAT"]);
            assert_eq!(server.ask(&["PUBLISH", &channel, &message]), "1");
            until("a look", async || server.calls("evalsha") > 0).await;
        }
        assert!(!waiter.is_finished(), "granted by a message of the past");
        server.ask(&["CONFIG", "RESETSTAT"]);
        let before = hold.token();
        hold.release().await.unwrap();
        let hold = soon("the grant", waiter).await.unwrap();
        requests.push(server.calls("evalsha"));
        assert!(hold.token() > before);
        hold.release().await.unwrap();
    }
    assert_eq!(requests.iter().min(), Some(&1), "{requests:?}");
}

/// The channel that a claim's record names.
fn channel_of(server: &Server, name: &str, id: &str) -> String {
    let records = format!("{{palisade:{name}}}:palisade:claims");
    let record = server.ask(&["HGET", &records, id]);
    record.split(' ').nth(5).unwrap().to_owned()
}

/// The conformance cases for an engine that is cut off, on their own server.
#[test]
fn the_cases_of_an_outage_hold() {
    if let Err(why) = table::recipe_of("redis").unwrap().installed() {
        return launch::skip("redis", &why);
    }
    for case in [
        "wait/cut_off_engine_is_unreachable",
        "renew/cut_off_engine_is_unknown",
    ] {
        let engine = EngineUnderTest::new("redis", || Err("not started".into()));
        let site = engines::severable("redis").unwrap();
        assert_eq!(harness::try_case(engine, site, case), Verdict::Ok, "{case}");
    }
}

/// A thousand waiters: each hand-over costs one enter, one leave and at most one read, apart from
/// re-checks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_waiters_are_no_herd() {
    const WAITERS: u64 = 1000;
    let server = need!(Server::start());
    let client = server.direct_client("timeout=20s").await;
    let hold = mutex(&client, "herd", MS(60_000)).lock().await.unwrap();
    server.ask(&["CONFIG", "RESETSTAT"]);
    let start = Instant::now();
    let tasks: Vec<_> = (0..WAITERS)
        .map(|_| {
            let next = mutex(&client, "herd", MS(60_000));
            tokio::spawn(async move { next.lock().await.unwrap().release().await.unwrap() })
        })
        .collect();
    let judge = server.direct_client("timeout=20s").await;
    let mut surveys = 0;
    until("a thousand waiters", async || {
        surveys += 1;
        line(&judge, "herd")
            .await
            .is_some_and(|line| line.waiters.len() as u64 == WAITERS)
    })
    .await;
    hold.release().await.unwrap();
    for task in tasks {
        soon("its turn", task).await.unwrap();
    }
    let took = start.elapsed().as_secs_f64();
    // Every waiter re-checks after three quarters of a second at the earliest.
    let rechecks = (took / 0.75 * WAITERS as f64) as u64;
    let published = server.calls("publish");
    assert!(published <= WAITERS + 10, "{published} messages");
    let evals = server.calls("evalsha");
    assert!(
        evals <= 3 * WAITERS + rechecks + surveys,
        "{evals} requests in {took:.1} s"
    );
}
