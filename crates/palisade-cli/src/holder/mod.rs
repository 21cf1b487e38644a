//! The holder: a background process that holds a lock for a shell, from `palisade acquire` to
//! `palisade release` or to the shell's end.
//!
//! `acquire` forks it while there is no other thread, and returns when it holds the lock. It is in
//! its own session and keeps no file of the script open but its stderr, so that `$(…)` returns.
//! `shell` finds the process that it follows, `socket` is where `release` reaches it, `notice` where
//! it reports a loss, this file is its main loop.
//!
//! Invariant: it ends only when it holds nothing, and not before the shell has ended or was told
//! what happened to the lock.

mod notice;
mod shell;
mod socket;

use std::cell::Cell;
use std::convert::Infallible;
use std::io;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::time::Duration;

use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};

use palisade::{BootTime, Client, ErrorKind, Hold, Loss, LossReason};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, Signal, getpid, setsid};
use serde::{Deserialize, Serialize};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::Instant;

use self::notice::Notice;
pub(crate) use self::shell::Shell;
pub(crate) use self::socket::{Answer, Directory, Key, Listening};
use self::socket::{RELEASE, WHO};
use crate::exit::{self, Failure, Outcome, Verdict, refused, told};
use crate::guardian::{KILL_LEAD, Terms, grace, link, receive, send, signal_tree};
use crate::job::{Acquired, Connected, FAREWELL, Job};
use crate::on_runtime;
use crate::signals::Signals;
use crate::spans::Spans;
use crate::sys::{self, Withheld};
use crate::view::shown;

/// How long the report of a loss waits for its cause.
const ASKED: Duration = Duration::from_millis(500);

/// The pause before accepting again, if the system refused to accept a connection.
const BREATH: Duration = Duration::from_millis(100);

/// What happens to the shell when its lock is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum OnLoss {
    /// The shell and all that it has started are asked to end
    Term,
    /// The same, and they are killed before the lock can be granted to another
    Kill,
    /// Nothing: only `release` reports the loss
    None,
}

/// What to hold, for whom, and how.
pub(crate) struct Task {
    pub(crate) job: Job,
    pub(crate) shell: Shell,
    pub(crate) on_loss: OnLoss,
}

/// What is held.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Held {
    pub(crate) name: String,
    pub(crate) token: String,
    pub(crate) owner: String,
    pub(crate) engine: String,
    pub(crate) key: Option<String>,
    /// The process whose end releases the lock.
    pub(crate) shell: i32,
    /// The process that holds it.
    pub(crate) holder: i32,
}

/// From the holder to `acquire`.
#[derive(Debug, Serialize, Deserialize)]
enum Report {
    Held(Held),
    /// It does not hold the lock, has said why, and this is the exit code.
    Ended(u8),
}

/// From `acquire` to the holder: the caller knows that the lock is held, and is about to return.
#[derive(Debug, Serialize, Deserialize)]
struct Known;

/// A holder that has its lock, until `acquire` has told its caller.
pub(crate) struct Holder {
    link: OwnedFd,
    pub(crate) held: Held,
}

impl Holder {
    /// Forks a holder and waits until it has the lock, or for its exit code if it fails. There must
    /// be no other thread.
    pub(crate) fn fork(task: Task, listening: Listening) -> Result<Result<Self, u8>, Failure> {
        let failed = refused("can't start a holder");
        let mask = Withheld::these([]).before();
        let (ours, its) = link().map_err(&failed)?;
        let mut given = Some((task, listening, its));
        let mut ours = Some(ours);
        sys::fork(|| {
            drop(ours.take());
            if let Some((task, listening, link)) = given.take() {
                // Signals of the caller's terminal must not reach the holder, which follows the
                // caller's end anyway.
                let _ = setsid();
                mask.set();
                task.perform(&listening, link);
            }
        })
        .map_err(&failed)?;
        drop(given);
        let link = ours.ok_or_else(|| failed(io::ErrorKind::NotConnected.into()))?;
        loop {
            match receive(&link) {
                Ok(Some(Report::Held(held))) => return Ok(Ok(Self { link, held })),
                Ok(Some(Report::Ended(code))) => return Ok(Err(code)),
                Ok(None) => {
                    let why = "the process that was to hold the lock was killed";
                    return Err(Failure::Defect(why.into()));
                }
                Err(_) => drop(poll(&mut [PollFd::new(&link, PollFlags::IN)], None)),
            }
        }
    }

    /// Detaches the holder. Without this it releases the lock at once.
    pub(crate) fn detach(self) {
        send(&self.link, &Known);
    }
}

/// The owners of locks that were acquired for ancestors of this process: waiting for those would
/// never end. Empty if no thread can be started for the query.
pub(crate) async fn owners_above() -> Vec<String> {
    let (found, owners) = tokio::sync::oneshot::channel();
    // The query blocks a thread of its own: it may ask this very process, which must answer.
    let ask = move || drop(found.send(socket::owners_above()));
    match std::thread::Builder::new().spawn(ask) {
        Ok(_) => owners.await.unwrap_or_default(),
        Err(_) => Vec::new(),
    }
}

/// Readable when the process at the other end has sent something or ended.
struct Watched(AsyncFd<OwnedFd>);

impl Watched {
    fn new(file: OwnedFd) -> Result<Self, Failure> {
        sys::watch(file)
            .map(Self)
            .map_err(refused("can't watch a process"))
    }

    async fn readable(&self) {
        // Fails only when the runtime shuts down.
        let _ = self.0.readable().await;
    }

    /// Whether the caller confirmed that it knows of the lock, rather than ended.
    async fn knows(&self) -> bool {
        while let Ok(mut ready) = self.0.readable().await {
            if let Ok(said) = ready.try_io(|link| receive(link.get_ref())) {
                return matches!(said, Ok(Some(Known)));
            }
        }
        false
    }
}

impl Task {
    /// The holder's main function.
    fn perform(self, listening: &Listening, link: OwnedFd) {
        let (printer, shell, on_loss) = (self.job.printer, self.shell.pid, self.on_loss);
        let name = shown(self.job.name.as_str());
        let result = link.try_clone();
        let detached = Cell::new(false);
        let hold = AssertUnwindSafe(|| self.hold(listening, link, &detached));
        let verdict = catch_unwind(hold).unwrap_or_else(|_| {
            if detached.get() && on_loss != OnLoss::None {
                end_softly(shell);
            }
            Err(Failure::Defect(format!(
                "lost {name}: the process that held it failed (bug)"
            )))
        });
        listening.remove();
        if let Err(failure) = &verdict {
            printer.failure(failure);
        }
        if let Ok(link) = result {
            send(&link, &Report::Ended(exit::code(&verdict)));
        }
    }

    fn hold(self, listening: &Listening, link: OwnedFd, detached: &Cell<bool>) -> Verdict {
        let (shell, on_loss) = (self.shell, self.on_loss);
        let prepared = self.job.prepare(Terms::One)?;
        on_runtime(async {
            let mut connected = prepared.connect(Spans::default()).await?;
            let verdict = hold(&mut connected, shell, on_loss, listening, link, detached).await;
            connected.close().await;
            verdict
        })
    }
}

async fn hold(
    connected: &mut Connected,
    shell: Shell,
    on_loss: OnLoss,
    listening: &Listening,
    link: OwnedFd,
    detached: &Cell<bool>,
) -> Verdict {
    let ended = |job: &Job| {
        let pid = shell.pid.as_raw_pid();
        job.not_acquired(format!(
            "process {pid}, which was to have the lock, has ended"
        ))
    };
    let Some(followed) = shell.follow()? else {
        return Err(ended(&connected.job));
    };
    let followed = Watched::new(followed)?;
    let caller = Watched::new(link)?;
    let socket = listening.socket().and_then(UnixListener::from_std);
    let socket = socket.map_err(refused("can't listen for the release"))?;
    let owner = connected.client.owner().to_owned();
    let mut requests = Requests::new(&socket, &owner);
    let acquired = tokio::select! {
        biased;
        // The caller sends nothing before our report, so this is its end.
        () = caller.readable() => return Ok(Outcome::Done),
        () = followed.readable() => None,
        never = refuse(&mut requests) => match never {},
        acquired = connected.acquire() => Some(acquired?),
    };
    let Some(Acquired { hold, since, .. }) = acquired else {
        return Err(ended(&connected.job));
    };
    let (job, client) = (&connected.job, &connected.client);
    let held = Held {
        name: job.name.as_str().to_owned(),
        token: hold.token().to_string(),
        owner: owner.clone(),
        engine: client.describe(),
        key: client.engine().key(hold.ticket()),
        shell: shell.pid.as_raw_pid(),
        holder: getpid().as_raw_pid(),
    };
    send(caller.0.get_ref(), &Report::Held(held));
    if !caller.knows().await {
        // The caller was killed, and nobody knows of the lock.
        let _ = hold.release().await;
        return Ok(Outcome::Done);
    }
    let notice = Notice::keep(shell.pid, job.printer);
    let _ = rustix::process::chdir("/");
    detached.set(true);
    // For the test that a defect is reported, too; not in release builds.
    #[cfg(debug_assertions)]
    if std::env::var_os("PALISADE_TEST_PANIC").is_some() {
        panic!("asked to panic");
    }
    let signals = &mut connected.signals;
    let mut keeping = Keeping {
        job,
        client,
        shell: shell.pid,
        on_loss,
        hold,
        notice,
        grace: grace(job.ttl_on(client)),
        not_before: job.not_before(since),
        lost: None,
        told: false,
        sent: None,
    };
    let over = keeping.until_over(&followed, &mut requests, signals).await;
    if matches!(over, Over::ShellEnded) {
        keeping.notice.close().await;
    }
    if matches!(over, Over::Signal) {
        // A service manager that ends us ends the shell, too.
        let _ = tokio::time::timeout(FAREWELL, followed.readable()).await;
    }
    let answer = keeping.end(&over, signals).await;
    // Before the answer, so that the shell can acquire the lock again right after it.
    listening.remove();
    if let Over::Asked(mut asker) = over {
        tell(&mut asker, &answer).await;
    }
    Ok(Outcome::Done)
}

/// Why a lock is not kept any longer.
enum Over {
    /// `release` waits for the answer.
    Asked(UnixStream),
    ShellEnded,
    Signal,
}

/// A lock that is held while the shell runs.
struct Keeping<'a> {
    job: &'a Job,
    client: &'a Client,
    shell: Pid,
    on_loss: OnLoss,
    hold: Hold,
    notice: Notice,
    /// How long before the end of the lease the shell is asked to end.
    grace: Duration,
    not_before: Instant,
    lost: Option<Loss>,
    /// Whether the shell's stderr says so.
    told: bool,
    /// The last signal that the shell was sent.
    sent: Option<Signal>,
}

impl Keeping<'_> {
    /// Keeps the lock, and signals the shell when it is lost.
    async fn until_over(
        &mut self,
        shell: &Watched,
        requests: &mut Requests<'_>,
        signals: &mut Signals,
    ) -> Over {
        loop {
            // Its deadline is past as soon as it is lost, and the reason is to be told.
            if self.lost.is_none() {
                self.lost = self.hold.lost().now_or_never();
            }
            if self.lost.is_some() {
                self.tell().await;
            }
            let next = self.next_signal();
            if let Some((signal, Duration::ZERO)) = next {
                self.send(signal);
                self.tell().await;
                continue;
            }
            tokio::select! {
                biased;
                loss = self.hold.lost(), if self.lost.is_none() => self.lost = Some(loss),
                () = shell.readable() => return Over::ShellEnded,
                _ = signals.ending() => return Over::Signal,
                asker = requests.release() => return Over::Asked(asker),
                () = self.notice.settled(), if !self.told => {}
                () = pause(next.map(|(_, pause)| pause)) => {}
            }
        }
    }

    /// The next signal to the shell, and when it is due: a renewal may still postpone it.
    fn next_signal(&self) -> Option<(Signal, Duration)> {
        let deadline = match &self.lost {
            None => self.hold.deadline(),
            Some(loss) if loss.reason == LossReason::Evicted => loss.lease_ends,
            // Another may hold it already.
            Some(_) => BootTime::PAST,
        };
        let before = |lead| deadline.remaining().saturating_sub(lead);
        match (self.on_loss, self.sent) {
            (OnLoss::None, _) => None,
            (_, None) if self.lost.is_some() => Some((Signal::TERM, Duration::ZERO)),
            (_, None) => Some((Signal::TERM, before(self.grace))),
            (OnLoss::Kill, Some(Signal::TERM)) => Some((Signal::KILL, before(KILL_LEAD))),
            (_, Some(_)) => None,
        }
    }

    /// Reports the loss, once. A shell that was asked to end before its lease did has lost its
    /// lock, too; what kept the lease from being renewed is then asked for.
    async fn tell(&mut self) {
        if std::mem::replace(&mut self.told, true) {
            return;
        }
        let job = self.job;
        let (reason, why) = match &self.lost {
            Some(loss) => (loss.reason, loss.why().map(told)),
            None => {
                // The kill, if one is due, does not wait.
                let left = self.next_signal().map_or(ASKED, |(_, left)| left / 2);
                let why = job.trouble(self.client, left.min(ASKED)).await;
                (LossReason::Expired, why)
            }
        };
        let mut lost = job.loss(self.hold.token(), reason, why);
        let pid = self.shell.as_raw_pid();
        lost.push_str(&match self.on_loss {
            OnLoss::None => format!("; the shell (pid {pid}) goes on without it"),
            OnLoss::Term | OnLoss::Kill => {
                format!("; the shell (pid {pid}) and its commands were asked to end")
            }
        });
        self.notice.find();
        self.notice
            .tell(job.lost_event(reason), Failure::Lost(lost))
            .await;
    }

    fn send(&mut self, signal: Signal) {
        self.sent = Some(signal);
        // Its stderr can be found only while it runs.
        self.notice.find();
        if signal == Signal::TERM {
            end_softly(self.shell);
        } else {
            signal_tree(self.shell, signal);
        }
    }

    /// Releases the lock, and returns what happened to it.
    async fn end(mut self, over: &Over, signals: &mut Signals) -> Answer {
        if !matches!(over, Over::Signal) && self.lost.is_none() {
            tokio::select! {
                biased;
                loss = self.hold.lost() => self.lost = Some(loss),
                _ = signals.ending() => {}
                () = tokio::time::sleep_until(self.not_before) => {}
            }
        }
        let job = self.job;
        // A shell that was asked to end has lost its lock, even if a later renewal succeeded.
        let asked = self.sent.map(|_| LossReason::Expired);
        let why = self.lost.as_ref().and_then(|loss| loss.why()).map(told);
        if let Some(reason) = self.lost.map(|loss| loss.reason).or(asked) {
            let lost = job.loss(self.hold.token(), reason, why);
            // An eviction completes when the evicted claim has left.
            drop(self.hold);
            self.notice.close().await;
            return Answer::Lost(lost);
        }
        self.notice.close().await;
        let token = self.hold.token();
        match self.hold.release().await {
            Ok(()) => Answer::Released,
            Err(error) if error.kind() == ErrorKind::Lost => {
                let name = shown(job.name.as_str());
                Answer::Lost(format!("lost {name} (token {token}): {}", told(&error)))
            }
            Err(error) => Answer::NotReleased(told(&error)),
        }
    }
}

/// Asks a process and all that it started to end.
fn end_softly(process: Pid) {
    // A stopped process reacts only to KILL until it is resumed.
    for signal in [Signal::TERM, Signal::CONT] {
        signal_tree(process, signal);
    }
}

async fn pause(time: Option<Duration>) {
    match time {
        Some(time) => tokio::time::sleep(time).await,
        None => std::future::pending().await,
    }
}

/// How long a connection may take for its request, which comes with it.
const REQUEST: Duration = Duration::from_secs(2);

/// How many connections are read at once. Only this user's processes can connect.
const AT_ONCE: usize = 64;

/// The requests to a holder. A connection that says nothing delays no other.
struct Requests<'a> {
    socket: &'a UnixListener,
    owner: &'a str,
    reading: FuturesUnordered<Reading>,
}

type Reading = Pin<Box<dyn Future<Output = Option<UnixStream>>>>;

impl<'a> Requests<'a> {
    fn new(socket: &'a UnixListener, owner: &'a str) -> Self {
        Self {
            socket,
            owner,
            reading: FuturesUnordered::new(),
        }
    }

    /// Waits for a request to release. Requests for the owner are answered meanwhile.
    ///
    /// # Cancellation
    /// No connection is lost: the next call goes on with it.
    async fn release(&mut self) -> UnixStream {
        loop {
            tokio::select! {
                Some(read) = self.reading.next(), if !self.reading.is_empty() => {
                    if let Some(asker) = read {
                        return asker;
                    }
                }
                accepted = self.socket.accept(), if self.reading.len() < AT_ONCE => match accepted {
                    Ok((asker, _)) => {
                        let owner = self.owner.to_owned();
                        self.reading.push(Box::pin(read(asker, owner)));
                    }
                    // For example, no file descriptor is left.
                    Err(_) => tokio::time::sleep(BREATH).await,
                },
            }
        }
    }
}

/// Reads one request; returns the connection if it asks for the release.
async fn read(mut asker: UnixStream, owner: String) -> Option<UnixStream> {
    let answered = async {
        let mut question = *WHO;
        // A connection without a request only checks whether a holder listens.
        asker.read_exact(&mut question).await.ok()?;
        let release = question == *RELEASE;
        let answer = if release {
            Answer::Heard
        } else {
            Answer::Owner(owner)
        };
        tell(&mut asker, &answer).await;
        release.then_some(())
    };
    let release = tokio::time::timeout(REQUEST, answered).await.ok().flatten();
    release.map(|()| asker)
}

/// Answers requests while the lock is not held yet.
async fn refuse(requests: &mut Requests<'_>) -> Infallible {
    loop {
        let mut asker = requests.release().await;
        tell(&mut asker, &Answer::NotHeld).await;
    }
}

async fn tell(asker: &mut UnixStream, answer: &Answer) {
    if let Ok(mut line) = serde_json::to_vec(answer) {
        line.push(b'\n');
        // The asker may have gone away.
        let _ = asker.write_all(&line).await;
    }
}
