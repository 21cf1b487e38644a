//! `Request`: a request for a place in a line, and the steps from enter to hold.
//!
//! enter → (held | wait → held) → hold. When an outcome is unknown, the enter is repeated with the
//! same claim id. A claim whose lease ended while it waited is replaced by a new claim. A future
//! that is dropped at any await leaves no place behind: `Occupied` ensures that.

use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;

use super::claim::{Ask, Claim, ClaimId};
use super::clock::BootTime;
use super::engine::{Entered, Place};
use super::error::{Error, ErrorKind, Outcome, Result};
use super::events::{Ending, Event, Stall};
use super::hold::Hold;
use super::keeper::Keeper;
use super::known_bad::{self, Bad};
use super::lookout::AgentState;
use super::name::Name;
use super::owner::{Agent, Group, Owner, may_block};
use super::place::Occupied;
use super::ticket::Ticket;
use super::token::Era;
use super::validity::{LossReason, Validity};
use super::wait::{Patience, Retry, Tries, recheck_at};

/// A request for a place in a line, on which every primitive is built. Reusable.
#[derive(Clone)]
pub struct Request {
    pub(crate) keeper: Arc<Keeper>,
    pub(crate) era: Era,
    pub(crate) owner: Arc<Owner>,
    pub(crate) name: Name,
    pub(crate) ask: Ask,
    pub(crate) ttl: Duration,
    pub(crate) value: Option<String>,
    pub(crate) at_least: Duration,
    pub(crate) retry: Retry,
    pub(crate) renewed: bool,
    /// The agent that the claim belongs to, if the caller named one.
    pub(crate) agent: Option<Arc<AgentState>>,
    /// The group that the claim belongs to: one granted claim of a group is enough.
    pub(crate) group: Option<Group>,
    pub(crate) deadlock_after: Option<Duration>,
    /// The first invalid argument; [`Request::acquire`] returns it.
    pub(crate) refused: Option<Error>,
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request")
            .field("name", &self.name)
            .field("ask", &self.ask)
            .field("ttl", &self.ttl)
            .finish_non_exhaustive()
    }
}

impl Request {
    /// Sets how long the place lasts without renewal. [`Request::acquire`] refuses a ttl outside
    /// the engine's range and names that range.
    #[must_use]
    pub fn ttl(mut self, ttl: Duration) -> Self {
        match self.keeper.engine().capability().explicit_ttl(ttl) {
            Ok(ttl) => self.ttl = ttl,
            Err(error) => self.refuse(error),
        }
        self
    }

    /// Sets the value that an election candidate announces.
    #[must_use]
    pub fn value(mut self, value: String) -> Self {
        self.value = Some(value);
        self
    }

    /// Keeps a granted hold for at least this long, so that a short scheduled job is not run again
    /// by a machine whose clock is slightly behind. A release waits until then. A dropped hold is
    /// kept in the background while its process lives.
    #[must_use]
    pub fn at_least(mut self, at_least: Duration) -> Self {
        self.at_least = at_least;
        self
    }

    /// Lets a granted hold expire: the claim is renewed while it waits, but no longer once it is
    /// granted. The hold then lasts at most one ttl, counted from the enter or from the last
    /// renewal, and its end is reported as a loss by expiry. An eviction mark is not noticed before
    /// the hold expires.
    ///
    /// [`Request::acquire`] refuses this as [`ErrorKind::Unsupported`] where a hold lives as long
    /// as its process or session, which is renewed for all of its holds (see
    /// [`Capability::detached`](super::capability::Capability::detached)).
    #[must_use]
    pub fn unrenewed(mut self) -> Self {
        if !self.keeper.engine().capability().detached {
            let message = "on this engine a hold lasts as long as its process or session; it \
                           can't expire earlier";
            self.refuse(Error::new(ErrorKind::Unsupported, "enter", message));
        }
        self.renewed = false;
        self
    }

    /// Sets how much of the line the claim takes.
    pub(crate) fn asking(mut self, ask: Ask) -> Self {
        self.ask = ask;
        let wrong = match ask {
            Ask::Part { capacity: 0, .. } => {
                "the capacity must be at least 1: with 0 permits nobody could ever acquire one"
                    .to_owned()
            }
            Ask::Part { weight, capacity } if weight == 0 || weight > capacity => {
                format!("permits must be 1 to {capacity}, not {weight}")
            }
            _ => return self,
        };
        self.refuse(Error::new(ErrorKind::InvalidArgument, "permits", wrong));
        self
    }

    /// Records why this request is invalid. Only the first reason is kept.
    pub(crate) fn refuse(&mut self, error: Error) {
        self.refused.get_or_insert(error);
    }

    /// Sets how to retry when the engine can't be reached or has no line to wait in.
    #[must_use]
    pub fn retry(mut self, retry: Retry) -> Self {
        self.retry = retry;
        self
    }

    /// Sets how long an [agent](crate::Client::agent) waits before it checks for a deadlock that it
    /// is in, and gives way if it is the one chosen to: 2 s by default, `None` for never. Only an
    /// agent that holds something checks.
    #[must_use]
    pub fn deadlock_after(mut self, after: impl Into<Option<Duration>>) -> Self {
        self.deadlock_after = after.into();
        self
    }

    /// Acquires the place; `None` if patience ended first. It returns at most a moment after
    /// patience ended, even if the engine does not answer: the claim is then left in the
    /// background.
    ///
    /// A line that is in use with another capacity, or as another kind, is waited for like a busy
    /// one.
    ///
    /// # Cancellation
    /// A call that is dropped at any await leaves no place behind. The place is left at once if the
    /// engine answers, and expires with its ttl if it doesn't.
    ///
    /// # Errors
    /// Before any I/O: [`ErrorKind::InvalidName`]; [`ErrorKind::InvalidArgument`] for an invalid
    /// ttl, weight or capacity; [`ErrorKind::Unsupported`] when the engine can't do it. Then
    /// [`ErrorKind::CapacityMismatch`] when patience ended while the line was in use with another
    /// capacity; [`ErrorKind::Unreachable`] when patience ended without an answer (at once with
    /// [`Patience::NoWait`]); [`ErrorKind::Lost`] when an operator evicted the waiting claim;
    /// [`ErrorKind::Deadlock`] when the claim was in a deadlock and gave way;
    /// [`ErrorKind::Unusable`] and [`ErrorKind::Denied`] from the engine.
    pub async fn acquire(&self, patience: Patience) -> Result<Option<Hold>> {
        if let Some(refused) = &self.refused {
            return Err(refused.clone());
        }
        self.keeper.engine().capability().allows(self.ask)?;
        let mut acquiring = Acquiring::begin(self);
        let acquired = self.acquire_by(patience, &mut acquiring.stall).await;
        acquiring.ending = match &acquired {
            Ok(Some(hold)) => Ending::Held(hold.token()),
            Ok(None) => Ending::Busy,
            Err(_) => Ending::Failed,
        };
        acquired
    }

    async fn acquire_by(&self, patience: Patience, stall: &mut Stall) -> Result<Option<Hold>> {
        let on = (self.keeper.observers(), &self.name);
        let mut tries = Tries::new(patience, self.retry, stall, on);
        loop {
            let ended = match self.attempt(&mut tries).await {
                Ok(Attempt::Held(hold)) => return Ok(Some(hold)),
                Ok(Attempt::OutOfPatience) => return Ok(None),
                Ok(Attempt::Again) => Ok(None),
                // A line's capacity is set by the claims in it, so the mismatch ends when they have
                // left.
                Err(error) if error.kind() == ErrorKind::CapacityMismatch => Err(error),
                Err(error) => return Err(error),
            };
            let again = match &ended {
                Ok(_) => tries.again().await,
                Err(error) => tries.again_after(error).await,
            };
            if !again {
                return ended;
            }
        }
    }

    /// Runs one claim from enter to its end.
    async fn attempt(&self, tries: &mut Tries<'_>) -> Result<Attempt> {
        let deadline = tries.deadline;
        self.keeper.start()?;
        let mut claim = Arc::new(self.claim(tries.patience != Patience::NoWait));
        let ticket = Ticket::own(self.name.clone(), claim.id);
        let (mode, agent) = (self.ask.mode(), self.agent.clone());
        let mut occupied = Occupied::entering(&self.keeper, ticket, self.ttl, mode, agent);

        let (armed, mut place) = loop {
            let called = BootTime::now();
            let enter = self.keeper.engine().enter(Arc::clone(&claim));
            match tries.bound("enter", enter).await {
                Ok(Entered::Busy) => {
                    tries.answered();
                    occupied.not_taken();
                    return Ok(Attempt::Again);
                }
                Ok(Entered::In {
                    ticket,
                    armed,
                    place,
                }) => break (occupied.entered(ticket, armed, called), place),
                Err(error) if error.is_transient() && tries.again_after(&error).await => {
                    if error.outcome() == Outcome::MaybeApplied {
                        occupied.in_doubt();
                    }
                }
                Err(error) => {
                    if error.outcome() == Outcome::NotApplied {
                        occupied.not_taken();
                    }
                    return Err(error.with("name", &self.name));
                }
            }
        };

        tries.answered();
        let validity = self.keeper.watch_over(&occupied.ticket, armed);
        let mut lookout = None;
        loop {
            match place {
                // A grant counts only while the claim's own lease is still valid.
                Place::Held { sequence }
                    if validity.is_valid() || known_bad::is(Bad::GrantUnchecked) =>
                {
                    let token = self.era.stamp(sequence)?;
                    validity.grant();
                    occupied.granted(sequence, &validity, self.at_least, self.renewed);
                    return Ok(Attempt::Held(Hold::new(occupied, token, validity)));
                }
                Place::Held { .. } | Place::Gone => {
                    return match validity.loss().map(|loss| loss.reason) {
                        Some(LossReason::Evicted) => Err(self.evicted()),
                        _ => Ok(Attempt::Again),
                    };
                }
                Place::Waiting if deadline.has_passed() => return Ok(Attempt::OutOfPatience),
                Place::Waiting => {
                    let known = occupied.ticket.claim;
                    let lookout = lookout.get_or_insert_with(|| self.lookout(known));
                    let waiting = async {
                        if let Some(now) = self.with_its_holds(&claim) {
                            let entering =
                                tries.bound("enter", self.keeper.engine().enter(now.clone()));
                            if let Some(place) = occupied.entered_again(entering.await) {
                                claim = now;
                                return Ok(place);
                            }
                        }
                        self.wait(&occupied.ticket, &validity, tries).await
                    };
                    place = tokio::select! {
                        biased;
                        place = waiting => place?,
                        error = lookout => return Err(error),
                    };
                }
            }
        }
    }

    /// Sleeps until the place may have changed, the re-check is due, or the deadline has passed.
    async fn wait(
        &self,
        ticket: &Ticket,
        validity: &Arc<Validity>,
        tries: &mut Tries<'_>,
    ) -> Result<Place> {
        let until = recheck_at(tries.deadline);
        let looked = self.keeper.engine().wait(ticket.clone(), until);
        let waited = tokio::select! {
            biased;
            loss = self.keeper.lost(validity) => match loss.reason {
                LossReason::Evicted => return Err(self.evicted()),
                LossReason::Expired | LossReason::Taken => Ok(Place::Gone),
            },
            place = tries.bound("wait", looked) => place,
        };
        match waited {
            Ok(place) => {
                tries.answered();
                Ok(place)
            }
            // Only the read failed. The place lasts as long as its lease.
            Err(error) if error.is_transient() && tries.again_after(&error).await => {
                Ok(Place::Waiting)
            }
            Err(error) => Err(error.with("name", &self.name)),
        }
    }

    /// Resolves with the error when the waiting claim must give way, and never otherwise.
    pub(super) fn lookout(&self, claim: ClaimId) -> BoxFuture<'static, Error> {
        let visible = self.keeper.engine().capability().waiters_visible;
        match (self.agent.clone(), self.deadlock_after) {
            (Some(agent), Some(after)) if visible => {
                let (keeper, name) = (Arc::clone(&self.keeper), self.name.clone());
                Box::pin(async move { agent.look_out(&keeper, claim, &name, after).await })
            }
            // `Pending` has no size, so this box does not allocate.
            _ => Box::pin(std::future::pending()),
        }
    }

    fn evicted(&self) -> Error {
        let message = "an operator evicted this claim before it was granted";
        Error::new(ErrorKind::Lost, "wait", message).with("name", &self.name)
    }

    /// The record of the request's agent, as it is now. Without visible waiters nobody could read
    /// it.
    fn agent_record(&self) -> Option<Agent> {
        let visible = self.keeper.engine().capability().waiters_visible;
        let agent = self.agent.as_ref().filter(|_| visible)?;
        Some(Agent {
            unrenewed: !self.renewed,
            group: self.group.clone(),
            ..agent.record(self.ttl, self.deadlock_after.is_some())
        })
    }

    /// The claim with a new record, if its agent has come to hold something since it entered with a
    /// record of no holds. An engine that held it back on its way to the line lets it pass then.
    pub(super) fn with_its_holds(&self, claim: &Claim) -> Option<Arc<Claim>> {
        let known = claim.owner.agent.as_ref()?;
        let holds_now = || self.agent.as_ref().is_some_and(|agent| agent.holds_any());
        if may_block(known) || !holds_now() {
            return None;
        }
        let agent = self.agent_record().filter(may_block);
        Some(Arc::new(Claim {
            owner: Owner {
                agent: Some(agent?),
                ..claim.owner.clone()
            },
            ..claim.clone()
        }))
    }

    pub(super) fn claim(&self, queue: bool) -> Claim {
        let mut owner = self.owner.asking_now();
        if let Some(agent) = self.agent_record() {
            owner.agent = Some(agent);
        }
        Claim {
            id: ClaimId::random(),
            name: self.name.clone(),
            ask: self.ask,
            ttl: self.ttl,
            queue,
            owner,
            value: self.value.clone(),
            renewed: self.renewed,
            at_least: self.at_least,
        }
    }
}

/// An acquire in progress. Dropping it reports the ending, also when the acquire was cancelled.
pub(super) struct Acquiring<R: Borrow<Request>> {
    request: R,
    since: BootTime,
    pub(super) ending: Ending,
    pub(super) stall: Stall,
}

impl<R: Borrow<Request>> Acquiring<R> {
    pub(super) fn begin(request: R) -> Self {
        let asked = request.borrow();
        let (name, mode) = (&asked.name, asked.ask.mode());
        let observers = asked.keeper.observers();
        observers.tell(|engine| Event::Acquiring { engine, name, mode });
        Self {
            request,
            since: BootTime::now(),
            ending: Ending::Cancelled,
            stall: Stall::default(),
        }
    }

    /// Reports why a try failed that may be repeated.
    pub(super) fn stalled(&mut self, why: &Error) {
        let request = self.request.borrow();
        self.stall
            .begins(request.keeper.observers(), &request.name, why);
    }

    /// Reports that the engine has answered.
    pub(super) fn answered(&mut self) {
        let request = self.request.borrow();
        self.stall.ends(request.keeper.observers(), &request.name);
    }
}

impl<R: Borrow<Request>> Drop for Acquiring<R> {
    fn drop(&mut self) {
        let request = self.request.borrow();
        let (name, mode, ending) = (&request.name, request.ask.mode(), self.ending);
        let took = BootTime::now().saturating_since(self.since);
        let observers = request.keeper.observers();
        observers.tell(|engine| Event::Acquired {
            engine,
            name,
            mode,
            ending,
            took,
        });
    }
}

/// How one claim ended.
enum Attempt {
    Held(Hold),
    OutOfPatience,
    /// Busy without a place, or the place was lost: retry as a new claim while patience lasts.
    Again,
}
