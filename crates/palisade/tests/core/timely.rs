//! A loss is told by the deadline though the keeper's thread does nothing any more: an engine blocks
//! it for ever, as a frozen disk or a debugger does.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};

use crate::support::{Fault, Faulty, SOON, ms, until, within};
use palisade::engine::{Settings, Url};
use palisade::events::{Event, Observer};
use palisade::{BootTime, Client, ErrorKind, LossReason};

/// The margin of this is 150 ms: told after 1,350 ms, granted to others after 1,500 ms.
const TTL: std::time::Duration = ms(1_500);

/// Counts the losses that were told.
#[derive(Clone, Default)]
struct Losses(Arc<AtomicUsize>);

impl Losses {
    fn told(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

impl Observer for Losses {
    fn see(&self, event: &Event<'_>) {
        if let Event::Lost {
            reason: LossReason::Expired,
            ..
        } = event
        {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
}

/// A client whose keeper's thread hangs from the first renewal on.
async fn hung() -> (Arc<Faulty>, Client, Losses) {
    let (engine, client) = Faulty::client(TTL).await;
    engine.renew.set([Fault::Block], Fault::Pass);
    let losses = Losses::default();
    (engine, client.observed_by(losses.clone()), losses)
}

/// Another client of the same engine, with a keeper of its own.
fn beside(engine: &Arc<Faulty>) -> Client {
    let settings: Settings = Url::parse("memory:?ttl=30s&timeout=10s")
        .unwrap()
        .take_settings()
        .unwrap();
    Client::new(engine.clone(), &settings).unwrap()
}

fn runtime(with: fn(&mut tokio::runtime::Builder)) -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    with(&mut builder);
    builder.build().unwrap()
}

#[tokio::test]
async fn work_ends_before_the_next_grant_though_the_keeper_hangs() {
    let (engine, client, losses) = hung().await;
    let hold = client.mutex("x").lock().await.unwrap();
    let next = beside(&engine).mutex("x");
    let next = tokio::spawn(async move {
        let next = next.lock().await.unwrap();
        (BootTime::now(), next)
    });
    let (deadline, waiting) = (hold.deadline(), hold.lost());
    let working = async {
        let worked = hold.run(std::future::pending::<()>()).await;
        (BootTime::now(), worked.unwrap_err())
    };
    let both = async { tokio::join!(waiting, working) };
    let (loss, (ended, error)) = within(SOON, both).await;
    assert_eq!(loss.reason, LossReason::Expired);
    assert!(loss.to_string().contains("did not answer"), "{loss}");
    assert_eq!(error.kind(), ErrorKind::Lost);
    assert!(ended >= deadline);
    let (granted, next) = within(SOON, next).await.unwrap();
    assert!(ended < granted, "ended {ended:?}, granted {granted:?}");
    assert!(next.is_valid());
    until(async || losses.told() > 0).await;
    // A release finds the same loss.
    let (token, released) = (hold.token(), within(SOON, hold.release()).await);
    assert_eq!(released.unwrap_err().kind(), ErrorKind::Lost);
    assert!(next.token() > token);
    // The keeper comes back, and finds nothing left to tell.
    engine.renew.unblock();
    within(SOON, client.flush()).await;
    drop(within(SOON, client.mutex("y").lock()).await.unwrap());
    within(SOON, client.flush()).await;
    assert_eq!(losses.told(), 1);
}

/// Many holds of several clients, with other deadlines: the timer is one for all.
#[tokio::test]
async fn each_of_many_losses_is_told_once_and_on_time() {
    let mut all = Vec::new();
    let (fine, lives) = Faulty::client(ms(600)).await;
    let lives = lives.mutex("x").lock().await.unwrap();
    for _ in 0..3 {
        let (engine, client, losses) = hung().await;
        let mut holds = Vec::new();
        for n in 0..50_u32 {
            let mutex = client.mutex(format!("x{n}"));
            holds.push(mutex.ttl(TTL + ms(7) * n).lock().await.unwrap());
        }
        all.push((engine, client, losses, holds));
    }
    for (_, _, losses, holds) in &all {
        for hold in holds {
            let deadline = hold.deadline();
            within(SOON, hold.lost()).await;
            assert!(deadline.has_passed() && hold.deadline() == BootTime::PAST);
        }
        until(async || losses.told() >= holds.len()).await;
        assert_eq!(losses.told(), holds.len());
    }
    assert!(lives.is_valid() && fine.renew.calls() > 2);
}

/// Its timers stand still, or jump: both would be wrong.
#[tokio::test(start_paused = true)]
async fn a_loss_is_told_under_paused_time() {
    let (_engine, client, losses) = hung().await;
    let hold = client.mutex("x").lock().await.unwrap();
    let deadline = hold.deadline();
    hold.run(std::future::pending::<()>()).await.unwrap_err();
    assert!(deadline.has_passed(), "it must not jump either");
    hold.lost().await;
    while losses.told() == 0 {
        std::thread::yield_now();
    }
}

#[test]
fn a_loss_is_told_without_timers_and_after_the_runtime_has_ended() {
    let first = runtime(|builder| {
        builder.enable_all();
    });
    let (_engine, client, losses) = first.block_on(hung());
    let hold = first.block_on(client.mutex("x").lock()).unwrap();
    drop(first);
    let bare = runtime(|_| {});
    let worked = bare.block_on(hold.run(std::future::pending::<()>()));
    assert_eq!(worked.unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(bare.block_on(hold.lost()).reason, LossReason::Expired);
    while losses.told() == 0 {
        std::thread::yield_now();
    }
}

/// Whoever polls learns it from the clock, even if nobody could tell.
#[tokio::test]
async fn every_poll_looks_at_the_clock() {
    let (_engine, client, _) = hung().await;
    let hold = client.mutex("x").lock().await.unwrap();
    let (deadline, mut lost) = (hold.deadline(), pin!(hold.lost()));
    let loss = loop {
        let late = deadline.has_passed();
        // No await in between: nothing else runs on this thread.
        match lost.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(loss) => break loss,
            Poll::Pending => assert!(!late),
        }
    };
    assert_eq!(loss.reason, LossReason::Expired);
}

/// An observer that hangs keeps nobody else from learning of a loss.
#[tokio::test]
async fn an_observer_that_hangs_holds_up_no_loss() {
    struct Hangs;
    impl Observer for Hangs {
        fn see(&self, event: &Event<'_>) {
            if let Event::Lost { .. } = event {
                loop {
                    std::thread::park();
                }
            }
        }
    }
    let (_engine, client, _) = hung().await;
    let client = client.observed_by(Hangs);
    let first = client.mutex("x").lock().await.unwrap();
    let second = client.mutex("y").ttl(TTL + ms(300)).lock().await.unwrap();
    within(SOON, first.lost()).await;
    let deadline = second.deadline();
    within(SOON, second.lost()).await;
    assert!(deadline.remaining() == ms(0) && !second.is_valid());
}
