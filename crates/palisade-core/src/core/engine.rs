//! `Engine`: what palisade requires of a store. Everything else is built on these methods.
//!
//! Authors implement them as plain `async fn`s whose futures are `Send` and may borrow the engine.
//! A future may be dropped at any time, though a request that was sent may still be applied. There
//! are no default methods, so that no engine forgets one. All other code uses a
//! [`SharedEngine`](super::dyn_engine::SharedEngine). Each `# Behavior` line is a case of the
//! conformance suite in `palisade-testkit`.
//!
//! An engine never renews on its own, never creates a hold, and never decides a place by a read.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::Stream;

use super::capability::Capability;
use super::claim::{Ask, Claim};
use super::clock::BootTime;
use super::error::{Error, ErrorKind, Result};
use super::name::Name;
use super::queue::SharedQueueStore;
use super::report::{Checkup, LineReport, Scope};
use super::ticket::{Lease, LeaseId, LeaseStart, Ticket};

/// A boxed future that owns what it needs.
pub type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send + 'static>>;

/// A boxed stream that owns what it needs.
pub type BoxStream<T> = Pin<Box<dyn Stream<Item = T> + Send + 'static>>;

/// A store that keeps lines. See the module documentation.
pub trait Engine: Send + Sync + 'static {
    /// What the engine can do. Constant for the life of the engine.
    fn capability(&self) -> Capability;

    /// A name for people: scheme and host, never a secret (`redis://db1:6379`, `memory:`).
    fn describe(&self) -> String;

    /// Takes a place in the claim's line.
    ///
    /// # Behavior
    /// - A free line is held at once, with a count greater than any before on that name.
    /// - A claim that can't be held at once takes the last place, or, if it does not queue, leaves
    ///   no trace and answers [`Entered::Busy`].
    /// - The same claim id again answers with the same ticket, never with a second place, and
    ///   says where it stands now.
    /// - A claim that was left before it arrived (see [`Engine::leave`]) answers
    ///   [`Entered::Busy`] and leaves no trace.
    /// - Another capacity, or another kind, than the live line's is `CapacityMismatch`.
    /// - `armed` counts from before the request that created or re-armed the lease was sent;
    ///   entering extends a shared lease only if the same atomic step re-arms it.
    fn enter(&self, claim: Arc<Claim>) -> impl Future<Output = Result<Entered>> + Send;

    /// Sleeps until the ticket's place may have changed, at most until `until`, then returns where
    /// it stands.
    ///
    /// # Behavior
    /// - Returns soon after the place changed: pushed by the engine, not polled.
    /// - Looks once more when `until` has come, and earlier when the lease of a claim that
    ///   blocks it is due to end: a push can be lost and is never a grant.
    /// - Dropping it keeps the place.
    /// - A ticket that is no longer in the line is [`Place::Gone`].
    /// - Fails as unreachable rather than sleeping while the engine can't be asked.
    fn wait(&self, ticket: Ticket, until: BootTime) -> impl Future<Output = Result<Place>> + Send;

    /// Renews many leases with one call. The results are in the order of the leases.
    ///
    /// # Behavior
    /// - A lease that lives is re-armed to its full ttl.
    /// - A lease that ended, or whose ticket is another incarnation, is lost and stays lost:
    ///   renewing never re-creates anything.
    /// - A ticket marked for eviction answers [`Renewal::Evicted`] and is not extended.
    /// - An outcome that is not known is [`Renewal::Unknown`], for that lease alone.
    /// - An answer that takes longer than `within` is of no use. An engine behind a connection
    ///   gives up on it by then and connects anew, so that the next try can still be in time.
    fn renew(
        &self,
        leases: Vec<Lease>,
        within: Duration,
    ) -> impl Future<Output = Vec<Renewal>> + Send;

    /// Changes the weight or the value of a ticket; its sequence stays.
    ///
    /// # Behavior
    /// - A held whole line can become a reader; other readers in line follow at once.
    /// - A reader becomes the whole line only as the one holder, else [`Amended::Busy`] and
    ///   nothing changes.
    /// - A value is replaced and shown by `survey`.
    /// - A ticket that is no longer in the line is [`Amended::Gone`].
    fn amend(
        &self,
        ticket: Ticket,
        amendment: Amendment,
    ) -> impl Future<Output = Result<Amended>> + Send;

    /// Leaves a place, held or waiting.
    ///
    /// # Behavior
    /// - Compares the incarnation (claim id, and the count where it is known), never just the
    ///   name: a late or doubled leave changes nothing.
    /// - The next in line is granted and woken.
    /// - An unknown claim id is remembered at least for the claim's usual ttl, so that an enter
    ///   still under way finds it was left. On shared leases [`Engine::audit`] does this instead.
    /// - A ticket in doubt is remembered in the same way, though it was found: an earlier copy of
    ///   its enter may still arrive.
    fn leave(&self, ticket: Ticket) -> impl Future<Output = Result<Left>> + Send;

    /// Lists the tickets of a shared lease, so that the keeper can leave those that no claim of its
    /// client knows (an enter whose future was dropped may still have been applied). An engine
    /// whose tickets have their own leases returns an empty list.
    fn audit(&self, lease: LeaseId) -> impl Future<Output = Result<Vec<Audited>>> + Send;

    /// Hints to the keeper that leases may be lost or marked for eviction, so that it renews or
    /// audits them at once. A hint decides nothing. Called once per client. The stream never ends
    /// before the engine does.
    fn alarms(&self) -> BoxStream<Alarm>;

    /// Reports holders and waiters.
    ///
    /// # Behavior
    /// - Holders first, then waiters in the order in which they will be served.
    /// - Shows no claim whose lease has ended.
    /// - An empty line is not shown.
    fn survey(&self, scope: Scope) -> impl Future<Output = Result<Vec<LineReport>>> + Send;

    /// Yields after every change that a survey of `scope` could show; several changes may be
    /// merged. Each item is a hint: the listener surveys, and also re-checks from time to time.
    fn watch(&self, scope: Scope) -> BoxStream<Result<()>>;

    /// Takes a place away from its owner.
    ///
    /// # Behavior
    /// - [`Eviction::Mark`] leaves the place as it is, makes its renewals answer
    ///   [`Renewal::Evicted`], and raises an alarm at its client.
    /// - [`Eviction::Remove`] removes it at once; the next in line is granted and woken, and an
    ///   alarm is raised at its client.
    /// - An id that is not in the line answers `false`.
    fn evict(
        &self,
        name: Name,
        id: String,
        eviction: Eviction,
    ) -> impl Future<Output = Result<bool>> + Send;

    /// Changes the capacity of a line of permits that is in use.
    ///
    /// # Behavior
    /// - Every claim in the line has the new capacity; holders keep what they hold, even if it is
    ///   more than fits now, and nobody is granted until it fits.
    /// - A greater capacity grants the next in line at once and wakes them.
    /// - A later claim must name the new capacity.
    /// - A claim that weighs more than the new capacity is `InvalidArgument`, and nothing changes.
    /// - A line of readers is `CapacityMismatch`; one without permits answers `false`.
    fn resize(&self, name: Name, capacity: u32) -> impl Future<Output = Result<bool>> + Send;

    /// The store of its work queues, if it has one (see
    /// [`Capability::queue`](super::capability::Capability::queue)). It shares the engine's
    /// connection.
    fn queues(&self) -> Option<SharedQueueStore>;

    /// Examines the engine itself: its version, its clock, and unsafe settings.
    fn check(&self) -> impl Future<Output = Result<Checkup>> + Send;

    /// The engine's own key of a place, for conditional writes of the user and for other tools (an
    /// etcd key, a Redis key, a path). `None` if there is no such key.
    fn key(&self, ticket: &Ticket) -> Option<String>;

    /// Releases what all claims share: sessions, leases, connections. Best effort.
    fn close(&self) -> impl Future<Output = ()> + Send;
}

/// The result of [`Engine::enter`].
#[derive(Debug, Clone)]
pub enum Entered {
    /// The claim can't be held now, and it took no place.
    Busy,
    /// The claim took a place, or has one already.
    In {
        /// The place.
        ticket: Ticket,
        /// When its lease was created or last renewed.
        armed: LeaseStart,
        /// Where it stands.
        place: Place,
    },
}

/// Where a ticket stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// It holds, with the sequence that the engine assigned to the grant.
    Held {
        /// The token without the era.
        sequence: u64,
    },
    /// Others are ahead.
    Waiting,
    /// It is not in the line: its lease ended, or it was removed.
    Gone,
}

/// The result of renewing one lease.
#[derive(Debug, Clone)]
pub enum Renewal {
    /// The lease was extended.
    Held(LeaseStart),
    /// The lease has ended.
    Lost,
    /// The lease has ended for a reason that its owner should learn: its store was moved away or
    /// replaced. Another claim may have been granted already.
    Revoked(Error),
    /// An operator evicts it, so it was not extended.
    Evicted,
    /// Unknown: the request or its answer was lost.
    Unknown(Error),
}

/// A change to a ticket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Amendment {
    /// Takes this much of the line instead.
    Ask(Ask),
    /// Announces this value instead.
    Value(String),
}

/// The result of [`Engine::amend`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Amended {
    /// Changed.
    Done,
    /// Others hold too; nothing was changed.
    Busy,
    /// The ticket is not in the line.
    Gone,
}

/// The result of [`Engine::leave`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Left {
    /// The place was left.
    Done,
    /// The ticket was not in the line.
    Absent,
}

impl Left {
    /// `Done` if the place was there.
    pub fn of(was_there: bool) -> Self {
        if was_there { Self::Done } else { Self::Absent }
    }
}

/// A ticket that belongs to a shared lease.
#[derive(Debug, Clone)]
pub struct Audited {
    /// The ticket, complete enough to be left.
    pub ticket: Ticket,
    /// Whether it is marked for eviction.
    pub evicted: bool,
}

/// A hint to the keeper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Alarm {
    /// Check this lease.
    Lease(LeaseId),
    /// Check all leases, for example because the connection was lost.
    All,
}

/// The answer of an engine that can't change the capacity of a line of permits.
pub fn cannot_resize() -> BoxFuture<Result<bool>> {
    let message = "this engine can't change the capacity of a line in use; wait until it is empty";
    Box::pin(std::future::ready(Err(Error::new(
        ErrorKind::Unsupported,
        "resize",
        message,
    ))))
}

/// How to evict a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Eviction {
    /// Tell the owner, who releases it.
    Mark,
    /// Remove it, whether or not the owner knows.
    Remove,
}
