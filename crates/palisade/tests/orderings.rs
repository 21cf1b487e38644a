//! Orderings of caller, keeper and clock, tried by a scheduler that picks which thread goes on at
//! every lock, atomic and clock read. Everything is the library's own code but locks, threads and
//! time; the engine is the one in memory.
//!
//! Run with `RUSTFLAGS="--cfg palisade_shuttle" cargo test -p palisade --test orderings`. A failure prints a
//! schedule, but ids are random: run it again rather than replay it.
#![cfg(palisade_shuttle)]
#![allow(clippy::unwrap_used)]

#[allow(dead_code)]
#[path = "core/support.rs"]
mod support;

use std::sync::Arc;
use std::time::Duration;

use palisade::command::advance;
use palisade::events::{Event, Observer};
use palisade::{Client, ErrorKind};
use shuttle::future::block_on;
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::sync::atomic::{AtomicUsize, Ordering};
use shuttle::thread;
use shuttle::{Config, MaxSteps, Runner};
use support::{Fault, Faulty};

const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// The margin of this is 50 ms: renewed after 100 ms, invalid after 250 ms.
const TTL: Duration = ms(300);
const DUE: Duration = ms(100);
const DEADLINE: Duration = ms(250);

/// Tries many orderings of `test`. A thread that waits for what never comes is a failure.
fn tried(test: fn()) {
    let full = std::env::var_os("PALISADE_TEST_FULL").is_some();
    let times = if full { 20_000 } else { 1_500 };
    let mut config = Config::new();
    config.max_steps = MaxSteps::FailAfter(50_000);
    config.stack_size = 0x40000;
    Runner::new(RandomScheduler::new(times), config.clone()).run(test);
    Runner::new(PctScheduler::new(4, times), config).run(test);
}

fn until(mut happened: impl FnMut() -> bool) {
    while !happened() {
        thread::yield_now();
    }
}

/// Lets the client go, and waits for the end of its keeper.
fn end(engine: &Arc<Faulty>, client: Client) {
    drop(client);
    until(|| Arc::strong_count(engine) == 1);
}

/// Counts the losses that were told.
struct Losses(Arc<AtomicUsize>);

impl Observer for Losses {
    fn see(&self, event: &Event<'_>) {
        if let Event::Lost { .. } = event {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
}

/// The lease becomes due only once the leave has been sent: nobody may care for it any more.
#[test]
fn no_renewal_is_started_once_the_leave_is_sent() {
    tried(|| {
        let (engine, client) = block_on(Faulty::client(TTL));
        let hold = block_on(client.mutex("x").lock()).unwrap();
        let clock = thread::spawn({
            let engine = Arc::clone(&engine);
            move || {
                until(|| engine.leave.calls() > 0);
                advance(DUE);
            }
        });
        block_on(hold.release()).unwrap();
        clock.join().unwrap();
        end(&engine, client);
        assert_eq!(engine.renew.calls(), 0);
        assert_eq!(engine.leave.calls(), 1);
    });
}

/// A renewal is under way while the hold is released; its answer comes when it may.
#[test]
fn a_late_answer_to_a_renewal_changes_nothing() {
    tried(|| {
        let (engine, client) = block_on(Faulty::client(TTL));
        let mutex = client.mutex("x");
        let hold = block_on(mutex.lock()).unwrap();
        let clock = thread::spawn(|| advance(DUE));
        block_on(hold.release()).unwrap();
        clock.join().unwrap();
        assert!(engine.renew.calls() <= 1);
        let next = block_on(mutex.try_lock()).unwrap().unwrap();
        assert!(next.is_valid());
        block_on(next.release()).unwrap();
        drop(mutex);
        end(&engine, client);
        assert_eq!(block_on(engine.in_line("x")), 0);
        assert_eq!(engine.leave.calls(), 2);
    });
}

/// Either the loss was told, or the release went well: never both, never neither.
#[test]
fn loss_and_release_race_to_one_outcome() {
    tried(|| {
        let (engine, client) = block_on(Faulty::client(TTL));
        engine.renew.set([], Fault::Hang);
        let told = Arc::new(AtomicUsize::new(0));
        let client = client.observed_by(Losses(Arc::clone(&told)));
        let hold = block_on(client.mutex("x").lock()).unwrap();
        let clock = thread::spawn(|| {
            advance(DUE);
            advance(DEADLINE - DUE);
        });
        let released = block_on(hold.release());
        clock.join().unwrap();
        end(&engine, client);
        match (told.load(Ordering::SeqCst), released) {
            (0, Ok(())) => {}
            // By the keeper, or by the release, which may find it first by the clock.
            (1, Err(error)) if error.kind() == ErrorKind::Lost => {}
            both => panic!("{both:?}"),
        }
        assert_eq!(engine.leave.calls(), 1);
        assert_eq!(block_on(engine.in_line("x")), 0);
    });
}

#[test]
fn a_hold_that_is_dropped_while_it_expires_is_left_once() {
    tried(|| {
        let (engine, client) = block_on(Faulty::client(TTL));
        engine.renew.set([], Fault::Hang);
        let hold = block_on(client.mutex("x").lock()).unwrap();
        let clock = thread::spawn(|| {
            advance(DUE);
            advance(DEADLINE - DUE);
        });
        drop(hold);
        block_on(client.flush());
        assert_eq!(block_on(engine.in_line("x")), 0);
        clock.join().unwrap();
        end(&engine, client);
        assert_eq!(engine.leave.calls(), 1);
    });
}

/// The keeper may be about to sleep for ever, or until another lease is due, just when a claim
/// comes: it must look again.
#[test]
fn a_claim_that_comes_while_the_keeper_falls_asleep_is_renewed() {
    tried(|| {
        let (engine, client) = block_on(Faulty::client(TTL));
        let other = client.mutex("other").ttl(ms(60_000));
        let taken = thread::spawn(move || block_on(other.lock()).unwrap());
        let hold = block_on(client.mutex("x").lock()).unwrap();
        advance(DUE);
        until(|| engine.renew.calls() > 0);
        let other = taken.join().unwrap();
        block_on(hold.release()).unwrap();
        block_on(other.release()).unwrap();
        end(&engine, client);
    });
}

/// The deadline passes while an answer that would move it is on its way.
#[test]
fn who_saw_itself_invalid_stays_so_and_is_told() {
    tried(|| {
        let (engine, client) = block_on(Faulty::client(TTL));
        let hold = Arc::new(block_on(client.mutex("x").lock()).unwrap());
        let clock = thread::spawn(|| {
            advance(DUE);
            advance(DEADLINE - DUE);
        });
        let looker = thread::spawn({
            let hold = Arc::clone(&hold);
            move || (0..20).any(|_| !hold.is_valid())
        });
        clock.join().unwrap();
        if looker.join().unwrap() {
            // The answer may come only now.
            for _ in 0..20 {
                assert!(!hold.is_valid(), "valid again");
            }
        }
        if !hold.is_valid() {
            // The keeper looks once a second at the latest.
            advance(ms(1_000));
            block_on(hold.lost());
        }
        drop(hold);
        block_on(client.flush());
        end(&engine, client);
        assert_eq!(engine.leave.calls(), 1);
    });
}

/// The keeper's thread hangs in a renewal, or is about to: whoever tells, tells once.
#[test]
fn a_loss_is_told_once_while_the_keeper_hangs() {
    tried(|| {
        let (engine, client) = block_on(Faulty::client(TTL));
        engine.renew.set([Fault::Block], Fault::Pass);
        let told = Arc::new(AtomicUsize::new(0));
        let client = client.observed_by(Losses(Arc::clone(&told)));
        let hold = block_on(client.mutex("x").lock()).unwrap();
        let clock = thread::spawn(|| {
            advance(DUE);
            advance(DEADLINE - DUE);
        });
        block_on(hold.lost());
        assert!(!hold.is_valid());
        clock.join().unwrap();
        engine.renew.unblock();
        drop(hold);
        end(&engine, client);
        assert_eq!(told.load(Ordering::SeqCst), 1);
    });
}

/// The timer finds nothing registered, and ends, just when a claim comes.
#[test]
fn a_claim_that_comes_while_the_timer_ends_is_told_of_its_loss() {
    tried(|| {
        let (engine, client) = block_on(Faulty::client(TTL));
        engine.renew.set([], Fault::Block);
        drop(block_on(client.mutex("y").lock()).unwrap());
        // The timer looks once a second at the latest.
        let clock = thread::spawn(|| advance(ms(1_000)));
        if let Ok(Some(hold)) = block_on(client.mutex("x").try_lock()) {
            clock.join().unwrap();
            let second = thread::spawn(|| {
                advance(DUE);
                advance(DEADLINE - DUE);
            });
            block_on(hold.lost());
            second.join().unwrap();
        } else {
            clock.join().unwrap();
        }
        engine.renew.unblock();
        end(&engine, client);
    });
}
