//! `Hold`: a granted ticket in the user's hands.
//!
//! Loss is a signal on it, never only a log line: [`Hold::lost`], [`Hold::is_valid`] and
//! [`Hold::run`]. When a lease expires the signal comes before the engine may grant to another.
//! When the lock is taken away at once (an operator's force, a wiped store) nobody can be told
//! before: the signal comes as soon as it is known, and the token protects the data.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use super::claim::{Ask, ClaimId, Mode};
use super::clock::BootTime;
use super::engine::{Amended, Amendment, Left};
use super::error::{Error, ErrorKind, Result};
use super::name::Name;
use super::place::Occupied;
use super::sync;
use super::ticket::Ticket;
use super::token::Token;
use super::validity::{Loss, LossReason, Validity};

/// A granted place: the lock is held while this lives and [`Hold::is_valid`].
///
/// It is owned, `Send + 'static` and not `Clone`. Dropping it gives the place up in the
/// background; [`Hold::release`] does so and says how it went.
#[must_use = "dropping the hold releases the lock"]
pub struct Hold {
    place: Occupied,
    /// As it holds now; [`Occupied`] knows how it was acquired.
    mode: Mode,
    token: Token,
    validity: Arc<Validity>,
}

impl Hold {
    pub(super) fn new(place: Occupied, token: Token, validity: Arc<Validity>) -> Self {
        Self {
            mode: place.mode,
            place,
            token,
            validity,
        }
    }

    /// The name of the line.
    pub fn name(&self) -> &Name {
        &self.place.ticket.name
    }

    /// Whether it holds alone, beside readers, or some of the permits. A downgrade and an upgrade
    /// change it.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// The fencing token: strictly greater for every later exclusive grant of this name. What a
    /// fenced storage takes it for depends on the mode: see
    /// [`write_token`](Self::write_token) and [`read_token`](Self::read_token).
    pub fn token(&self) -> Token {
        self.token
    }

    /// The claim that was granted.
    pub fn claim(&self) -> ClaimId {
        self.place.ticket.claim
    }

    /// The ticket behind it: the engine's own key of the place, its lease and its count, for
    /// conditions in writes of the user's own. Releasing it goes through the hold alone.
    pub fn ticket(&self) -> &Ticket {
        &self.place.ticket
    }

    /// The engine's own key of the place, as it is now.
    #[cfg(feature = "zookeeper")]
    pub(crate) fn key(&self) -> Option<String> {
        self.place.keeper.engine().key(&self.place.ticket)
    }

    /// Whether the lock is held now. Costs nanoseconds: one clock read and one atomic load.
    ///
    /// A pause can come right after the answer, so this narrows the window and does not close
    /// it; the token, checked by the storage, does.
    pub fn is_valid(&self) -> bool {
        self.validity.is_valid()
    }

    /// How long it stays valid without a further renewal; zero when it is lost.
    pub fn remaining(&self) -> Duration {
        if self.is_valid() {
            self.validity.deadline().remaining()
        } else {
            Duration::ZERO
        }
    }

    /// Until when it is valid, on the clock that runs on while the machine sleeps. Moves on with
    /// every renewal; in the past when it is lost. For a timer see [`BootTime::to_instant`].
    pub fn deadline(&self) -> BootTime {
        self.validity.deadline()
    }

    /// Resolves when the hold is lost, and never otherwise.
    ///
    /// # Cancellation
    /// Can be dropped and called again; a loss is remembered.
    pub async fn lost(&self) -> Loss {
        self.validity.lost().await
    }

    /// Does `work` while the lock is held, and drops it unfinished at the moment of a loss.
    ///
    /// # Errors
    /// [`ErrorKind::Lost`] when the hold was lost before the work was done, also if it was found out
    /// only at the end.
    pub async fn run<T>(&self, work: impl Future<Output = T>) -> Result<T> {
        let done = self.validity.run(work).await;
        done.ok_or_else(|| self.lost_error("run"))
    }

    /// Gives the place up: stops renewing first, then leaves. Waits for the end of
    /// [`at_least`](super::acquire::Request::at_least) before that.
    ///
    /// # Cancellation
    /// A release that is dropped half-way goes on in the background.
    ///
    /// # Errors
    /// [`ErrorKind::Lost`] when the hold had been lost before, so that the end of the work may have
    /// gone unprotected. [`ErrorKind::Unreachable`] when the engine did not answer: the release is
    /// then tried on in the background, and the ttl ends it at the latest.
    pub async fn release(self) -> Result<()> {
        let Self {
            place,
            token,
            validity,
            ..
        } = self;
        // Even a sleep for no time costs a timer's tick.
        if !place.not_before.has_passed() {
            tokio::select! {
                biased;
                _ = validity.lost() => {}
                () = sync::sleep_until(place.not_before) => {}
            }
        }
        let keeper = Arc::clone(&place.keeper);
        if !validity.is_valid() {
            // By the clock, perhaps before the keeper could tell.
            keeper.lose(&validity, LossReason::Expired);
        }
        let name = place.ticket.name.clone();
        match place.leave().await? {
            // Told between the look and the end of the renewal, after which nothing is told.
            Left::Done if validity.loss().is_none() => Ok(()),
            Left::Done | Left::Absent => {
                keeper.lose(&validity, LossReason::Taken);
                Err(lost_error("release", &name, token, &validity))
            }
        }
    }

    /// Gives up what its user has not kept alive, for who passes places on to others: it is told as
    /// lost, and left.
    ///
    /// # Errors
    /// [`ErrorKind::Lost`], or those of [`Hold::release`].
    #[doc(hidden)]
    pub async fn expire(self) -> Result<()> {
        let keeper = Arc::clone(&self.place.keeper);
        keeper.lose(&self.validity, LossReason::Expired);
        self.release().await
    }

    /// Asks for another part of the line; `false` when others are in the way.
    pub(crate) async fn reweigh(&mut self, ask: Ask, operation: &'static str) -> Result<bool> {
        self.place.keeper.engine().capability().allows(ask)?;
        match self.amend(Amendment::Ask(ask)).await? {
            _ if !self.is_valid() => Err(self.lost_error(operation)),
            Amended::Done => {
                self.mode = ask.mode();
                Ok(true)
            }
            Amended::Busy => Ok(false),
            Amended::Gone => Err(self.lost_error(operation)),
        }
    }

    pub(crate) async fn amend(&self, amendment: Amendment) -> Result<Amended> {
        self.place
            .keeper
            .engine()
            .amend(self.place.ticket.clone(), amendment)
            .await
    }

    pub(crate) fn lost_error(&self, operation: &'static str) -> Error {
        lost_error(operation, self.name(), self.token, &self.validity)
    }
}

fn lost_error(operation: &'static str, name: &Name, token: Token, validity: &Validity) -> Error {
    let why = match validity.loss() {
        Some(loss) => loss.to_string(),
        // The engine no longer knows it, and the keeper has not asked since.
        None if validity.is_valid() => LossReason::Taken.to_string(),
        // Found by the clock, before the keeper could tell.
        None => LossReason::Expired.to_string(),
    };
    let message = format!("the lock was lost while it was held: {why}");
    Error::new(ErrorKind::Lost, operation, message)
        .with("name", name)
        .with("token", token)
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hold")
            .field("name", self.name())
            .field("token", &self.token.0)
            .field("valid", &self.is_valid())
            .finish()
    }
}
