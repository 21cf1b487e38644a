//! Strict order within a key.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use palisade::Patience;
use palisade::queue::{Draft, Pick, Retries};
use parking_lot::Mutex;

use crate::{Fixture, LONG, cases, soon};

cases! {
    one_of_a_key_at_a_time_in_order,
    a_failing_message_blocks_its_key,
    a_delayed_message_blocks_its_key,
    a_dead_letter_blocks_its_key_until_it_is_retried,
    a_dropped_first_lets_the_next_come,
    other_keys_go_on,
    a_key_can_begin_again,
    many_keys_keep_their_orders,
}

fn keyed(body: &str, key: &str) -> Draft {
    Draft::new(body).key(key)
}

async fn one_of_a_key_at_a_time_in_order(fx: Fixture) {
    let (queue, other) = (fx.queue().await, fx.queue().await);
    queue.push(keyed("1", "k")).await.unwrap();
    queue
        .push_all([keyed("2", "k"), keyed("3", "k")])
        .await
        .unwrap();
    assert_eq!(queue.report().await.unwrap().unwrap().blocked, 2);
    for body in ["1", "2", "3"] {
        let mut claimed = queue.claim(10).await.unwrap();
        assert_eq!(claimed.len(), 1);
        let message = claimed.remove(0);
        assert_eq!(
            (message.body(), message.key()),
            (body.as_bytes(), Some("k"))
        );
        assert!(other.claim(10).await.unwrap().is_empty());
        message.done().await.unwrap();
    }
}

async fn a_failing_message_blocks_its_key(fx: Fixture) {
    let queue = fx.queue().await.retries(Retries {
        attempts: 5,
        min: Duration::from_millis(400),
        max: Duration::from_millis(400),
    });
    queue
        .push_all([keyed("1", "k"), keyed("2", "k")])
        .await
        .unwrap();
    for attempt in 1..=3 {
        let message = soon("a try", queue.next()).await.unwrap();
        assert_eq!((message.body(), message.attempt()), (&b"1"[..], attempt));
        message.fail("no").await.unwrap();
        assert!(
            queue.claim(10).await.unwrap().is_empty(),
            "it waits, and blocks"
        );
    }
    let message = soon("a try", queue.next()).await.unwrap();
    assert_eq!(message.body(), b"1");
    message.done().await.unwrap();
    assert_eq!(queue.next().await.unwrap().body(), b"2");
}

async fn a_delayed_message_blocks_its_key(fx: Fixture) {
    let queue = fx.queue().await;
    let late = keyed("1", "k").delay(Duration::from_secs(1));
    queue.push(late).await.unwrap();
    queue.push(keyed("2", "k")).await.unwrap();
    assert!(queue.claim(10).await.unwrap().is_empty());
    for body in ["1", "2"] {
        let message = soon("the next", queue.next()).await.unwrap();
        assert_eq!(message.body(), body.as_bytes());
        message.done().await.unwrap();
    }
    // The delay of a message that is not first counts from its push.
    let third = keyed("4", "k").delay(Duration::from_secs(2));
    queue.push_all([keyed("3", "k"), third]).await.unwrap();
    queue.next().await.unwrap().done().await.unwrap();
    assert!(queue.claim(10).await.unwrap().is_empty());
    assert_eq!(soon("the last", queue.next()).await.unwrap().body(), b"4");
}

async fn a_dead_letter_blocks_its_key_until_it_is_retried(fx: Fixture) {
    let queue = fx.queue().await;
    queue
        .push_all([keyed("1", "k"), keyed("2", "k")])
        .await
        .unwrap();
    queue.next().await.unwrap().bury("no").await.unwrap();
    assert!(queue.claim(10).await.unwrap().is_empty());
    let report = queue.report().await.unwrap().unwrap();
    assert_eq!((report.dead, report.blocked), (1, 1));
    assert_eq!(queue.retry(Pick::Dead).await.unwrap(), 1);
    for body in ["1", "2"] {
        let message = soon("the next", queue.next()).await.unwrap();
        assert_eq!((message.body(), message.attempt()), (body.as_bytes(), 1));
        message.done().await.unwrap();
    }
}

async fn a_dropped_first_lets_the_next_come(fx: Fixture) {
    let queue = fx.queue().await;
    queue
        .push_all(["1", "2", "3", "4"].map(|body| keyed(body, "k").id(body)))
        .await
        .unwrap();
    queue.next().await.unwrap().bury("no").await.unwrap();
    let id = |id: &str| Pick::Id(id.to_owned());
    assert_eq!(queue.drop_messages(id("3"), false).await.unwrap(), 1);
    assert!(
        queue.claim(10).await.unwrap().is_empty(),
        "one in the middle"
    );
    assert_eq!(queue.drop_messages(id("1"), false).await.unwrap(), 1);
    for body in ["2", "4"] {
        let message = soon("the next", queue.next()).await.unwrap();
        assert_eq!(message.body(), body.as_bytes());
        message.done().await.unwrap();
    }
}

async fn other_keys_go_on(fx: Fixture) {
    let queue = fx.queue().await;
    // The blocked messages precede the others.
    for number in 0..50 {
        queue
            .push(keyed(&format!("{number}"), "blocked"))
            .await
            .unwrap();
    }
    queue
        .push_all([keyed("a", "free"), Draft::new("b")])
        .await
        .unwrap();
    let blocks = queue.next().await.unwrap();
    let mut others: Vec<Vec<u8>> = Vec::new();
    for message in queue.claim(10).await.unwrap() {
        others.push(message.body().to_vec());
        message.done().await.unwrap();
    }
    assert_eq!(others, [b"a", b"b"]);
    blocks.done().await.unwrap();
}

async fn a_key_can_begin_again(fx: Fixture) {
    let queue = fx.queue().await;
    for round in 0..20 {
        let body = format!("{round}");
        let pushes = (queue.push(keyed(&body, "k")), queue.push(keyed(&body, "k")));
        let (one, two) = tokio::join!(pushes.0, pushes.1);
        one.and(two).unwrap();
        // One is pushed while the last one is being completed.
        for left in [2, 1] {
            let message = soon("the next", queue.next()).await.unwrap();
            assert_eq!(queue.report().await.unwrap().unwrap().blocked, left - 1);
            message.done().await.unwrap();
        }
        let (done, pushed) = tokio::join!(
            async {
                let message = queue.next_within(Patience::NoWait).await.unwrap();
                match message {
                    Some(message) => message.done().await.map(|()| 1),
                    None => Ok(0),
                }
            },
            queue.push(keyed("late", "k")),
        );
        pushed.unwrap();
        if done.unwrap() == 0 {
            soon("the late one", queue.next())
                .await
                .unwrap()
                .done()
                .await
                .unwrap();
        }
    }
    assert_eq!(queue.report().await.unwrap().unwrap().total(), 0);
}

async fn many_keys_keep_their_orders(fx: Fixture) {
    const KEYS: usize = 6;
    const EACH: usize = 25;
    let queue = fx.queue().await.ttl(LONG).retries(Retries {
        attempts: 100,
        min: Duration::ZERO,
        max: Duration::from_millis(1),
    });
    // Per key: the number of the last message done, and whether one is in progress.
    type Seen = HashMap<String, (usize, bool)>;
    let seen: Arc<Mutex<Seen>> = Arc::default();
    let pusher = tokio::spawn({
        let queue = fx.queue().await;
        async move {
            for number in 1..=EACH {
                for key in 0..KEYS {
                    let draft = keyed(&format!("{number}"), &format!("k{key}"));
                    queue.push(draft).await.unwrap();
                }
            }
        }
    });
    let mut consumers = Vec::new();
    for _ in 0..4 {
        let (queue, seen) = (queue.clone(), Arc::clone(&seen));
        consumers.push(tokio::spawn(async move {
            while seen.lock().values().map(|(done, _)| done).sum::<usize>() < KEYS * EACH {
                // `Patience::For` would fail on a slow machine.
                let Some(message) = queue.next_within(Patience::NoWait).await.unwrap() else {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                    continue;
                };
                let number: usize = std::str::from_utf8(message.body())
                    .unwrap()
                    .parse()
                    .unwrap();
                let key = message.key().unwrap().to_owned();
                {
                    let mut seen = seen.lock();
                    let (done, busy) = seen.entry(key.clone()).or_default();
                    assert!(!*busy, "{key} {number} while another is at it");
                    assert_eq!(number, *done + 1, "{key}");
                    *busy = true;
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
                let fails = rand::random_range(0..5) == 0;
                {
                    let mut seen = seen.lock();
                    let (done, busy) = seen.get_mut(&key).unwrap();
                    *busy = false;
                    *done += usize::from(!fails);
                }
                if fails {
                    message.fail("by chance").await.unwrap();
                } else {
                    message.done().await.unwrap();
                }
            }
        }));
    }
    soon("all is pushed", pusher).await.unwrap();
    for consumer in consumers {
        soon("all is done", consumer).await.unwrap();
    }
}
