//! `Session`: one ZooKeeper session, as the verbs use it. A [`Driver`] on the engine's own thread
//! keeps it connected.
//!
//! **The lease of a session counts from the last write that a majority accepted.** A server that is
//! cut off from its leader answers reads and pings for a while, but these do not keep the session
//! alive. Even a write through a follower does not touch the leader's session timer by itself: the
//! follower reports the sessions that it has heard from with the leader's next ping, every half
//! tick. So the session timeout is 1.5 times the lease, and a write counts in full only if
//! something was answered long enough before it to have been reported (see [`Touches`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{broadcast, mpsc, oneshot};

use super::connection::{Connection, Endpoints, NoConnection};
use super::driver::Driver;
use super::proto::{Answer, Request};
use super::thread::Thread;
use super::watches::{Watched, Watches};
use crate::core::clock::BootTime;
use crate::core::engine::Alarm;
use crate::core::error::{Error, Result, no_connection};
use crate::core::ticket::{LeaseId, LeaseStart};

/// How many answers in a row may be late before the connection is dropped.
const LATE: u32 = 2;

/// How long the server may take to confirm that it has closed a session.
pub(super) const CLOSING: Duration = Duration::from_secs(1);

/// Why a request has no answer.
#[derive(Debug, Clone)]
pub(super) enum Failure {
    /// It was never sent.
    NotSent(Error),
    /// The connection broke; it may have been applied.
    Broken,
    /// The session has ended, and with it everything that it owned.
    Over,
}

pub(super) type Told = std::result::Result<Vec<Answer>, Failure>;

/// A request to the driver.
pub(super) enum Command {
    Call {
        requests: Vec<Request>,
        tell: oneshot::Sender<Told>,
    },
    /// Drops the connection of this generation.
    Break(u64),
    Close(oneshot::Sender<()>),
}

pub(super) struct Session {
    shared: Arc<Shared>,
    commands: mpsc::UnboundedSender<Command>,
}

/// What a session and its driver share.
pub(super) struct Shared {
    pub(super) id: i64,
    /// The timeout that the server granted.
    pub(super) timeout: Duration,
    pub(super) state: Mutex<State>,
    pub(super) watches: Mutex<Watches>,
    /// The number of its current connection.
    pub(super) generation: AtomicU64,
    late: AtomicU32,
}

impl Shared {
    fn new(connection: &Connection) -> Self {
        let (sent, greeted) = (connection.sent, &connection.greeted);
        let timeout = u64::try_from(greeted.timeout_ms).unwrap_or(0);
        let timeout = Duration::from_millis(timeout);
        let ttl = timeout * 2 / 3;
        Self {
            id: greeted.session,
            timeout,
            state: Mutex::new(State {
                armed: LeaseStart { sent, ttl },
                leased: None,
                over: false,
                idle_since: sent,
            }),
            watches: Mutex::default(),
            generation: AtomicU64::new(0),
            late: AtomicU32::new(0),
        }
    }

    /// The core's id of its lease.
    pub(super) fn lease(&self) -> LeaseId {
        LeaseId(u128::from(self.id as u64))
    }
}

pub(super) struct State {
    /// The last write that a majority accepted.
    armed: LeaseStart,
    /// When claims began to use it. From then on it ends with its lease.
    leased: Option<BootTime>,
    pub(super) over: bool,
    idle_since: BootTime,
}

impl State {
    fn is_usable(&self) -> bool {
        let over = |lease: LeaseStart| lease.deadline().has_passed();
        !self.over && !self.lease().is_some_and(over)
    }

    /// Its lease, if claims use it.
    pub(super) fn lease(&self) -> Option<LeaseStart> {
        let sent = self.armed.sent.max(self.leased?);
        Some(LeaseStart { sent, ..self.armed })
    }

    /// Records a write that a majority accepted. The leader certainly knows of `settled`, and
    /// expires the session no earlier than 1.5 leases after it; a holder relies on nine tenths of a
    /// lease.
    pub(super) fn arm(&mut self, sent: BootTime, settled: BootTime) {
        let sent = sent.min(settled + self.armed.ttl * 6 / 10);
        if self.is_usable() && sent > self.armed.sent {
            self.armed.sent = sent;
        }
    }
}

impl Session {
    /// Opens a session on the engine's thread.
    ///
    /// # Errors
    /// As connecting. There is nothing to undo, because a session without an owner is closed.
    pub(super) async fn open(
        thread: &Thread,
        endpoints: &Arc<Endpoints>,
        timeout: Duration,
        alarms: &broadcast::Sender<Alarm>,
    ) -> Result<Arc<Self>> {
        let (tell, told) = oneshot::channel();
        let (endpoints, alarms) = (Arc::clone(endpoints), alarms.clone());
        let limit = endpoints.connect_timeout;
        thread.spawn(async move {
            let each = limit / u32::try_from(endpoints.hosts.len()).unwrap_or(1);
            let asked = i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX);
            let connection = match endpoints.connect(None, asked, each).await {
                Ok(connection) => connection,
                Err(no) => {
                    let error = match no {
                        NoConnection::Failed(error) => error,
                        NoConnection::Over => no_connection("the server granted no session"),
                    };
                    return drop(tell.send(Err(error)));
                }
            };
            let (commands, told) = mpsc::unbounded_channel();
            let shared = Arc::new(Shared::new(&connection));
            let driver = Driver::new(&connection, Arc::clone(&shared), told, endpoints, alarms);
            // If nobody waits any more, the driver finds its command channel closed.
            let _ = tell.send(Ok(Arc::new(Self { shared, commands })));
            driver.run(connection).await;
        });
        let opened = tokio::time::timeout(limit, told).await;
        match opened {
            Ok(Ok(opened)) => opened,
            Ok(Err(_)) => Err(no_connection("the attempt to connect was given up")),
            Err(_) => Err(no_connection(format!(
                "no connection to the ensemble within {limit:?}"
            ))),
        }
    }

    pub(super) fn id(&self) -> i64 {
        self.shared.id
    }

    /// The core's id of its lease.
    pub(super) fn lease(&self) -> LeaseId {
        self.shared.lease()
    }

    /// The timeout that the server granted.
    pub(super) fn timeout(&self) -> Duration {
        self.shared.timeout
    }

    /// The last write that a majority accepted.
    pub(super) fn armed(&self) -> LeaseStart {
        self.shared.state.lock().armed
    }

    /// Whether claims can still use it.
    pub(super) fn is_usable(&self) -> bool {
        self.shared.state.lock().is_usable()
    }

    /// Uses it for a claim; `false` when it has ended.
    pub(super) fn lease_out(&self) -> bool {
        let mut state = self.shared.state.lock();
        let usable = state.is_usable();
        if usable {
            state.idle_since = BootTime::now();
            state.leased = state.leased.or(Some(state.idle_since));
        }
        usable
    }

    /// How long it was not used for a new claim.
    pub(super) fn idle(&self) -> Duration {
        let since = self.shared.state.lock().idle_since;
        BootTime::now().saturating_since(since)
    }

    /// Sends requests pipelined, and waits for all answers.
    ///
    /// # Cancellation
    /// The requests may still be sent and applied after the future is dropped.
    pub(super) async fn call(&self, requests: Vec<Request>) -> Told {
        let (tell, told) = oneshot::channel();
        let call = Command::Call { requests, tell };
        if self.commands.send(call).is_err() {
            return Err(Failure::Over);
        }
        told.await.unwrap_or(Err(Failure::Over))
    }

    /// The number of its current connection.
    pub(super) fn generation(&self) -> u64 {
        self.shared.generation.load(Ordering::Relaxed)
    }

    /// Records that an answer came in time.
    pub(super) fn answered(&self) {
        self.shared.late.store(0, Ordering::Relaxed);
    }

    /// Records that an answer was late: a frozen server keeps its connection open.
    pub(super) fn late(&self, generation: u64) {
        if self.shared.late.fetch_add(1, Ordering::Relaxed) + 1 >= LATE {
            self.give_up(generation);
        }
    }

    /// Reconnects, unless that has happened already.
    pub(super) fn give_up(&self, generation: u64) {
        self.shared.late.store(0, Ordering::Relaxed);
        let _ = self.commands.send(Command::Break(generation));
    }

    /// Resolves when the znode or its children change, or when the watch can't report any more. The
    /// caller must send a request with a watch next.
    pub(super) fn watch(&self, path: &str, what: Watched) -> oneshot::Receiver<()> {
        self.shared.watches.lock().once(path, what)
    }

    /// Yields after changes at and below `path`, and ends with the connection. The caller must send
    /// [`Request::add_watch`] next.
    pub(super) fn watch_tree(&self, path: &str) -> mpsc::Receiver<()> {
        self.shared.watches.lock().tree(path)
    }

    /// Removes closed listeners; `true` when nobody listens to `path` any more.
    pub(super) fn unwatch_tree(&self, path: &str) -> bool {
        self.shared.watches.lock().is_unheard(path)
    }

    /// Closes the session, which deletes its ephemeral znodes. Best effort.
    pub(super) async fn close(&self) {
        self.shared.state.lock().over = true;
        let (tell, told) = oneshot::channel();
        if self.commands.send(Command::Close(tell)).is_ok() {
            let _ = tokio::time::timeout(CLOSING, told).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A holder relies on nine tenths of a lease, and the session expires 1.5 leases after the last
    /// touch that the leader knows of. A write that may not have touched its timer counts for that
    /// much less.
    #[test]
    fn a_write_counts_as_far_as_the_leader_knows() {
        let (ttl, begun) = (Duration::from_secs(10), BootTime::now());
        let mut state = State {
            armed: LeaseStart { sent: begun, ttl },
            leased: None,
            over: false,
            idle_since: begun,
        };
        let after = |seconds: u64| begun + Duration::from_secs(seconds);
        for (sent, settled, counts) in [
            (4, 0, 4),
            (9, 0, 6),
            (9, 2, 8),
            // The start of the lease never goes back.
            (7, 7, 8),
            (9, 9, 9),
        ] {
            state.arm(after(sent), after(settled));
            assert_eq!(state.armed.sent, after(counts), "{sent} and {settled}");
            let believed = state.armed.deadline();
            assert!(believed <= after(settled.max(2)) + ttl * 3 / 2);
        }
        state.over = true;
        state.arm(after(30), after(30));
        assert_eq!(state.armed.sent, after(9), "it is over");
    }
}
