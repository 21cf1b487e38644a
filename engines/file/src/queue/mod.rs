//! Work queues of the embedded store: each a SQLite database in `queues/`, kept across boots.
//!
//! A push is synced before it returns; claims and `done`s are not. After a power failure the last
//! of these may be forgotten: messages are delivered again, but none is lost. Times, tokens and
//! message numbers come from the store's token clock (`tokens`), which cannot be stepped and which
//! continues above its former values after a boot. The kernel notices the death of a consumer, as
//! it does for a holder.
//!
//! `database` is the file and its tables, `tx` has the operations of producers and consumers,
//! `inspect` those of operators, `room` keeps space for emptying a queue, `worker` is the thread that has the database open: concurrent
//! requests share one transaction. This file implements the traits of the core.

mod database;
mod inspect;
mod room;
mod tx;
mod worker;

use std::any::Any;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::stream;
use parking_lot::Mutex;
use rustix::process::getpid;

pub(super) use self::room::take_some;
use self::tx::Tx;
use self::worker::Worker;
use super::boot::QUEUES;
use super::error::{file_failed, forked};
use super::notify::Sleeper;
use super::store::Store;
use super::{FileEngine, dir, keys};
use palisade_core::engine::{
    Alarm, Audited, BoxStream, ClaimId, Lease, LeaseId, Leasing, Left, Renewal, Ticket,
};
use palisade_core::queue::{
    Draft, FullReport, MessageReport, Pick, Pushed, QueueReport, QueueStore, Receipt, Settlement,
    Take, Taken,
};
use palisade_core::report::Scope;
use palisade_core::{BootTime, Error, ErrorKind, Name, Result};
use palisade_kit::renew_by_queue;

/// The suffix of database files.
const DATABASE: &str = ".db";

/// The queues of one namespace.
pub(super) struct FileQueues {
    store: Arc<Store>,
    namespace: Arc<str>,
    timeout: Duration,
    workers: Mutex<HashMap<String, Arc<Worker>>>,
    sleepers: Mutex<HashMap<ClaimId, Arc<Asleep>>>,
}

/// A consumer that waits for messages.
struct Asleep {
    sleeper: Sleeper,
    /// The processes that have claimed messages: their death makes messages ready.
    processes: Mutex<Vec<u64>>,
}

impl FileQueues {
    pub(super) fn new(engine: &FileEngine) -> Self {
        Self {
            store: Arc::clone(&engine.store),
            namespace: Arc::clone(&engine.namespace),
            timeout: engine.timeout,
            workers: Mutex::default(),
            sleepers: Mutex::default(),
        }
    }

    /// Runs `verb` in one transaction of the queue's database, which is created if it does not
    /// exist.
    async fn ask<T: Send + 'static>(
        &self,
        operation: &'static str,
        queue: &Name,
        verb: impl Fn(&mut Tx<'_>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.ask_within(operation, queue, self.timeout, verb).await
    }

    async fn ask_within<T: Send + 'static>(
        &self,
        operation: &'static str,
        queue: &Name,
        within: Duration,
        verb: impl Fn(&mut Tx<'_>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let worker = self.worker(operation, queue)?;
        let asked = worker.ask(operation, BootTime::now() + within, verb);
        let asked = asked.await;
        if worker.has_ended() {
            self.workers
                .lock()
                .retain(|_, known| !Arc::ptr_eq(known, &worker));
        }
        asked
    }

    fn worker(&self, operation: &'static str, queue: &Name) -> Result<Arc<Worker>> {
        if getpid() != self.store.pid {
            return Err(forked(operation));
        }
        let mut workers = self.workers.lock();
        if let Some(worker) = workers.get(queue.as_str()) {
            return Ok(Arc::clone(worker));
        }
        let file = keys::file_name(&self.namespace, queue.as_str()) + DATABASE;
        let owner = (Arc::clone(&self.namespace), queue.clone());
        let worker = Worker::start(Arc::clone(&self.store), owner, file)?;
        let worker = Arc::new(worker);
        workers.insert(queue.as_str().to_owned(), Arc::clone(&worker));
        Ok(worker)
    }

    /// The files of existing queues in the scope.
    fn existing(&self, scope: &Scope) -> Result<Vec<String>> {
        let home = self.store.home();
        let failed = |errno| file_failed("survey", &home.dir.path.join(QUEUES), errno);
        let names = match rustix::fs::openat(
            &home.dir.fd,
            QUEUES,
            rustix::fs::OFlags::RDONLY
                | rustix::fs::OFlags::DIRECTORY
                | rustix::fs::OFlags::CLOEXEC,
            rustix::fs::Mode::empty(),
        ) {
            Ok(folder) => dir::names(folder).map_err(failed)?,
            Err(rustix::io::Errno::NOENT) => Vec::new(),
            Err(errno) => return Err(failed(errno)),
        };
        let files = names.iter().filter_map(|name| name.strip_suffix(DATABASE));
        let files = files.filter(|file| keys::may_include(&self.namespace, scope, file));
        Ok(files.map(|file| file.to_owned() + DATABASE).collect())
    }

    /// Counts the messages that this process has claimed.
    fn count(&self, step: i64) {
        self.store.messages.fetch_add(step, Ordering::AcqRel);
    }

    fn asleep(&self, id: ClaimId) -> Arc<Asleep> {
        let mut sleepers = self.sleepers.lock();
        let new = || {
            Arc::new(Asleep {
                sleeper: self.store.watcher.sleeper(id.0),
                processes: Mutex::default(),
            })
        };
        Arc::clone(sleepers.entry(id).or_insert_with(new))
    }
}

impl Leasing for FileQueues {
    fn renew(&self, leases: Vec<Lease>, within: Duration) -> BoxFuture<'_, Vec<Renewal>> {
        Box::pin(async move {
            self.store.liveness.restore();
            renew_by_queue(&leases, |queue, receipts| async move {
                let sent = BootTime::now();
                let renew = move |tx: &mut Tx<'_>| tx.renew(&receipts);
                let renewed = self.ask_within("renew", &queue, within, renew).await?;
                if let Some(ttl) = renewed.iter().flatten().max() {
                    let covered = self.store.leases.cover(sent + *ttl);
                    covered
                        .map_err(|errno| file_failed("renew", &self.store.leases.path(), errno))?;
                }
                Ok(renewed)
            })
            .await
        })
    }

    fn leave(&self, ticket: Ticket) -> BoxFuture<'_, Result<Left>> {
        Box::pin(async move {
            let left = match Receipt::of(&ticket) {
                Some(receipt) => {
                    let back = move |tx: &mut Tx<'_>| tx.put_back(&[receipt], &abandoned(receipt));
                    let left = self.ask("leave", &ticket.name, back).await?;
                    self.count(-1);
                    left.iter().filter(|left| **left).count()
                }
                // Requests are processed in order, so the claim of this batch can't arrive any
                // more.
                None => {
                    let batch = ticket.claim;
                    let leave = move |tx: &mut Tx<'_>| tx.leave(batch);
                    self.ask("leave", &ticket.name, leave).await?
                }
            };
            Ok(Left::of(left > 0))
        })
    }

    fn audit(&self, _: LeaseId) -> BoxFuture<'_, Result<Vec<Audited>>> {
        Box::pin(async { Ok(Vec::new()) })
    }

    fn alarms(&self) -> BoxStream<Alarm> {
        Box::pin(stream::pending())
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async { self.workers.lock().clear() })
    }
}

/// How a message ends that its consumer dropped.
fn abandoned(receipt: Receipt) -> Settlement {
    if receipt.seen {
        Settlement::Retry {
            after: Duration::ZERO,
            why: String::new(),
        }
    } else {
        Settlement::Release
    }
}

impl QueueStore for FileQueues {
    fn push(&self, queue: Name, drafts: Vec<Draft>) -> BoxFuture<'_, Result<Vec<Pushed>>> {
        Box::pin(async move { self.ask("push", &queue, move |tx| tx.push(&drafts)).await })
    }

    fn take(&self, take: Take) -> BoxFuture<'_, Result<Taken>> {
        Box::pin(async move {
            // Registered before the claim records it as asleep, so that no hint is missed.
            let asleep = take.sleeper.map(|sleeper| self.asleep(sleeper));
            let covered = self.store.leases.cover(BootTime::now() + take.ttl);
            covered.map_err(|errno| file_failed("claim", &self.store.leases.path(), errno))?;
            let queue = take.queue.clone();
            let asked = self.ask("claim", &queue, move |tx| tx.take(&take));
            let (taken, processes) = asked.await?;
            self.count(taken.messages.len() as i64);
            if let Some(asleep) = asleep {
                *asleep.processes.lock() = processes;
            }
            Ok(taken)
        })
    }

    fn sleep(&self, sleeper: ClaimId, until: BootTime) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let asleep = self.asleep(sleeper);
            let processes = std::mem::take(&mut *asleep.processes.lock());
            asleep.sleeper.mind(&processes);
            let _ = tokio::time::timeout(until.remaining(), asleep.sleeper.woken()).await;
            Ok(())
        })
    }

    fn forget(&self, sleeper: ClaimId) {
        self.sleepers.lock().remove(&sleeper);
    }

    fn settle(
        &self,
        queue: Name,
        receipts: Vec<Receipt>,
        how: Settlement,
    ) -> BoxFuture<'_, Result<Vec<bool>>> {
        Box::pin(async move {
            let (operation, asked) = match &how {
                Settlement::Done => ("done", receipts.len()),
                _ => ("fail", receipts.len()),
            };
            let settle = move |tx: &mut Tx<'_>| match &how {
                Settlement::Done => tx.done(&receipts),
                how => tx.put_back(&receipts, how),
            };
            let settled = self.ask(operation, &queue, settle).await?;
            self.count(-(asked as i64));
            Ok(settled)
        })
    }

    fn extend(&self, ticket: Ticket, ttl: Duration) -> BoxFuture<'_, Result<bool>> {
        Box::pin(async move {
            let Some(receipt) = Receipt::of(&ticket) else {
                return Ok(false);
            };
            let covered = self.store.leases.cover(BootTime::now() + ttl);
            covered.map_err(|errno| file_failed("extend", &self.store.leases.path(), errno))?;
            let extend = move |tx: &mut Tx<'_>| tx.extend(receipt, ttl);
            self.ask("extend", &ticket.name, extend).await
        })
    }

    fn survey(&self, scope: Scope) -> BoxFuture<'_, Result<Vec<QueueReport>>> {
        Box::pin(async move {
            let mut reports = Vec::new();
            for file in self.existing(&scope)? {
                let Some(name) = database::name_of(&self.store, &file)? else {
                    continue;
                };
                if name.0 == *self.namespace && scope.includes(name.1.as_str()) {
                    let counted = self.ask("survey", &name.1, |tx| tx.count());
                    reports.push(counted.await?);
                }
            }
            reports.sort_by(|one, other| one.name.cmp(&other.name));
            Ok(reports)
        })
    }

    fn list(
        &self,
        queue: Name,
        dead: bool,
        limit: usize,
    ) -> BoxFuture<'_, Result<Vec<MessageReport>>> {
        Box::pin(async move {
            if self.existing(&Scope::Line(queue.clone()))?.is_empty() {
                return Ok(Vec::new());
            }
            self.ask("list", &queue, move |tx| tx.list(dead, limit))
                .await
        })
    }

    fn read(&self, queue: Name, id: String) -> BoxFuture<'_, Result<Option<FullReport>>> {
        Box::pin(async move {
            if self.existing(&Scope::Line(queue.clone()))?.is_empty() {
                return Ok(None);
            }
            self.ask("read", &queue, move |tx| tx.read(&id)).await
        })
    }

    fn retry(&self, queue: Name, pick: Pick) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move {
            if self.existing(&Scope::Line(queue.clone()))?.is_empty() {
                return Ok(0);
            }
            self.ask("retry", &queue, move |tx| tx.retry(&pick)).await
        })
    }

    fn discard(&self, queue: Name, pick: Pick, force: bool) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move {
            if self.existing(&Scope::Line(queue.clone()))?.is_empty() {
                return Ok(0);
            }
            // In steps, so that much can be dropped on a disk without space.
            let (mut gone, mut below) = (0, None);
            loop {
                let pick = pick.clone();
                let drop = move |tx: &mut Tx<'_>| tx.discard(&pick, force, below);
                let (some, rest) = self.ask("drop", &queue, drop).await?;
                gone += some;
                if rest.is_none() {
                    return Ok(gone);
                }
                below = rest;
            }
        })
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// The error for a thread that ended without an answer.
fn ended(operation: &'static str) -> Error {
    let message = "the thread of the queue has ended (bug)";
    Error::new(ErrorKind::Internal, operation, message).maybe_applied()
}
