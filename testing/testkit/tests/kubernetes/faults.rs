//! Faults of real servers: lost answers, conflicts, silence, throttling.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hyper::Method;
use palisade::{ErrorKind, LossReason};
use palisade_testkit::lab::launch::apiserver::{Fault, Rule};
use palisade_testkit::lab::trial::Crew;

use crate::util::{client, cycle, holder, lease, seconds, server, shown, soon, until};

/// The acquiring write is applied or not, and its answer is lost, in every possible way.
#[tokio::test(flavor = "multi_thread")]
async fn an_update_whose_answer_is_lost_is_found_by_a_read() {
    let server = server();
    let client = client(&server).await;
    cycle(&client.mutex("a")).await;
    for fault in [
        Fault::ReplyLost,
        Fault::RequestLost,
        Fault::Ambiguous {
            code: 504,
            applied: true,
        },
        Fault::Ambiguous {
            code: 504,
            applied: false,
        },
        Fault::Ambiguous {
            code: 500,
            applied: true,
        },
        Fault::Ambiguous {
            code: 500,
            applied: false,
        },
    ] {
        let applied = matches!(
            fault,
            Fault::ReplyLost | Fault::Ambiguous { applied: true, .. }
        );
        let shown_as = format!("{fault:?}");
        server.inject(Rule::next(Method::PUT, fault));
        let writes = server.requests("PUT");
        let hold = client.mutex("a").lock().await.unwrap();
        let taken = lease(&server, "a");
        assert!(
            holder(&taken).contains(&hold.claim().to_string()),
            "{shown_as}"
        );
        if applied {
            // It was not sent again.
            assert_eq!(server.requests("PUT") - writes, 1, "{shown_as}");
        }
        assert_eq!(shown(&client, "a").await.unwrap().holders.len(), 1);
        hold.release().await.unwrap();
        assert_eq!(server.heal(), 0, "{shown_as}: the fault did not happen");
    }
}

/// After these a client does not know whether its request was applied.
const UNCLEAR: [Fault; 3] = [
    Fault::ReplyLost,
    Fault::Ambiguous {
        code: 504,
        applied: true,
    },
    Fault::Ambiguous {
        code: 500,
        applied: false,
    },
];

/// The same for renewals and releases.
#[tokio::test(flavor = "multi_thread")]
async fn renewals_and_releases_survive_lost_answers() {
    let server = server();
    let client = client(&server).await;
    for fault in UNCLEAR {
        let shown_as = format!("{fault:?}");
        let hold = client.mutex("a").ttl(seconds(3)).lock().await.unwrap();
        let first = hold.deadline();
        server.inject(Rule::next(Method::PUT, fault.clone()));
        until("a renewal", async || hold.deadline() > first).await;
        assert_eq!(server.heal(), 0, "{shown_as}: the fault did not happen");
        assert!(hold.is_valid());
        server.inject(Rule::next(Method::PUT, fault));
        hold.release().await.unwrap();
        until("the release", async || {
            holder(&lease(&server, "a")).is_empty()
        })
        .await;
        server.heal();
    }
}

/// etcd commits a write after everyone has given up on it and its claim was left. The write is
/// refused, because the leave has written since.
#[tokio::test(flavor = "multi_thread")]
async fn a_write_that_comes_true_late_takes_nothing() {
    let server = server();
    let client = client(&server).await;
    cycle(&client.mutex("a")).await;
    server.inject(Rule::next(
        Method::PUT,
        Fault::AppliedLate(Duration::from_millis(1500)),
    ));
    let refused = client.mutex("a").try_lock().await;
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Unreachable);
    client.flush().await;
    let left = lease(&server, "a");
    tokio::time::sleep(seconds(2)).await;
    assert_eq!(lease(&server, "a"), left, "it came true");
    assert_eq!(holder(&left), "");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_acquire_leaves_nothing() {
    let server = server();
    let client = client(&server).await;
    cycle(&client.mutex("a")).await;
    for millis in [0, 1, 5, 20, 60] {
        server.inject(Rule::always(Fault::Delayed(Duration::from_millis(30))));
        let lock = client.mutex("a");
        let dropped = tokio::time::timeout(Duration::from_millis(millis), lock.lock()).await;
        drop(dropped);
        server.heal();
        client.flush().await;
        until("a free Lease", async || {
            holder(&lease(&server, "a")).is_empty()
        })
        .await;
    }
}

/// Eight concurrent attempts, repeatedly: one succeeds each time.
#[tokio::test(flavor = "multi_thread")]
async fn a_storm_of_conflicts_has_one_winner() {
    let server = server();
    let mut clients = Vec::new();
    for _ in 0..8 {
        clients.push(client(&server).await);
    }
    let mut last = 0;
    for round in 0..10 {
        let barrier = Arc::new(tokio::sync::Barrier::new(8));
        let tries = clients.iter().map(|client| {
            let (mutex, barrier) = (client.mutex("a"), Arc::clone(&barrier));
            tokio::spawn(async move {
                barrier.wait().await;
                mutex.try_lock().await.unwrap()
            })
        });
        let tries: Vec<_> = tries.collect();
        let mut holds = Vec::new();
        for one in tries {
            holds.extend(soon("an answer", one).await.unwrap());
        }
        assert_eq!(holds.len(), 1, "round {round}");
        let hold = holds.remove(0);
        assert!(hold.token().0 > last);
        last = hold.token().0;
        hold.release().await.unwrap();
    }
    // The same with permits: none is lost and none exceeds the capacity.
    let pool: Vec<_> = clients
        .iter()
        .map(|client| {
            let pool = client.semaphore("pool", 5);
            tokio::spawn(async move { pool.try_acquire().await.unwrap() })
        })
        .collect();
    let mut held = Vec::new();
    for one in pool {
        held.extend(soon("an answer", one).await.unwrap());
    }
    assert_eq!(held.len(), 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn eight_work_while_the_server_is_hurt() {
    let server = server();
    let crew = Crew::start(&server.url(), 8, seconds(2), seconds(20)).await;
    crew.grants(20).await;
    let clear = [Fault::TooMany { retry_after: 1 }, Fault::Refused(503)];
    for fault in UNCLEAR.into_iter().chain(clear) {
        server.inject(Rule::next(Method::PUT, fault).times(5));
        crew.grants(15).await;
        server.heal();
    }
    server.forget_history();
    crew.grants(20).await;
    server.freeze(true);
    tokio::time::sleep(seconds(3)).await;
    server.freeze(false);
    crew.grants(20).await;
    crew.end().await;
}

/// Silent for longer than the lease: the holder stops first.
#[tokio::test(flavor = "multi_thread")]
async fn a_silent_server_ends_the_hold_before_another_is_granted() {
    let server = server();
    let (one, two) = (client(&server).await, client(&server).await);
    let ttl = seconds(3);
    let hold = one.mutex("a").ttl(ttl).lock().await.unwrap();
    let waiting = tokio::spawn(async move {
        let hold = two.mutex("a").lock().await;
        (hold, Instant::now())
    });
    tokio::time::sleep(Duration::from_millis(300)).await;
    let start = Instant::now();
    server.freeze(true);
    let loss = soon("the loss", hold.lost()).await;
    let lost = Instant::now();
    assert_eq!(loss.reason, LossReason::Expired);
    assert!(start.elapsed() < ttl, "told after {:?}", start.elapsed());
    tokio::time::sleep(seconds(2)).await;
    server.freeze(false);
    let (next, granted) = soon("the grant", waiting).await.unwrap();
    assert!(granted > lost && next.unwrap().token() > hold.token());
}

/// 503 for longer than the lease, as when all API servers restart.
#[tokio::test(flavor = "multi_thread")]
async fn refusals_longer_than_the_lease_end_the_hold_in_time() {
    let server = server();
    let (one, two) = (client(&server).await, client(&server).await);
    let ttl = seconds(2);
    let hold = one.mutex("a").ttl(ttl).lock().await.unwrap();
    let waiting = tokio::spawn(async move {
        let hold = two.mutex("a").lock().await;
        (hold, Instant::now())
    });
    let start = Instant::now();
    server.inject(Rule::always(Fault::Refused(503)));
    soon("the loss", hold.lost()).await;
    let lost = Instant::now();
    assert!(start.elapsed() < ttl, "told after {:?}", start.elapsed());
    tokio::time::sleep(seconds(1)).await;
    assert!(!waiting.is_finished());
    server.heal();
    let (next, granted) = soon("the grant", waiting).await.unwrap();
    assert!(granted > lost && next.unwrap().token() > hold.token());
}

/// A refused renewal (a role that is edited, a token that is rotated) is no loss yet.
#[tokio::test(flavor = "multi_thread")]
async fn a_short_refusal_of_renewals_is_no_loss() {
    let server = server();
    let client = client(&server).await;
    let hold = client.mutex("a").ttl(seconds(4)).lock().await.unwrap();
    for fault in [
        Fault::Refused(403),
        Fault::TooMany { retry_after: 1 },
        Fault::Refused(401),
    ] {
        let first = hold.deadline();
        server.inject(Rule::next(Method::PUT, fault));
        until("a renewal", async || hold.deadline() > first).await;
        assert_eq!(server.heal(), 0, "the fault did not happen");
    }
    assert!(hold.is_valid());
    hold.release().await.unwrap();
}

/// A throttled request was not executed: it is repeated when the server says so.
#[tokio::test(flavor = "multi_thread")]
async fn throttling_is_waited_for() {
    let server = server();
    let client = client(&server).await;
    // One of this lock: a client also connects and watches in the background.
    let refused = Rule::always(Fault::TooMany { retry_after: 1 }).times(1);
    server.inject(refused.containing("palisade.a"));
    let start = Instant::now();
    let hold = client.mutex("a").try_lock().await.unwrap().expect("free");
    assert!(start.elapsed() >= seconds(1), "asked again at once");
    hold.release().await.unwrap();
    // A delay longer than a request may take is reported as unreachable, and not applied.
    server.inject(Rule::always(Fault::TooMany { retry_after: 30 }));
    let error = client.mutex("b").try_lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable);
    server.heal();
    assert_eq!(server.lease("palisade.b"), None);
}
