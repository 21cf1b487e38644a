//! `Hold`: a granted ticket, owned by the user.
//!
//! Loss is a signal on it, never only a log line: [`Hold::lost`], [`Hold::is_valid`] and
//! [`Hold::run`]. When a lease expires, the signal comes before the engine may grant to another
//! claim. When a lock is removed at once (a forced eviction, a wiped store), no earlier signal is
//! possible: it comes as soon as the removal is known, and the token protects the data.

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
/// It is owned, `Send + 'static` and not `Clone`. Dropping it releases the place in the background;
/// [`Hold::release`] does so and reports the result.
#[must_use = "dropping the hold releases the lock"]
pub struct Hold {
    place: Occupied,
    /// The current mode; [`Occupied`] has the one that was acquired.
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

    /// Whether it holds alone, beside readers, or some of the permits. Downgrading and upgrading
    /// change it.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// The fencing token: strictly greater for every later exclusive grant of this name. Which
    /// token a fenced store expects depends on the mode: see [`write_token`](Self::write_token) and
    /// [`read_token`](Self::read_token).
    pub fn token(&self) -> Token {
        self.token
    }

    /// The claim that was granted.
    pub fn claim(&self) -> ClaimId {
        self.place.ticket.claim
    }

    /// The underlying ticket: the engine's own key of the place, its lease and its sequence, for
    /// conditions in the user's own writes. Only the hold can release it.
    pub fn ticket(&self) -> &Ticket {
        &self.place.ticket
    }

    /// The engine's current key of the place.
    pub fn key(&self) -> Option<String> {
        self.place.keeper.engine().key(&self.place.ticket)
    }

    /// Whether the lock is held now. Costs nanoseconds: one clock read and one atomic load.
    ///
    /// The process can be paused right after the answer. So this check narrows the window but does
    /// not close it; a store that checks the token does.
    pub fn is_valid(&self) -> bool {
        self.validity.is_valid()
    }

    /// How long it stays valid without a further renewal; zero once it is lost.
    pub fn remaining(&self) -> Duration {
        if self.is_valid() {
            self.validity.deadline().remaining()
        } else {
            Duration::ZERO
        }
    }

    /// The end of its validity, on a clock that runs during suspend. Every renewal moves it on;
    /// once the hold is lost it is in the past. For a timer see [`BootTime::to_instant`].
    pub fn deadline(&self) -> BootTime {
        self.validity.deadline()
    }

    /// Resolves when the hold is lost, and never otherwise.
    ///
    /// # Cancellation
    /// Can be dropped and called again; a loss is not forgotten.
    pub async fn lost(&self) -> Loss {
        self.place.keeper.lost(&self.validity).await
    }

    /// Runs `work` while the lock is held, and drops it unfinished when the hold is lost.
    ///
    /// # Errors
    /// [`ErrorKind::Lost`] when the hold was lost before the work completed, even if that was
    /// noticed only at the end.
    pub async fn run<T>(&self, work: impl Future<Output = T>) -> Result<T> {
        let done = self.place.keeper.run(&self.validity, work).await;
        done.ok_or_else(|| self.lost_error("run"))
    }

    /// Releases the place: stops renewing first, then leaves. Before that it waits until
    /// [`at_least`](super::acquire::Request::at_least) has passed.
    ///
    /// # Cancellation
    /// A release that is dropped continues in the background.
    ///
    /// # Errors
    /// [`ErrorKind::Lost`] when the hold had been lost before, so that the end of the work may have
    /// been unprotected. [`ErrorKind::Unreachable`] when the engine did not answer: the release is
    /// then retried in the background, and the place ends with its ttl at the latest.
    pub async fn release(self) -> Result<()> {
        let Self {
            place,
            token,
            validity,
            ..
        } = self;
        // Even a sleep of zero length costs a timer tick.
        if !place.not_before.has_passed() {
            tokio::select! {
                biased;
                _ = place.keeper.lost(&validity) => {}
                () = sync::sleep_until(place.not_before) => {}
            }
        }
        let keeper = Arc::clone(&place.keeper);
        keeper.notice(&validity);
        let name = place.ticket.name.clone();
        match place.leave().await? {
            // A loss may be reported between the check above and the end of the renewal.
            Left::Done if validity.loss().is_none() => Ok(()),
            Left::Done | Left::Absent => {
                keeper.lose(&validity, LossReason::Taken);
                Err(lost_error("release", &name, token, &validity))
            }
        }
    }

    /// Releases a hold whose user did not keep it alive, for code that acquires on behalf of
    /// others. It is reported as lost, and left.
    ///
    /// # Errors
    /// [`ErrorKind::Lost`], or those of [`Hold::release`].
    #[doc(hidden)]
    pub async fn expire(self) -> Result<()> {
        let keeper = Arc::clone(&self.place.keeper);
        keeper.lose(&self.validity, LossReason::Expired);
        self.release().await
    }

    /// Changes the part of the line that it takes; `false` if other holders prevent that.
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

    /// The error of an operation on a hold that was lost, with the reason.
    #[doc(hidden)]
    pub fn lost_error(&self, operation: &'static str) -> Error {
        lost_error(operation, self.name(), self.token, &self.validity)
    }
}

fn lost_error(operation: &'static str, name: &Name, token: Token, validity: &Validity) -> Error {
    let why = match validity.loss() {
        Some(loss) => loss.to_string(),
        // The engine no longer has the ticket, and the keeper has not asked since.
        None if validity.is_valid() => LossReason::Taken.to_string(),
        // Expired by the clock, before the keeper reported it.
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
