//! `Ears`: hears hints in the runtimes where somebody sleeps.
//!
//! The watcher's thread could hear them, but to wake a runtime from another thread is to wake a
//! second core, which takes as long as the rest of a hand-over. So each runtime that sleeps
//! listens to the FIFO itself, by a task of its own. Whoever reads a hint first hands it on.
//!
//! A runtime opens the FIFO anew and does not copy the descriptor, which is the sign of life: a
//! task that has not ended yet when the store is closed must not keep that.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use tokio::net::unix::pipe::Receiver;
use tokio::runtime::{Handle, Id};
use tokio::task::JoinHandle;

use super::liveness;
use super::notify::Inner;

/// The tasks that listen, by runtime; `None` for one that can't.
#[derive(Default)]
pub(super) struct Ears(Mutex<HashMap<Id, Option<JoinHandle<()>>>>);

impl Ears {
    /// Lets the runtime of this call listen. Says whether it does.
    pub(super) fn listen_here(&self, inner: &Arc<Inner>) -> bool {
        let runtime = Handle::current();
        let mut ears = self.0.lock();
        match ears.get(&runtime.id()) {
            None => {}
            Some(Some(task)) if task.is_finished() => {}
            Some(task) => return task.is_some(),
        }
        // Forgets runtimes that have ended.
        ears.retain(|_, task| !task.as_ref().is_some_and(JoinHandle::is_finished));
        let task = open(inner).map(|ear| runtime.spawn(listen(ear, Arc::downgrade(inner))));
        let listens = task.is_some();
        ears.insert(runtime.id(), task);
        listens
    }

    /// Ends all tasks, when their runtimes get to it.
    pub(super) fn stop(&self) {
        for task in self.0.lock().drain().filter_map(|(_, task)| task) {
            task.abort();
        }
    }
}

fn open(inner: &Inner) -> Option<Receiver> {
    // That a runtime has no I/O can only be told by the panic that it answers with.
    if cfg!(panic = "abort") {
        return None;
    }
    let ear = inner.liveness().open_to_hear().ok()?;
    std::panic::catch_unwind(|| Receiver::from_owned_fd(ear).ok()).ok()?
}

async fn listen(ear: Receiver, inner: Weak<Inner>) {
    while ear.readable().await.is_ok() {
        let Some(inner) = inner.upgrade() else {
            return;
        };
        liveness::receive(|buffer| ear.try_read(buffer), |hint| inner.hand(hint));
    }
}
