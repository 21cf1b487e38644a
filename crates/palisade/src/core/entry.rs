//! `Entry`: one claim under an id of the caller's, for who passes places on to others.
//!
//! [`Request::acquire`] makes a new claim when one was lost while it waited. A gateway can't: its
//! client has been told what stands in the line. So an entry is one claim from enter to its end,
//! never started over, and its deadline can be read while it waits. The keeper renews it like any
//! other, and dropped at any await it leaves no place behind.

use std::fmt;
use std::sync::Arc;

use futures_util::future::BoxFuture;

use super::acquire::{Acquiring, Request};
use super::claim::{Claim, ClaimId};
use super::clock::BootTime;
use super::engine::{Entered, Place};
use super::error::{Error, Outcome, Result};
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
    /// It has a place, and others are ahead.
    Waiting,
    /// It was granted: [`Entry::into_hold`].
    Held,
    /// It is over.
    Lost(Loss),
}

/// One claim under an id of the caller's. See the module's text.
pub struct Entry {
    request: Arc<Request>,
    claim: Arc<Claim>,
    /// The place, from when it is first asked for.
    occupied: Option<Occupied>,
    validity: Option<Arc<Validity>>,
    place: Place,
    /// Looks for deadlocks while it waits, where it is an agent's.
    lookout: Option<BoxFuture<'static, Error>>,
    /// Tells the observers how it ended.
    told: Acquiring<Arc<Request>>,
}

impl Request {
    /// An entry that has not asked yet.
    ///
    /// # Errors
    /// Before any I/O, those of [`Request::acquire`].
    pub fn entry(&self, id: ClaimId, owner: Owner, queue: bool) -> Result<Entry> {
        if let Some(refused) = &self.refused {
            return Err(refused.clone());
        }
        self.keeper.engine().capability().allows(self.ask)?;
        let claim = self.claim(queue);
        // Whose agent it is, the request says, or the record where the request has none.
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
    /// Asks for the place, or for where it stands. After an error it can be asked again: it is the
    /// same claim.
    ///
    /// # Cancellation
    /// Dropped half-way the place may have been taken: [`Entry::leave`], or the drop of the entry,
    /// leaves it.
    ///
    /// # Errors
    /// Those of [`Engine::enter`](super::engine::Engine::enter).
    pub async fn enter(&mut self) -> Result<Progress> {
        self.request.keeper.start()?;
        let keeper = &self.request.keeper;
        let occupied = self.occupied.get_or_insert_with(|| {
            let ticket = Ticket::own(self.claim.name.clone(), self.claim.id);
            let (ttl, mode) = (self.request.ttl, self.request.ask.mode());
            Occupied::entering(keeper, ticket, ttl, mode, self.request.agent.clone())
        });
        let called = BootTime::now();
        let entered = keeper.engine().enter(Arc::clone(&self.claim)).await;
        match entered {
            Ok(Entered::Busy) => {
                self.told.ending = Ending::Busy;
                self.not_taken();
                Ok(Progress::Busy)
            }
            Ok(Entered::In {
                ticket,
                armed,
                place,
            }) => {
                let armed = occupied.entered(ticket, armed, called);
                self.validity = Some(keeper.watch_over(&occupied.ticket, armed));
                self.place = place;
                self.told.ending = Ending::Cancelled;
                Ok(self.progress())
            }
            Err(error) => {
                self.told.ending = Ending::Failed;
                if error.outcome() == Outcome::MaybeApplied {
                    occupied.in_doubt();
                } else {
                    self.not_taken();
                }
                Err(error.with("name", &self.claim.name))
            }
        }
    }

    /// Says that no place was taken by the last request. One that an earlier copy may still take
    /// is left at the end, and not before: the same id is asked for again.
    fn not_taken(&mut self) {
        let in_doubt = |occupied: &mut Occupied| occupied.ticket.in_doubt;
        if let Some(occupied) = self.occupied.take_if(|occupied| !in_doubt(occupied)) {
            occupied.not_taken();
        }
    }

    /// Sleeps until the place may have changed, a second at the longest.
    ///
    /// # Errors
    /// Those of [`Engine::wait`](super::engine::Engine::wait), and the place is kept;
    /// [`ErrorKind::Deadlock`](super::error::ErrorKind::Deadlock) when it is to give way.
    pub async fn wait(&mut self) -> Result<Progress> {
        let (Some(occupied), Some(validity)) = (&self.occupied, &self.validity) else {
            return Ok(Progress::Busy);
        };
        let engine = self.request.keeper.engine();
        let looked = engine.wait(occupied.ticket.clone(), recheck_at(BootTime::NEVER));
        let lookout = self.lookout.get_or_insert_with(|| {
            // Goes on over many waits.
            self.request.lookout(self.claim.id)
        });
        self.place = tokio::select! {
            biased;
            loss = validity.lost() => return Ok(Progress::Lost(loss)),
            place = looked => place?,
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

    /// Reads until when its place lasts without a further renewal, also while something else has
    /// the entry or the hold that it became; in the past before it has a place.
    pub fn deadline_reader(&self) -> impl Fn() -> BootTime + Send + Sync + 'static + use<> {
        let validity = self.validity.clone();
        move || match &validity {
            Some(validity) => validity.deadline(),
            None => BootTime::PAST,
        }
    }

    /// Reads why the place was lost, `None` while it was not, while something else has the entry.
    pub fn loss_reader(&self) -> impl Fn() -> Option<Loss> + Send + Sync + 'static + use<> {
        let validity = self.validity.clone();
        move || {
            validity
                .as_ref()
                .and_then(|validity| validity.loss().cloned())
        }
    }

    /// The hold, once it is [`Progress::Held`]; `None` otherwise, and when it was lost since.
    ///
    /// # Errors
    /// [`ErrorKind::Unusable`](super::error::ErrorKind::Unusable) when the engine's counter has outgrown the token.
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

    /// Gives the place up, if it may have one.
    ///
    /// # Cancellation
    /// Dropped half-way it goes on in the background.
    ///
    /// # Errors
    /// Those of [`Engine::leave`](super::engine::Engine::leave); it then goes on in the background.
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
