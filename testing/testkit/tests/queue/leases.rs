//! Claims whose consumers don't renew, lose replies, or come too late. They are made directly at
//! the store, so that no keeper renews them.

use std::sync::Arc;
use std::time::Duration;

use palisade::engine::{ClaimId, Lease, Left, Renewal, Ticket};
use palisade::queue::{Delivery, Draft, Receipt, Settlement, SharedQueueStore, Take, Taken};
use palisade::{ErrorKind, Name, Patience};

use crate::{Fixture, cases, soon, until};

cases! {
    a_late_done_is_refused_when_another_has_had_it,
    a_late_done_is_accepted_when_nobody_else_has_had_it,
    a_claim_without_renewal_goes_to_another_with_a_greater_token,
    a_message_that_kills_its_consumers_becomes_a_dead_letter,
    a_claim_asked_again_is_the_same_claim,
    a_claim_that_was_given_up_is_left_untried,
    a_claim_that_comes_after_it_was_left_takes_nothing,
    renewal_keeps_and_never_revives,
    extending_makes_the_lease_longer,
    a_loss_is_told,
    an_engine_without_queues_says_so,
}

const TTL: Duration = Duration::from_secs(1);

struct Bare {
    store: SharedQueueStore,
    queue: Name,
}

impl Bare {
    async fn new(fx: &Fixture) -> Self {
        let client = fx.client().await;
        let store = client.engine().queues().unwrap();
        Self {
            store,
            queue: Name::new("work").unwrap(),
        }
    }

    fn ask(&self, count: usize) -> Take {
        Take {
            queue: self.queue.clone(),
            batch: ClaimId::random(),
            again: false,
            count,
            ttl: TTL,
            attempts: 3,
            owner: "{}".to_owned(),
            sleeper: None,
        }
    }

    async fn take(&self) -> Option<Delivery> {
        let taken = self.store.take(self.ask(1)).await.unwrap();
        taken.messages.into_iter().next()
    }

    async fn settle(&self, delivery: &Delivery, how: Settlement) -> bool {
        let receipts = vec![receipt(delivery)];
        let settled = self.store.settle(self.queue.clone(), receipts, how).await;
        settled.unwrap()[0]
    }

    fn ticket(&self, delivery: &Delivery) -> Ticket {
        let keyed = if delivery.key.is_some() { "key" } else { "-" };
        Ticket {
            sequence: delivery.sequence,
            native: Some(format!("{} {keyed} seen", delivery.number).into()),
            ..Ticket::own(self.queue.clone(), ClaimId::random())
        }
    }

    async fn renew(&self, delivery: &Delivery) -> Renewal {
        let lease = Lease::in_a_test(&self.ticket(delivery));
        let within = Duration::from_secs(5);
        self.store.renew(vec![lease], within).await.remove(0)
    }
}

fn receipt(delivery: &Delivery) -> Receipt {
    Receipt {
        number: delivery.number,
        sequence: delivery.sequence,
        keyed: delivery.key.is_some(),
        seen: true,
    }
}

async fn a_claim_without_renewal_goes_to_another_with_a_greater_token(fx: Fixture) {
    let (bare, queue) = (Bare::new(&fx).await, fx.queue().await);
    queue.push("x").await.unwrap();
    let first = bare.take().await.unwrap();
    assert!(queue.claim(1).await.unwrap().is_empty());
    let message = soon("the end of the lease", queue.next()).await.unwrap();
    assert!(message.token().0 > first.sequence);
    assert_eq!(message.attempt(), 2);
    assert!(matches!(bare.renew(&first).await, Renewal::Lost));
    message.done().await.unwrap();
}

async fn a_late_done_is_refused_when_another_has_had_it(fx: Fixture) {
    let (bare, queue) = (Bare::new(&fx).await, fx.queue().await);
    for draft in [Draft::new("x"), Draft::new("x").key("k")] {
        queue.push(draft).await.unwrap();
        let late = bare.take().await.unwrap();
        let message = soon("the end of the lease", queue.next()).await.unwrap();
        let again = Settlement::Retry {
            after: Duration::ZERO,
            why: "late".to_owned(),
        };
        for how in [Settlement::Done, again, Settlement::Release] {
            assert!(!bare.settle(&late, how).await);
        }
        assert!(matches!(
            bare.store.leave(bare.ticket(&late)).await,
            Ok(Left::Absent)
        ));
        assert!(message.is_valid());
        message.done().await.unwrap();
        assert!(!bare.settle(&late, Settlement::Done).await, "it is gone");
    }
}

async fn a_late_done_is_accepted_when_nobody_else_has_had_it(fx: Fixture) {
    let (bare, queue) = (Bare::new(&fx).await, fx.queue().await);
    queue.push("x").await.unwrap();
    let late = bare.take().await.unwrap();
    until("the end of the lease", async || {
        queue.report().await.unwrap().unwrap().ready == 1
    })
    .await;
    assert!(bare.settle(&late, Settlement::Done).await);
    assert_eq!(queue.report().await.unwrap().unwrap().total(), 0);
}

async fn a_message_that_kills_its_consumers_becomes_a_dead_letter(fx: Fixture) {
    let (bare, queue) = (Bare::new(&fx).await, fx.queue().await);
    queue.push("poison").await.unwrap();
    queue.push("fine").await.unwrap();
    let mut claimed = 0;
    let mut fine = false;
    until("a dead letter", async || {
        let Taken { messages, .. } = bare.store.take(bare.ask(1)).await.unwrap();
        for delivery in messages {
            if delivery.body == b"fine" {
                fine = bare.settle(&delivery, Settlement::Done).await;
            } else {
                claimed += 1;
                assert_eq!(delivery.attempt, claimed);
            }
        }
        queue.report().await.unwrap().unwrap().dead == 1
    })
    .await;
    assert!(fine);
    assert_eq!(claimed, 3);
    let dead = queue.list(true, 1).await.unwrap().remove(0);
    assert!(dead.why.unwrap().contains("lost"));
}

async fn a_claim_asked_again_is_the_same_claim(fx: Fixture) {
    let (bare, queue) = (Bare::new(&fx).await, fx.queue().await);
    for number in 0..5 {
        queue.push(format!("{number}")).await.unwrap();
    }
    let ask = bare.ask(3);
    let first = bare.store.take(ask.clone()).await.unwrap().messages;
    assert_eq!(first.len(), 3);
    // As after a lost reply, and late: the lease is renewed.
    tokio::time::sleep(TTL * 2 / 3).await;
    let again = Take { again: true, ..ask };
    let second = bare.store.take(again.clone()).await.unwrap().messages;
    let named = |all: &[Delivery]| -> Vec<_> {
        let mut named: Vec<_> = all
            .iter()
            .map(|d| (d.number, d.sequence, d.attempt))
            .collect();
        named.sort_unstable();
        named
    };
    assert_eq!(named(&first), named(&second));
    tokio::time::sleep(TTL * 2 / 3).await;
    for delivery in &second {
        assert!(matches!(bare.renew(delivery).await, Renewal::Held(_)));
    }
    // The first copy was not applied, so it claims now.
    let fresh = Take {
        batch: ClaimId::random(),
        ..again
    };
    assert_eq!(bare.store.take(fresh).await.unwrap().messages.len(), 2);
}

async fn a_claim_that_was_given_up_is_left_untried(fx: Fixture) {
    let (bare, queue) = (Bare::new(&fx).await, fx.queue().await);
    queue.push("1").await.unwrap();
    queue.push("2").await.unwrap();
    let ask = bare.ask(2);
    let taken = bare.store.take(ask.clone()).await.unwrap().messages;
    assert_eq!(taken.len(), 2);
    let batch = Ticket::own(bare.queue.clone(), ask.batch);
    assert_eq!(bare.store.leave(batch.clone()).await.unwrap(), Left::Done);
    assert_eq!(bare.store.leave(batch).await.unwrap(), Left::Absent);
    for body in ["1", "2"] {
        let message = queue.next_within(Patience::NoWait).await.unwrap().unwrap();
        assert_eq!((message.body(), message.attempt()), (body.as_bytes(), 1));
        message.done().await.unwrap();
    }
    assert!(!bare.settle(&taken[0], Settlement::Done).await);
}

async fn a_claim_that_comes_after_it_was_left_takes_nothing(fx: Fixture) {
    // Where the requests of a process are processed in order, none can arrive later.
    if fx.store == "file" {
        return;
    }
    let (bare, queue) = (Bare::new(&fx).await, fx.queue().await);
    queue.push("x").await.unwrap();
    let ask = bare.ask(1);
    let batch = Ticket::own(bare.queue.clone(), ask.batch);
    assert_eq!(bare.store.leave(batch).await.unwrap(), Left::Absent);
    for again in [false, true] {
        let late = Take {
            again,
            ..ask.clone()
        };
        assert!(bare.store.take(late).await.unwrap().messages.is_empty());
    }
    assert_eq!(queue.claim(1).await.unwrap().len(), 1);
}

async fn renewal_keeps_and_never_revives(fx: Fixture) {
    let (bare, queue) = (Bare::new(&fx).await, fx.queue().await);
    queue.push("x").await.unwrap();
    let kept = bare.take().await.unwrap();
    for _ in 0..6 {
        tokio::time::sleep(TTL / 3).await;
        assert!(matches!(bare.renew(&kept).await, Renewal::Held(lease) if lease.ttl == TTL));
        assert!(queue.claim(1).await.unwrap().is_empty());
    }
    let other = Delivery {
        sequence: kept.sequence - 1,
        ..kept.clone()
    };
    assert!(matches!(bare.renew(&other).await, Renewal::Lost));
    until("the end of the lease", async || {
        queue.report().await.unwrap().unwrap().ready == 1
    })
    .await;
    assert!(matches!(bare.renew(&kept).await, Renewal::Lost));
    assert_eq!(
        queue.report().await.unwrap().unwrap().ready,
        1,
        "it stays so"
    );
}

async fn extending_makes_the_lease_longer(fx: Fixture) {
    let (bare, queue) = (Bare::new(&fx).await, fx.queue().await);
    queue.push("x").await.unwrap();
    let long = bare.take().await.unwrap();
    let ticket = bare.ticket(&long);
    assert!(bare.store.extend(ticket.clone(), TTL * 60).await.unwrap());
    let listed = queue.list(false, 1).await.unwrap().remove(0);
    assert!(listed.changes_in.unwrap() > TTL * 30);
    assert!(matches!(bare.renew(&long).await, Renewal::Held(lease) if lease.ttl == TTL * 60));
    assert!(bare.settle(&long, Settlement::Release).await);
    assert!(
        !bare.store.extend(ticket, TTL * 60).await.unwrap(),
        "it is over"
    );

    let mut message = queue.next().await.unwrap();
    let before = message.deadline();
    message.extend(Duration::from_secs(60)).await.unwrap();
    assert!(message.deadline() > before);
    assert_eq!(message.ttl(), Duration::from_secs(60));
    let shorter = message.extend(Duration::from_secs(1)).await.unwrap_err();
    assert_eq!(shorter.kind(), ErrorKind::InvalidArgument);
    message.done().await.unwrap();
}

async fn a_loss_is_told(fx: Fixture) {
    let (queue, operator) = (fx.queue().await, fx.queue().await);
    queue.push(Draft::new("x").id("it")).await.unwrap();
    let message = Arc::new(queue.next().await.unwrap());
    let works = tokio::spawn({
        let message = Arc::clone(&message);
        async move { message.run(std::future::pending::<()>()).await }
    });
    let it = palisade::queue::Pick::Id("it".to_owned());
    assert_eq!(
        operator.drop_messages(it.clone(), false).await.unwrap(),
        0,
        "it is claimed"
    );
    assert!(message.is_valid());
    assert_eq!(operator.drop_messages(it, true).await.unwrap(), 1);
    let lost = soon("the loss", works).await.unwrap().unwrap_err();
    assert_eq!(lost.kind(), ErrorKind::Lost);
    assert!(!message.is_valid());
    let late = Arc::into_inner(message).unwrap().done().await.unwrap_err();
    assert_eq!(late.kind(), ErrorKind::Lost);
}

async fn an_engine_without_queues_says_so(_: Fixture) {
    let client = palisade::connect("memory:").await.unwrap();
    assert!(!client.capability().queue);
    let refused = client.queue("x").push("y").await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unsupported);
}
