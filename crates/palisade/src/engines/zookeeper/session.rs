//! `Session`: one session of ZooKeeper on one connection at a time, which it makes anew when it
//! breaks.
//!
//! A task of the engine's own thread drives it, so that a blocked or ended runtime of the caller
//! costs nothing. Requests are answered in the order in which they were sent; what was sent and
//! not answered when the connection breaks may have been applied.
//!
//! **The lease of a session counts from the last write that a majority took.** A server that is
//! cut off from its leader answers reads and pings for a while, and they do not keep the session.
//! Even a write that came through a follower does not reach the leader's timer by itself: the
//! follower reports whom it has heard from with the leader's next ping, every half tick. So the
//! session asked for is 1.5 times the lease, and a write counts in full only if something was
//! answered long enough before it to have been reported (see [`Touches`]).

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{broadcast, mpsc, oneshot};
use tokio::task::JoinSet;

use super::connection::{Connection, Endpoints, NoConnection, Ticket, take_packet};
use super::proto::{Answer, Packet, Request, code, event};
use crate::core::clock::BootTime;
use crate::core::engine::{Alarm, BoxFuture};
use crate::core::error::{Error, ErrorKind, Result};
use crate::core::sync::{Runtime, sleep_until};
use crate::core::ticket::{LeaseId, LeaseStart};

/// The pause after the first failed attempt to connect, and the longest one.
const PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// How many answers in a row may fail to come in time before the connection is given up.
const LATE: u32 = 2;

/// How long the server may take to say that it has closed a session.
const CLOSING: Duration = Duration::from_secs(1);

/// The thread that drives sessions.
pub(super) struct Thread(mpsc::UnboundedSender<BoxFuture<()>>);

impl Thread {
    /// # Errors
    /// [`ErrorKind::Denied`] when the system gives no thread.
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

type Told = std::result::Result<Vec<Answer>, Failure>;

enum Command {
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

struct Shared {
    id: i64,
    timeout: Duration,
    state: Mutex<State>,
    watches: Mutex<Watches>,
    generation: AtomicU64,
    late: AtomicU32,
}

struct State {
    armed: LeaseStart,
    /// When claims began to use it: from then on it ends with its lease.
    leased: Option<BootTime>,
    over: bool,
    idle_since: BootTime,
}

impl State {
    fn is_usable(&self) -> bool {
        let over = |lease: LeaseStart| lease.deadline().has_passed();
        !self.over && !self.lease().is_some_and(over)
    }

    /// How long it lasts without a further write, if claims use it.
    fn lease(&self) -> Option<LeaseStart> {
        let sent = self.armed.sent.max(self.leased?);
        Some(LeaseStart { sent, ..self.armed })
    }
}

/// What of a node is watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Watched {
    Node,
    Children,
}

/// Who is to be told of what. Dropped senders tell, too: whoever waits looks again.
#[derive(Default)]
struct Watches {
    once: HashMap<(String, Watched), Vec<oneshot::Sender<()>>>,
    trees: Vec<(String, mpsc::Sender<()>)>,
}

impl Watches {
    fn tell(&mut self, kind: i32, path: &str) {
        let mut fire = |what| self.once.remove(&(path.to_owned(), what));
        match kind {
            event::CHILDREN => drop(fire(Watched::Children)),
            event::DELETED => drop((fire(Watched::Node), fire(Watched::Children))),
            _ => drop(fire(Watched::Node)),
        }
        let is_below = |tree: &str| {
            let rest = path.strip_prefix(tree.trim_end_matches('/'));
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        for (_, tell) in self.trees.iter().filter(|(tree, _)| is_below(tree)) {
            // One that has not been taken yet tells of this, too.
            let _ = tell.try_send(());
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
                        NoConnection::Over => unreachable("the server gave no session"),
                    };
                    return drop(tell.send(Err(error)));
                }
            };
            let (session, driver) = Driver::new(&connection, endpoints, alarms);
            // Nobody waits any more: the driver finds its end of the channel closed.
            let _ = tell.send(Ok(Arc::new(session)));
            driver.run(connection).await;
        });
        let opened = tokio::time::timeout(limit, told).await;
        match opened {
            Ok(Ok(opened)) => opened,
            Ok(Err(_)) => Err(unreachable("the attempt to connect was given up")),
            Err(_) => Err(unreachable(format!(
                "no connection to the ensemble within {limit:?}"
            ))),
        }
    }

    pub(super) fn id(&self) -> i64 {
        self.shared.id
    }

    /// How the core calls its lease.
    pub(super) fn lease(&self) -> LeaseId {
        LeaseId(u128::from(self.shared.id as u64))
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
        let (tell, told) = oneshot::channel();
        let mut watches = self.shared.watches.lock();
        let all = watches.once.entry((path.to_owned(), what)).or_default();
        all.retain(|other| !other.is_closed());
        all.push(tell);
        told
    }

    /// Yields after changes at and below `path`, and ends when the connection does. To be followed
    /// by [`Request::add_watch`].
    pub(super) fn watch_tree(&self, path: &str) -> mpsc::Receiver<()> {
        let (tell, told) = mpsc::channel(1);
        let mut watches = self.shared.watches.lock();
        watches.trees.push((path.to_owned(), tell));
        told
    }

    /// Forgets who has stopped listening; `true` when nobody listens to `path` any more.
    pub(super) fn unwatch_tree(&self, path: &str) -> bool {
        let mut watches = self.shared.watches.lock();
        watches.trees.retain(|(_, tell)| !tell.is_closed());
        let unheard = !watches.trees.iter().any(|(other, _)| other == path);
        if unheard {
            // The request that takes it away takes these with it.
            watches.once.retain(|(other, _), _| other != path);
        }
        unheard
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

fn unreachable(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Unreachable, "connect", message)
}

/// When the server was heard from, to know what the leader's timer has been told.
#[derive(Debug)]
struct Touches {
    /// The last time of which the leader knows for certain.
    settled: BootTime,
    /// Sent and answered, not reported to the leader for certain yet.
    recent: VecDeque<(BootTime, BootTime)>,
}

impl Touches {
    fn new(settled: BootTime) -> Self {
        Self {
            settled,
            recent: VecDeque::new(),
        }
    }

    fn answered(&mut self, sent: BootTime, now: BootTime, step: Duration) {
        let last = self.recent.back().map_or(BootTime::PAST, |(last, _)| *last);
        if sent.saturating_since(last) >= step {
            self.recent.push_back((sent, now));
        }
    }

    /// The last touch that was answered at least `report` before `sent`.
    fn settled(&mut self, sent: BootTime, report: Duration) -> BootTime {
        while let Some((touched, answered)) = self.recent.front().copied()
            && answered + report <= sent
        {
            self.settled = self.settled.max(touched);
            self.recent.pop_front();
        }
        self.settled
    }
}

/// Requests that were sent together, and what has come of them.
struct Batch {
    tell: oneshot::Sender<Told>,
    sent: BootTime,
    first: i32,
    /// Which of them are writes.
    writes: Vec<bool>,
    answers: Vec<Answer>,
}

/// How a connection ended.
enum End {
    Broken,
    Closed,
}

/// Drives one session.
struct Driver {
    shared: Arc<Shared>,
    endpoints: Arc<Endpoints>,
    alarms: broadcast::Sender<Alarm>,
    commands: mpsc::UnboundedReceiver<Command>,
    ticket: Ticket,
    xid: i32,
    batches: VecDeque<Batch>,
    /// Asked for while there was no connection.
    queued: Vec<(Vec<Request>, oneshot::Sender<Told>)>,
    touches: Touches,
    pinged: Option<BootTime>,
    spoke: BootTime,
}

impl Driver {
    fn new(
        connection: &Connection,
        endpoints: Arc<Endpoints>,
        alarms: broadcast::Sender<Alarm>,
    ) -> (Session, Self) {
        let (sent, greeted) = (connection.sent, &connection.greeted);
        let timeout = u64::try_from(greeted.timeout_ms).unwrap_or(0);
        let timeout = Duration::from_millis(timeout);
        let ttl = timeout * 2 / 3;
        let shared = Arc::new(Shared {
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
        });
        let (give, commands) = mpsc::unbounded_channel();
        let session = Session {
            shared: Arc::clone(&shared),
            commands: give,
        };
        let driver = Self {
            shared,
            endpoints,
            alarms,
            commands,
            ticket: Ticket {
                session: greeted.session,
                password: greeted.password.clone(),
            },
            xid: 0,
            batches: VecDeque::new(),
            queued: Vec::new(),
            touches: Touches::new(sent),
            pinged: None,
            spoke: sent,
        };
        (session, driver)
    }

    async fn run(mut self, mut connection: Connection) {
        loop {
            let end = self.serve(connection).await;
            self.disconnected();
            connection = match end {
                End::Closed => break,
                End::Broken => match self.reconnect().await {
                    Some(connection) => connection,
                    None => break,
                },
            };
        }
        self.shared.state.lock().over = true;
        self.commands.close();
        for (_, tell) in self.queued.drain(..) {
            let _ = tell.send(Err(Failure::Over));
        }
        while let Ok(command) = self.commands.try_recv() {
            if let Command::Call { tell, .. } = command {
                let _ = tell.send(Err(Failure::Over));
            }
        }
        let lease = LeaseId(u128::from(self.shared.id as u64));
        let _ = self.alarms.send(Alarm::Lease(lease));
    }

    /// When a session that claims use is over without a further write: its holders have been told
    /// before.
    fn ends(&self) -> BootTime {
        let lease = self.shared.state.lock().lease();
        lease.map_or(BootTime::NEVER, |lease| lease.sent + lease.ttl)
    }

    async fn serve(&mut self, connection: Connection) -> End {
        let (mut reader, mut writer) = tokio::io::split(connection.stream);
        let (mut inbox, mut outbox) = (connection.inbox, connection.login.unwrap_or_default());
        let mut written = 0;
        for (requests, tell) in std::mem::take(&mut self.queued) {
            self.post(&requests, tell, &mut outbox);
        }
        self.spoke = BootTime::now();
        loop {
            let timeout = self.shared.timeout;
            let ends = self.ends();
            // A tenth of the lease: pings are never a renewal, only touches of the session.
            let ping = match self.pinged {
                None => self.spoke + timeout / 15,
                Some(_) => BootTime::NEVER,
            };
            let oldest = self.batches.front().map(|batch| batch.sent);
            let oldest = oldest.into_iter().chain(self.pinged).min();
            let stalls = oldest.map_or(BootTime::NEVER, |sent| sent + timeout / 3);
            tokio::select! {
                biased;
                wrote = writer.write(&outbox[written..]), if written < outbox.len() => {
                    written += match wrote {
                        Ok(0) | Err(_) => return End::Broken,
                        Ok(wrote) => wrote,
                    };
                    if written == outbox.len() {
                        outbox.clear();
                        written = 0;
                        if writer.flush().await.is_err() {
                            return End::Broken;
                        }
                    }
                }
                read = reader.read_buf(&mut inbox) => {
                    if !matches!(read, Ok(1..)) {
                        return End::Broken;
                    }
                    loop {
                        match take_packet(&mut inbox) {
                            Ok(None) => break,
                            Ok(Some(packet)) if self.take(&packet) => {}
                            Ok(Some(_)) | Err(_) => return End::Broken,
                        }
                    }
                }
                command = self.commands.recv() => match command {
                    Some(Command::Call { requests, tell }) => {
                        self.post(&requests, tell, &mut outbox);
                    }
                    Some(Command::Break(generation)) => {
                        if generation == self.shared.generation.load(Ordering::Relaxed) {
                            return End::Broken;
                        }
                    }
                    close @ (Some(Command::Close(_)) | None) => {
                        outbox.drain(..written);
                        self.xid = self.xid.wrapping_add(1).max(1);
                        outbox.extend(Request::close().packet(self.xid));
                        let closed = async {
                            writer.write_all(&outbox).await?;
                            writer.flush().await?;
                            // The server ends the connection after its answer.
                            while reader.read_buf(&mut inbox).await? > 0 {
                                inbox.clear();
                            }
                            Ok::<_, std::io::Error>(())
                        };
                        let _ = tokio::time::timeout(CLOSING, closed).await;
                        if let Some(Command::Close(tell)) = close {
                            let _ = tell.send(());
                        }
                        return End::Closed;
                    }
                },
                () = sleep_until(ping.min(stalls).min(ends)) => {
                    let now = BootTime::now();
                    if ends <= now {
                        // Nobody has written for a whole lease: what lives with it is to go.
                        self.commands.close();
                        continue;
                    }
                    if stalls <= now {
                        return End::Broken;
                    }
                    if ping <= now {
                        self.pinged = Some(now);
                        self.spoke = now;
                        outbox.extend(Request::ping());
                    }
                }
            }
        }
    }

    /// Puts requests into the outbox.
    fn post(&mut self, requests: &[Request], tell: oneshot::Sender<Told>, outbox: &mut Vec<u8>) {
        let first = self.xid.checked_add(1).unwrap_or(1);
        let sent = BootTime::now();
        for request in requests {
            self.xid = self.xid.checked_add(1).unwrap_or(1);
            outbox.extend(request.packet(self.xid));
        }
        self.spoke = sent;
        self.batches.push_back(Batch {
            tell,
            sent,
            first,
            writes: requests.iter().map(Request::is_write).collect(),
            answers: Vec::new(),
        });
    }

    /// Takes what the server sent; `false` when that can't be, or the connection is of no use.
    fn take(&mut self, packet: &[u8]) -> bool {
        let step = self.shared.timeout / 60;
        match Packet::read(packet) {
            Ok(Packet::Pong) => {
                if let Some(sent) = self.pinged.take() {
                    self.touches.answered(sent, BootTime::now(), step);
                }
                true
            }
            Ok(Packet::Event { kind, path }) => {
                self.shared.watches.lock().tell(kind, &path);
                true
            }
            Ok(Packet::LoggedIn(taken)) => taken,
            Ok(Packet::Answer(answer)) => self.take_answer(answer, step),
            Err(_) => false,
        }
    }

    fn take_answer(&mut self, mut answer: Answer, step: Duration) -> bool {
        let Some(batch) = self.batches.front_mut() else {
            return false;
        };
        let at = batch.answers.len();
        let expected = batch.first.checked_add(i32::try_from(at).unwrap_or(0));
        // After the wrap numbers begin again, and only the first can be told.
        if answer.xid != expected.unwrap_or(answer.xid) {
            return false;
        }
        answer.sent = batch.sent;
        // Refusals are agreed on by a majority like everything else that would write.
        let agreed = [0, code::NO_NODE, code::NODE_EXISTS, code::BAD_VERSION];
        let armed = batch.writes[at] && agreed.contains(&answer.error);
        let is_over = answer.error == code::SESSION_EXPIRED;
        let is_moved = answer.error == code::SESSION_MOVED;
        if answer.zxid > 0 {
            self.endpoints.saw(answer.zxid);
        }
        let sent = batch.sent;
        batch.answers.push(answer);
        let batch = match batch.answers.len() == batch.writes.len() {
            true => self.batches.pop_front(),
            false => None,
        };
        if armed {
            self.arm(sent);
        }
        self.touches.answered(sent, BootTime::now(), step);
        if let Some(batch) = batch {
            let told = if is_over {
                Err(Failure::Over)
            } else {
                Ok(batch.answers)
            };
            let _ = batch.tell.send(told);
        }
        !is_over && !is_moved
    }

    /// Counts a write that a majority took.
    fn arm(&mut self, sent: BootTime) {
        // Half a tick at the most, since no session is shorter than two of them.
        let settled = self.touches.settled(sent, self.shared.timeout / 4);
        let mut state = self.shared.state.lock();
        let ttl = state.armed.ttl;
        // The leader ends the session no earlier than 1.5 leases after what it knows of, and a
        // holder believes in nine tenths of a lease.
        let sent = sent.min(settled + ttl * 6 / 10);
        if state.is_usable() && sent > state.armed.sent {
            state.armed.sent = sent;
        }
    }

    /// The connection is gone: nobody will hear of what was asked on it.
    fn disconnected(&mut self) {
        self.shared.generation.fetch_add(1, Ordering::Relaxed);
        self.pinged = None;
        for batch in self.batches.drain(..) {
            let _ = batch.tell.send(Err(Failure::Broken));
        }
        *self.shared.watches.lock() = Watches::default();
    }

    /// Goes on with the session on another connection; `None` when it is over.
    async fn reconnect(&mut self) -> Option<Connection> {
        let mut pause = Duration::ZERO;
        let mut down: Option<Error> = None;
        loop {
            let pausing = BootTime::now() + pause;
            while let Some(error) = down.as_ref().filter(|_| !pausing.has_passed()) {
                let ends = self.ends();
                tokio::select! {
                    () = sleep_until(pausing.min(ends)) => {}
                    command = self.commands.recv() => match command {
                        Some(Command::Call { tell, .. }) => {
                            let _ = tell.send(Err(Failure::NotSent(error.clone())));
                        }
                        Some(Command::Break(_)) => {}
                        Some(Command::Close(_)) | None => return None,
                    },
                }
                if ends.has_passed() {
                    return None;
                }
            }
            let error = match self.attempt().await? {
                Ok(connection) => return Some(connection),
                Err(error) => error,
            };
            for (_, tell) in self.queued.drain(..) {
                let _ = tell.send(Err(Failure::NotSent(error.clone())));
            }
            down = Some(error);
            pause = (pause * 2).clamp(PAUSE, LONGEST_PAUSE);
        }
    }

    /// Asks every server once; what is called for meanwhile waits. `None` when the session is over.
    async fn attempt(&mut self) -> Option<Result<Connection>> {
        let hosts = u32::try_from(self.endpoints.hosts.len()).unwrap_or(1);
        let limit = self.endpoints.connect_timeout.min(self.shared.timeout / 3);
        let timeout = i32::try_from(self.shared.timeout.as_millis()).unwrap_or(i32::MAX);
        let (endpoints, ticket) = (Arc::clone(&self.endpoints), self.ticket.clone());
        let connect = endpoints.connect(Some(&ticket), timeout, limit / hosts);
        tokio::pin!(connect);
        loop {
            let ends = self.ends();
            tokio::select! {
                connected = &mut connect => match connected {
                    Ok(connection) => {
                        // The leader was asked whether the session lives.
                        self.touches = Touches::new(connection.sent);
                        return Some(Ok(connection));
                    }
                    Err(NoConnection::Over) => return None,
                    Err(NoConnection::Failed(error)) => return Some(Err(error)),
                },
                command = self.commands.recv() => match command {
                    Some(Command::Call { requests, tell }) => self.queued.push((requests, tell)),
                    Some(Command::Break(_)) => {}
                    Some(Command::Close(_)) | None => return None,
                },
                () = sleep_until(ends) => return None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_touch_counts_when_it_must_have_been_reported() {
        let at = |ms: u64| BootTime::from_nanos(ms * 1_000_000);
        let ms = Duration::from_millis;
        let mut touches = Touches::new(at(0));
        touches.answered(at(100), at(110), ms(10));
        touches.answered(at(105), at(115), ms(10));
        touches.answered(at(200), at(290), ms(10));
        assert_eq!(touches.settled(at(300), ms(200)), at(0));
        assert_eq!(touches.settled(at(310), ms(200)), at(100));
        assert_eq!(touches.settled(at(489), ms(200)), at(100));
        assert_eq!(touches.settled(at(490), ms(200)), at(200));
    }

    #[test]
    fn events_reach_those_who_watch() {
        let mut watches = Watches::default();
        let (tell, mut node) = oneshot::channel();
        watches
            .once
            .insert(("/a/b".into(), Watched::Node), vec![tell]);
        let (tell, mut tree) = mpsc::channel(1);
        watches.trees.push(("/a".into(), tell));
        watches.tell(event::CHILDREN, "/a/b");
        assert!(node.try_recv() == Err(oneshot::error::TryRecvError::Empty));
        assert!(tree.try_recv().is_ok());
        watches.tell(event::DELETED, "/a/b");
        assert!(node.try_recv() == Err(oneshot::error::TryRecvError::Closed));
        watches.tell(3, "/ab");
        assert_eq!(tree.try_recv(), Ok(()));
        assert!(tree.try_recv().is_err());
    }
}
