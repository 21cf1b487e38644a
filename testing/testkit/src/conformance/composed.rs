//! What combinations of holds promise: downgrades and upgrades, many locks at once, any of many,
//! re-entry, and a leadership with its work.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use palisade::engine::Ask;
use palisade::{BootTime, ErrorKind, Patience};

use super::fixture::{answered, fails, free, granted, taken};
use super::{Fixture, SOON, cases, needs, soon, within};

cases! { pub(super) CASES, "composed";
    "A writer may become a reader and a sole reader the writer, with nobody in between." => [
        a_downgrade_lets_readers_in if needs::shared,
        a_sole_reader_is_upgraded if needs::shared,
        a_reader_among_others_is_not_upgraded if needs::shared,
    ],
    "Several locks are taken all or none, whatever the order of their names." => [
        multi_lock_is_all_or_nothing,
        multi_locks_in_any_order_do_not_deadlock,
        a_multi_lock_given_up_leaves_no_claim,
    ],
    "Any of several locks is the first free one." => [
        lock_any_skips_the_locked,
        lock_any_waits_for_whichever_comes,
    ],
    "A reentrant lock is taken again by its own handle, and by no other." => [
        reentry_has_the_same_token,
    ],
    "A leader's work ends before another leads." => [
        lead_ends_its_work_on_loss,
        lead_resigns_after_its_work,
    ],
    "A lock is kept at least as long as it was asked for." => [
        at_least_is_kept,
    ],
}

async fn a_downgrade_lets_readers_in(fx: Fixture) {
    let lock = fx.client().rwlock("changed");
    let other = fx.other_client().await.rwlock("changed");
    let mut hold = lock.write().await.unwrap();
    let token = hold.token();
    let reading = other.clone();
    let reader = fx.queued("changed", 1, async move { reading.read().await });
    let reader = reader.await;
    hold.downgrade().await.unwrap();
    assert_eq!(hold.token(), token);
    let reader = granted(reader).await;
    assert!(hold.is_valid() && reader.is_valid(), "readers");
    taken(other.try_write().await);
}

async fn a_sole_reader_is_upgraded(fx: Fixture) {
    let lock = fx.client().rwlock("changed");
    let mut hold = lock.read().await.unwrap();
    let token = hold.token();
    assert!(hold.try_upgrade().await.unwrap(), "not upgraded");
    assert_eq!(hold.token(), token);
    taken(lock.try_read().await);
    hold.release().await.unwrap();
    drop(free(lock.try_write().await));
}

async fn a_reader_among_others_is_not_upgraded(fx: Fixture) {
    let lock = fx.client().rwlock("changed");
    let mut hold = lock.read().await.unwrap();
    let other = fx
        .other_client()
        .await
        .rwlock("changed")
        .read()
        .await
        .unwrap();
    assert!(
        !hold.try_upgrade().await.unwrap(),
        "a writer beside a reader"
    );
    assert!(hold.is_valid() && other.is_valid(), "readers");
    free(lock.try_read().await).release().await.unwrap();
    other.release().await.unwrap();
    assert!(hold.try_upgrade().await.unwrap(), "not upgraded");
}

async fn multi_lock_is_all_or_nothing(fx: Fixture) {
    let (client, other) = (fx.client(), fx.other_client().await);
    let b = other.mutex("b").lock().await.unwrap();
    let all = client.multi_lock(["c", "a", "b", "a"]);
    taken(all.try_lock().await);
    soon("the background releases", client.flush()).await;
    for name in ["a", "c"] {
        let hold = free(other.mutex(name).try_lock().await);
        hold.release().await.unwrap();
    }
    b.release().await.unwrap();
    let holds = free(all.try_lock().await);
    let names = holds.holds().iter().map(|hold| hold.name().as_str());
    assert_eq!(names.collect::<Vec<_>>(), ["a", "b", "c"]);
    for name in ["a", "b", "c"] {
        taken(other.mutex(name).try_lock().await);
    }
    holds.release().await.unwrap();
}

async fn multi_locks_in_any_order_do_not_deadlock(fx: Fixture) {
    let mut tasks = tokio::task::JoinSet::new();
    for names in [["a", "b", "c"], ["c", "b", "a"], ["b", "c", "a"]] {
        let all = fx.other_client().await.multi_lock(names);
        tasks.spawn(async move {
            for _ in 0..5 {
                all.lock().await.unwrap().release().await.unwrap();
            }
        });
    }
    within(SOON * 2, "all rounds", tasks.join_all()).await;
}

async fn a_multi_lock_given_up_leaves_no_claim(fx: Fixture) {
    let client = fx.lasting_client().await;
    let _c = fx.other_client().await.mutex("c").lock().await.unwrap();
    let all = client.multi_lock(["a", "b", "c"]);
    let given_up = async || all.lock_timeout(Duration::from_millis(150)).await;
    taken(answered(&client, given_up).await);
    let dropped = tokio::time::timeout(Duration::from_millis(100), all.lock()).await;
    assert!(dropped.is_err(), "two holders");
    soon("the background leaves", client.flush()).await;
    for name in ["a", "b"] {
        fx.line(name).until_empty().await;
    }
    assert_eq!(fx.line("c").length().await, (1, 0));
}

async fn lock_any_skips_the_locked(fx: Fixture) {
    let (client, other) = (fx.client(), fx.other_client().await);
    let names = ["a", "b", "c"];
    let a = other.mutex("a").lock().await.unwrap();
    let b = free(client.lock_any(names, Patience::NoWait).await);
    assert_eq!(b.name().as_str(), "b", "the first free one");
    let c = free(other.lock_any(names, Patience::NoWait).await);
    assert_eq!(c.name().as_str(), "c", "the next free one");
    taken(client.lock_any(names, Patience::NoWait).await);
    for hold in [a, b, c] {
        let line = fx.line(hold.name().as_str());
        assert_eq!(line.length().await, (1, 0));
        hold.release().await.unwrap();
    }
}

async fn lock_any_waits_for_whichever_comes(fx: Fixture) {
    let (client, other) = (fx.client(), fx.other_client().await);
    let _a = other.mutex("a").lock().await.unwrap();
    let b = other.mutex("b").lock().await.unwrap();
    let waiting = client.clone();
    let any = async move { waiting.lock_any(["a", "b"], Patience::Forever).await };
    let any = fx.queued("b", 1, any).await;
    if fx.capability().waiters_visible {
        fx.line("a").until_waiting(1).await;
    }
    b.release().await.unwrap();
    let hold = granted(any).await.expect("a hold");
    assert_eq!(hold.name().as_str(), "b", "the one that came free");
    soon("the background leaves", client.flush()).await;
    assert_eq!(fx.line("a").length().await, (1, 0));
}

async fn reentry_has_the_same_token(fx: Fixture) {
    let mine = fx.client().reentrant("again");
    let outer = mine.lock().await.unwrap();
    let inner = soon("the re-entry", mine.lock()).await.unwrap();
    assert_eq!(outer.token(), inner.token());
    assert_eq!(inner.depth(), 2);
    taken(fx.client().reentrant("again").try_lock().await);
    inner.release().await.unwrap();
    taken(fx.mutex("again").try_lock().await);
    outer.release().await.unwrap();
    drop(free(fx.mutex("again").try_lock().await));
}

/// Sets its flag when the future that owns it is dropped.
struct Ended(Arc<AtomicBool>);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

async fn lead_ends_its_work_on_loss(fx: Fixture) {
    let (spy, client) = fx.spied_client().await;
    let ttl = fx.short_ttl();
    let election = client.election("chair").ttl(ttl);
    let ended = Arc::new(AtomicBool::new(false));
    let work = Ended(Arc::clone(&ended));
    let lead = tokio::spawn(async move {
        let forever = |_| async move {
            let _work = work;
            std::future::pending::<()>().await
        };
        election.lead("one", forever).await
    });
    fx.line("chair").until_held().await;
    spy.lose_renewals(u32::MAX);
    let next = fx.client().election("chair");
    let next = within(ttl + SOON, "the next leader", next.campaign("two")).await;
    if fx.capability().early_loss {
        assert!(ended.load(Ordering::SeqCst), "two leaders at work");
    }
    let lost = soon("the end of the former leader", lead).await.unwrap();
    fails(lost, ErrorKind::Lost);
    next.unwrap().resign().await.unwrap();
}

async fn lead_resigns_after_its_work(fx: Fixture) {
    let election = fx.client().election("chair");
    let other = fx.other_client().await.election("chair");
    let work = election.lead("one", |leadership| async move {
        taken(other.try_campaign("two").await);
        assert!(leadership.is_valid(), "a leader at work is not valid");
        leadership
    });
    let leadership = work.await.unwrap();
    assert!(!leadership.is_valid(), "a former leader is valid");
    assert_eq!(election.leader().await.unwrap(), None, "after the work");
}

async fn at_least_is_kept(fx: Fixture) {
    let at_least = Duration::from_millis(400);
    let request = fx.client().line("kept", Ask::Whole).at_least(at_least);
    let start = BootTime::now();
    let hold = free(request.acquire(Patience::NoWait).await);
    hold.release().await.unwrap();
    let took = BootTime::now().saturating_since(start);
    assert!(took >= at_least, "released after {took:?}");
    // A dropped hold is kept in the background.
    let start = BootTime::now();
    drop(free(request.acquire(Patience::NoWait).await));
    let other = fx.other_client().await.mutex("kept");
    drop(soon("the grant", other.lock()).await.unwrap());
    let took = BootTime::now().saturating_since(start);
    assert!(took >= at_least, "handed over after {took:?}");
}
