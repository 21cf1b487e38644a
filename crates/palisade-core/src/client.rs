//! `Client`: one connection to an engine, which creates the primitives.

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
use crate::core::error::{Error, ErrorKind, Result, config_error};
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
/// Holds keep what they need alive, so a client may be dropped before its holds.
#[derive(Clone)]
pub struct Client {
    keeper: Arc<Keeper>,
    /// The keeper of messages, created at the first use of a queue; `None` if there are no queues.
    queues: Arc<OnceLock<Option<Arc<QueueKeeper>>>>,
    era: Era,
    owner: Arc<Owner>,
    agents: Arc<Agents>,
    agent: Option<Arc<AgentState>>,
    ttl: Duration,
}

impl Client {
    /// A client of an engine that is already open: for authors of engines and layers. Other code
    /// uses `palisade::connect`.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] when `settings` have a ttl outside the engine's range.
    pub fn new(engine: SharedEngine, settings: &Settings) -> Result<Self> {
        let capability = engine.capability();
        let ttl = match settings.ttl {
            None => capability.default_ttl(),
            Some(ttl) => capability
                .explicit_ttl(ttl)
                .map_err(|error| config_error(format!("option ttl: {}", error.message())))?,
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

    /// The engine's name for people: scheme and host, never a secret.
    pub fn describe(&self) -> String {
        self.engine().describe()
    }

    /// The owner handle in this client's claims.
    pub fn owner(&self) -> &str {
        &self.owner.owner
    }

    /// How long this client's places last without renewal, unless a primitive overrides it.
    pub fn ttl(&self) -> Duration {
        self.ttl
    }

    /// A client with another owner handle on the same connection.
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

    /// A client whose claims record this W3C trace. It shares this client's connection.
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

    /// A client whose claims belong to one agent, which does one thing at a time: while one of its
    /// claims waits, it releases nothing. Agents that wait for each other are detected by
    /// [`Client::deadlocks`] and by the agents themselves, and one of them gives way with
    /// [`ErrorKind::Deadlock`]; see [`Request::deadlock_after`].
    ///
    /// The same name on this client and its clones is the same agent. On another client it is a
    /// different one.
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

    /// An agent that runs inside claims of others (the outermost first), which end after it.
    /// `yields_nested`: whether it also gives way in circles through these, which are likely but
    /// not certain.
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

    /// A client on the same connection with its own set of agents, whose names may repeat: for code
    /// that acquires on behalf of many, such as a gateway.
    #[doc(hidden)]
    #[must_use]
    pub fn with_own_agents(&self) -> Self {
        Self {
            agents: self.agents.others(),
            agent: None,
            ..self.clone()
        }
    }

    /// Reports to `observer` what happens to the claims of this client and all its clones.
    #[must_use]
    pub fn observed_by(self, observer: impl Observer) -> Self {
        self.keeper.observers().add(Arc::new(observer));
        self
    }

    /// Wraps the engine in a layer: `client.layer(layers::Traced::over)`. Existing clones and holds
    /// continue without it.
    #[must_use]
    pub fn layer<E: Engine>(self, layer: impl FnOnce(SharedEngine) -> E) -> Self {
        Self {
            keeper: Arc::new(self.keeper.layered(layer)),
            queues: Arc::default(),
            ..self
        }
    }

    /// Requires tokens that can't decrease, because data depends on them. It examines the engine's
    /// current configuration: everything that [`Client::check`] reports as a danger is refused.
    ///
    /// # Errors
    /// [`ErrorKind::NotForCorrectness`] on an engine of class C or without tokens, or on one whose
    /// settings endanger exclusion or tokens, with the reason and the remedy; those of the engine.
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

    /// Accepts the engine as it is, for locks that only avoid duplicate work. The default.
    #[must_use]
    pub fn for_efficiency(&self) -> Self {
        self.clone()
    }

    /// A mutual exclusion lock. As with every primitive, name and options are checked when it is
    /// used.
    pub fn mutex(&self, name: impl AsRef<str>) -> Mutex {
        Mutex(self.line(name, Ask::Whole))
    }

    /// A lock that many may hold to read, or one to write.
    pub fn rwlock(&self, name: impl AsRef<str>) -> RwLock {
        RwLock {
            read: self.line(&name, Ask::READ),
            write: self.line(name, Ask::Whole),
        }
    }

    /// A semaphore of `capacity` permits, 1 to `u32::MAX - 1`. All users of the name must agree on
    /// the capacity.
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

    /// A lock that its owner may lock again while holding it. The owner is the returned handle and
    /// its clones.
    pub fn reentrant(&self, name: impl AsRef<str>) -> ReentrantMutex {
        ReentrantMutex::new(self.line(name, Ask::Whole))
    }

    /// Several locks, all or nothing. The library sorts the names; there must be at least one.
    pub fn multi_lock<N: AsRef<str>>(&self, names: impl IntoIterator<Item = N>) -> MultiLock {
        MultiLock::new(self.wholes(names))
    }

    /// Locks the first of `names` that is free and skips locked ones: picks one of many tasks. If
    /// patience allows, it then waits for any of them; `None` if patience ended first.
    ///
    /// # Cancellation
    /// A call that is dropped at any await leaves no place in any line.
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

    /// A request for a place in a line, by weight: all primitives are built on it.
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

    /// A work queue: each message has one consumer at a time, and none is lost when a consumer
    /// dies. As with every primitive, name and options are checked when it is used.
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

    /// Reports the queues of this namespace.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] on an engine without queues; those of the engine.
    pub async fn survey_queues(&self, scope: Scope) -> Result<Vec<QueueReport>> {
        self.queue_keeper()?.store().survey(scope).await
    }

    /// Reports holders and waiters.
    ///
    /// # Errors
    /// Those of the engine.
    pub async fn survey(&self, scope: Scope) -> Result<Vec<LineReport>> {
        self.engine().survey(scope).await
    }

    /// The agents of this namespace that wait for each other, confirmed by two surveys.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] where an engine does not show waiters; those of the engine.
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

    /// The token that users see for an engine's sequence, for example from a survey.
    ///
    /// # Errors
    /// [`ErrorKind::Unusable`] when the engine's counter exceeds the range of a token.
    pub fn token(&self, sequence: u64) -> Result<Token> {
        self.era.stamp(sequence)
    }

    /// Examines the engine itself: its version, its clock, and unsafe settings.
    ///
    /// # Errors
    /// Those of the engine.
    pub async fn check(&self) -> Result<Checkup> {
        self.engine().check().await
    }

    /// Changes the capacity of the permits in a line that is in use; `false` if there are none.
    ///
    /// Holders keep what they hold, even if it is more than fits now; waiters are granted by the
    /// new capacity at once. Later claims must name the new capacity.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] before any I/O when the engine can't do it;
    /// [`ErrorKind::InvalidName`]; [`ErrorKind::InvalidArgument`] for a capacity that no semaphore
    /// can have, or when a claim in the line weighs more; [`ErrorKind::CapacityMismatch`] for a
    /// line of readers.
    pub async fn resize(&self, name: impl AsRef<str>, capacity: u32) -> Result<bool> {
        let name = Name::new(name)?;
        check_capacity(capacity)?;
        if !self.capability().resize {
            return cannot_resize().await;
        }
        self.engine().resize(name, capacity).await
    }

    /// Evicts claims from a line; `false` if no claim matches.
    ///
    /// [`Eviction::Mark`] tells the owner first (its hold is lost, its child process ended). The
    /// place is removed when the owner has released it, or when its lease has ended.
    /// [`Eviction::Remove`] removes it at once: another claim may be granted before the owner
    /// knows, and only the token protects the data.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidName`]; [`ErrorKind::Unsupported`] when a claim of another tool is to be
    /// marked; those of the engine.
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
                let message = "this claim belongs to another tool, which can't be told; use force";
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
        // The mark stops renewal, so the claim lasts at most for the rest of its current lease.
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
            // A change can be missed. Ten reads per second are cheap while an operator waits.
            let recheck = deadline.remaining().min(Duration::from_millis(100));
            let _ = tokio::time::timeout(recheck, changes.next()).await;
        }
    }

    /// Waits until every background release is done. Live holds are not affected.
    pub async fn flush(&self) {
        self.keeper.drain().await;
        if let Some(Some(queues)) = self.queues.get() {
            queues.drain().await;
        }
    }

    /// Flushes, then closes the connection if nothing else uses it (no clone, hold or primitive);
    /// otherwise the last user closes it. Call it before a program ends, to leave nothing behind.
    pub async fn close(self) {
        self.flush().await;
        // The messages use the same connection, so their keeper ends first and the other one closes
        // it.
        let queues = Arc::into_inner(self.queues).and_then(OnceLock::into_inner);
        if let Some(keeper) = queues.flatten().and_then(Arc::into_inner) {
            keeper.end().await;
        }
        if let Some(keeper) = Arc::into_inner(self.keeper) {
            keeper.end().await;
        }
    }
}

/// The claims that [`Client::evict`] evicts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Which<'a> {
    /// Every holder of the line.
    Holders,
    /// The claim with this id, held or waiting.
    Claim(&'a str),
}

/// `READERS` is the capacity of readers, so permits must stay below it.
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
