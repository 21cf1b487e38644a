//! Runs the futures of blocking calls on a small runtime of the library, so that they depend on no
//! runtime of the caller, and refuses calls that would block a runtime's only thread.

use std::future::Future;
use std::pin::pin;
use std::sync::LazyLock;
use std::task::{Context, Poll, Waker};

use tokio::runtime::{Builder, Handle, Runtime, RuntimeFlavor};

use crate::core::error::{Error, ErrorKind, Result};

/// One worker drives timers and sockets; the futures themselves run on the callers' threads.
static RUNTIME: LazyLock<std::io::Result<Runtime>> = LazyLock::new(|| {
    let mut builder = Builder::new_multi_thread();
    builder
        .worker_threads(1)
        .thread_name("palisade-blocking")
        .enable_all()
        .build()
});

/// Blocks until `future` is done.
///
/// # Errors
/// [`ErrorKind::WouldBlock`] on the only thread of a runtime, [`ErrorKind::Denied`] when no thread
/// can be started.
pub fn wait<T>(future: impl Future<Output = T>) -> Result<T> {
    let runtime = RUNTIME.as_ref().map_err(|error| {
        let message = "the runtime of blocking calls can't be started; are limits reached?";
        Error::new(ErrorKind::Denied, "blocking", message).because(error.to_string())
    })?;
    match Handle::try_current().map(|handle| handle.runtime_flavor()) {
        Ok(RuntimeFlavor::MultiThread) => {
            Ok(tokio::task::block_in_place(|| runtime.block_on(future)))
        }
        Ok(_) if polls_tasks_here() => Err(Error::new(
            ErrorKind::WouldBlock,
            "blocking",
            "this would block the only thread of a runtime: use the async API here, or \
             spawn_blocking",
        )),
        Ok(_) | Err(_) => Ok(runtime.block_on(future)),
    }
}

/// Whether this thread is polling tasks right now, and not running blocking code for a runtime that
/// polls elsewhere. Tasks are polled with a coop budget, blocking code is not. Consuming the budget
/// until it is used up tells the two apart, and costs a refused caller no more than an early yield.
fn polls_tasks_here() -> bool {
    /// More than tokio's budget of 128.
    const BEYOND: usize = 1024;
    let mut context = Context::from_waker(Waker::noop());
    (0..BEYOND)
        .any(|_| pin!(tokio::task::coop::consume_budget()).poll(&mut context) == Poll::Pending)
}
