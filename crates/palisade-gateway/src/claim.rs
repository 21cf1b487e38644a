//! `Claim`: one claim of a session, and the task that has its place.
//!
//! The task owns the place, so that a request that is dropped changes nothing. It ends the claim
//! when it is released, when it is lost, and when the last promise to its client has passed.
//!
//! **A promise never outlives what it rests on**: it is the earlier of the engine's deadline for
//! this claim and the end of the session less a margin, both counted from the arrival of the
//! request that asks.

use std::sync::Arc;
use std::time::Duration;

use palisade::engine::{Amended, Amendment, Ask, ClaimId, Entry, Progress};
use palisade::{BootTime, Client, Error, Hold, LossReason, Name};
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot, watch};

/// Where a claim stands.
#[derive(Debug, Clone)]
pub(crate) enum Stage {
    /// The engine has not answered yet; what it said last.
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
    /// Whether it can't change any more.
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

/// What a request asks of the task.
pub(crate) enum Order {
    Release(oneshot::Sender<Result<(), Error>>),
    /// Leaves unless it holds by now: the wait of a client that does not queue is over.
    GiveUp,
    Amend(Amendment, oneshot::Sender<Result<Amended, Error>>),
}

/// What a client asked for under an id: asking again must be the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Asked {
    pub(crate) name: Name,
    pub(crate) ask: Ask,
    pub(crate) queue: Option<bool>,
    pub(crate) value: Option<String>,
}

/// See the module's text.
pub(crate) struct Claim {
    pub(crate) id: String,
    pub(crate) claim: ClaimId,
    pub(crate) asked: Asked,
    stage: watch::Sender<Stage>,
    orders: mpsc::Sender<Order>,
    /// When the gateway lets go of it: no promise goes beyond this.
    until: Mutex<BootTime>,
    /// Reads the engine's deadline.
    deadline: Mutex<Option<DeadlineReader>>,
    /// Since when it can't change any more.
    pub(crate) over_since: Mutex<Option<BootTime>>,
}

impl Claim {
    /// Starts the task. `told` hears of every change.
    pub(crate) fn start(
        client: &Client,
        id: String,
        claim: ClaimId,
        asked: Asked,
        entry: Entry,
        until: BootTime,
        told: impl Fn(&Claim, &Stage) + Send + Sync + 'static,
    ) -> Arc<Self> {
        let (orders, receive) = mpsc::channel(16);
        let started = Arc::new(Self {
            id,
            claim,
            asked,
            stage: watch::Sender::new(Stage::Entering(None)),
            orders,
            until: Mutex::new(until),
            deadline: Mutex::new(None),
            over_since: Mutex::new(None),
        });
        let task = Task {
            claim: Arc::clone(&started),
            client: client.clone(),
            orders: receive,
            told: Box::new(told),
        };
        tokio::spawn(task.run(entry));
        started
    }

    pub(crate) fn stage(&self) -> Stage {
        self.stage.borrow().clone()
    }

    /// Lets the claim last until then at the least.
    pub(crate) fn extend(&self, until: BootTime) {
        let mut known = self.until.lock();
        *known = known.max(until);
    }

    pub(crate) fn until(&self) -> BootTime {
        *self.until.lock()
    }

    /// Until when the engine keeps it, as far as is known.
    pub(crate) fn deadline(&self) -> BootTime {
        self.deadline
            .lock()
            .as_ref()
            .map_or(BootTime::PAST, |deadline| deadline())
    }

    /// Waits until it holds or is over, `until` at the longest.
    pub(crate) async fn settled(&self, until: BootTime) -> Stage {
        let mut stage = self.stage.subscribe();
        let settled =
            stage.wait_for(|stage| matches!(stage, Stage::Held { .. }) || stage.is_over());
        let _ = tokio::time::timeout(until.remaining(), settled).await;
        self.stage()
    }

    /// Waits until the engine has answered once.
    pub(crate) async fn answered(&self) -> Stage {
        let mut stage = self.stage.subscribe();
        let _ = stage
            .wait_for(|stage| !matches!(stage, Stage::Entering(None)))
            .await;
        self.stage()
    }

    /// Waits until it is over.
    pub(crate) async fn over(&self) -> Stage {
        let mut stage = self.stage.subscribe();
        let _ = stage.wait_for(Stage::is_over).await;
        self.stage()
    }

    /// Gives an order; without an answer when the claim is over.
    pub(crate) async fn order(&self, order: Order) {
        let _ = self.orders.send(order).await;
    }
}

/// Hears of every change of a claim.
type Told = Box<dyn Fn(&Claim, &Stage) + Send + Sync>;

/// Reads the engine's deadline of a claim.
type DeadlineReader = Box<dyn Fn() -> BootTime + Send + Sync>;

struct Task {
    claim: Arc<Claim>,
    client: Client,
    orders: mpsc::Receiver<Order>,
    told: Told,
}

/// How the time before the grant ended.
enum Acquired {
    Held(Hold),
    Over(Stage),
}

impl Task {
    async fn run(mut self, entry: Entry) {
        let over = match self.acquire(entry).await {
            Acquired::Over(stage) => stage,
            Acquired::Held(hold) => {
                let (token, sequence) = (hold.token().0, hold.ticket().sequence);
                self.tell(Stage::Held { token, sequence });
                self.keep(hold).await
            }
        };
        *self.claim.over_since.lock() = Some(BootTime::now());
        self.tell(over);
        // Whoever still asks for something is answered by the drop.
        self.orders.close();
        while let Some(order) = self.orders.recv().await {
            if let Order::Release(answer) = order {
                let _ = answer.send(Ok(()));
            }
        }
    }

    fn tell(&self, stage: Stage) {
        (self.told)(&self.claim, &stage);
        self.claim.stage.send_replace(stage);
    }

    async fn acquire(&mut self, mut entry: Entry) -> Acquired {
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
                // A call under way is dropped: the place is then left in the background.
                over = interrupted(&self.claim, &mut self.orders) => return Acquired::Over(over),
                progress = step => progress,
            };
            match progress {
                Ok(Progress::Held) => {
                    *self.claim.deadline.lock() = Some(Box::new(entry.deadline_reader()));
                    return match entry.into_hold() {
                        Ok(Some(hold)) => Acquired::Held(hold),
                        Ok(None) => Acquired::Over(Stage::Lost(LossReason::Expired.to_string())),
                        Err(error) => Acquired::Over(Stage::Failed(error)),
                    };
                }
                Ok(Progress::Waiting) => {
                    if !entered {
                        *self.claim.deadline.lock() = Some(Box::new(entry.deadline_reader()));
                        self.tell(Stage::Waiting);
                    }
                    (entered, pause) = (true, PAUSE);
                    continue;
                }
                Ok(Progress::Lost(loss)) => return Acquired::Over(lost(&loss)),
                Ok(Progress::Busy) if self.claim.asked.queue == Some(false) => {
                    return Acquired::Over(Stage::Busy);
                }
                // An engine without a line to wait in.
                Ok(Progress::Busy) => self.tell(Stage::Waiting),
                Err(error) if error.is_transient() => {
                    if !entered {
                        self.tell(Stage::Entering(Some(error)));
                    }
                }
                Err(error) => return Acquired::Over(Stage::Failed(error)),
            }
            tokio::select! {
                biased;
                over = interrupted(&self.claim, &mut self.orders) => return Acquired::Over(over),
                () = tokio::time::sleep(pause.mul_f64(rand::random_range(0.5..1.0))) => {}
            }
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
    }

    async fn keep(&mut self, hold: Hold) -> Stage {
        loop {
            let order = tokio::select! {
                biased;
                loss = hold.lost() => return lost(&loss),
                () = ended(&self.claim) => {
                    // In the background on an error; the ttl ends it at the latest.
                    let _ = hold.release().await;
                    return Stage::Released;
                }
                order = self.orders.recv() => order,
            };
            match order {
                // It holds; the client will hear of it, or let the session end.
                Some(Order::GiveUp) => {}
                Some(Order::Release(answer)) => {
                    let released = hold.release().await;
                    let _ = answer.send(released);
                    return Stage::Released;
                }
                Some(Order::Amend(amendment, answer)) => {
                    let engine = self.client.engine();
                    let amended = engine.amend(hold.ticket().clone(), amendment).await;
                    let _ = answer.send(amended);
                }
                // The claim itself has a sender, so that this can't be.
                None => return Stage::Released,
            }
        }
    }
}

/// What ends a claim that does not hold: an order, or the end of its time.
async fn interrupted(claim: &Claim, orders: &mut mpsc::Receiver<Order>) -> Stage {
    loop {
        let order = tokio::select! {
            biased;
            order = orders.recv() => order,
            () = ended(claim) => return Stage::Released,
        };
        match order {
            Some(Order::GiveUp) => return Stage::Busy,
            Some(Order::Release(answer)) => {
                let _ = answer.send(Ok(()));
                return Stage::Released;
            }
            // Only what is held can be amended: the drop answers.
            Some(Order::Amend(..)) => {}
            None => return Stage::Released,
        }
    }
}

/// Resolves when the last promise of a claim has passed.
async fn ended(claim: &Claim) {
    loop {
        let left = claim.until().remaining();
        if left.is_zero() {
            return;
        }
        tokio::time::sleep(left).await;
    }
}

fn lost(loss: &palisade::Loss) -> Stage {
    match loss.reason {
        LossReason::Evicted => Stage::Evicted,
        _ => Stage::Lost(loss.to_string()),
    }
}

/// Between two tries at an engine that can't be reached or has no line: a few round trips at
/// first, half a second at the longest.
const PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
