//! `Worker`: the thread that has a queue's database open.
//!
//! It runs all pending requests in one transaction, so that the pushes of many tasks cost one sync,
//! and answers when that is committed. A request that failed is rolled back alone. Requests are
//! processed in order. The database is opened when it is first needed, and again when its file was
//! replaced.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::sync::oneshot;

use super::database::{self, Opened};
use super::tx::Tx;
use super::{ended, room};
use crate::store::Store;
use palisade_core::{BootTime, Error, ErrorKind, Name, Result};

/// The maximum number of requests in one transaction, so that others are not blocked for long.
const BATCH: usize = 256;

/// See the module documentation. Dropping it waits, for some milliseconds, until the thread has
/// finished pending requests, closed the database and ended.
pub(super) struct Worker {
    /// `None` at the end.
    requests: Option<Sender<Box<dyn Request>>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.requests = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Worker {
    pub(super) fn start(store: Arc<Store>, owner: (Arc<str>, Name), file: String) -> Result<Self> {
        let (requests, asked) = channel();
        let work = move || work(&store, &owner, &file, &asked);
        let thread = std::thread::Builder::new().name("palisade-queue".into());
        let thread = thread.spawn(work).map_err(|error| {
            let message = "no thread can be started for the queue; are limits reached?";
            Error::new(ErrorKind::Unreachable, "queue", message).because(error)
        })?;
        Ok(Self {
            requests: Some(requests),
            thread: Some(thread),
        })
    }

    /// Whether it will never answer again.
    pub(super) fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Runs `verb` in a transaction that begins before `until`. It runs even if this future is
    /// dropped.
    pub(super) async fn ask<T: Send + 'static>(
        &self,
        operation: &'static str,
        until: BootTime,
        verb: impl Fn(&mut Tx<'_>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (answer, answered) = oneshot::channel();
        let request = Box::new(Verb {
            operation,
            until,
            verb,
            done: None,
            answer,
        });
        let requests = self.requests.as_ref().ok_or_else(|| ended(operation))?;
        requests.send(request).map_err(|_| ended(operation))?;
        answered.await.unwrap_or_else(|_| Err(ended(operation)))
    }
}

/// A pending request.
trait Request: Send {
    fn operation(&self) -> &'static str;
    /// The time by which its transaction must have begun.
    fn until(&self) -> BootTime;
    /// Runs it, perhaps once more; `false` if it failed and must be rolled back.
    fn run(&mut self, tx: &mut Tx<'_>) -> bool;
    /// Whether it failed because the disk is full.
    fn found_full(&self) -> bool;
    /// Sends the result, given that of the transaction.
    fn answer(self: Box<Self>, committed: Result<()>);
}

struct Verb<T, F> {
    operation: &'static str,
    until: BootTime,
    verb: F,
    done: Option<Result<T>>,
    answer: oneshot::Sender<Result<T>>,
}

impl<T: Send, F: Fn(&mut Tx<'_>) -> Result<T> + Send> Request for Verb<T, F> {
    fn operation(&self) -> &'static str {
        self.operation
    }

    fn until(&self) -> BootTime {
        self.until
    }

    fn run(&mut self, tx: &mut Tx<'_>) -> bool {
        self.done = Some((self.verb)(tx));
        matches!(self.done, Some(Ok(_)))
    }

    fn found_full(&self) -> bool {
        matches!(&self.done, Some(Err(error)) if is_full(error))
    }

    fn answer(self: Box<Self>, committed: Result<()>) {
        let done = self.done.unwrap_or_else(|| Err(ended(self.operation)));
        let answer = match (done, committed) {
            (Ok(done), Ok(())) => Ok(done),
            (Err(error), Ok(())) | (_, Err(error)) => Err(error),
        };
        // The caller may no longer wait for it.
        let _ = self.answer.send(answer);
    }
}

fn work(
    store: &Arc<Store>,
    owner: &(Arc<str>, Name),
    file: &str,
    asked: &Receiver<Box<dyn Request>>,
) {
    let mut opened: Option<Opened> = None;
    while let Ok(first) = asked.recv() {
        let mut requests = vec![first];
        requests.extend(asked.try_iter().take(BATCH - 1));
        let operation = requests[0].operation();
        let until = requests.iter().map(|request| request.until()).max();
        let until = until.unwrap_or(BootTime::PAST);
        let database = match opened.take().filter(Opened::is_in_place) {
            Some(opened) => Ok(opened),
            None => match database::open(store, owner, file, operation, until) {
                Err(error) if is_full(&error) && room::take_some(&store.home().dir) => {
                    database::open(store, owner, file, operation, until)
                }
                opened => opened,
            },
        };
        let committed = match database {
            Err(error) => Err(error),
            Ok(mut database) => {
                let committed = attempt(store, &mut database, until, &mut requests);
                // A database that failed may be damaged or gone.
                opened = committed.is_ok().then_some(database);
                committed
            }
        };
        for request in requests {
            request.answer(committed.clone());
        }
    }
}

fn is_full(error: &Error) -> bool {
    error.message().contains("full")
}

/// Runs all requests in one transaction; those that find the disk full, once more with the space
/// that is kept for that.
fn attempt(
    store: &Arc<Store>,
    database: &mut Opened,
    until: BootTime,
    requests: &mut Vec<Box<dyn Request>>,
) -> Result<()> {
    let pushes = |request: &dyn Request| request.operation() == "push";
    if requests.iter().any(|request| pushes(&**request))
        && let Err(error) = room::keep(store, database, "push")
    {
        let (refused, rest) = std::mem::take(requests)
            .into_iter()
            .partition(|request| pushes(&**request));
        *requests = rest;
        let refused: Vec<Box<dyn Request>> = refused;
        for request in refused {
            request.answer(Err(error.clone()));
        }
    }
    if requests.is_empty() {
        return Ok(());
    }
    let mut committed = transact(store, database, until, requests);
    let shorten = |database: &Opened| room::shorten(store, database);
    for remedy in [&shorten as &dyn Fn(&Opened) -> bool, &room::give_up] {
        let full = committed.as_ref().is_err_and(is_full);
        let failed = |request: &dyn Request| full || request.found_full();
        if !requests.iter().any(|request| failed(&**request)) || !remedy(database) {
            continue;
        }
        // What was done is done; only what failed runs again.
        let (failed, over) = std::mem::take(requests)
            .into_iter()
            .partition(|request| failed(&**request));
        *requests = failed;
        let over: Vec<Box<dyn Request>> = over;
        for request in over {
            request.answer(committed.clone());
        }
        committed = transact(store, database, until, requests);
        // The space that is given up is not for more messages.
        if requests.iter().any(|request| pushes(&**request)) {
            break;
        }
    }
    if committed.is_ok() {
        tidy(store, database, requests);
    }
    committed
}

/// What can wait until the requests are done, and may fail.
fn tidy(store: &Arc<Store>, database: &Opened, requests: &[Box<dyn Request>]) {
    let any = |operation: &str| {
        requests
            .iter()
            .any(|request| request.operation() == operation)
    };
    if any("push") {
        let _ = room::keep(store, database, "push");
    }
    // Others wait meanwhile.
    if any("drop") {
        room::shrink(database, Duration::from_secs(2));
    } else if database.scarce.get() || database.is_nth_change() {
        room::shrink(database, Duration::from_millis(20));
    }
    if database.scarce.get() {
        room::checkpoint(&database.connection);
    }
}

/// Runs all requests in one transaction.
fn transact(
    store: &Arc<Store>,
    database: &mut Opened,
    until: BootTime,
    requests: &mut [Box<dyn Request>],
) -> Result<()> {
    let operation = requests
        .first()
        .map_or("queue", |request| request.operation());
    let durable = requests
        .iter()
        .any(|request| database::is_durable(request.operation()));
    database.begin(operation, durable, until)?;
    let database = Open(database);
    let mut tx = Tx::new(store, database.0, operation)?;
    let several = requests.len() > 1;
    for request in requests {
        if several {
            tx.execute("SAVEPOINT request")?;
        }
        match (request.run(&mut tx), several) {
            (true, true) => tx.execute("RELEASE request")?,
            (true, false) => {}
            (false, true) => tx.execute("ROLLBACK TO request; RELEASE request")?,
            // The request reports its own failure; nothing is left to commit.
            (false, false) => return Ok(()),
        }
    }
    let hints = tx.commit()?;
    drop(database);
    hints.send(store);
    Ok(())
}

/// Rolls the transaction back on drop unless it was committed.
struct Open<'a>(&'a Opened);

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.roll_back();
    }
}
