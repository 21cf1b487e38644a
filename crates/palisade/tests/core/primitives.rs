//! The primitives that are more than one claim, and what a hold can become.

use crate::support::{self, Fault, Faulty, LEFT, SOON, ms, until, within};
use palisade::engine::Ask;
use palisade::{BootTime, Client, ErrorKind, Hold, Patience, Retry};

async fn client() -> Client {
    // What is left behind stays for longer than any test waits.
    let url = format!("memory:{:x}?ttl=120s", rand::random::<u64>());
    palisade::connect(&url).await.unwrap()
}

async fn in_line(client: &Client, name: &str) -> usize {
    support::in_line(client.engine(), name).await
}

#[tokio::test]
async fn downgrade_lets_readers_in_but_no_writer_between() {
    let client = client().await;
    let lock = client.rwlock("x");
    let mut writer = lock.write().await.unwrap();
    let token = writer.token();
    let waiting = tokio::spawn({
        let lock = lock.clone();
        async move { lock.read().await }
    });
    until(async || in_line(&client, "x").await >= 2).await;
    writer.downgrade().await.unwrap();
    let reader = within(SOON, waiting).await.unwrap().unwrap();
    assert!(writer.is_valid() && reader.is_valid());
    assert_eq!(writer.token(), token);
    assert!(lock.try_write().await.unwrap().is_none());
}

#[tokio::test]
async fn only_the_sole_reader_is_upgraded_and_busy_keeps_the_read() {
    let client = client().await;
    let lock = client.rwlock("x");
    let mut one = lock.read().await.unwrap();
    let two = lock.read().await.unwrap();
    assert!(!one.try_upgrade().await.unwrap());
    assert!(one.is_valid());
    two.release().await.unwrap();
    assert!(one.try_upgrade().await.unwrap());
    assert!(lock.try_read().await.unwrap().is_none(), "it writes now");
    one.release().await.unwrap();
    assert!(lock.try_read().await.unwrap().is_some());
}

#[tokio::test]
async fn a_permit_can_not_become_a_reader_beside_other_permits() {
    let client = client().await;
    let mut whole = client.rwlock("x").write().await.unwrap();
    let waiting = tokio::spawn({
        let permits = client.semaphore("x", 3);
        async move { permits.acquire().await }
    });
    until(async || in_line(&client, "x").await >= 2).await;
    assert_eq!(
        whole.downgrade().await.unwrap_err().kind(),
        ErrorKind::CapacityMismatch
    );
    assert!(whole.is_valid());
    whole.release().await.unwrap();
    within(SOON, waiting)
        .await
        .unwrap()
        .unwrap()
        .release()
        .await
        .unwrap();
}

#[tokio::test]
async fn a_multi_lock_takes_all_or_nothing() {
    let client = client().await;
    let both = client.multi_lock(["b", "a", "b"]);
    let b = client.mutex("b").lock().await.unwrap();
    assert!(both.try_lock().await.unwrap().is_none());
    assert!(both.lock_timeout(ms(50)).await.unwrap().is_none());
    within(SOON, client.flush()).await;
    assert_eq!(
        in_line(&client, "a").await,
        0,
        "the partial grant was undone"
    );
    b.release().await.unwrap();
    let holds = both.lock().await.unwrap();
    let names: Vec<_> = holds
        .holds()
        .iter()
        .map(|hold| hold.name().as_str())
        .collect();
    assert_eq!(names, ["a", "b"]);
    holds.release().await.unwrap();
    assert_eq!(in_line(&client, "a").await + in_line(&client, "b").await, 0);
}

#[tokio::test]
async fn a_multi_lock_that_gives_up_has_given_everything_back() {
    let client = client().await;
    let _last = client.mutex("c").lock().await.unwrap();
    let all = client.multi_lock(["a", "b", "c"]);
    for _ in 0..50 {
        assert!(all.try_lock().await.unwrap().is_none());
        assert_eq!(in_line(&client, "a").await + in_line(&client, "b").await, 0);
    }
    assert!(all.lock_timeout(ms(5)).await.unwrap().is_none());
    assert_eq!(in_line(&client, "a").await + in_line(&client, "b").await, 0);
}

#[tokio::test]
async fn a_claim_with_another_capacity_waits_as_its_patience_allows() {
    let client = client().await;
    let (three, five) = (client.semaphore("x", 3), client.semaphore("x", 5));
    let permit = three.acquire().await.unwrap();
    let mismatch = |answer: palisade::Result<Option<Hold>>| {
        assert_eq!(answer.unwrap_err().kind(), ErrorKind::CapacityMismatch);
    };
    mismatch(five.try_acquire().await);
    let began = BootTime::now();
    mismatch(within(SOON, five.acquire_timeout(ms(100))).await);
    assert!(BootTime::now().saturating_since(began) >= ms(100));

    let waiting = tokio::spawn({
        let five = five.clone();
        async move { five.acquire_timeout(SOON).await }
    });
    permit.release().await.unwrap();
    let permit = within(SOON, waiting).await.unwrap().unwrap().unwrap();
    mismatch(three.try_acquire().await);
    permit.release().await.unwrap();
}

#[tokio::test]
async fn multi_locks_of_opposite_orders_never_deadlock() {
    let client = client().await;
    let run = |names: [&'static str; 3]| {
        let lock = client.multi_lock(names);
        tokio::spawn(async move {
            for _ in 0..100 {
                lock.lock().await.unwrap().release().await.unwrap();
            }
        })
    };
    let (one, two) = (run(["a", "b", "c"]), run(["c", "b", "a"]));
    within(SOON, one).await.unwrap();
    within(SOON, two).await.unwrap();
}

#[tokio::test]
async fn one_deadline_counts_for_all_names() {
    let wait = ms(4_000);
    let client = client().await;
    let b = client.mutex("b").lock().await.unwrap();
    let _c = client.mutex("c").lock().await.unwrap();
    let before = BootTime::now();
    let all = client.multi_lock(["a", "b", "c"]);
    let all = tokio::spawn(async move { all.lock_timeout(wait).await });
    // Half of the time is spent on `b`. With a deadline of its own, `c` would end it at six seconds.
    tokio::time::sleep((before + wait / 2).remaining()).await;
    assert_eq!(in_line(&client, "b").await, 2, "it waits for `b`");
    b.release().await.unwrap();
    until(async || in_line(&client, "c").await == 2).await;
    assert!(within(SOON, all).await.unwrap().unwrap().is_none());
    let took = BootTime::now().saturating_since(before);
    assert!(took >= wait && took < ms(5_500), "{took:?}");
}

#[tokio::test]
async fn a_multi_hold_is_lost_when_one_of_it_is() {
    let (engine, client) = Faulty::client(ms(200)).await;
    let holds = client.multi_lock(["a", "b"]).lock().await.unwrap();
    engine.renew.set([], Fault::Refuse);
    within(SOON, holds.lost()).await;
    assert!(!holds.is_valid());
    assert_eq!(
        holds.run(async {}).await.unwrap_err().kind(),
        ErrorKind::Lost
    );
}

#[tokio::test]
async fn any_takes_the_first_free_and_can_wait_for_one() {
    let client = client().await;
    let names = ["a", "b"];
    let a = client
        .lock_any(names, Patience::NoWait)
        .await
        .unwrap()
        .unwrap();
    let b = client
        .lock_any(names, Patience::NoWait)
        .await
        .unwrap()
        .unwrap();
    assert_eq!((a.name().as_str(), b.name().as_str()), ("a", "b"));
    assert!(
        client
            .lock_any(names, Patience::NoWait)
            .await
            .unwrap()
            .is_none()
    );
    assert!(
        client
            .lock_any(names, Patience::For(ms(30)))
            .await
            .unwrap()
            .is_none()
    );
    let waiting = tokio::spawn({
        let client = client.clone();
        async move { client.lock_any(["a", "b"], Patience::Forever).await }
    });
    until(async || in_line(&client, "a").await + in_line(&client, "b").await >= 4).await;
    b.release().await.unwrap();
    let got = within(SOON, waiting).await.unwrap().unwrap().unwrap();
    assert_eq!(got.name().as_str(), "b");
    until(async || in_line(&client, "a").await <= 1).await;
}

#[tokio::test]
async fn re_entry_gives_the_same_token_and_the_last_one_releases() {
    let client = client().await;
    let mine = client.reentrant("x");
    let outer = mine.lock().await.unwrap();
    let inner = mine.clone().try_lock().await.unwrap().unwrap();
    assert_eq!(outer.token(), inner.token());
    assert_eq!(inner.depth(), 2);
    let other = client.reentrant("x");
    assert!(
        other.try_lock().await.unwrap().is_none(),
        "another handle is another owner"
    );
    outer.release().await.unwrap();
    assert!(other.try_lock().await.unwrap().is_none());
    inner.release().await.unwrap();
    assert!(other.try_lock().await.unwrap().is_some());
}

#[tokio::test]
async fn re_entry_into_a_lost_hold_is_refused() {
    let (engine, client) = Faulty::client(ms(200)).await;
    engine.renew.set([], Fault::Refuse);
    let mine = client.reentrant("x");
    let outer = mine.lock().await.unwrap();
    within(SOON, outer.lost()).await;
    assert_eq!(mine.lock().await.unwrap_err().kind(), ErrorKind::Lost);
    drop(outer);
    assert!(within(SOON, mine.lock()).await.unwrap().is_valid());
}

#[tokio::test]
async fn leading_ends_only_after_the_work() {
    let client = client().await;
    let election = client.election("x");
    let (started, running) = tokio::sync::oneshot::channel();
    let (finish, finished) = tokio::sync::oneshot::channel();
    let leading = tokio::spawn({
        let election = election.clone();
        async move {
            election
                .lead("one", |leadership| async move {
                    started.send(leadership.clone()).unwrap();
                    finished.await.unwrap();
                    leadership.is_valid()
                })
                .await
        }
    });
    let leadership = within(SOON, running).await.unwrap();
    leadership.proclaim("two").await.unwrap();
    let leader = election.leader().await.unwrap().unwrap();
    assert_eq!(
        (leader.value.as_deref(), leader.token),
        (Some("two"), leadership.token())
    );
    assert!(election.try_campaign("three").await.unwrap().is_none());
    finish.send(()).unwrap();
    assert!(within(SOON, leading).await.unwrap().unwrap());
    assert!(
        !leadership.is_valid(),
        "a kept clone does not keep the leadership"
    );
    assert!(election.try_campaign("three").await.unwrap().is_some());
}

#[tokio::test]
async fn work_of_a_lost_leader_is_dropped_before_the_next_leads() {
    let (engine, client) = Faulty::client(ms(300)).await;
    engine.renew.set([], Fault::Refuse);
    let election = client.election("x");
    let led = within(SOON, election.lead("one", |_| std::future::pending::<()>())).await;
    assert_eq!(led.unwrap_err().kind(), ErrorKind::Lost);
}

#[tokio::test]
async fn a_panic_in_the_work_resigns() {
    let client = client().await;
    let election = client.election("x");
    let panicked = tokio::spawn({
        let election = election.clone();
        async move {
            election
                .lead("one", |_| async { panic!("the test asked for it") })
                .await
        }
    });
    assert!(within(SOON, panicked).await.unwrap_err().is_panic());
    assert!(
        election
            .campaign_timeout("two", SOON)
            .await
            .unwrap()
            .is_some()
    );
}

#[tokio::test]
async fn at_least_keeps_a_released_and_a_dropped_hold() {
    let client = client().await;
    let request = client.line("x", Ask::Whole).at_least(ms(120));
    let mutex = client.mutex("x");

    let before = BootTime::now();
    request
        .acquire(Patience::NoWait)
        .await
        .unwrap()
        .unwrap()
        .release()
        .await
        .unwrap();
    assert!(BootTime::now().saturating_since(before) >= ms(120));

    let before = BootTime::now();
    drop(request.acquire(Patience::NoWait).await.unwrap().unwrap());
    assert!(mutex.try_lock().await.unwrap().is_none());
    let next = within(SOON, mutex.lock()).await.unwrap();
    let kept = BootTime::now().saturating_since(before);
    assert!(kept >= ms(120) && kept < ms(3_000), "{kept:?}");
    next.release().await.unwrap();
}

#[tokio::test]
async fn a_dropped_hold_that_is_kept_longer_than_its_ttl_is_renewed() {
    let (engine, client) = Faulty::client(ms(900)).await;
    let request = client.line("x", Ask::Whole).at_least(ms(2_000));
    drop(request.acquire(Patience::NoWait).await.unwrap().unwrap());
    let before = BootTime::now();
    within(SOON, client.flush()).await;
    assert!(BootTime::now().saturating_since(before) >= ms(1_500));
    assert!(engine.renew.calls() >= 3);
    assert_eq!(engine.in_line("x").await, 0);
}

#[tokio::test]
async fn retry_policies_decide_how_often_an_unreachable_engine_is_asked() {
    let (engine, client) = Faulty::client(ms(5_000)).await;
    engine.enter.set([], Fault::Refuse);
    let request = client.line("x", Ask::Whole);
    let none = request.clone().retry(Retry::None);
    assert_eq!(
        none.acquire(Patience::Forever).await.unwrap_err().kind(),
        ErrorKind::Unreachable
    );
    assert_eq!(engine.enter.calls(), 1);
    let fixed = request.retry(Retry::Fixed(ms(20)));
    assert!(fixed.acquire(Patience::For(ms(110))).await.is_err());
    let calls = engine.enter.calls() - 1;
    assert!((2..=7).contains(&calls), "{calls}");
}

#[tokio::test]
async fn a_semaphore_without_permits_is_refused_with_a_reason() {
    let (_engine, client) = Faulty::client(LEFT).await;
    for wrong in [client.semaphore("s", 0).acquire().await, {
        let ask = Ask::Part {
            weight: 1,
            capacity: 0,
        };
        let line = client.line("s", ask);
        line.acquire(Patience::NoWait).await.map(Option::unwrap)
    }] {
        let error = wrong.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.message().contains("at least 1"), "{error}");
        assert!(!error.message().contains("1 to 0"), "{error}");
    }
    let error = client.semaphore("s", 3).acquire_many(4).await.unwrap_err();
    assert!(error.message().contains("1 to 3, not 4"), "{error}");
}
