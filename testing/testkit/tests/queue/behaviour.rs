//! What a queue promises while no consumer dies.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use palisade::queue::{Draft, Failed, MAX_BODY, Retries};
use palisade::{ErrorKind, Patience};
use parking_lot::Mutex;

use crate::{Fixture, LONG, cases, soon, until};

cases! {
    a_message_is_pushed_claimed_and_done,
    messages_come_in_the_order_of_their_pushes,
    a_claimed_message_is_nobody_elses,
    a_failed_message_comes_again_after_a_while,
    the_last_failure_makes_a_dead_letter,
    a_buried_message_is_a_dead_letter_at_once,
    a_dropped_message_is_ready_again_and_the_try_counts,
    a_released_message_has_not_been_tried,
    a_delayed_message_is_kept_back,
    an_id_is_stored_once,
    whoever_waits_is_woken_by_a_push,
    a_wait_ends_when_patience_does,
    a_dropped_wait_leaves_nothing_claimed,
    a_stream_hands_out_and_gives_back,
    several_are_done_with_one_request,
    all_of_a_push_or_none,
    bodies_are_any_bytes,
    many_consumers_share_the_work,
    two_queues_have_nothing_to_do_with_each_other,
}

async fn a_message_is_pushed_claimed_and_done(fx: Fixture) {
    let queue = fx.queue().await;
    assert!(queue.claim(5).await.unwrap().is_empty());
    let pushed = queue.push("hello").await.unwrap();
    assert!(
        !pushed.duplicate && pushed.id.starts_with('@'),
        "{pushed:?}"
    );
    let mut claimed = queue.claim(5).await.unwrap();
    assert_eq!(claimed.len(), 1);
    let message = claimed.remove(0);
    assert_eq!(message.body(), b"hello");
    assert_eq!((message.id(), message.key()), (&*pushed.id, None));
    assert_eq!(message.attempt(), 1);
    assert!(message.is_valid() && message.token().0 > 0);
    assert_eq!(message.run(async { 7 }).await.unwrap(), 7);
    message.done().await.unwrap();
    assert!(queue.claim(5).await.unwrap().is_empty());
    assert_eq!(queue.report().await.unwrap().unwrap().total(), 0);
}

async fn messages_come_in_the_order_of_their_pushes(fx: Fixture) {
    let queue = fx.queue().await;
    for number in 0..5 {
        queue.push(format!("{number}")).await.unwrap();
    }
    queue
        .push_all((5..20).map(|number| Draft::new(format!("{number}"))))
        .await
        .unwrap();
    let mut tokens = Vec::new();
    for number in 0..20 {
        let message = queue.next().await.unwrap();
        assert_eq!(message.body(), format!("{number}").as_bytes());
        tokens.push(message.token());
        message.done().await.unwrap();
    }
    assert!(tokens.is_sorted_by(|one, next| one < next), "{tokens:?}");
}

async fn a_claimed_message_is_nobody_elses(fx: Fixture) {
    let (queue, other) = (fx.queue().await, fx.queue().await);
    queue.push("x").await.unwrap();
    let message = queue.next().await.unwrap();
    // Longer than the lease: the keeper renews it.
    let end = tokio::time::Instant::now() + message.ttl() * 2;
    while tokio::time::Instant::now() < end {
        assert!(other.claim(1).await.unwrap().is_empty());
        assert!(message.is_valid());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    message.done().await.unwrap();
}

fn quick(attempts: u32) -> Retries {
    Retries {
        attempts,
        min: Duration::from_millis(1),
        max: Duration::from_millis(2),
    }
}

async fn a_failed_message_comes_again_after_a_while(fx: Fixture) {
    let queue = fx.queue().await.retries(Retries {
        min: Duration::from_millis(600),
        ..quick(3)
    });
    assert_eq!(
        queue.claim(1).await.unwrap_err().kind(),
        ErrorKind::InvalidArgument,
        "the shortest wait is above the longest"
    );
    let queue = fx.queue().await.retries(Retries {
        attempts: 3,
        min: Duration::from_secs(2),
        max: Duration::from_secs(2),
    });
    queue.push("x").await.unwrap();
    let message = queue.next().await.unwrap();
    let first = message.token();
    let Failed::Again { after } = message.fail("no").await.unwrap() else {
        panic!("its last try");
    };
    assert!(after >= Duration::from_secs(1), "{after:?}");
    assert!(queue.claim(1).await.unwrap().is_empty(), "not yet");
    assert_eq!(queue.report().await.unwrap().unwrap().delayed, 1);
    let message = soon("the second try", queue.next()).await.unwrap();
    assert_eq!(message.attempt(), 2);
    assert!(message.token() > first);
    message.done().await.unwrap();
}

async fn the_last_failure_makes_a_dead_letter(fx: Fixture) {
    let queue = fx.queue().await.retries(quick(3));
    queue.push("x").await.unwrap();
    for attempt in 1..=3 {
        let message = soon("a try", queue.next()).await.unwrap();
        assert_eq!(message.attempt(), attempt);
        let failed = message.fail(format!("try {attempt}")).await.unwrap();
        assert_eq!(failed == Failed::Dead, attempt == 3);
    }
    assert!(queue.claim(1).await.unwrap().is_empty());
    let dead = queue.list(true, 10).await.unwrap();
    assert_eq!(dead.len(), 1);
    assert_eq!(
        (dead[0].attempts, dead[0].why.as_deref()),
        (3, Some("try 3"))
    );
    assert_eq!(queue.report().await.unwrap().unwrap().dead, 1);
}

async fn a_buried_message_is_a_dead_letter_at_once(fx: Fixture) {
    let queue = fx.queue().await;
    queue.push("x").await.unwrap();
    let long = "why ".repeat(10_000) + "\0";
    queue.next().await.unwrap().bury(long).await.unwrap();
    let dead = queue.list(true, 10).await.unwrap();
    assert!(dead[0].why.as_ref().unwrap().len() < 3000);
}

async fn a_dropped_message_is_ready_again_and_the_try_counts(fx: Fixture) {
    let queue = fx.queue().await.retries(quick(3));
    queue.push("x").await.unwrap();
    for attempt in 1..=3 {
        let message = soon("a try", queue.next()).await.unwrap();
        assert_eq!(message.attempt(), attempt);
        drop(message);
    }
    // The next claim finds that it was tried often enough.
    until("a dead letter", async || {
        assert!(queue.claim(1).await.unwrap().is_empty());
        queue.report().await.unwrap().unwrap().dead == 1
    })
    .await;
}

async fn a_released_message_has_not_been_tried(fx: Fixture) {
    let queue = fx.queue().await;
    queue.push("x").await.unwrap();
    for _ in 0..7 {
        let message = soon("it", queue.next()).await.unwrap();
        assert_eq!(message.attempt(), 1);
        message.release().await.unwrap();
    }
}

async fn a_delayed_message_is_kept_back(fx: Fixture) {
    let queue = fx.queue().await;
    let delay = Duration::from_secs(2);
    let pushed = tokio::time::Instant::now();
    queue.push(Draft::new("late").delay(delay)).await.unwrap();
    queue.push("now").await.unwrap();
    let message = queue.next().await.unwrap();
    assert_eq!(message.body(), b"now");
    message.done().await.unwrap();
    let message = soon("the delayed one", queue.next()).await.unwrap();
    assert_eq!(message.body(), b"late");
    // The store's clock and ours may run at slightly different speeds.
    assert!(pushed.elapsed() > delay - Duration::from_millis(50));
    message.done().await.unwrap();
}

async fn an_id_is_stored_once(fx: Fixture) {
    let queue = fx.queue().await;
    let draft = || Draft::new("x").id("order-1");
    let first = queue.push(draft()).await.unwrap();
    assert_eq!((&*first.id, first.duplicate), ("order-1", false));
    assert!(queue.push(draft()).await.unwrap().duplicate, "in the queue");
    let twice = [draft(), Draft::new("y").id("order-2"), draft()];
    let twice = queue.push_all(twice).await.unwrap();
    let duplicates: Vec<bool> = twice.iter().map(|pushed| pushed.duplicate).collect();
    assert_eq!(duplicates, [true, false, true]);
    let (one, two) = (queue.next().await.unwrap(), queue.next().await.unwrap());
    assert_eq!((one.id(), two.id()), ("order-1", "order-2"));
    one.done().await.unwrap();
    two.done().await.unwrap();
    assert!(queue.push(draft()).await.unwrap().duplicate, "it is done");
    assert!(queue.claim(1).await.unwrap().is_empty());
    let both = tokio::join!(
        queue.push(Draft::new("z").id("order-3")),
        queue.push(Draft::new("z").id("order-3")),
    );
    assert_ne!(both.0.unwrap().duplicate, both.1.unwrap().duplicate);
}

async fn whoever_waits_is_woken_by_a_push(fx: Fixture) {
    let (queue, other) = (fx.queue().await, fx.queue().await);
    for round in 0..5 {
        let waits = tokio::spawn({
            let queue = queue.clone();
            async move { queue.next().await }
        });
        // It sleeps, or is about to.
        tokio::time::sleep(Duration::from_millis(20 * round)).await;
        other.push("x").await.unwrap();
        let message = soon("the message", waits).await.unwrap().unwrap();
        message.done().await.unwrap();
    }
}

async fn a_wait_ends_when_patience_does(fx: Fixture) {
    let queue = fx.queue().await;
    assert!(queue.claim(1).await.unwrap().is_empty());
    let began = tokio::time::Instant::now();
    let patience = Patience::For(Duration::from_millis(300));
    match queue.next_within(patience).await {
        Ok(message) => assert!(message.is_none()),
        // A busy machine may be too slow for a last read.
        Err(error) => assert_eq!(error.kind(), ErrorKind::Unreachable),
    }
    assert!(began.elapsed() >= Duration::from_millis(300));
    assert!(queue.next_within(Patience::NoWait).await.unwrap().is_none());
}

async fn a_dropped_wait_leaves_nothing_claimed(fx: Fixture) {
    // Longer than a busy machine needs to return them.
    let queue = fx.queue().await.ttl(LONG).retries(quick(1000));
    for number in 0..20 {
        queue.push(format!("{number}")).await.unwrap();
    }
    for round in 0..60 {
        let limit = Duration::from_micros(50 * round);
        let waiting = tokio::time::timeout(limit, queue.next()).await;
        if let Ok(message) = waiting {
            message.unwrap().release().await.unwrap();
        }
    }
    let mut seen = BTreeSet::new();
    until("all are claimed", async || {
        for message in queue.claim(20).await.unwrap() {
            assert_eq!(message.attempt(), 1, "nobody has tried it");
            seen.insert(message.id().to_owned());
            message.done().await.unwrap();
        }
        seen.len() == 20
    })
    .await;
}

async fn a_stream_hands_out_and_gives_back(fx: Fixture) {
    let queue = fx.queue().await;
    for number in 0..10 {
        queue.push(format!("{number}")).await.unwrap();
    }
    let mut messages = Box::pin(queue.messages(6));
    for number in 0..3 {
        let message = soon("a message", messages.next()).await.unwrap().unwrap();
        assert_eq!(message.body(), format!("{number}").as_bytes());
        message.done().await.unwrap();
    }
    assert_eq!(queue.report().await.unwrap().unwrap().claimed, 3);
    drop(messages);
    for number in 3..10 {
        let message = soon("a message", queue.next()).await.unwrap();
        assert_eq!(message.attempt(), 1, "{number} was not handed out");
        message.done().await.unwrap();
    }
}

async fn several_are_done_with_one_request(fx: Fixture) {
    let queue = fx.queue().await;
    let drafts = (0..50).map(|number| Draft::new(format!("{number}")));
    queue.push_all(drafts).await.unwrap();
    let messages = queue.claim(100).await.unwrap();
    assert_eq!(messages.len(), 50);
    assert_eq!(queue.done_all(messages).await.unwrap(), [""; 0]);
    assert_eq!(queue.report().await.unwrap().unwrap().total(), 0);
    let other = fx.client().await.queue("other");
    other.push("x").await.unwrap();
    let message = other.next().await.unwrap();
    let mixed = queue.done_all(vec![message]).await.unwrap_err();
    assert_eq!(mixed.kind(), ErrorKind::InvalidArgument);
}

async fn all_of_a_push_or_none(fx: Fixture) {
    let queue = fx.queue().await;
    let too_large = Draft::new(vec![0; MAX_BODY + 1]);
    let refused = queue.push_all([Draft::new("x"), too_large]).await;
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::InvalidArgument);
    let refused = queue.push(Draft::new("x").id("@7")).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
    let refused = fx.client().await.queue("a\nb").push("x").await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidName);
    assert!(queue.claim(10).await.unwrap().is_empty());
    assert_eq!(queue.push_all([]).await.unwrap(), []);
}

async fn bodies_are_any_bytes(fx: Fixture) {
    let queue = fx.client().await.queue("{a}/b c%:é");
    let every: Vec<u8> = (0..=255).collect();
    let large = every.repeat(1 << 12);
    for body in [Vec::new(), every, large] {
        queue.push(body.clone()).await.unwrap();
        let message = queue.next().await.unwrap();
        assert!(message.body() == body, "{} bytes", body.len());
        message.done().await.unwrap();
    }
}

async fn many_consumers_share_the_work(fx: Fixture) {
    const MESSAGES: usize = 400;
    let queue = fx.queue().await;
    for chunk in 0..4 {
        let numbers = chunk * MESSAGES / 4..(chunk + 1) * MESSAGES / 4;
        let drafts = numbers.map(|number| Draft::new(format!("{number}")));
        queue.push_all(drafts).await.unwrap();
    }
    let seen = Arc::new(Mutex::new(Vec::new()));
    let mut consumers = Vec::new();
    for _ in 0..8 {
        let (queue, seen) = (fx.queue().await, Arc::clone(&seen));
        consumers.push(tokio::spawn(async move {
            while let Some(message) = queue.next_within(Patience::NoWait).await.unwrap() {
                seen.lock()
                    .push(String::from_utf8(message.body().to_vec()).unwrap());
                message.done().await.unwrap();
            }
        }));
    }
    for consumer in consumers {
        soon("a consumer ends", consumer).await.unwrap();
    }
    let seen = std::mem::take(&mut *seen.lock());
    assert_eq!(seen.len(), MESSAGES, "none twice");
    assert_eq!(
        seen.iter().collect::<BTreeSet<_>>().len(),
        MESSAGES,
        "none lost"
    );
}

async fn two_queues_have_nothing_to_do_with_each_other(fx: Fixture) {
    let client = fx.client().await;
    let (one, two) = (client.queue("one"), client.queue("two"));
    one.push(Draft::new("1").key("k").id("i")).await.unwrap();
    assert!(two.claim(1).await.unwrap().is_empty());
    let pushed = two.push(Draft::new("2").key("k").id("i")).await.unwrap();
    assert!(!pushed.duplicate);
    let (first, second) = (one.next().await.unwrap(), two.next().await.unwrap());
    assert_eq!((first.body(), second.body()), (&b"1"[..], &b"2"[..]));
    first.done().await.unwrap();
    second.done().await.unwrap();
}
