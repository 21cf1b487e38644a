//! `Thread`: the engine's own thread, which drives sessions, so that they survive when the caller's
//! runtime is blocked or ends.

use tokio::sync::mpsc;
use tokio::task::JoinSet;

use palisade_core::engine::BoxFuture;
use palisade_core::engine::sync::Runtime;
use palisade_core::{Error, ErrorKind, Result};

pub(super) struct Thread(mpsc::UnboundedSender<BoxFuture<()>>);

impl Thread {
    /// # Errors
    /// [`ErrorKind::Denied`] when the system refuses a thread.
    pub(super) fn start() -> Result<Self> {
        let (give, mut given) = mpsc::unbounded_channel::<BoxFuture<()>>();
        let run = async move {
            let mut tasks = JoinSet::new();
            let mut open = true;
            while open || !tasks.is_empty() {
                tokio::select! {
                    task = given.recv(), if open => match task {
                        Some(task) => drop(tasks.spawn(task)),
                        None => open = false,
                    },
                    Some(_) = tasks.join_next() => {}
                }
            }
        };
        let started = Runtime::new().and_then(|runtime| runtime.spawn("palisade-zk", run));
        started.map_err(|error| {
            let message = "no thread can be started; are limits on threads or memory reached?";
            Error::new(ErrorKind::Denied, "connect", message).because(error)
        })?;
        Ok(Self(give))
    }

    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        // The thread lives as long as this.
        let _ = self.0.send(Box::pin(task));
    }
}
