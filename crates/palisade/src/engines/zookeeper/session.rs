//! `Session`: one session of ZooKeeper, as the verbs use it. A [`Driver`] on the engine's own thread
//! keeps it on a connection.
//!
//! **The lease of a session counts from the last write that a majority took.** A server that is
//! cut off from its leader answers reads and pings for a while, and they do not keep the session.
//! Even a write that came through a follower does not reach the leader's timer by itself: the
//! follower reports whom it has heard from with the leader's next ping, every half tick. So the
//! session asked for is 1.5 times the lease, and a write counts in full only if something was
//! answered long enough before it to have been reported (see [`Touches`]).

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

/// How many answers in a row may fail to come in time before the connection is given up.
const LATE: u32 = 2;

/// How long the server may take to say that it has closed a session.
pub(super) const CLOSING: Duration = Duration::from_secs(1);

/// Why a request has no answer.
#[derive(Debug, Clone)]
pub(super) enum Failure {
    /// It was never sent.
    NotSent(Error),
    /// It may have been applied.
    Broken,
    /// The session is over, and everything that lived with it.
    Over,
}

pub(super) type Told = std::result::Result<Vec<Answer>, Failure>;

/// What a driver is asked for.
pub(super) enum Command {
    Call {
        requests: Vec<Request>,
        tell: oneshot::Sender<Told>,
    },
    /// Gives up the connection of this generation.
    Break(u64),
    Close(oneshot::Sender<()>),
}

/// See the module's text.
pub(super) struct Session {
    shared: Arc<Shared>,
    commands: mpsc::UnboundedSender<Command>,
}

/// What a session and its driver both know.
pub(super) struct Shared {
    pub(super) id: i64,
    /// The timeout that the server granted.
    pub(super) timeout: Duration,
    pub(super) state: Mutex<State>,
    pub(super) watches: Mutex<Watches>,
    /// Which connection it is on.
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

    /// How the core calls its lease.
    pub(super) fn lease(&self) -> LeaseId {
        LeaseId(u128::from(self.id as u64))
    }
}

pub(super) struct State {
    /// The last write that a majority took.
    armed: LeaseStart,
    /// When claims began to use it: from then on it ends with its lease.
    leased: Option<BootTime>,
    pub(super) over: bool,
    idle_since: BootTime,
}

impl State {
    fn is_usable(&self) -> bool {
        let over = |lease: LeaseStart| lease.deadline().has_passed();
        !self.over && !self.lease().is_some_and(over)
    }

    /// How long it lasts without a further write, if claims use it.
    pub(super) fn lease(&self) -> Option<LeaseStart> {
        let sent = self.armed.sent.max(self.leased?);
        Some(LeaseStart { sent, ..self.armed })
    }

    /// Counts a write that a majority took. The leader knows for certain of what was `settled`,
    /// and ends the session no earlier than 1.5 leases after that; a holder believes in nine
    /// tenths of a lease.
    pub(super) fn arm(&mut self, sent: BootTime, settled: BootTime) {
        let sent = sent.min(settled + self.armed.ttl * 6 / 10);
        if self.is_usable() && sent > self.armed.sent {
            self.armed.sent = sent;
        }
    }
}

impl Session {
    /// Begins a session on the engine's thread.
    ///
    /// # Errors
    /// Those of connecting; nothing is left to undo, since a session that nobody has is closed.
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
                        NoConnection::Over => no_connection("the server gave no session"),
                    };
                    return drop(tell.send(Err(error)));
                }
            };
            let (commands, told) = mpsc::unbounded_channel();
            let shared = Arc::new(Shared::new(&connection));
            let driver = Driver::new(&connection, Arc::clone(&shared), told, endpoints, alarms);
            // Nobody waits any more: the driver finds its end of the channel closed.
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

    /// How the core calls its lease.
    pub(super) fn lease(&self) -> LeaseId {
        self.shared.lease()
    }

    /// The timeout that the server granted.
    pub(super) fn timeout(&self) -> Duration {
        self.shared.timeout
    }

    /// The last write that a majority took.
    pub(super) fn armed(&self) -> LeaseStart {
        self.shared.state.lock().armed
    }

    /// Whether claims can go on using it.
    pub(super) fn is_usable(&self) -> bool {
        self.shared.state.lock().is_usable()
    }

    /// Takes it for a claim; `false` when it is over.
    pub(super) fn lease_out(&self) -> bool {
        let mut state = self.shared.state.lock();
        let usable = state.is_usable();
        if usable {
            state.idle_since = BootTime::now();
            state.leased = state.leased.or(Some(state.idle_since));
        }
        usable
    }

    /// How long it has not been taken for a claim.
    pub(super) fn idle(&self) -> Duration {
        let since = self.shared.state.lock().idle_since;
        BootTime::now().saturating_since(since)
    }

    /// Sends requests together and waits for all answers.
    ///
    /// # Cancellation
    /// Dropped, the requests may still be sent and applied.
    pub(super) async fn call(&self, requests: Vec<Request>) -> Told {
        let (tell, told) = oneshot::channel();
        let call = Command::Call { requests, tell };
        if self.commands.send(call).is_err() {
            return Err(Failure::Over);
        }
        told.await.unwrap_or(Err(Failure::Over))
    }

    /// Which connection it is on.
    pub(super) fn generation(&self) -> u64 {
        self.shared.generation.load(Ordering::Relaxed)
    }

    /// Says that an answer came in time.
    pub(super) fn answered(&self) {
        self.shared.late.store(0, Ordering::Relaxed);
    }

    /// Says that an answer did not: a frozen server looks alive.
    pub(super) fn late(&self, generation: u64) {
        if self.shared.late.fetch_add(1, Ordering::Relaxed) + 1 >= LATE {
            self.give_up(generation);
        }
    }

    /// Connects anew, unless that has happened already.
    pub(super) fn give_up(&self, generation: u64) {
        self.shared.late.store(0, Ordering::Relaxed);
        let _ = self.commands.send(Command::Break(generation));
    }

    /// Resolves when the node or its children change, or nothing can be told any more. To be
    /// followed by a request with a watch.
    pub(super) fn watch(&self, path: &str, what: Watched) -> oneshot::Receiver<()> {
        self.shared.watches.lock().once(path, what)
    }

    /// Yields after changes at and below `path`, and ends when the connection does. To be followed
    /// by [`Request::add_watch`].
    pub(super) fn watch_tree(&self, path: &str) -> mpsc::Receiver<()> {
        self.shared.watches.lock().tree(path)
    }

    /// Forgets who has stopped listening; `true` when nobody listens to `path` any more.
    pub(super) fn unwatch_tree(&self, path: &str) -> bool {
        self.shared.watches.lock().is_unheard(path)
    }

    /// Closes it, and with it removes everything that lives with it. Best effort.
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

    /// A holder believes in nine tenths of a lease, and the session ends 1.5 of them after what the
    /// leader knows of: a write that may not have reached its timer counts for that much less.
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
            // What is known never goes back.
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
