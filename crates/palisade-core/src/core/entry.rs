//! `Entry`: one claim under an id that the caller chose, for code that acquires on behalf of
//! others.
//!
//! [`Request::acquire`] starts a new claim when the old one was lost while it waited. A gateway
//! can't do that, because its client has been told about the claim. So an entry is one claim from
//! enter to its end and is never restarted, and its deadline can be read while it waits. The keeper
//! renews it like any other claim. An entry that is dropped at any await leaves no place behind.

use std::fmt;
use std::sync::Arc;

use futures_util::future::BoxFuture;

use super::acquire::{Acquiring, Request};
use super::claim::{Claim, ClaimId};
use super::clock::BootTime;
use super::engine::{Entered, Place};
use super::error::{Error, ErrorKind, Outcome, Result};
use super::events::Ending;
use super::hold::Hold;
use super::owner::Owner;
use super::place::Occupied;
use super::ticket::Ticket;
use super::validity::{Loss, LossReason, Validity};
use super::wait::recheck_at;

/// Where an entry stands.
#[derive(Debug, Clone)]
pub enum Progress {
    /// It has no place: others hold, and it does not queue or the engine has no line.
    Busy,
    /// It has a place, and others are ahead of it.
    Waiting,
    /// It was granted: call [`Entry::into_hold`].
    Held,
    /// It was lost.
    Lost(Loss),
}

/// One claim under an id that the caller chose. See the module documentation.
pub struct Entry {
    request: Arc<Request>,
    claim: Arc<Claim>,
    /// The place, from the first enter on.
    occupied: Option<Occupied>,
    validity: Option<Arc<Validity>>,
    place: Place,
    /// Checks for deadlocks while the entry waits, if it belongs to an agent.
    lookout: Option<BoxFuture<'static, Error>>,
    /// Reports the ending to the observers.
    told: Acquiring<Arc<Request>>,
}

impl Request {
    /// Creates an entry that has not entered yet.
    ///
    /// # Errors
    /// Those that [`Request::acquire`] returns before any I/O.
    pub fn entry(&self, id: ClaimId, owner: Owner, queue: bool) -> Result<Entry> {
        if let Some(refused) = &self.refused {
            return Err(refused.clone());
        }
        self.keeper.engine().capability().allows(self.ask)?;
        let claim = self.claim(queue);
        // The request's agent, or else the agent of the given owner record.
        let agent = claim.owner.agent.or_else(|| owner.agent.clone());
        let claim = Claim {
            id,
            owner: Owner { agent, ..owner },
            ..claim
        };
        let request = Arc::new(self.clone());
        Ok(Entry {
            claim: Arc::new(claim),
            occupied: None,
            validity: None,
            place: Place::Waiting,
            lookout: None,
            told: Acquiring::begin(Arc::clone(&request)),
            request,
        })
    }
}

impl Entry {
    /// Enters the line, or asks where the entry stands. It can be called again at any time, after an
    /// error or a success: it concerns the same claim. An entry that was lost stays lost.
    ///
    /// # Cancellation
    /// If it is dropped, the place may have been taken. [`Entry::leave`], or dropping the entry,
    /// leaves that place.
    ///
    /// # Errors
    /// Those of [`Engine::enter`](super::engine::Engine::enter). A place that was taken before is
    /// kept.
    pub async fn enter(&mut self) -> Result<Progress> {
        self.request.keeper.start()?;
        let keeper = &self.request.keeper;
        if let Some(validity) = &self.validity {
            keeper.notice(validity);
            if let Some(loss) = validity.loss() {
                return Ok(Progress::Lost(loss.clone()));
            }
        }
        let occupied = self.occupied.get_or_insert_with(|| {
            let ticket = Ticket::own(self.claim.name.clone(), self.claim.id);
            let (ttl, mode) = (self.request.ttl, self.request.ask.mode());
            Occupied::entering(keeper, ticket, ttl, mode, self.request.agent.clone())
        });
        let called = BootTime::now();
        let entered = keeper.engine().enter(Arc::clone(&self.claim)).await;
        match (entered, &self.validity) {
            (Ok(Entered::Busy), Some(_)) => {
                // It had a place.
                self.place = Place::Gone;
                Ok(self.progress())
            }
            (Ok(Entered::Busy), None) => {
                self.told.ending = Ending::Busy;
                self.told.answered();
                self.not_taken();
                Ok(Progress::Busy)
            }
            (
                Ok(Entered::In {
                    ticket,
                    armed,
                    place,
                }),
                _,
            ) => {
                let armed = occupied.entered(ticket, armed, called);
                self.validity = Some(keeper.watch_over(&occupied.ticket, armed));
                self.place = place;
                self.told.ending = Ending::Cancelled;
                self.told.answered();
                Ok(self.progress())
            }
            (Err(error), had_place) => {
                self.told.ending = Ending::Failed;
                if error.is_transient() || error.kind() == ErrorKind::CapacityMismatch {
                    self.told.stalled(&error);
                }
                if error.outcome() == Outcome::MaybeApplied {
                    occupied.in_doubt();
                } else if had_place.is_none() {
                    self.not_taken();
                }
                Err(error.with("name", &self.claim.name))
            }
        }
    }

    /// Records that the last request took no place. If an earlier copy of it may still take one,
    /// the place is left only at the end, because the same id may enter again.
    fn not_taken(&mut self) {
        let in_doubt = |occupied: &mut Occupied| occupied.ticket.in_doubt;
        if let Some(occupied) = self.occupied.take_if(|occupied| !in_doubt(occupied)) {
            occupied.not_taken();
        }
    }

    /// Sleeps until the place may have changed, for at most a second.
    ///
    /// # Errors
    /// Those of [`Engine::wait`](super::engine::Engine::wait), after which the place is kept;
    /// [`ErrorKind::Deadlock`](super::error::ErrorKind::Deadlock) when the claim must give way.
    pub async fn wait(&mut self) -> Result<Progress> {
        let (Some(occupied), Some(validity)) = (&mut self.occupied, &self.validity) else {
            return Ok(Progress::Busy);
        };
        let keeper = &self.request.keeper;
        let (id, now) = (self.claim.id, self.request.with_its_holds(&self.claim));
        let looked = async {
            if let Some(now) = now {
                let entered = keeper.engine().enter(Arc::clone(&now)).await;
                if let Some(place) = occupied.entered_again(entered) {
                    self.claim = now;
                    return Ok(place);
                }
            }
            let until = recheck_at(BootTime::NEVER);
            keeper.engine().wait(occupied.ticket.clone(), until).await
        };
        let lookout = self.lookout.get_or_insert_with(|| {
            // One future across many waits.
            self.request.lookout(id)
        });
        self.place = tokio::select! {
            biased;
            loss = keeper.lost(validity) => return Ok(Progress::Lost(loss)),
            place = looked => match place {
                Ok(place) => {
                    self.told.answered();
                    place
                }
                Err(error) => {
                    if error.is_transient() {
                        self.told.stalled(&error);
                    }
                    return Err(error);
                }
            },
            error = lookout => {
                self.told.ending = Ending::Failed;
                return Err(error);
            }
        };
        Ok(self.progress())
    }

    fn progress(&self) -> Progress {
        let Some(validity) = &self.validity else {
            return Progress::Busy;
        };
        match (validity.loss(), self.place) {
            (Some(loss), _) => Progress::Lost(loss.clone()),
            (None, Place::Held { .. }) if validity.is_valid() => Progress::Held,
            (None, Place::Waiting) => Progress::Waiting,
            (None, Place::Held { .. } | Place::Gone) => {
                validity.lose(LossReason::Taken, None);
                match validity.loss() {
                    Some(loss) => Progress::Lost(loss.clone()),
                    None => Progress::Busy,
                }
            }
        }
    }

    /// Returns a function that reads how long the place lasts without a further renewal. It works
    /// even after the entry was moved or became a hold. Before the entry has a place, the result is
    /// in the past.
    pub fn deadline_reader(&self) -> impl Fn() -> BootTime + Send + Sync + 'static + use<> {
        let validity = self.validity.clone();
        move || match &validity {
            Some(validity) => validity.deadline(),
            None => BootTime::PAST,
        }
    }

    /// Returns a function that reads why the place was lost, or `None`. It works even after the
    /// entry was moved.
    pub fn loss_reader(&self) -> impl Fn() -> Option<Loss> + Send + Sync + 'static + use<> {
        let validity = self.validity.clone();
        move || {
            validity
                .as_ref()
                .and_then(|validity| validity.loss().cloned())
        }
    }

    /// The hold, once the entry is [`Progress::Held`]; `None` before that, or if it was lost since.
    ///
    /// # Errors
    /// [`ErrorKind::Unusable`](super::error::ErrorKind::Unusable) when the engine's counter exceeds
    /// the range of a token.
    pub fn into_hold(mut self) -> Result<Option<Hold>> {
        let (Some(mut occupied), Some(validity)) = (self.occupied, self.validity) else {
            return Ok(None);
        };
        let Place::Held { sequence } = self.place else {
            return Ok(None);
        };
        if !validity.is_valid() {
            return Ok(None);
        }
        let token = self.request.era.stamp(sequence)?;
        self.told.ending = Ending::Held(token);
        validity.grant();
        let (at_least, renewed) = (self.request.at_least, self.request.renewed);
        occupied.granted(sequence, &validity, at_least, renewed);
        Ok(Some(Hold::new(occupied, token, validity)))
    }

    /// Leaves the place, if the entry may have one.
    ///
    /// # Cancellation
    /// If it is dropped, the leave continues in the background.
    ///
    /// # Errors
    /// Those of [`Engine::leave`](super::engine::Engine::leave); the leave then continues in the
    /// background.
    pub async fn leave(self) -> Result<()> {
        match self.occupied {
            Some(occupied) => occupied.leave().await.map(drop),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Entry")
            .field("claim", &self.claim.id)
            .field("place", &self.place)
            .finish_non_exhaustive()
    }
}
