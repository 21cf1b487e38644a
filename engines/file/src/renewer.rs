//! `Renewer`: the thread that does what may block on a renewal.
//!
//! A file system can hang. The keeper has one thread, which must be free to report deadlines, so
//! renewals read and write files here. The thread starts with the first renewal, and ends with its
//! store. There is only one: while it hangs, later requests wait and are given up.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;

use palisade_core::BootTime;

type Job = Box<dyn FnOnce() + Send>;
/// Work for later; returns after which time it is to be done again.
type Chore = Box<dyn Fn() -> Option<Duration> + Send>;

enum Asked {
    Now(Job),
    Later(BootTime, Chore),
}

/// See the module documentation.
#[derive(Default)]
pub(super) struct Renewer(Mutex<Option<Sender<Asked>>>);

impl Renewer {
    /// Runs `job` on the thread; `None` if that is not possible. A job whose future was dropped
    /// before it began does not run.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let (answer, answered) = oneshot::channel();
        let job: Job = Box::new(move || {
            if !answer.is_closed() {
                let _ = answer.send(job());
            }
        });
        // Without a thread it runs here.
        if let Err(Asked::Now(job)) = self.give(Asked::Now(job)) {
            job();
        }
        answered.await.ok()
    }

    /// Does this chore after a while, instead of the one that waits already.
    pub(super) fn later(
        &self,
        after: Duration,
        chore: impl Fn() -> Option<Duration> + Send + 'static,
    ) {
        // Without a thread it is not done.
        let _ = self.give(Asked::Later(BootTime::now() + after, Box::new(chore)));
    }

    fn give(&self, asked: Asked) -> Result<(), Asked> {
        let mut thread = self.0.lock();
        if thread.is_none() {
            let (sender, receiver) = channel();
            let named = std::thread::Builder::new().name("palisade-renew".into());
            if named.spawn(move || work(&receiver)).is_err() {
                return Err(asked);
            }
            *thread = Some(sender);
        }
        match thread.as_ref().map(|thread| thread.send(asked)) {
            Some(Err(unsent)) => {
                // The thread has panicked; what is asked next starts another.
                *thread = None;
                Err(unsent.0)
            }
            _ => Ok(()),
        }
    }
}

/// Ends when the store is gone.
fn work(asked: &Receiver<Asked>) {
    let mut waiting: Option<(BootTime, Chore)> = None;
    loop {
        let next = match &waiting {
            None => asked.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some((at, _)) => asked.recv_timeout(at.remaining()),
        };
        match next {
            Ok(Asked::Now(job)) => job(),
            Ok(Asked::Later(at, chore)) => waiting = Some((at, chore)),
            Err(RecvTimeoutError::Disconnected) => return,
            Err(RecvTimeoutError::Timeout) => {}
        }
        if waiting.as_ref().is_some_and(|(at, _)| at.has_passed())
            && let Some((_, chore)) = waiting.take()
        {
            waiting = chore().map(|after| (BootTime::now() + after, chore));
        }
    }
}
