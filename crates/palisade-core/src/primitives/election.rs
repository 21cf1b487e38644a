//! `Election`: the whole line, with a value that the leader announces.

use std::future::Future;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::{Stream, StreamExt, stream};

use super::{forever, now, within};
use crate::client::Client;
use crate::core::acquire::Request;
use crate::core::engine::{Amended, Amendment, BoxStream};
use crate::core::error::{Error, ErrorKind, Result};
use crate::core::hold::Hold;
use crate::core::owner::Owner;
use crate::core::report::Scope;
use crate::core::token::Token;

/// An election among all users of the same engine and name: one leads at a time.
///
/// # Example
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> palisade::Result<()> {
/// let palisade = palisade::connect("memory:").await?;
/// let election = palisade.election("scheduler");
/// let elected = election.campaign("10.0.0.7:8080").await?;
/// let leader = election.leader().await?.expect("we lead");
/// assert_eq!(leader.value.as_deref(), Some("10.0.0.7:8080"));
/// elected.proclaim("10.0.0.7:8081").await?;
/// elected.resign().await
/// # }
/// ```
#[derive(Clone)]
pub struct Election {
    pub(crate) request: Request,
    pub(crate) client: Client,
}

/// The current leader.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Leader {
    /// The value that the leader announces.
    pub value: Option<String>,
    /// The owner record; `None` if another tool leads.
    pub owner: Option<Owner>,
    /// The term: greater for every later leader.
    pub token: Token,
}

impl Election {
    /// Waits to become the leader. For cancellation see [`Request::acquire`].
    ///
    /// # Errors
    /// Those of [`Request::acquire`].
    pub async fn campaign(&self, value: impl Into<String>) -> Result<Elected> {
        Ok(Elected(forever(&self.standing_for(value)).await?))
    }

    /// Becomes the leader if there is none.
    ///
    /// # Errors
    /// As [`Election::campaign`].
    pub async fn try_campaign(&self, value: impl Into<String>) -> Result<Option<Elected>> {
        Ok(now(&self.standing_for(value)).await?.map(Elected))
    }

    /// Waits to become the leader, at most this long.
    ///
    /// # Errors
    /// As [`Election::campaign`].
    pub async fn campaign_timeout(
        &self,
        value: impl Into<String>,
        wait: Duration,
    ) -> Result<Option<Elected>> {
        Ok(within(&self.standing_for(value), wait).await?.map(Elected))
    }

    /// Waits to become the leader, runs `work` while leading, and resigns only after the work has
    /// ended. If the leadership is lost, the work is dropped unfinished, before another can lead.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> palisade::Result<()> {
    /// let palisade = palisade::connect("memory:").await?;
    /// let term = palisade
    ///     .election("scheduler")
    ///     .lead("10.0.0.7:8080", |leadership| async move { leadership.token() })
    ///     .await?;
    /// # let _ = term; Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Those of [`Request::acquire`]; [`ErrorKind::Lost`] when the leadership was lost before the
    /// work completed.
    pub async fn lead<F: Future>(
        &self,
        value: impl Into<String>,
        work: impl FnOnce(Leadership) -> F,
    ) -> Result<F::Output> {
        let hold = Arc::new(forever(&self.standing_for(value)).await?);
        let leadership = Leadership {
            token: hold.token(),
            hold: Arc::downgrade(&hold),
        };
        let done = hold.run(work(leadership)).await;
        // Another task may use a clone at this moment: then dropping the last one resigns.
        if let Some(hold) = Arc::into_inner(hold) {
            // The work is done and counts, even if the release must continue in the background.
            let _ = hold.release().await;
        }
        done
    }

    /// The current leader.
    ///
    /// # Errors
    /// Those of the engine.
    pub async fn leader(&self) -> Result<Option<Leader>> {
        if let Some(refused) = &self.request.refused {
            return Err(refused.clone());
        }
        let lines = self.client.survey(self.scope()).await?;
        let Some(holder) = lines.into_iter().flat_map(|line| line.holders).next() else {
            return Ok(None);
        };
        let token = self.client.token(holder.sequence.unwrap_or(0))?;
        Ok(Some(Leader {
            value: holder.value,
            owner: holder.owner,
            token,
        }))
    }

    /// The leader, now and after every change of the leader or its value.
    ///
    /// Changes in quick succession may be merged. The stream never ends; it continues after an
    /// error.
    pub fn observe(&self) -> impl Stream<Item = Result<Option<Leader>>> + Send + 'static + use<> {
        let watching = Watching {
            election: self.clone(),
            // Opened before the first read, so that no change in between is missed.
            changes: match &self.request.refused {
                None => self.client.engine().watch(self.scope()),
                Some(_) => stream::pending().boxed(),
            },
            last: None,
        };
        stream::unfold(watching, |mut watching| async move {
            let seen = watching.next().await;
            Some((seen, watching))
        })
        .boxed()
    }

    fn standing_for(&self, value: impl Into<String>) -> Request {
        self.request.clone().value(value.into())
    }

    fn scope(&self) -> Scope {
        Scope::Line(self.request.name.clone())
    }
}

/// The state of [`Election::observe`].
struct Watching {
    election: Election,
    changes: BoxStream<Result<()>>,
    last: Option<Option<Leader>>,
}

impl Watching {
    async fn next(&mut self) -> Result<Option<Leader>> {
        /// The delay with which a missed change is noticed.
        const RECHECK: Duration = Duration::from_secs(1);
        loop {
            let leader = self.election.leader().await;
            if let Err(error) = leader {
                // Report an error once per check, not in a busy loop.
                tokio::time::sleep(RECHECK).await;
                return Err(error);
            }
            let leader = leader?;
            if self.last.as_ref() != Some(&leader) {
                self.last = Some(leader.clone());
                return Ok(leader);
            }
            let _ = tokio::time::timeout(RECHECK, self.changes.next()).await;
        }
    }
}

/// A won election: it leads while it lives and its hold is valid. Dropping it resigns.
#[must_use = "dropping it resigns"]
#[derive(Debug)]
pub struct Elected(Hold);

impl Elected {
    /// The hold: token, deadline, loss.
    pub fn hold(&self) -> &Hold {
        &self.0
    }

    /// Announces another value without a new election: the token stays.
    ///
    /// # Errors
    /// [`ErrorKind::Lost`] when the leadership is over; those of the engine.
    pub async fn proclaim(&self, value: impl Into<String>) -> Result<()> {
        proclaim(&self.0, value.into()).await
    }

    /// Resigns.
    ///
    /// # Errors
    /// As [`Hold::release`].
    pub async fn resign(self) -> Result<()> {
        self.0.release().await
    }
}

/// The leadership during [`Election::lead`]: it can be inspected and used to proclaim, but not to
/// resign.
#[derive(Debug, Clone)]
pub struct Leadership {
    token: Token,
    hold: Weak<Hold>,
}

impl Leadership {
    /// The term: greater for every later leader.
    pub fn token(&self) -> Token {
        self.token
    }

    /// Whether it leads now.
    pub fn is_valid(&self) -> bool {
        self.hold.upgrade().is_some_and(|hold| hold.is_valid())
    }

    /// Announces another value without a new election.
    ///
    /// # Errors
    /// [`ErrorKind::Lost`] when the leadership is over; those of the engine.
    pub async fn proclaim(&self, value: impl Into<String>) -> Result<()> {
        match self.hold.upgrade() {
            Some(hold) => proclaim(&hold, value.into()).await,
            None => Err(Error::new(
                ErrorKind::Lost,
                "proclaim",
                "the leadership is over",
            )),
        }
    }
}

async fn proclaim(hold: &Hold, value: String) -> Result<()> {
    if !hold.is_valid() {
        return Err(hold.lost_error("proclaim"));
    }
    match hold.amend(Amendment::Value(value)).await? {
        Amended::Done => Ok(()),
        Amended::Gone => Err(hold.lost_error("proclaim")),
        Amended::Busy => Err(Error::new(
            ErrorKind::Internal,
            "proclaim",
            "unexpected `Busy` from a value update (bug)",
        )),
    }
}
