//! `Client`: one connection to an engine, from which the primitives are made.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::StreamExt;

use crate::core::acquire::Request;
use crate::core::capability::{Capability, Guarantee, Tokens};
use crate::core::claim::{Ask, READERS};
use crate::core::clock::BootTime;
use crate::core::deadlock::{Deadlock, Sightings, find};
use crate::core::dyn_engine::SharedEngine;
use crate::core::engine::{Engine, Eviction, cannot_resize};
use crate::core::error::{Error, ErrorKind, Result};
use crate::core::events::Observer;
use crate::core::hold::Hold;
use crate::core::keeper::Keeper;
use crate::core::lookout::{AgentState, Agents, DEADLOCK_AFTER};
use crate::core::name::Name;
use crate::core::owner::{Ancestor, Owner};
use crate::core::queue::{Queue, QueueKeeper, QueueReport};
use crate::core::report::{Checkup, ClaimReport, LineReport, Scope, Severity};
use crate::core::token::{Era, Token};
use crate::core::url::Settings;
use crate::core::wait::{Patience, Retry};
use crate::primitives::{Election, MultiLock, Mutex, ReentrantMutex, RwLock, Semaphore, any};

/// A client of one engine. Cheap to clone; all clones share one keeper.
///
/// Holds keep what they need alive, so a client may be dropped before them.
#[derive(Clone)]
pub struct Client {
    keeper: Arc<Keeper>,
    /// The keeper of messages, from the first use of a queue on; `None` without queues.
    queues: Arc<OnceLock<Option<Arc<QueueKeeper>>>>,
    era: Era,
    owner: Arc<Owner>,
    agents: Arc<Agents>,
    agent: Option<Arc<AgentState>>,
    ttl: Duration,
}

impl Client {
    /// A client of an engine that is open already: for authors of engines, and for layers.
    /// Everyone else uses [`connect`](crate::connect()).
    ///
    /// # Errors
    /// [`ErrorKind::Config`] when `settings` ask for a ttl that the engine can't keep.
    pub fn new(engine: SharedEngine, settings: &Settings) -> Result<Self> {
        let capability = engine.capability();
        let ttl = match settings.ttl {
            None => capability.default_ttl(),
            Some(ttl) => capability.explicit_ttl(ttl).map_err(|error| {
                Error::new(
                    ErrorKind::Config,
                    "connect",
                    format!("option ttl: {}", error.message()),
                )
            })?,
        };
        let handle = format!("{:016x}", rand::random::<u64>());
        Ok(Self {
            keeper: Arc::new(Keeper::new(engine, settings.timeout)),
            queues: Arc::default(),
            era: settings.era,
            owner: Arc::new(Owner::here(handle, settings.label.clone())),
            agents: Agents::new(),
            agent: None,
            ttl,
        })
    }

    /// The engine itself.
    pub fn engine(&self) -> &SharedEngine {
        self.keeper.engine()
    }

    /// What the engine can do.
    pub fn capability(&self) -> Capability {
        self.engine().capability()
    }

    /// What people call the engine: scheme and host, never a secret.
    pub fn describe(&self) -> String {
        self.engine().describe()
    }

    /// The owner handle that claims of this client carry.
    pub fn owner(&self) -> &str {
        &self.owner.owner
    }

    /// How long places of this client last without renewal, unless a primitive says otherwise.
    pub fn ttl(&self) -> Duration {
        self.ttl
    }

    /// A client with another owner handle, sharing this one's connection.
    #[must_use]
    pub fn with_owner(&self, handle: impl Into<String>) -> Self {
        let owner = Owner {
            owner: handle.into(),
            ..(*self.owner).clone()
        };
        Self {
            owner: Arc::new(owner),
            ..self.clone()
        }
    }

    /// A client whose claims say that they are made in this W3C trace, sharing this one's connection.
    #[doc(hidden)]
    #[must_use]
    pub fn in_trace(&self, traceparent: Option<String>) -> Self {
        let owner = Owner {
            traceparent,
            ..(*self.owner).clone()
        };
        Self {
            owner: Arc::new(owner),
            ..self.clone()
        }
    }

    /// A client whose claims are those of one agent, which does one thing at a time: while one of
    /// its claims waits, it releases nothing. Agents that wait for each other are found, by
    /// [`Client::deadlocks`] and by themselves, and one of them gives way with
    /// [`ErrorKind::Deadlock`]; see [`Request::deadlock_after`].
    ///
    /// The same name on this client and its clones is the same agent; on another client it is
    /// another.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> palisade::Result<()> {
    /// let palisade = palisade::connect("memory:").await?;
    /// let worker = palisade.agent("worker-7");
    /// let from = worker.mutex("account-1").lock().await?;
    /// let to = worker.mutex("account-2").lock().await?;
    /// # to.release().await?; from.release().await
    /// # }
    /// ```
    #[must_use]
    pub fn agent(&self, name: impl Into<String>) -> Self {
        self.agent_within(name, Vec::new(), false)
    }

    /// An agent that runs under claims of others, which end after it: the outermost first. Whether
    /// it gives way also in circles through them, which are likely and not certain.
    #[doc(hidden)]
    #[must_use]
    pub fn agent_within(
        &self,
        name: impl Into<String>,
        within: Vec<Ancestor>,
        yields_nested: bool,
    ) -> Self {
        Self {
            agent: Some(self.agents.named(name.into(), within, yields_nested)),
            ..self.clone()
        }
    }

    /// A client whose agents are none of this one's, though they may have the same names, sharing
    /// this one's connection: for who asks on behalf of many, as a gateway does.
    #[doc(hidden)]
    #[must_use]
    pub fn with_own_agents(&self) -> Self {
        Self {
            agents: self.agents.others(),
            agent: None,
            ..self.clone()
        }
    }

    /// Tells `observer` what happens to the claims of this client and all its clones.
    #[must_use]
    pub fn observed_by(self, observer: impl Observer) -> Self {
        self.keeper.observers().add(Arc::new(observer));
        self
    }

    /// Lays a layer over the engine: `client.layer(layers::Traced::over)`. Clones and holds from
    /// before go on without it.
    #[must_use]
    pub fn layer<E: Engine>(self, layer: impl FnOnce(SharedEngine) -> E) -> Self {
        Self {
            keeper: Arc::new(self.keeper.layered(layer)),
            queues: Arc::default(),
            ..self
        }
    }

    /// Asks for tokens that can't go back, because data depends on them. Looks at the engine as
    /// it is set up now: whatever [`Client::check`] calls a danger is refused.
    ///
    /// # Errors
    /// [`ErrorKind::NotForCorrectness`] on an engine of class C or without tokens, or one whose settings
    /// endanger exclusion or tokens, with the reason and what to do; those of the engine.
    pub async fn for_correctness(&self) -> Result<Self> {
        let refuse = |message: String| {
            let error = Error::new(ErrorKind::NotForCorrectness, "connect", message);
            Err(error.with("engine", self.describe()))
        };
        let Capability { class, tokens, .. } = self.capability();
        if class == Guarantee::Timed || tokens == Tokens::None {
            let message = "this engine is of class C: its tokens and its exclusion assume sane \
                           clocks and kept data. Use an engine of class A or B, or ask \
                           for_efficiency() where a double run costs time and not data";
            return refuse(message.into());
        }
        let dangers: Vec<String> = self
            .check()
            .await?
            .findings
            .into_iter()
            .filter(|finding| finding.severity == Severity::Danger)
            .map(|finding| format!("{} ({})", finding.message, finding.remedy))
            .collect();
        if dangers.is_empty() {
            return Ok(self.clone());
        }
        refuse(format!(
            "this engine is set up so that exclusion or tokens can fail: {}",
            dangers.join("; ")
        ))
    }

    /// Takes the engine as it is: a lock that saves double work. The default.
    #[must_use]
    pub fn for_efficiency(&self) -> Self {
        self.clone()
    }

    /// A mutual exclusion lock. As with every primitive, the name and the options are checked
    /// when it is used.
    pub fn mutex(&self, name: impl AsRef<str>) -> Mutex {
        Mutex(self.line(name, Ask::Whole))
    }

    /// A lock that many may read, or one write.
    pub fn rwlock(&self, name: impl AsRef<str>) -> RwLock {
        RwLock {
            read: self.line(&name, Ask::READ),
            write: self.line(name, Ask::Whole),
        }
    }

    /// A semaphore of `capacity` permits. All who use the name must agree on the capacity, which
    /// is 1 to `u32::MAX - 1`.
    pub fn semaphore(&self, name: impl AsRef<str>, capacity: u32) -> Semaphore {
        let weight = 1;
        let mut request = self.line(name, Ask::Part { weight, capacity });
        if let Err(error) = check_capacity(capacity) {
            request.refuse(error);
        }
        Semaphore(request)
    }

    /// An election of one leader.
    pub fn election(&self, name: impl AsRef<str>) -> Election {
        Election {
            request: self.line(name, Ask::Whole),
            client: self.clone(),
        }
    }

    /// A lock that its owner may take again while holding it. The owner is the handle that this
    /// returns, and its clones.
    pub fn reentrant(&self, name: impl AsRef<str>) -> ReentrantMutex {
        ReentrantMutex::new(self.line(name, Ask::Whole))
    }

    /// Several locks, all or nothing. Names are sorted by the library; there must be at least one.
    pub fn multi_lock<N: AsRef<str>>(&self, names: impl IntoIterator<Item = N>) -> MultiLock {
        MultiLock::new(self.wholes(names))
    }

    /// Locks the first of `names` that is free, skipping those that are locked: one task of many.
    /// With patience it then waits for any of them; `None` when patience ended first.
    ///
    /// # Cancellation
    /// Dropped at any await it leaves no place in any line.
    ///
    /// # Errors
    /// Those of [`Request::acquire`].
    pub async fn lock_any<N: AsRef<str>>(
        &self,
        names: impl IntoIterator<Item = N>,
        patience: Patience,
    ) -> Result<Option<Hold>> {
        any(self.wholes(names), patience).await
    }

    fn wholes<N: AsRef<str>>(&self, names: impl IntoIterator<Item = N>) -> Vec<Request> {
        let names = names.into_iter();
        names.map(|name| self.line(name, Ask::Whole)).collect()
    }

    /// A place in a line, by weight: what all primitives are made of.
    pub fn line(&self, name: impl AsRef<str>, ask: Ask) -> Request {
        let (name, refused) = match Name::new(name) {
            Ok(name) => (name, None),
            Err(error) => (Name::refused(), Some(error)),
        };
        Request {
            keeper: Arc::clone(&self.keeper),
            era: self.era,
            owner: Arc::clone(&self.owner),
            name,
            ask: Ask::Whole,
            ttl: self.ttl,
            value: None,
            at_least: Duration::ZERO,
            retry: Retry::default(),
            renewed: true,
            agent: self.agent.clone(),
            group: None,
            deadlock_after: Some(DEADLOCK_AFTER),
            refused,
        }
        .asking(ask)
    }

    /// A work queue: each message to one consumer at a time, and none lost when a consumer dies.
    /// As with every primitive, name and options are checked when it is used.
    pub fn queue(&self, name: impl AsRef<str>) -> Queue {
        let mine = (self.era, Arc::clone(&self.owner), self.ttl);
        let (keeper, can) = (self.queue_keeper(), self.capability());
        Queue::new(keeper, Name::new(name), can, mine)
    }

    fn queue_keeper(&self) -> Result<Arc<QueueKeeper>> {
        let keeper = self.queues.get_or_init(|| {
            let store = self.engine().queues()?;
            Some(Arc::new(self.keeper.beside(store)))
        });
        keeper.clone().ok_or_else(|| {
            let message = "this engine has no work queues; use postgres:, redis:, or file: with the feature file-queue";
            let error = Error::new(ErrorKind::Unsupported, "queue", message);
            error.with("engine", self.describe())
        })
    }

    /// Shows the queues of this namespace.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] on an engine without queues; those of the engine.
    pub async fn survey_queues(&self, scope: Scope) -> Result<Vec<QueueReport>> {
        self.queue_keeper()?.store().survey(scope).await
    }

    /// Shows who holds and who waits.
    ///
    /// # Errors
    /// Those of the engine.
    pub async fn survey(&self, scope: Scope) -> Result<Vec<LineReport>> {
        self.engine().survey(scope).await
    }

    /// The agents of this namespace that wait for each other, as two surveys show alike.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] where an engine does not show who waits; those of the engine.
    pub async fn deadlocks(&self) -> Result<Vec<Deadlock>> {
        if !self.capability().waiters_visible {
            let message = "this engine does not show who waits, so deadlocks can't be found; see its \
                           page";
            let error = Error::new(ErrorKind::Unsupported, "deadlocks", message);
            return Err(error.with("engine", self.describe()));
        }
        let mut sightings = Sightings::default();
        let found = find(&self.survey(Scope::Prefix(String::new())).await?);
        if found.is_empty() {
            return Ok(found);
        }
        sightings.confirm(found);
        let again = find(&self.survey(Scope::Prefix(String::new())).await?);
        Ok(sightings.confirm(again))
    }

    /// The token that users see for what the engine counted, as in a survey.
    ///
    /// # Errors
    /// [`ErrorKind::Unusable`] when the engine's counter has outgrown the token.
    pub fn token(&self, sequence: u64) -> Result<Token> {
        self.era.stamp(sequence)
    }

    /// Looks at the engine itself: its version, its clock, and unsafe settings.
    ///
    /// # Errors
    /// Those of the engine.
    pub async fn check(&self) -> Result<Checkup> {
        self.engine().check().await
    }

    /// Gives the permits of a line that is in use another capacity; `false` when there are none.
    ///
    /// Holders keep what they hold, even if it is more than fits now; waiters are granted by the
    /// new capacity at once. Whoever asks from now on must name the new capacity.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] before any I/O when the engine can't do it; [`ErrorKind::InvalidName`];
    /// [`ErrorKind::InvalidArgument`] for a capacity that a semaphore can't have, or when a claim in
    /// the line takes more; [`ErrorKind::CapacityMismatch`] for a line of readers.
    pub async fn resize(&self, name: impl AsRef<str>, capacity: u32) -> Result<bool> {
        let name = Name::new(name)?;
        check_capacity(capacity)?;
        if !self.capability().resize {
            return cannot_resize().await;
        }
        self.engine().resize(name, capacity).await
    }

    /// Takes places away from their owners. Answers `false` when there is nothing to take.
    ///
    /// [`Eviction::Mark`] tells the owner first (its hold is lost, its child ended), and the place
    /// is removed when it has let go, or when its lease has ended. [`Eviction::Remove`] removes it
    /// at once: another may be granted before the owner knows, and only the token protects the
    /// data.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidName`]; [`ErrorKind::Unsupported`] when a claim of another tool is to be told;
    /// those of the engine.
    pub async fn evict(
        &self,
        name: impl AsRef<str>,
        which: Which<'_>,
        how: Eviction,
    ) -> Result<bool> {
        let name = &Name::new(name)?;
        let targets = self.targets(name, which).await?;
        for target in &targets {
            if how == Eviction::Remove {
                let id = target.id.clone();
                self.engine().evict(name.clone(), id, how).await?;
            } else if target.owner.is_none() {
                let message = "this claim belongs to another tool and can't be told; use force";
                return Err(
                    Error::new(ErrorKind::Unsupported, "evict", message).with("id", &target.id)
                );
            } else {
                self.evict_gently(name, target).await?;
            }
        }
        Ok(!targets.is_empty())
    }

    async fn targets(&self, name: &Name, which: Which<'_>) -> Result<Vec<ClaimReport>> {
        let lines = self.survey(Scope::Line(name.clone())).await?;
        let claims = lines.into_iter().flat_map(|line| match which {
            Which::Holders => line.holders,
            Which::Claim(id) => {
                let all = line.holders.into_iter().chain(line.waiters);
                all.filter(|claim| claim.id == id).collect()
            }
        });
        Ok(claims.collect())
    }

    async fn evict_gently(&self, name: &Name, target: &ClaimReport) -> Result<()> {
        let mut changes = self.engine().watch(Scope::Line(name.clone()));
        if !self
            .engine()
            .evict(name.clone(), target.id.clone(), Eviction::Mark)
            .await?
        {
            return Ok(());
        }
        // The mark ends renewal, so the lease as it stands now is the longest it can last.
        let mut deadline = None;
        loop {
            let still = self.targets(name, Which::Claim(&target.id)).await?;
            let Some(still) = still.first() else {
                return Ok(());
            };
            let left = still.expires_in.unwrap_or(self.ttl);
            let deadline = *deadline.get_or_insert_with(|| BootTime::now() + left);
            if deadline.has_passed() {
                self.engine()
                    .evict(name.clone(), target.id.clone(), Eviction::Remove)
                    .await?;
                return Ok(());
            }
            // A change can be missed; a look ten times a second while an operator waits is cheap.
            let recheck = deadline.remaining().min(Duration::from_millis(100));
            let _ = tokio::time::timeout(recheck, changes.next()).await;
        }
    }

    /// Waits until every release that was left to the background is done.
    /// Holds that live on are not touched.
    pub async fn flush(&self) {
        self.keeper.drain().await;
        if let Some(Some(queues)) = self.queues.get() {
            queues.drain().await;
        }
    }

    /// Flushes, then closes the connection if nothing else uses it (no clone, hold or primitive);
    /// otherwise the last of them closes it. For a program that ends: it leaves nothing behind.
    pub async fn close(self) {
        self.flush().await;
        // Its messages are on the same connection, which the other one closes.
        let queues = Arc::into_inner(self.queues).and_then(OnceLock::into_inner);
        if let Some(keeper) = queues.flatten().and_then(Arc::into_inner) {
            keeper.end().await;
        }
        if let Some(keeper) = Arc::into_inner(self.keeper) {
            keeper.end().await;
        }
    }
}

/// Whom [`Client::evict`] takes places from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Which<'a> {
    /// Every holder of the line.
    Holders,
    /// The claim with this id, held or waiting.
    Claim(&'a str),
}

/// Readers are a line of the greatest capacity; permits stay below it.
fn check_capacity(capacity: u32) -> Result<()> {
    if (1..READERS).contains(&capacity) {
        return Ok(());
    }
    let message = format!("the capacity must be 1 to {}", READERS - 1);
    Err(Error::new(ErrorKind::InvalidArgument, "permits", message))
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("engine", &self.describe())
            .finish()
    }
}
