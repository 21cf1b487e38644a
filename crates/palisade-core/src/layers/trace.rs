//! `Traced`: an engine whose every call is a `tracing` span. `Trace`: an event for everything that
//! happens to a client's claims.
//!
//! Names, claim ids and tokens are fields; URLs and values are not, because they may contain a
//! secret. Make `Traced` the innermost layer: around another layer it would count that layer's own
//! time and retries as the engine's.

use std::sync::Arc;
use std::time::Duration;

use tracing::{Instrument, Span, debug, debug_span, info, trace_span, warn};

use crate::core::claim::Claim;
use crate::core::clock::BootTime;
use crate::core::dyn_engine::{Layer, SharedEngine};
use crate::core::engine::{Amended, Amendment, Audited, Entered, Eviction, Left, Place, Renewal};
use crate::core::error::Result;
use crate::core::events::{Ending, Event, Observer};
use crate::core::name::Name;
use crate::core::report::{Checkup, LineReport, Scope};
use crate::core::ticket::{Lease, LeaseId, Ticket};

/// Reports what happens to a client's claims as `tracing` events with the target `palisade`.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> palisade::Result<()> {
/// let palisade = palisade::connect("memory:").await?.observed_by(palisade::layers::Trace);
/// palisade.mutex("x").lock().await?.release().await
/// # }
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct Trace;

impl Observer for Trace {
    fn see(&self, event: &Event<'_>) {
        match *event {
            Event::Acquiring { engine, name, mode } => {
                debug!(target: "palisade", engine, %name, %mode, "acquiring");
            }
            Event::Acquired {
                engine,
                name,
                mode,
                ending: Ending::Held(token),
                took,
            } => {
                info!(target: "palisade", engine, %name, %mode, %token, ?took, "acquired");
            }
            Event::Acquired {
                engine,
                name,
                mode,
                ending,
                took,
            } => {
                let outcome = ending.code();
                info!(target: "palisade", engine, %name, %mode, outcome, ?took, "not acquired");
            }
            Event::Released {
                engine,
                name,
                mode,
                held,
            } => {
                info!(target: "palisade", engine, %name, %mode, ?held, "released");
            }
            Event::Renewed {
                engine,
                outcome,
                took,
            } => {
                debug!(target: "palisade", engine, outcome = outcome.code(), ?took, "renewed");
            }
            Event::Lost {
                engine,
                name,
                reason,
                why,
            } => {
                let why = why.map(tracing::field::display);
                warn!(target: "palisade", engine, %name, reason = reason.code(), why, "lost");
            }
            Event::Stalled { engine, name, why } => match why {
                Some(why) => warn!(target: "palisade", engine, %name, %why, "stalled"),
                None => info!(target: "palisade", engine, %name, "no longer stalled"),
            },
            Event::Deadlocked {
                engine,
                name,
                deadlock,
                gives_way,
            } => {
                let likely = deadlock.likely;
                warn!(target: "palisade", engine, %name, likely, gives_way, %deadlock, "deadlock");
            }
        }
    }
}

/// An engine whose calls are spans: `enter`, `wait`, `renew`, `amend`, `leave`, `audit`, `survey`,
/// `evict`, `resize`, `check`, `close`, each with the target `palisade::engine`.
pub struct Traced(SharedEngine);

impl std::fmt::Debug for Traced {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Traced").field(&self.0.describe()).finish()
    }
}

impl Traced {
    /// Wraps `engine`.
    pub fn over(engine: SharedEngine) -> Self {
        Self(engine)
    }
}

async fn within<T>(span: Span, call: impl Future<Output = Result<T>>) -> Result<T> {
    let answer = async move {
        let answer = call.await;
        if let Err(error) = &answer {
            debug!(target: "palisade::engine", kind = error.kind().code(), %error, "failed");
        }
        answer
    };
    answer.instrument(span).await
}

fn verb(name: &'static str, ticket: &Ticket) -> Span {
    debug_span!(
        target: "palisade::engine", "verb", verb = name, name = %ticket.name, claim = %ticket.claim
    )
}

impl Layer for Traced {
    fn inner(&self) -> &SharedEngine {
        &self.0
    }

    async fn enter(&self, claim: Arc<Claim>) -> Result<Entered> {
        let span = verb("enter", &Ticket::own(claim.name.clone(), claim.id));
        within(span, self.0.enter(claim)).await
    }

    async fn wait(&self, ticket: Ticket, until: BootTime) -> Result<Place> {
        within(verb("wait", &ticket), self.0.wait(ticket, until)).await
    }

    async fn renew(&self, leases: Vec<Lease>, within: Duration) -> Vec<Renewal> {
        let count = leases.len();
        let span = trace_span!(target: "palisade::engine", "verb", verb = "renew", leases = count);
        self.0.renew(leases, within).instrument(span).await
    }

    async fn amend(&self, ticket: Ticket, amendment: Amendment) -> Result<Amended> {
        within(verb("amend", &ticket), self.0.amend(ticket, amendment)).await
    }

    async fn leave(&self, ticket: Ticket) -> Result<Left> {
        within(verb("leave", &ticket), self.0.leave(ticket)).await
    }

    async fn audit(&self, lease: LeaseId) -> Result<Vec<Audited>> {
        let span = trace_span!(target: "palisade::engine", "verb", verb = "audit");
        within(span, self.0.audit(lease)).await
    }

    async fn survey(&self, scope: Scope) -> Result<Vec<LineReport>> {
        let span = debug_span!(target: "palisade::engine", "verb", verb = "survey", ?scope);
        within(span, self.0.survey(scope)).await
    }

    async fn evict(&self, name: Name, id: String, eviction: Eviction) -> Result<bool> {
        let span = debug_span!(
            target: "palisade::engine", "verb", verb = "evict", %name, claim = id, ?eviction
        );
        within(span, self.0.evict(name, id, eviction)).await
    }

    async fn resize(&self, name: Name, capacity: u32) -> Result<bool> {
        let span =
            debug_span!(target: "palisade::engine", "verb", verb = "resize", %name, capacity);
        within(span, self.0.resize(name, capacity)).await
    }

    async fn check(&self) -> Result<Checkup> {
        let span = debug_span!(target: "palisade::engine", "verb", verb = "check");
        within(span, self.0.check()).await
    }

    async fn close(&self) {
        let span = debug_span!(target: "palisade::engine", "verb", verb = "close");
        self.0.close().instrument(span).await;
    }
}
