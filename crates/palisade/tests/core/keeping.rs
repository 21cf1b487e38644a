//! The keeper and the hold under faults of the engine: what is renewed, what is told, what is
//! left. Each test names the rule that it breaks if it fails.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::support::{Fault, Faulty, LEFT, SOON, ms, until, within};
use futures_util::FutureExt;
use palisade::engine::Ask;
use palisade::events::{Event, Observer};
use palisade::{BootTime, ErrorKind, Hold, LossReason, Patience};
use parking_lot::Mutex;

#[tokio::test]
async fn a_hold_outlives_its_ttl_because_it_is_renewed() {
    let (engine, client) = Faulty::client(ms(600)).await;
    let hold = client.mutex("x").lock().await.unwrap();
    let first = hold.deadline();
    until(async || engine.renew.calls() >= 6).await;
    assert!(hold.is_valid() && hold.deadline() > first);
    hold.release().await.unwrap();
}

#[tokio::test]
async fn one_failed_renewal_is_no_loss() {
    let (engine, client) = Faulty::client(ms(300)).await;
    engine
        .renew
        .set([Fault::Refuse, Fault::EatReply], Fault::Pass);
    let hold = client.mutex("x").lock().await.unwrap();
    until(async || engine.renew.calls() >= 6).await;
    assert!(hold.is_valid());
    hold.release().await.unwrap();
}

/// The loss comes by the local deadline though the request hangs, and before the engine can grant.
#[tokio::test]
async fn a_hung_renewal_is_told_before_anyone_else_is_granted() {
    let (engine, client) = Faulty::client(ms(400)).await;
    engine.renew.set([], Fault::Hang);
    let mutex = client.mutex("x");
    let hold = mutex.lock().await.unwrap();
    let next = tokio::spawn(async move {
        let next = mutex.lock().await.unwrap();
        (BootTime::now(), next)
    });
    let loss = within(SOON, hold.lost()).await;
    let told = BootTime::now();
    assert_eq!(loss.reason, LossReason::Expired);
    assert!(!hold.is_valid() && hold.remaining().is_zero());
    // The second claim is not renewed either, so it may have to start over.
    engine.renew.set([], Fault::Pass);
    let (granted, next) = within(SOON, next).await.unwrap();
    assert!(told < granted, "told {told:?}, granted {granted:?}");
    assert!(next.token() > hold.token());
    assert_eq!(hold.release().await.unwrap_err().kind(), ErrorKind::Lost);
    assert!(
        next.is_valid(),
        "the late release of a lost hold left another's place alone"
    );
}

/// An answer that comes after the deadline must not revive what was told to be over.
#[tokio::test]
async fn a_late_acknowledgement_does_not_revive_a_hold() {
    let (engine, client) = Faulty::client(ms(300)).await;
    engine.renew.set([Fault::Late(ms(350))], Fault::Hang);
    let hold = client.mutex("x").lock().await.unwrap();
    within(SOON, hold.lost()).await;
    tokio::time::sleep(ms(400)).await;
    assert!(!hold.is_valid());
}

#[tokio::test]
async fn a_grant_whose_answer_took_longer_than_the_ttl_is_not_held() {
    let (engine, client) = Faulty::client(ms(200)).await;
    engine.enter.set([Fault::Late(ms(250))], Fault::Pass);
    let mutex = client.mutex("x");
    assert!(mutex.try_lock().await.unwrap().is_none());
    engine.until_in_line("x", 0).await;
}

#[tokio::test]
async fn a_lost_reply_is_answered_by_asking_again_with_the_same_id() {
    let (engine, client) = Faulty::client(ms(2_000)).await;
    engine
        .enter
        .set([Fault::EatReply, Fault::EatReply], Fault::Pass);
    let hold = client.mutex("x").lock().await.unwrap();
    assert_eq!(engine.in_line("x").await, 1, "one claim, not three");
    hold.release().await.unwrap();
    assert_eq!(engine.in_line("x").await, 0);
}

#[tokio::test]
async fn an_unknown_enter_that_is_given_up_is_left_in_the_background() {
    let (engine, client) = Faulty::client(LEFT).await;
    engine.enter.set([], Fault::EatReply);
    let error = client.mutex("x").try_lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable);
    engine.until_in_line("x", 0).await;
}

#[tokio::test]
async fn an_unreachable_engine_is_retried_until_patience_ends() {
    let (engine, client) = Faulty::client(LEFT).await;
    engine
        .enter
        .set([Fault::Refuse, Fault::Refuse, Fault::Refuse], Fault::Pass);
    let mutex = client.mutex("x");
    within(SOON, mutex.lock())
        .await
        .unwrap()
        .release()
        .await
        .unwrap();

    engine.enter.set([], Fault::Refuse);
    let error = within(SOON, mutex.lock_timeout(ms(100))).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable);
    let calls = engine.enter.calls();
    assert_eq!(
        mutex.try_lock().await.unwrap_err().kind(),
        ErrorKind::Unreachable
    );
    assert_eq!(engine.enter.calls(), calls + 1, "no patience, one try");
}

#[tokio::test]
async fn dropping_a_hold_leaves_in_the_background_until_it_is_done() {
    let (engine, client) = Faulty::client(LEFT).await;
    engine
        .leave
        .set([Fault::Refuse, Fault::Refuse], Fault::Pass);
    drop(client.mutex("x").lock().await.unwrap());
    within(SOON, client.flush()).await;
    assert_eq!(engine.in_line("x").await, 0);
    assert_eq!(engine.leave.calls(), 3);
}

/// Dropped at every await, and in between: nothing stays in the line.
#[tokio::test]
async fn a_dropped_acquire_leaves_no_place() {
    let (engine, client) = Faulty::client(LEFT).await;
    let mutex = client.mutex("x");
    let hold = mutex.lock().await.unwrap();
    // While waiting.
    assert!(tokio::time::timeout(ms(30), mutex.lock()).await.is_err());
    engine.until_in_line("x", 1).await;
    // While the enter hangs, having been applied.
    engine.enter.set([Fault::Late(SOON)], Fault::Pass);
    assert!(tokio::time::timeout(ms(30), mutex.lock()).await.is_err());
    engine.until_in_line("x", 1).await;
    hold.release().await.unwrap();
    assert_eq!(engine.in_line("x").await, 0);
}

#[tokio::test]
async fn a_release_that_is_dropped_half_way_goes_on() {
    let (engine, client) = Faulty::client(LEFT).await;
    engine.leave.set([Fault::Hang], Fault::Pass);
    let hold = client.mutex("x").lock().await.unwrap();
    assert!(tokio::time::timeout(ms(20), hold.release()).await.is_err());
    engine.until_in_line("x", 0).await;
}

#[tokio::test]
async fn no_renewal_outlives_its_release() {
    let (engine, client) = Faulty::client(ms(150)).await;
    let mutex = client.mutex("x");
    for _ in 0..20 {
        mutex.lock().await.unwrap().release().await.unwrap();
    }
    let after = engine.renew.calls();
    tokio::time::sleep(ms(300)).await;
    assert_eq!(engine.renew.calls(), after);
}

/// A panic in the engine ends the keeper; its holds must not believe on.
#[tokio::test]
async fn a_panic_in_the_engine_is_a_loss_and_the_next_claim_starts_afresh() {
    let (engine, client) = Faulty::client(ms(300)).await;
    engine.renew.set([Fault::Panic], Fault::Pass);
    let hold = client.mutex("x").lock().await.unwrap();
    assert_eq!(within(SOON, hold.lost()).await.reason, LossReason::Expired);
    drop(hold);
    let again = within(SOON, client.mutex("x").lock()).await.unwrap();
    assert!(again.is_valid());
}

/// The same panic, while a claim is on its way: nobody would renew it, and nobody tell.
#[tokio::test]
async fn a_claim_that_arrives_after_a_panic_starts_afresh_too() {
    let (engine, client) = Faulty::client(ms(12_000)).await;
    engine.renew.set([Fault::Panic], Fault::Pass);
    engine.enter.set([Fault::Pass, Fault::Held], Fault::Pass);
    let first = client.mutex("x").ttl(ms(3_000)).lock().await.unwrap();
    let second = client.mutex("y");
    let second = tokio::spawn(async move { second.lock().await });
    // The panic comes after a third of the ttl, and printing it may take a while.
    within(SOON, first.lost()).await;
    engine.enter.answer();
    let second = within(SOON, second).await.unwrap().unwrap();
    let granted = second.deadline();
    until(async || second.deadline() != granted).await;
    assert!(second.is_valid(), "someone renews it");
}

/// The keeper has a thread of its own: holds live on, and are released, without the runtime that
/// they were taken on.
#[test]
fn holds_survive_the_runtime_that_took_them() {
    let runtime = || {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
    };
    let (engine, client, hold) = {
        let first = runtime();
        let (engine, client) = first.block_on(Faulty::client(ms(200)));
        let hold = first.block_on(client.mutex("x").lock()).unwrap();
        (engine, client, hold)
    };
    let before = hold.deadline();
    runtime().block_on(within(SOON, async {
        while hold.deadline() == before {
            tokio::time::sleep(ms(5)).await;
        }
    }));
    assert!(hold.is_valid());
    drop(hold);
    runtime().block_on(async {
        within(SOON, client.flush()).await;
        assert_eq!(engine.in_line("x").await, 0);
    });
}

#[tokio::test]
async fn work_is_dropped_at_the_moment_of_a_loss() {
    let (engine, client) = Faulty::client(ms(200)).await;
    engine.renew.set([], Fault::Refuse);
    let hold = client.mutex("x").lock().await.unwrap();
    let worked = within(SOON, hold.run(std::future::pending::<()>())).await;
    assert_eq!(worked.unwrap_err().kind(), ErrorKind::Lost);
}

#[tokio::test]
async fn work_that_ends_after_the_loss_is_not_called_done() {
    let (engine, client) = Faulty::client(ms(200)).await;
    engine.renew.set([], Fault::Refuse);
    let hold = client.mutex("x").lock().await.unwrap();
    // Blocks the runtime, as a paused process would: nothing can be told meanwhile.
    let worked = hold.run(async { std::thread::sleep(ms(300)) }).await;
    assert_eq!(worked.unwrap_err().kind(), ErrorKind::Lost);
}

#[tokio::test]
async fn a_lease_that_ends_while_waiting_starts_over_and_is_never_granted() {
    let (engine, client) = Faulty::client(ms(300)).await;
    let mutex = client.mutex("x");
    let hold = mutex.clone().ttl(LEFT).lock().await.unwrap();
    engine.renew.set([], Fault::Refuse);
    let waiter = tokio::spawn({
        let mutex = mutex.clone();
        async move { mutex.lock().await }
    });
    let enters = engine.enter.calls();
    until(async || engine.enter.calls() >= enters + 2).await;
    engine.renew.set([], Fault::Pass);
    hold.release().await.unwrap();
    let next = within(SOON, waiter).await.unwrap().unwrap();
    assert!(next.is_valid());
    assert_eq!(engine.in_line("x").await, 1, "the dead claim is gone");
}

#[tokio::test]
async fn a_failed_look_keeps_the_place() {
    let (engine, client) = Faulty::client(ms(5_000)).await;
    let mutex = client.mutex("x");
    let hold = mutex.lock().await.unwrap();
    engine.wait.set([Fault::Refuse, Fault::Refuse], Fault::Pass);
    let waiter = tokio::spawn({
        let mutex = mutex.clone();
        async move { mutex.lock().await }
    });
    until(async || engine.wait.calls() >= 3).await;
    assert_eq!(engine.enter.calls(), 2, "it did not enter again");
    hold.release().await.unwrap();
    assert!(within(SOON, waiter).await.unwrap().unwrap().is_valid());
}

#[tokio::test]
async fn an_evicted_waiter_is_told_and_does_not_come_back() {
    let (engine, client) = Faulty::client(LEFT).await;
    let mutex = client.mutex("x");
    let _hold = mutex.lock().await.unwrap();
    let waiter = tokio::spawn({
        let mutex = mutex.clone();
        async move { mutex.lock().await }
    });
    engine.until_in_line("x", 2).await;
    let name = palisade::Name::new("x").unwrap();
    let lines = client
        .survey(palisade::report::Scope::Line(name.clone()))
        .await
        .unwrap();
    let id = lines[0].waiters[0].id.clone();
    assert!(
        within(
            SOON,
            client.evict(&name, palisade::Which::Claim(&id), palisade::Eviction::Mark)
        )
        .await
        .unwrap()
    );
    assert_eq!(
        within(SOON, waiter).await.unwrap().unwrap_err().kind(),
        ErrorKind::Lost
    );
    assert_eq!(engine.in_line("x").await, 1);
}

#[tokio::test]
async fn many_leases_are_renewed_with_few_calls() {
    let (engine, client) = Faulty::client(ms(600)).await;
    let mut holds = Vec::new();
    for n in 0..500 {
        holds.push(client.mutex(format!("x{n}")).lock().await.unwrap());
    }
    let before = engine.renew.calls();
    let deadlines: Vec<_> = holds.iter().map(|hold| hold.deadline()).collect();
    until(async || {
        !holds
            .iter()
            .zip(&deadlines)
            .any(|(hold, was)| hold.deadline() == *was)
    })
    .await;
    let calls = engine.renew.calls() - before;
    assert!(calls <= 25, "{calls} calls for 500 leases");
    assert!(holds.iter().all(|hold| hold.is_valid()));
}

#[tokio::test]
async fn patience_ends_on_time() {
    let (_engine, client) = Faulty::client(ms(5_000)).await;
    let mutex = client.mutex("x");
    let _hold = mutex.lock().await.unwrap();
    let before = BootTime::now();
    let request = client.line("x", Ask::Whole);
    assert!(
        request
            .acquire(Patience::For(ms(80)))
            .await
            .unwrap()
            .is_none()
    );
    let took = BootTime::now().saturating_since(before);
    assert!(took >= ms(80) && took < ms(80 + 900), "{took:?}");
}

/// The engine is frozen: nothing is refused, nothing is answered.
#[tokio::test]
async fn patience_is_a_bound_on_a_frozen_engine_too() {
    let (engine, client) = Faulty::client(LEFT).await;
    let mutex = client.mutex("x");
    let hold = mutex.lock().await.unwrap();
    let punctual = |began: BootTime| {
        let took = BootTime::now().saturating_since(began);
        assert!(took >= ms(100) && took < ms(2_000), "{took:?}");
    };

    // While it waits.
    engine.wait.set([], Fault::Hang);
    let began = BootTime::now();
    let error = within(SOON, mutex.lock_timeout(ms(100))).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable);
    punctual(began);
    engine.until_in_line("x", 1).await;
    hold.release().await.unwrap();

    // While it enters, which is applied at once, or when nobody waits for it any more.
    for frozen in [Fault::Late(SOON), Fault::Defer] {
        engine.enter.set([frozen], Fault::Hang);
        let began = BootTime::now();
        let error = within(SOON, mutex.lock_timeout(ms(100))).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreachable);
        punctual(began);
        within(SOON, client.flush()).await;
        engine.enter.arrive().await;
        assert_eq!(engine.in_line("x").await, 0, "{frozen:?}");
    }

    // And while several are taken, one of which must be given back.
    engine.enter.set([Fault::Pass], Fault::Hang);
    engine.leave.set([Fault::Hang], Fault::Pass);
    let began = BootTime::now();
    let both = client.multi_lock(["x", "y"]);
    let error = within(SOON, both.lock_timeout(ms(100))).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable);
    punctual(began);
    engine.until_in_line("x", 0).await;
}

/// Told on the keeper's thread, which must be able to go on whatever the observer does.
struct Watcher<F>(F);

impl<F: Fn(&Event<'_>) + Send + Sync + 'static> Observer for Watcher<F> {
    fn see(&self, event: &Event<'_>) {
        (self.0)(event);
    }
}

#[tokio::test]
async fn an_observer_may_drop_holds_and_use_the_client_when_it_is_told_of_a_loss() {
    let (engine, client) = Faulty::client(ms(300)).await;
    let holds: Arc<Mutex<Vec<Hold>>> = Arc::default();
    let client = client.clone().observed_by(Watcher({
        let (holds, line) = (Arc::clone(&holds), client.line("z", Ask::Whole));
        move |event: &Event<'_>| {
            if let Event::Lost { .. } = event {
                holds.lock().clear();
                // Enters, and leaves again, without an answer.
                let _ = pin!(line.acquire(Patience::NoWait)).now_or_never();
            }
        }
    }));
    engine.renew.set([], Fault::Refuse);
    for name in ["x", "y"] {
        let hold = client.mutex(name).lock().await.unwrap();
        holds.lock().push(hold);
    }
    until(async || holds.lock().is_empty()).await;
    engine.renew.set([], Fault::Pass);
    within(SOON, client.flush()).await;
    engine.until_in_line("x", 0).await;
    let again = within(SOON, client.mutex("x").lock()).await;
    again.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn a_loss_that_the_release_finds_before_the_keeper_is_told_once() {
    let (_, client) = Faulty::client(ms(300)).await;
    let (go, gate) = std::sync::mpsc::channel::<()>();
    let told: Arc<Mutex<Vec<LossReason>>> = Arc::default();
    let client = client.observed_by(Watcher({
        let (gate, told) = (Mutex::new(gate), Arc::clone(&told));
        move |event: &Event<'_>| match event {
            // The keeper's thread comes to nothing until the other end is dropped.
            Event::Renewed { .. } => drop(gate.lock().recv()),
            Event::Lost { reason, .. } => told.lock().push(*reason),
            _ => {}
        }
    }));
    let hold = client.mutex("x").lock().await.unwrap();
    until(async || !hold.is_valid()).await;
    let error = hold.release().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost);
    // By the release or, on a thread of its own, by the timer.
    until(async || !told.lock().is_empty()).await;
    assert_eq!(*told.lock(), [LossReason::Expired]);
    drop(go);
    // The keeper has looked again when it has given this back.
    drop(client.mutex("y").lock().await.unwrap());
    within(SOON, client.flush()).await;
    assert_eq!(*told.lock(), [LossReason::Expired]);
}

#[tokio::test]
async fn an_observer_that_panics_costs_nobody_a_lease() {
    let (engine, client) = Faulty::client(ms(300)).await;
    let told = Arc::new(AtomicUsize::new(0));
    let client = client
        .observed_by(Watcher(|_: &Event<'_>| panic!("the test asked for it")))
        .observed_by(Watcher({
            let told = Arc::clone(&told);
            move |_: &Event<'_>| {
                told.fetch_add(1, Ordering::SeqCst);
            }
        }));
    let hold = client.mutex("x").lock().await.unwrap();
    until(async || engine.renew.calls() >= 3).await;
    assert!(hold.is_valid());
    assert!(told.load(Ordering::SeqCst) >= 4, "the others are told");
    hold.release().await.unwrap();
}

#[tokio::test]
async fn a_loss_says_why_the_renewals_failed() {
    let (engine, client) = Faulty::client(ms(300)).await;
    engine.renew.set([], Fault::Refuse);
    let hold = client.mutex("x").lock().await.unwrap();
    let loss = within(SOON, hold.lost()).await;
    assert_eq!(loss.why().unwrap().kind(), ErrorKind::Unreachable);
    let said = "its lease was not renewed in time: renew: cut off";
    assert_eq!(loss.to_string(), said);
    let error = hold.release().await.unwrap_err();
    assert!(error.to_string().contains(said), "{error}");

    engine.renew.set([], Fault::Hang);
    let hold = client.mutex("x").lock().await.unwrap();
    let loss = within(SOON, hold.lost()).await;
    assert!(loss.to_string().contains("did not answer"), "{loss}");
}
