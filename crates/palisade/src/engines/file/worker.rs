//! The store's own thread: where operations wait for a writer lock that stays taken.
//!
//! An operation is pending, then running, or abandoned, decided by one compare-and-swap: one
//! whose caller gave up is never applied later. A process that is stopped inside a transaction
//! so makes others fail as unreachable after their timeout, and never hang. The thread holds no
//! store: it ends with the last one.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use tokio::sync::oneshot;

use super::dir::busy;
use super::fault::Fault;
use super::store::{Gate, Held, Store};
use super::tx::Tx;
use crate::core::error::{Error, Kind, Result};

/// What the thread runs under the writer lock; what that returns runs after it.
pub(super) type Job = Box<dyn FnOnce(Result<Held<'_>>) + Send>;

const PENDING: u8 = 0;
const RUNNING: u8 = 1;
const ABANDONED: u8 = 2;

/// The caller's side of a job; dropping it abandons what has not begun.
struct Caller(Arc<AtomicU8>);

impl Caller {
    /// Whether the job never begins now.
    fn abandon(&self) -> bool {
        let swapped =
            self.0
                .compare_exchange(PENDING, ABANDONED, Ordering::AcqRel, Ordering::Acquire);
        swapped.is_ok()
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        self.abandon();
    }
}

impl Store {
    /// Hands an operation to the thread and waits for its answer.
    pub(super) async fn run_later<T, F>(
        self: &Arc<Self>,
        operation: &'static str,
        timeout: Duration,
        op: F,
    ) -> Result<T>
    where
        T: Send + 'static,
        F: FnMut(&mut Tx<'_>) -> std::result::Result<T, Fault> + Send + 'static,
    {
        let (answer, mut answered) = oneshot::channel();
        let caller = Caller(Arc::new(AtomicU8::new(PENDING)));
        self.submit(operation, Arc::clone(&caller.0), op, move |done| {
            // The caller may be gone.
            let _ = answer.send(done);
        })?;
        let gone = |_| {
            Err(Error::new(
                Kind::Internal,
                operation,
                "the store's thread ended",
            ))
        };
        match tokio::time::timeout(timeout, &mut answered).await {
            Ok(done) => return done.unwrap_or_else(gone),
            Err(_) if caller.abandon() => return Err(busy(operation, timeout)),
            Err(_) => {}
        }
        // It has begun and takes microseconds, unless the disk hangs.
        match tokio::time::timeout(timeout, answered).await {
            Ok(done) => done.unwrap_or_else(gone),
            Err(_) => Err(busy(operation, timeout).maybe_applied()),
        }
    }

    /// Hands an operation to the thread and does not wait.
    pub(super) fn run_detached<F>(self: &Arc<Self>, operation: &'static str, op: F)
    where
        F: FnMut(&mut Tx<'_>) -> std::result::Result<(), Fault> + Send + 'static,
    {
        // Best effort: what is left behind is removed when this process is gone.
        let _ = self.submit(operation, Arc::new(AtomicU8::new(PENDING)), op, |_| ());
    }

    fn submit<T, F>(
        self: &Arc<Self>,
        operation: &'static str,
        state: Arc<AtomicU8>,
        mut op: F,
        answer: impl FnOnce(Result<T>) + Send + 'static,
    ) -> Result<()>
    where
        T: Send + 'static,
        F: FnMut(&mut Tx<'_>) -> std::result::Result<T, Fault> + Send + 'static,
    {
        let store = Arc::downgrade(self);
        let job: Job = Box::new(move |held| {
            let Some(store) = store.upgrade() else { return };
            let begun =
                state.compare_exchange(PENDING, RUNNING, Ordering::AcqRel, Ordering::Acquire);
            if begun.is_err() {
                return;
            }
            let done = held.and_then(|mut held| held.perform(&store.shared, operation, &mut op));
            let done = done.map(|(value, hints)| {
                store.deliver(hints);
                value
            });
            // Before the answer: the caller may be the last to have the store, and end with it.
            drop(store);
            answer(done);
        });
        let jobs = match self.worker.get() {
            Some(jobs) => jobs,
            None => {
                let (jobs, queue) = mpsc::channel();
                let gate = Arc::clone(&self.gate);
                std::thread::Builder::new()
                    .name("palisade-store".into())
                    .spawn(move || work(&gate, &queue))
                    .map_err(|error| {
                        Error::new(Kind::Unreachable, operation, "no thread can be started")
                            .because(error)
                    })?;
                // Another caller may have been quicker; the thread of this one ends then.
                self.worker.get_or_init(|| jobs)
            }
        };
        jobs.send(job)
            .map_err(|_| Error::new(Kind::Internal, operation, "the store's thread ended"))
    }
}

fn work(gate: &Gate, queue: &mpsc::Receiver<Job>) {
    while let Ok(job) = queue.recv() {
        job(gate.enter());
    }
}
