//! The primitives of normal builds.

use std::future::Future;
use std::io;

use parking_lot::Condvar;
pub(crate) use parking_lot::Mutex;
pub(crate) use std::sync::atomic::AtomicU64;
pub(crate) use tokio::time::timeout;

use crate::core::clock::BootTime;

/// Reads the lease clock.
pub fn nanos() -> u64 {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    const CLOCK: rustix::time::ClockId = rustix::time::ClockId::Boottime;
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    const CLOCK: rustix::time::ClockId = rustix::time::ClockId::Monotonic;
    let now = rustix::time::clock_gettime(CLOCK);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Sleeps until a moment of the lease clock.
pub fn sleep_until(until: BootTime) -> tokio::time::Sleep {
    tokio::time::sleep(until.remaining())
}

/// A single-threaded runtime for a thread of its own.
#[derive(Debug)]
pub struct Runtime(tokio::runtime::Runtime);

impl Runtime {
    /// A runtime that nothing runs on yet.
    ///
    /// # Errors
    /// When the system refuses what it needs, such as descriptors.
    pub fn new() -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        Ok(Self(runtime))
    }

    /// Calls a function that needs a runtime context.
    pub fn enter<T>(&self, call: impl FnOnce() -> T) -> T {
        let _entered = self.0.enter();
        call()
    }

    /// Runs `task` to completion on a new thread.
    pub fn spawn(
        self,
        name: &str,
        task: impl Future<Output = ()> + Send + 'static,
    ) -> io::Result<()> {
        let mut unused = Unused(Some(self.0));
        spawn(name, move || {
            if let Some(runtime) = unused.0.take() {
                runtime.block_on(task);
            }
        })
    }
}

/// A runtime on its way to a thread. If that can't be started, this is dropped where the caller is,
/// which may be in a runtime, and a runtime can't wait there for another's end.
struct Unused(Option<tokio::runtime::Runtime>);

impl Drop for Unused {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// Runs `work` on a new thread.
pub(crate) fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    std::thread::Builder::new().name(name.into()).spawn(work)?;
    Ok(())
}

/// Where a thread without a runtime sleeps. A call that comes before it sleeps wakes it, too.
#[derive(Debug, Default)]
pub(crate) struct Parking {
    called: Mutex<bool>,
    bell: Condvar,
}

impl Parking {
    /// Sleeps until then, or until the next call. The sleep stands still during suspend.
    pub(crate) fn sleep_until(&self, until: BootTime) {
        let mut called = self.called.lock();
        if !*called {
            self.bell.wait_for(&mut called, until.remaining());
        }
        *called = false;
    }

    pub(crate) fn call(&self) {
        *self.called.lock() = true;
        self.bell.notify_one();
    }
}
