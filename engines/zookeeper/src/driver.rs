//! `Driver`: drives one session, on one connection at a time; it reconnects when that breaks.
//!
//! Requests are answered in the order in which they were sent. Requests without an answer when the
//! connection breaks may have been applied. Every write that a majority accepted renews the lease.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{broadcast, mpsc, oneshot};

use super::connection::{Connection, Endpoints, NoConnection, Ticket, take_packet};
use super::proto::{self, Answer, Packet, Request, code};
use super::session::{CLOSING, Command, Failure, Shared, Told};
use super::watches::Watches;
use palisade_core::engine::Alarm;
use palisade_core::engine::sync::sleep_until;
use palisade_core::{BootTime, Error, Result};
use palisade_kit::replies::REPLY;

/// The pause after the first failed attempt to connect, and the longest one.
const PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// Requests that were sent together, and their answers so far.
struct Batch {
    tell: oneshot::Sender<Told>,
    sent: BootTime,
    first: i32,
    requests: Vec<Request>,
    answers: Vec<Answer>,
}

/// How a connection ended.
enum End {
    Broken,
    Closed,
}

pub(super) struct Driver {
    shared: Arc<Shared>,
    endpoints: Arc<Endpoints>,
    alarms: broadcast::Sender<Alarm>,
    commands: mpsc::UnboundedReceiver<Command>,
    ticket: Ticket,
    xid: i32,
    batches: VecDeque<Batch>,
    /// Requests made while there was no connection.
    queued: Vec<(Vec<Request>, oneshot::Sender<Told>)>,
    pinged: Option<BootTime>,
    spoke: BootTime,
    /// The limit that the last packet exceeded.
    exceeded: Option<usize>,
}

impl Driver {
    pub(super) fn new(
        connection: &Connection,
        shared: Arc<Shared>,
        commands: mpsc::UnboundedReceiver<Command>,
        endpoints: Arc<Endpoints>,
        alarms: broadcast::Sender<Alarm>,
    ) -> Self {
        let (sent, greeted) = (connection.sent, &connection.greeted);
        Self {
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
            pinged: None,
            spoke: sent,
            exceeded: None,
        }
    }

    pub(super) async fn run(mut self, mut connection: Connection) {
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
        let _ = self.alarms.send(Alarm::Lease(self.shared.lease()));
    }

    /// When a session that claims use ends without a further write. Its holders have been notified
    /// before.
    fn ends(&self) -> BootTime {
        let lease = self.shared.state.lock().lease();
        lease.map_or(BootTime::NEVER, |lease| lease.sent + lease.ttl)
    }

    /// Asks the keeper for a renewal now, if claims use the session.
    fn hurry(&self, now: BootTime) {
        let mut state = self.shared.state.lock();
        state.hurry(now);
        if state.lease().is_some() {
            drop(state);
            let _ = self.alarms.send(Alarm::Lease(self.shared.lease()));
        }
    }

    async fn serve(&mut self, connection: Connection) -> End {
        let (mut reader, mut writer) = tokio::io::split(connection.stream);
        let (mut inbox, mut outbox) = (connection.inbox, connection.login.unwrap_or_default());
        let mut written = 0;
        for (requests, tell) in std::mem::take(&mut self.queued) {
            self.post(requests, tell, &mut outbox);
        }
        self.spoke = BootTime::now();
        if self.shared.generation.load(Ordering::Relaxed) > 0 {
            // There may be little left of the lease.
            self.hurry(self.spoke);
        }
        loop {
            let timeout = self.shared.timeout;
            let (ends, renews) = (self.ends(), self.shared.state.lock().renews());
            // A tenth of the lease. Pings never renew the lease; they only touch the session.
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
                        let most = self.most();
                        match take_packet(&mut inbox, most) {
                            Ok(None) => break,
                            Ok(Some(packet)) if self.take(&packet) => {}
                            Ok(Some(_)) => return End::Broken,
                            Err(_) => {
                                self.exceeded = Some(most);
                                return End::Broken;
                            }
                        }
                    }
                }
                command = self.commands.recv() => match command {
                    Some(Command::Call { requests, tell }) => {
                        self.post(requests, tell, &mut outbox);
                    }
                    Some(Command::Break(generation)) => {
                        if generation == self.shared.generation.load(Ordering::Relaxed) {
                            return End::Broken;
                        }
                    }
                    close @ (Some(Command::Close(_)) | None) => {
                        outbox.drain(..written);
                        self.xid = self.xid.wrapping_add(1).max(1);
                        outbox.extend(Request::Close.packet(self.xid));
                        let closed = async {
                            writer.write_all(&outbox).await?;
                            writer.flush().await?;
                            // The server closes the connection after its answer.
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
                () = sleep_until(ping.min(stalls).min(ends).min(renews)) => {
                    let now = BootTime::now();
                    if renews <= now {
                        self.hurry(now);
                    }
                    if ends <= now {
                        // There was no write for a whole lease, so the session and its znodes must
                        // go.
                        self.commands.close();
                        continue;
                    }
                    if stalls <= now {
                        return End::Broken;
                    }
                    if ping <= now {
                        self.pinged = Some(now);
                        self.spoke = now;
                        outbox.extend(proto::ping());
                    }
                }
            }
        }
    }

    /// The most that the next packet may have: the answer to the oldest request, or an event.
    fn most(&self) -> usize {
        let next = self.batches.front();
        let next = next.and_then(|batch| batch.requests.get(batch.answers.len()));
        next.map_or(REPLY, Request::most)
    }

    /// Appends requests to the outbox.
    fn post(&mut self, requests: Vec<Request>, tell: oneshot::Sender<Told>, outbox: &mut Vec<u8>) {
        let first = self.xid.checked_add(1).unwrap_or(1);
        let sent = BootTime::now();
        for request in &requests {
            self.xid = self.xid.checked_add(1).unwrap_or(1);
            outbox.extend(request.packet(self.xid));
        }
        self.spoke = sent;
        self.batches.push_back(Batch {
            tell,
            sent,
            first,
            requests,
            answers: Vec::new(),
        });
    }

    /// Handles a packet; `false` when it makes no sense or the connection is no longer usable.
    fn take(&mut self, packet: &[u8]) -> bool {
        match Packet::read(packet) {
            Ok(Packet::Pong) => {
                if let Some(sent) = self.pinged.take() {
                    let mut state = self.shared.state.lock();
                    state.touched(sent, BootTime::now(), self.shared.timeout);
                }
                true
            }
            Ok(Packet::Event { kind, path }) => {
                self.shared.watches.lock().tell(kind, &path);
                true
            }
            Ok(Packet::LoggedIn(taken)) => taken,
            Ok(Packet::Answer {
                xid,
                zxid,
                error,
                record,
            }) => self.take_answer(xid, zxid, error, record),
            Err(_) => false,
        }
    }

    /// Takes the answer to the oldest request, and gives a batch of answers to its caller.
    fn take_answer(&mut self, xid: i32, zxid: i64, error: i32, record: &[u8]) -> bool {
        let Some(batch) = self.batches.front_mut() else {
            return false;
        };
        let at = batch.answers.len();
        let expected = batch.first.checked_add(i32::try_from(at).unwrap_or(0));
        // After a wrap the numbers start again, and only the first one can be checked.
        if xid != expected.unwrap_or(xid) {
            return false;
        }
        self.endpoints.saw(zxid);
        let request = &batch.requests[at];
        batch.answers.push(request.answer(error, record));
        let mut state = self.shared.state.lock();
        // A refusal of a write is committed by a majority as well.
        let agreed = [0, code::NO_NODE, code::NODE_EXISTS, code::BAD_VERSION];
        if request.is_write() && agreed.contains(&error) {
            state.arm(batch.sent, self.shared.timeout);
        }
        state.touched(batch.sent, BootTime::now(), self.shared.timeout);
        drop(state);
        let is_over = error == code::SESSION_EXPIRED;
        if batch.answers.len() == batch.requests.len()
            && let Some(Batch { tell, answers, .. }) = self.batches.pop_front()
        {
            let _ = tell.send(if is_over {
                Err(Failure::Over)
            } else {
                Ok(answers)
            });
        }
        !is_over && error != code::SESSION_MOVED
    }

    /// The connection has ended, so its requests will not be answered.
    fn disconnected(&mut self) {
        self.shared.generation.fetch_add(1, Ordering::Relaxed);
        self.pinged = None;
        let exceeded = self.exceeded.take();
        let failure = exceeded.map_or(Failure::Broken, Failure::TooLarge);
        for batch in self.batches.drain(..) {
            let _ = batch.tell.send(Err(failure.clone()));
        }
        *self.shared.watches.lock() = Watches::default();
    }

    /// Continues the session on another connection; `None` when the session has ended.
    async fn reconnect(&mut self) -> Option<Connection> {
        // A fortieth of the lease.
        let longest = LONGEST_PAUSE.min(self.shared.timeout / 60).max(PAUSE);
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
            pause = (pause * 2).clamp(PAUSE, longest);
        }
    }

    /// Tries every server once, while new calls are queued. `None` when the session has ended.
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
                        // The leader was asked whether the session is alive.
                        self.shared.state.lock().settle(connection.sent);
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
