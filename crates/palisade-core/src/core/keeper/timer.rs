//! `Timer`: the thread that tells losses on time, whatever holds up the keepers' own threads.
//!
//! A keeper's thread runs the engine's code, which a frozen disk, a debugger or a defect can stop.
//! So one thread of the process does nothing but sleep until the next deadline of any keeper, and
//! then ends what has expired. It does no I/O, and calls no engine and no observer.
//!
//! Invariant: while a lease is registered, the thread is awake, or wakes by the lease's deadline. It
//! ends when no lease is registered, and the next one starts it again.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use super::ledger::TICK;
use crate::core::clock::BootTime;
use crate::core::sync::{AtomicU64, Mutex, Parking, spawn};

/// What has deadlines: a keeper.
pub(super) trait Timed: Send + Sync {
    /// Ends what has expired, and returns the next deadline. It must neither block nor call the
    /// code of others on this thread, not even by being dropped.
    fn expire(self: Arc<Self>) -> BootTime;
}

/// The timer of a process.
pub(super) struct Timer {
    /// When the thread looks next without being called; never while it looks, or does not run.
    looks_at: AtomicU64,
    state: Mutex<State>,
    parking: Parking,
}

#[derive(Default)]
struct State {
    running: bool,
    /// Whether something has changed since the thread began to look.
    again: bool,
    all: Vec<Weak<dyn Timed>>,
}

#[cfg(not(palisade_shuttle))]
static TIMER: std::sync::LazyLock<Arc<Timer>> = std::sync::LazyLock::new(Timer::new);

#[cfg(palisade_shuttle)]
::shuttle::lazy_static! {
    static ref TIMER: Arc<Timer> = Timer::new();
}

/// The timer of this process.
pub(super) fn timer() -> &'static Arc<Timer> {
    &TIMER
}

impl Timer {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            looks_at: AtomicU64::new(BootTime::NEVER.as_nanos()),
            state: Mutex::new(State::default()),
            parking: Parking::default(),
        })
    }

    /// Adds a keeper. Its deadlines count from now on.
    pub(super) fn add(&self, timed: Weak<dyn Timed>) {
        self.state.lock().all.push(timed);
    }

    /// Removes a keeper, which has no deadlines any more.
    pub(super) fn remove(&self, timed: &Weak<dyn Timed>) {
        let mut state = self.state.lock();
        state.all.retain(|known| !Weak::ptr_eq(known, timed));
        state.again = true;
        if state.running {
            self.parking.call();
        }
    }

    /// Sees to it that the thread looks by `deadline`, which a keeper has registered before. If the
    /// thread can't be started, the keeper's own thread is left, and the next call tries again.
    pub(super) fn mind(self: &Arc<Self>, deadline: BootTime) {
        if deadline.as_nanos() >= self.looks_at.load(Ordering::SeqCst) {
            return;
        }
        let mut state = self.state.lock();
        state.again = true;
        if state.running {
            self.parking.call();
        } else {
            let timer = Arc::clone(self);
            state.running = spawn("palisade-timer", move || timer.run()).is_ok();
        }
    }

    fn run(&self) {
        loop {
            // First this, then the look: whoever registers too late for the look finds that nobody
            // is going to look, and says so.
            let never = BootTime::NEVER.as_nanos();
            self.looks_at.store(never, Ordering::SeqCst);
            let all = {
                let mut state = self.state.lock();
                state.again = false;
                state.all.clone()
            };
            let all = all.iter().filter_map(Weak::upgrade);
            let next = all.map(Timed::expire).min();

            let mut state = self.state.lock();
            if state.again {
                continue;
            }
            let Some(next) = next.filter(|next| *next < BootTime::NEVER) else {
                state.running = false;
                return;
            };
            // Looking once a second bounds how late a loss is told after a suspend.
            let looks_at = next.min(BootTime::now() + TICK);
            self.looks_at.store(looks_at.as_nanos(), Ordering::SeqCst);
            drop(state);
            self.parking.sleep_until(looks_at);
        }
    }
}
