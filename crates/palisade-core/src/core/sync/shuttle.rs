//! The primitives of `tests/orderings.rs`: shuttle's threads, locks and atomics, and a clock that
//! stands still until the test advances it.

use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use ::shuttle::sync::atomic::Ordering;
use ::shuttle::sync::{MutexGuard, TryLockError};
use futures_util::future::{Either, select};
use tokio::sync::Notify;

pub use ::shuttle::sync::atomic::AtomicU64;

use crate::core::clock::BootTime;

/// A mutex with the interface of the real one.
#[derive(Debug, Default)]
pub struct Mutex<T>(::shuttle::sync::Mutex<T>);

impl<T> Mutex<T> {
    pub fn new(value: T) -> Self {
        Self(::shuttle::sync::Mutex::new(value))
    }

    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.0
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        match self.0.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

::shuttle::lazy_static! {
    /// Reset for every execution. It does not start at zero, which is `BootTime::PAST`.
    static ref CLOCK: AtomicU64 = AtomicU64::new(1_000_000_000);
    /// Never held across a scheduling point, so it need not be shuttle's.
    static ref SLEEPERS: parking_lot::Mutex<Vec<Waker>> = parking_lot::Mutex::default();
}

/// Reads the clock, which is a scheduling point.
pub fn nanos() -> u64 {
    CLOCK.load(Ordering::SeqCst)
}

pub(super) fn advance(by: Duration) {
    CLOCK.fetch_add(by.as_nanos() as u64, Ordering::SeqCst);
    let sleepers = std::mem::take(&mut *SLEEPERS.lock());
    sleepers.into_iter().for_each(Waker::wake);
}

pub fn sleep_until(until: BootTime) -> Sleep {
    Sleep(until)
}

pub struct Sleep(BootTime);

impl Future for Sleep {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        // Register before checking the time; otherwise an advance in between would be missed.
        SLEEPERS.lock().push(context.waker().clone());
        if self.0.has_passed() {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    }
}

pub async fn timeout<T>(limit: Duration, task: impl Future<Output = T>) -> Result<T, ()> {
    match select(pin!(task), sleep_until(BootTime::now() + limit)).await {
        Either::Left((done, _)) => Ok(done),
        Either::Right(_) => Err(()),
    }
}

/// A substitute for the runtime, without any state.
pub struct Runtime;

impl Runtime {
    pub fn new() -> io::Result<Self> {
        Ok(Self)
    }

    pub fn enter<T>(&self, call: impl FnOnce() -> T) -> T {
        call()
    }

    pub fn spawn(
        self,
        name: &str,
        task: impl Future<Output = ()> + Send + 'static,
    ) -> io::Result<()> {
        spawn(name, move || ::shuttle::future::block_on(task))
    }
}

pub(crate) fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    ::shuttle::thread::Builder::new()
        .name(name.into())
        .spawn(work)?;
    Ok(())
}

#[derive(Debug, Default)]
pub(crate) struct Parking(Notify);

impl Parking {
    pub(crate) fn sleep_until(&self, until: BootTime) {
        let called = pin!(self.0.notified());
        ::shuttle::future::block_on(select(called, sleep_until(until)));
    }

    pub(crate) fn call(&self) {
        self.0.notify_one();
    }
}
