//! A leave or a renewal of one incarnation never touches another: neither another claim's place
//! nor a later place of the same claim.

use std::sync::Arc;
use std::time::Duration;

use crate::support::{Fault, Faulty, LEFT, SOON, ms, until, within};
use palisade::engine::{Ask, Claim, ClaimId, Engine, Entered, Lease, Left, Place, Renewal, Ticket};
use palisade::report::Owner;
use palisade::{ErrorKind, Eviction, Name};

fn claim(id: u128) -> Arc<Claim> {
    Arc::new(Claim {
        id: ClaimId(id),
        name: Name::new("x").unwrap(),
        ask: Ask::Whole,
        ttl: LEFT,
        queue: false,
        owner: Owner::here("test".to_owned(), None),
        value: None,
        renewed: true,
        at_least: Duration::ZERO,
    })
}

/// Enters, and returns the ticket of a place that is held.
async fn held(engine: &Faulty, id: u128) -> Ticket {
    match engine.enter(claim(id)).await.unwrap() {
        Entered::In {
            ticket,
            place: Place::Held { sequence },
            ..
        } => Ticket { sequence, ..ticket },
        other => panic!("not held: {other:?}"),
    }
}

/// Takes a place away, as the end of a lease would.
async fn end(engine: &Faulty, ticket: &Ticket) {
    let gone = engine.evict(
        ticket.name.clone(),
        ticket.claim.to_string(),
        Eviction::Remove,
    );
    assert!(gone.await.unwrap());
}

async fn renew(engine: &Faulty, ticket: &Ticket) -> Renewal {
    let lease = Lease::in_a_test(ticket);
    engine
        .renew(vec![lease], Duration::from_secs(2))
        .await
        .remove(0)
}

#[tokio::test]
async fn a_late_leave_leaves_the_next_holder_alone() {
    let (engine, _client) = Faulty::client(ms(5_000)).await;
    let first = held(&engine, 1).await;
    end(&engine, &first).await;
    let next = held(&engine, 2).await;
    assert_eq!(engine.leave(first).await.unwrap(), Left::Absent);
    assert!(matches!(renew(&engine, &next).await, Renewal::Held(_)));
}

/// The same claim can come twice, when an enter that was given up for lost is asked again after
/// its first place has ended.
#[tokio::test]
async fn a_late_leave_leaves_a_later_incarnation_of_the_same_claim_alone() {
    let (engine, _client) = Faulty::client(ms(5_000)).await;
    let first = held(&engine, 1).await;
    end(&engine, &first).await;
    let again = held(&engine, 1).await;
    assert!(again.sequence > first.sequence);
    assert_eq!(engine.leave(first).await.unwrap(), Left::Absent);
    assert!(matches!(renew(&engine, &again).await, Renewal::Held(_)));
}

#[tokio::test]
async fn a_late_renewal_renews_neither_the_next_holder_nor_a_later_incarnation() {
    let (engine, _client) = Faulty::client(ms(5_000)).await;
    let first = held(&engine, 1).await;
    end(&engine, &first).await;
    assert!(matches!(renew(&engine, &first).await, Renewal::Lost));
    assert_eq!(engine.in_line("x").await, 0, "nothing was re-created");
    let next = held(&engine, 2).await;
    assert!(matches!(renew(&engine, &first).await, Renewal::Lost));
    end(&engine, &next).await;
    held(&engine, 1).await;
    assert!(matches!(renew(&engine, &first).await, Renewal::Lost));
}

/// The whole way: a hold that was lost is released late, and the next one is untouched.
#[tokio::test]
async fn a_late_release_leaves_the_next_hold_alone() {
    let (engine, client) = Faulty::client(ms(300)).await;
    let mutex = client.mutex("x");
    engine.renew.set([], Fault::Refuse);
    let hold = mutex.lock().await.unwrap();
    within(SOON, hold.lost()).await;
    engine.renew.set([], Fault::Pass);
    let next = within(SOON, mutex.lock()).await.unwrap();
    assert_eq!(hold.release().await.unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(engine.in_line("x").await, 1);
    let renewed = next.deadline();
    until(async || !(next.deadline() == renewed && next.is_valid())).await;
    assert!(next.is_valid());
}

#[tokio::test]
async fn a_copy_of_an_enter_that_arrives_after_the_release_takes_no_place() {
    let (engine, client) = Faulty::client(LEFT).await;
    for queue in [true, false] {
        engine.enter.set([Fault::Defer], Fault::Pass);
        let mutex = client.mutex("copied");
        if queue {
            mutex.lock().await.unwrap().release().await.unwrap();
        } else {
            // Not asked again: it is left in the background.
            mutex.try_lock().await.unwrap_err();
            within(SOON, client.flush()).await;
        }
        assert_eq!(engine.enter.arrive().await, 1);
        assert_eq!(engine.in_line("copied").await, 0, "queue: {queue}");
    }
}
