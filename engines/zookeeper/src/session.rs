//! `Session`: one ZooKeeper session, as the verbs use it. A [`Driver`] on the engine's own thread
//! keeps it connected.
//!
//! **The lease of a session counts from the last write that a majority accepted.** A server that is
//! cut off from its leader answers reads and pings for a while, but these do not keep the session
//! alive. Even a write through a follower does not touch the leader's session timer by itself: the
//! follower reports the sessions that it has heard from with the leader's next ping, every half
//! tick. So the session timeout is 1.5 times the lease, and a write counts in full only if
//! something was answered long enough before it to have been reported.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{broadcast, mpsc, oneshot};

use super::connection::{Connection, Endpoints, NoConnection};
use super::driver::Driver;
use super::error;
use super::proto::{Answer, Request};
use super::thread::Thread;
use super::watches::{Watched, Watches};
use palisade_core::engine::{Alarm, LeaseId, LeaseStart, no_connection, rounded};
use palisade_core::{BootTime, Error, Result};

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
    /// There was no answer within this time; it may have been applied.
    Late(Duration),
    /// The server sent more than this; it may have been applied.
    TooLarge(usize),
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
            state: Mutex::new(State::new(LeaseStart { sent, ttl })),
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
    /// When the keeper was last asked to renew, and whether it was since it last asked for a list of
    /// places.
    hurried: BootTime,
    is_hurried: bool,
    /// When the places were last listed, and whether one is suspected to be gone.
    audited: BootTime,
    suspects: bool,
    /// The last touch that the leader certainly knows of.
    settled: BootTime,
    /// Touches, sent and answered, that may not have been reported to the leader yet.
    recent: VecDeque<(BootTime, BootTime)>,
}

impl State {
    fn new(armed: LeaseStart) -> Self {
        Self {
            armed,
            leased: None,
            over: false,
            idle_since: armed.sent,
            hurried: armed.sent,
            is_hurried: false,
            audited: BootTime::PAST,
            suspects: false,
            settled: armed.sent,
            recent: VecDeque::new(),
        }
    }

    fn is_usable(&self) -> bool {
        !self.over
            && self
                .lease()
                .is_none_or(|lease| !lease.deadline().has_passed())
    }

    /// Its lease, if claims use it.
    pub(super) fn lease(&self) -> Option<LeaseStart> {
        self.leased.map(|leased| LeaseStart {
            sent: self.armed.sent.max(leased),
            ..self.armed
        })
    }

    /// When the keeper is to be asked for a renewal, if claims use the session: a tenth of the lease
    /// after the last one. The keeper's own pace is a third. Here that is too seldom: while the
    /// servers elect another leader they accept no writes for some seconds, and what is left of a
    /// lease then decides whether its holds survive.
    pub(super) fn renews(&self) -> BootTime {
        let every = self.armed.ttl / 10;
        match self.leased {
            Some(_) if !self.over => self.armed.sent.max(self.hurried) + every,
            _ => BootTime::NEVER,
        }
    }

    /// The keeper is asked for a renewal.
    pub(super) fn hurry(&mut self, now: BootTime) {
        (self.hurried, self.is_hurried) = (now, true);
    }

    /// The leader was asked at `sent` whether the session is alive.
    pub(super) fn settle(&mut self, sent: BootTime) {
        self.settled = sent;
        self.recent.clear();
    }

    /// Records that what was sent at `sent` was answered at `now`; `timeout` is the session's.
    pub(super) fn touched(&mut self, sent: BootTime, now: BootTime, timeout: Duration) {
        let last = self.recent.back().map_or(BootTime::PAST, |(last, _)| *last);
        if sent.saturating_since(last) >= timeout / 60 {
            self.recent.push_back((sent, now));
            // A session that only reads has no write to settle them: two timeouts' worth are kept.
            if self.recent.len() > 120 {
                self.recent.pop_front();
            }
        }
    }

    /// Records a write that a majority accepted. The leader certainly knows of `settled`, and
    /// expires the session no earlier than 1.5 leases after it; a holder relies on nine tenths of a
    /// lease.
    pub(super) fn arm(&mut self, sent: BootTime, timeout: Duration) {
        // Half a tick at most, because no session timeout is shorter than two ticks.
        let report = timeout / 4;
        while let Some((touched, answered)) = self.recent.front().copied()
            && answered + report <= sent
        {
            self.settled = self.settled.max(touched);
            self.recent.pop_front();
        }
        let sent = sent.min(self.settled + self.armed.ttl * 6 / 10);
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
                "no connection to the ensemble within {}",
                rounded(limit)
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
    ///
    /// # Errors
    /// [`ErrorKind::Unreachable`](palisade_core::ErrorKind::Unreachable) when they were not sent, or, maybe applied, when they were not
    /// answered; [`ErrorKind::Lost`](palisade_core::ErrorKind::Lost) when the session has ended.
    pub(super) async fn call(
        &self,
        operation: &'static str,
        within: Duration,
        requests: Vec<Request>,
    ) -> Result<Vec<Answer>> {
        let generation = self.shared.generation.load(Ordering::Relaxed);
        let answers = tokio::time::timeout(within, self.send(requests)).await;
        let failure = match answers {
            Ok(Ok(Ok(answers))) => {
                self.shared.late.store(0, Ordering::Relaxed);
                return Ok(answers);
            }
            Ok(Ok(Err(failure))) => failure,
            // The driver has ended.
            Ok(Err(_)) => Failure::Over,
            Err(_) => {
                self.late(operation, generation);
                Failure::Late(within)
            }
        };
        Err(error::failed(operation, failure))
    }

    /// Whether its places must be listed now. The keeper asks for that at each renewal; after one
    /// that the driver asked for a recent list is enough, unless a place is suspected to be gone.
    pub(super) fn audits(&self) -> bool {
        let (mut state, now) = (self.shared.state.lock(), BootTime::now());
        let hurried = std::mem::take(&mut state.is_hurried);
        let is_due = !hurried || state.suspects || state.audited + state.armed.ttl / 4 <= now;
        if is_due {
            (state.audited, state.suspects) = (now, false);
        }
        is_due
    }

    /// A place is marked or gone, so that the next list counts.
    pub(super) fn suspect(&self) {
        self.shared.state.lock().suspects = true;
    }

    /// Sends one request, as [`Session::call`].
    pub(super) async fn ask(
        &self,
        operation: &'static str,
        within: Duration,
        request: Request,
    ) -> Result<Answer> {
        let mut answers = self.call(operation, within, vec![request]).await?;
        answers.pop().ok_or_else(error::missing)
    }

    /// Sends requests; the receiver gets their answers, and need not be awaited.
    pub(super) fn send(&self, requests: Vec<Request>) -> oneshot::Receiver<Told> {
        let (tell, told) = oneshot::channel();
        // Without a driver the sender is dropped, which ends the receiver.
        let _ = self.commands.send(Command::Call { requests, tell });
        told
    }

    /// Records that an answer was late: a frozen server keeps its connection open. A renewal can't
    /// afford a second timeout, so the next one uses another connection.
    fn late(&self, operation: &'static str, generation: u64) {
        let late = self.shared.late.fetch_add(1, Ordering::Relaxed) + 1;
        if late >= LATE || operation == "renew" {
            self.shared.late.store(0, Ordering::Relaxed);
            let _ = self.commands.send(Command::Break(generation));
        }
    }

    /// Resolves when the znode or its children change, or when the watch can't report any more. The
    /// caller must send a request with a watch next.
    pub(super) fn watch(&self, path: &str, what: Watched) -> oneshot::Receiver<()> {
        self.shared.watches.lock().once(path, what)
    }

    /// Yields after changes at and below `path`, and ends with the connection. The caller must send
    /// [`Request::AddWatch`] next.
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

    fn at(ms: u64) -> BootTime {
        BootTime::from_nanos(ms * 1_000_000)
    }

    fn state(begun: BootTime, ttl: Duration) -> State {
        State::new(LeaseStart { sent: begun, ttl })
    }

    /// A holder relies on nine tenths of a lease, and the session expires 1.5 leases after the last
    /// touch that the leader knows of. A write that may not have touched its timer counts for that
    /// much less.
    #[test]
    fn a_write_counts_as_far_as_the_leader_knows() {
        let (ttl, begun) = (Duration::from_secs(10), BootTime::now());
        let (mut state, timeout) = (state(begun, ttl), ttl * 3 / 2);
        let after = |seconds: u64| begun + Duration::from_secs(seconds);
        for (sent, settled, counts) in [
            (4, 0, 4),
            (9, 0, 6),
            (9, 2, 8),
            // The start of the lease never goes back.
            (7, 7, 8),
            (9, 9, 9),
        ] {
            state.settle(after(settled));
            state.arm(after(sent), timeout);
            assert_eq!(state.armed.sent, after(counts), "{sent} and {settled}");
            let believed = state.armed.deadline();
            assert!(believed <= after(settled.max(2)) + timeout);
        }
        state.over = true;
        state.settle(after(30));
        state.arm(after(30), timeout);
        assert_eq!(state.armed.sent, after(9), "it is over");
    }

    #[test]
    fn a_touch_counts_when_it_must_have_been_reported() {
        let timeout = Duration::from_millis(800);
        let mut state = state(at(0), timeout * 2 / 3);
        for (sent, answered) in [(100, 110), (105, 115), (200, 290)] {
            state.touched(at(sent), at(answered), timeout);
        }
        for (sent, settled) in [(300, 0), (310, 100), (489, 100), (490, 200)] {
            state.arm(at(sent), timeout);
            assert_eq!(state.settled, at(settled), "{sent}");
        }
        state.settle(at(600));
        assert_eq!(state.settled, at(600));
    }
}
