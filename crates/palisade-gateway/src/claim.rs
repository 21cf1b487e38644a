//! `Claim`: one claim of a session, and the task that owns its place in the line.
//!
//! The task owns the place, so that a dropped request changes nothing. It ends the claim when it is
//! released, when it is lost, and when the last promise to its client has passed.
//!
//! **A promise never outlives what it rests on**: it is the earlier of the engine's deadline for
//! this claim and the end of the claim's term less a margin, both counted from the arrival of the
//! request that asks. Code that ends the claim closes the term first, and a closed term promises
//! nothing: no promise can be made between the decision and the release.

use std::sync::Arc;
use std::time::Duration;

use palisade::engine::{Amended, Amendment, Ask, ClaimId, Entry, Progress};
use palisade::{BootTime, Client, Error, ErrorKind, Hold, Loss, LossReason, Name};
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot, watch};

/// Where a claim stands.
#[derive(Debug, Clone)]
pub(crate) enum Stage {
    /// The engine has not answered yet; its last error.
    Entering(Option<Error>),
    Waiting,
    Held {
        token: u64,
        sequence: u64,
    },
    /// Others hold, and nothing was left behind.
    Busy,
    Lost(String),
    Evicted,
    Failed(Error),
    Released,
}

impl Stage {
    /// Whether it can't be held any more.
    pub(crate) fn is_over(&self) -> bool {
        !matches!(self, Self::Entering(_) | Self::Waiting | Self::Held { .. })
    }

    pub(crate) fn word(&self) -> &'static str {
        match self {
            Self::Entering(_) | Self::Waiting => "waiting",
            Self::Held { .. } => "held",
            Self::Busy => "busy",
            Self::Lost(_) => "lost",
            Self::Evicted => "evicted",
            Self::Failed(_) => "failed",
            Self::Released => "released",
        }
    }
}

impl From<&Loss> for Stage {
    fn from(loss: &Loss) -> Self {
        match loss.reason {
            LossReason::Evicted => Self::Evicted,
            _ => Self::Lost(loss.to_string()),
        }
    }
}

/// An order from a request to the task. It is dropped unanswered when the claim is over.
pub(crate) enum Order {
    Release(oneshot::Sender<Result<(), Error>>),
    /// Leaves unless it holds by now: the wait of a client that does not queue is over.
    GiveUp,
    Amend(Amendment, oneshot::Sender<Result<Amended, Error>>),
}

/// What a client requested under an id: a retry must request the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Asked {
    pub(crate) name: Name,
    pub(crate) ask: Ask,
    pub(crate) queue: Option<bool>,
    pub(crate) value: Option<String>,
    pub(crate) agent: Option<String>,
}

/// See the module's documentation.
pub(crate) struct Claim {
    pub(crate) id: String,
    pub(crate) claim: ClaimId,
    pub(crate) asked: Asked,
    stage: watch::Sender<Stage>,
    /// Orders of requests in flight; `None` when the task accepts no more.
    orders: Mutex<Option<Vec<Order>>>,
    ordered: Notify,
    term: Mutex<Term>,
}

/// How long a claim lasts.
struct Term {
    /// When the gateway ends the claim.
    until: BootTime,
    /// The last promise to its client.
    promised: BootTime,
    /// Whether the claim is being ended.
    closed: bool,
    /// Reads the engine's deadline.
    deadline: Option<Box<dyn Fn() -> BootTime + Send + Sync>>,
    /// Reads why the engine's lease is lost.
    loss: Option<Box<dyn Fn() -> Option<Loss> + Send + Sync>>,
}

impl Claim {
    /// Starts the task. `told` is called for every change, and when the task has ended.
    pub(crate) fn start(
        client: &Client,
        (id, claim, asked): (String, ClaimId, Asked),
        entry: Entry,
        until: BootTime,
        told: impl Fn(&Claim, Told<'_>) + Send + Sync + 'static,
    ) -> Arc<Self> {
        let started = Arc::new(Self {
            id,
            claim,
            asked,
            stage: watch::Sender::new(Stage::Entering(None)),
            orders: Mutex::new(Some(Vec::new())),
            ordered: Notify::new(),
            term: Mutex::new(Term {
                until,
                promised: BootTime::PAST,
                closed: false,
                deadline: None,
                loss: None,
            }),
        });
        let task = Task {
            claim: Arc::clone(&started),
            client: client.clone(),
            told: Box::new(told),
        };
        tokio::spawn(task.run(Box::new(entry)));
        started
    }

    pub(crate) fn stage(&self) -> Stage {
        self.stage.borrow().clone()
    }

    pub(crate) fn is_held(&self) -> bool {
        matches!(*self.stage.borrow(), Stage::Held { .. })
    }

    /// Extends the claim to at least that time, unless it is being ended.
    pub(crate) fn extend(&self, until: BootTime) {
        let mut term = self.term.lock();
        term.until = term.until.max(until);
    }

    /// Makes a promise: how long the client may rely on the claim, counted from `arrival`, with
    /// `margin` to the end of the claim's term. The claim is kept for at least that long.
    pub(crate) fn promise(&self, arrival: BootTime, margin: Duration) -> Duration {
        let mut term = self.term.lock();
        let engine = match &term.deadline {
            Some(deadline) if !term.closed => deadline(),
            _ => return Duration::ZERO,
        };
        let by_term = term.until.saturating_since(arrival).saturating_sub(margin);
        let valid = by_term.min(engine.saturating_since(arrival));
        term.promised = term.promised.max(arrival + valid);
        valid
    }

    /// Until when its lease lasts if nobody renews it, `margin` after the engine's deadline, and its
    /// client may rely on it; `None` if it has no place any more.
    pub(crate) fn believed_until(&self, margin: Duration) -> Option<BootTime> {
        let left = matches!(
            *self.stage.borrow(),
            Stage::Busy | Stage::Lost(_) | Stage::Failed(_) | Stage::Released
        );
        let term = self.term.lock();
        let lease = term.deadline.as_ref().filter(|_| !left)?() + margin;
        Some(lease.max(term.promised)).filter(|until| !until.has_passed())
    }

    /// Records that an operator took it away, or asks for it: no further promise is made. `false`
    /// if it was over before.
    pub(crate) fn take(&self, over: &Stage) -> bool {
        let taken = self.stage.send_if_modified(|stage| {
            let live = !stage.is_over();
            if live {
                *stage = over.clone();
            }
            live
        });
        // Closed after that, so that no request takes a closed term for a lost lease.
        self.close();
        taken
    }

    /// Why the library has lost it, if the task has not reported that yet.
    pub(crate) fn loss(&self) -> Option<Stage> {
        let term = self.term.lock();
        let loss = term.loss.as_ref().and_then(|loss| loss());
        loss.map(|loss| Stage::from(&loss))
    }

    /// Sets the place that promises rest on.
    fn rests_on(&self, entry: &Entry) {
        let mut term = self.term.lock();
        term.deadline = Some(Box::new(entry.deadline_reader()));
        term.loss = Some(Box::new(entry.loss_reader()));
    }

    /// Makes no further promise; returns the end of the last one.
    fn close(&self) -> BootTime {
        let mut term = self.term.lock();
        term.closed = true;
        term.promised
    }

    /// Waits until it holds or is over, at most until `until`.
    pub(crate) async fn settled(&self, until: BootTime) -> Stage {
        let mut stage = self.stage.subscribe();
        let settled =
            stage.wait_for(|stage| matches!(stage, Stage::Held { .. }) || stage.is_over());
        let _ = tokio::time::timeout(until.remaining(), settled).await;
        self.stage()
    }

    /// Waits until the engine has answered once, at most until `until`.
    pub(crate) async fn answered(&self, until: BootTime) -> Stage {
        let mut stage = self.stage.subscribe();
        let answered = stage.wait_for(|stage| !matches!(stage, Stage::Entering(None)));
        let _ = tokio::time::timeout(until.remaining(), answered).await;
        self.stage()
    }

    /// Waits until it is over.
    pub(crate) async fn over(&self) -> Stage {
        let mut stage = self.stage.subscribe();
        let _ = stage.wait_for(Stage::is_over).await;
        self.stage()
    }

    /// Sends an order; it is dropped if the claim is over.
    pub(crate) fn order(&self, order: Order) {
        if let Some(orders) = &mut *self.orders.lock() {
            orders.push(order);
        }
        self.ordered.notify_one();
    }

    /// The next order. Only the task calls this, so that none is missed.
    async fn next_order(&self) -> Order {
        loop {
            let first = match &mut *self.orders.lock() {
                Some(orders) if !orders.is_empty() => Some(orders.remove(0)),
                _ => None,
            };
            if let Some(order) = first {
                return order;
            }
            self.ordered.notified().await;
        }
    }

    /// Resolves when its term is over, and closes it.
    async fn ended(&self) {
        loop {
            let left = {
                let mut term = self.term.lock();
                let left = term.until.remaining();
                term.closed |= left.is_zero();
                left
            };
            if left.is_zero() {
                return;
            }
            tokio::time::sleep(left).await;
        }
    }
}

/// What a claim reports to its session.
pub(crate) enum Told<'a> {
    Stage(&'a Stage),
    /// The task has ended, and with it the place.
    Ended(&'a Stage),
}

type Listener = Box<dyn Fn(&Claim, Told<'_>) + Send + Sync>;

struct Task {
    claim: Arc<Claim>,
    client: Client,
    told: Listener,
}

/// How the time before the grant ended.
enum Acquired {
    Held(Hold),
    Over(Stage),
}

/// What ends a claim that does not hold, and the request that waits for that.
struct Interrupted(Stage, Option<oneshot::Sender<Result<(), Error>>>);

impl Task {
    async fn run(mut self, entry: Box<Entry>) {
        let over = match self.acquire(entry).await {
            Acquired::Over(stage) => stage,
            Acquired::Held(hold) => {
                let (token, sequence) = (hold.token().0, hold.ticket().sequence);
                self.tell(Stage::Held { token, sequence });
                self.keep(hold).await
            }
        };
        self.claim.close();
        if !self.claim.stage.borrow().is_over() {
            self.tell(over.clone());
        }
        // Orders that are left are answered by their drop.
        drop(self.claim.orders.lock().take());
        (self.told)(&self.claim, Told::Ended(&over));
    }

    fn tell(&self, stage: Stage) {
        self.claim.stage.send_replace(stage.clone());
        (self.told)(&self.claim, Told::Stage(&stage));
    }

    async fn acquire(&mut self, mut entry: Box<Entry>) -> Acquired {
        let mut pause = PAUSE;
        let mut entered = false;
        loop {
            let step = async {
                if entered {
                    entry.wait().await
                } else {
                    entry.enter().await
                }
            };
            let progress = tokio::select! {
                biased;
                end = self.interrupted() => Err(end),
                progress = step => Ok(progress),
            };
            match progress {
                Err(end) => return left(entry, end).await,
                Ok(Ok(Progress::Held)) => {
                    self.claim.rests_on(&entry);
                    return match entry.into_hold() {
                        Ok(Some(hold)) => Acquired::Held(hold),
                        Ok(None) => Acquired::Over(Stage::Lost(LossReason::Expired.to_string())),
                        Err(error) => Acquired::Over(Stage::Failed(error)),
                    };
                }
                Ok(Ok(Progress::Waiting)) => {
                    if !entered {
                        self.claim.rests_on(&entry);
                        self.tell(Stage::Waiting);
                    }
                    (entered, pause) = (true, PAUSE);
                    continue;
                }
                Ok(Ok(Progress::Lost(loss))) => return Acquired::Over(Stage::from(&loss)),
                Ok(Ok(Progress::Busy)) if self.claim.asked.queue == Some(false) => {
                    return Acquired::Over(Stage::Busy);
                }
                // An engine without a queue.
                Ok(Ok(Progress::Busy)) => self.tell(Stage::Waiting),
                Ok(Err(error)) if error.is_transient() => {
                    if !entered {
                        self.tell(Stage::Entering(Some(error)));
                    }
                }
                Ok(Err(error)) => {
                    let end = Interrupted(Stage::Failed(error), None);
                    return left(entry, end).await;
                }
            }
            tokio::select! {
                biased;
                end = self.interrupted() => return left(entry, end).await,
                () = tokio::time::sleep(pause.mul_f64(rand::random_range(0.5..1.0))) => {}
            }
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
    }

    /// What ends a claim that does not hold: an order, or the end of its term.
    async fn interrupted(&self) -> Interrupted {
        loop {
            let order = tokio::select! {
                biased;
                order = self.claim.next_order() => order,
                () = self.claim.ended() => return Interrupted(not_kept(), None),
            };
            match order {
                Order::GiveUp => return Interrupted(Stage::Busy, None),
                Order::Release(answer) => return Interrupted(Stage::Released, Some(answer)),
                // Only a held claim can be amended: the drop is the answer.
                Order::Amend(..) => {}
            }
        }
    }

    async fn keep(&mut self, hold: Hold) -> Stage {
        loop {
            let order = tokio::select! {
                biased;
                loss = hold.lost() => return self.lose(hold, &loss).await,
                () = self.claim.ended() => {
                    // On an error in the background, to the ttl at the longest.
                    let _ = hold.expire().await;
                    return not_kept();
                }
                order = self.claim.next_order() => order,
            };
            match order {
                // It holds; the client will hear of it, or let the session end.
                Order::GiveUp => {}
                Order::Release(answer) => {
                    self.claim.close();
                    let left = hold.release().await;
                    let over = self.released(&left);
                    let _ = answer.send(left);
                    return over;
                }
                Order::Amend(amendment, answer) => {
                    let engine = self.client.engine();
                    let amended = engine.amend(hold.ticket().clone(), amendment).await;
                    let _ = answer.send(amended);
                }
            }
        }
    }

    /// The state of a hold after its release, which may find that it was lost before.
    fn released(&self, left: &Result<(), Error>) -> Stage {
        match left {
            Err(error) if error.kind() == ErrorKind::Lost => {
                let lost = || Stage::Lost(error.message().to_owned());
                self.claim.loss().unwrap_or_else(lost)
            }
            // If the engine did not answer, the release continues in the background, at most for
            // the ttl.
            _ => Stage::Released,
        }
    }

    /// An evicted claim stays in the line until its client has released it, or its last promise has
    /// passed: the next claim may be granted as soon as it leaves.
    async fn lose(&mut self, hold: Hold, loss: &Loss) -> Stage {
        let stage = Stage::from(loss);
        if loss.reason != LossReason::Evicted {
            self.claim.close();
            return stage;
        }
        // Reported first, so that a concurrent request does not see another kind of loss. Promises
        // made before the close are kept.
        self.tell(stage.clone());
        let promised = self.claim.close();
        let believed = promised.min(loss.lease_ends);
        let mut answer = None;
        while answer.is_none() && !believed.has_passed() {
            tokio::select! {
                biased;
                order = self.claim.next_order() => {
                    if let Order::Release(asked) = order {
                        answer = Some(asked);
                    }
                }
                () = tokio::time::sleep(believed.remaining()) => {}
            }
        }
        // The result only says that the claim was lost, which is known.
        let _ = hold.release().await;
        if let Some(answer) = answer {
            let _ = answer.send(Ok(()));
        }
        stage
    }
}

/// Leaves the line, so that nothing is left behind when the end is reported; in the background if
/// the engine does not answer.
async fn left(entry: Box<Entry>, Interrupted(stage, answer): Interrupted) -> Acquired {
    let left = entry.leave().await;
    if let Some(answer) = answer {
        let _ = answer.send(left);
    }
    Acquired::Over(stage)
}

/// The state of a claim whose term is over.
fn not_kept() -> Stage {
    Stage::Lost("its client did not keep it alive in time".into())
}

/// The pause between two attempts at an engine that can't be reached or has no queue: a few round
/// trips at first, at most half a second.
const PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
