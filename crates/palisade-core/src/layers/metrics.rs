//! `Metrics`: records metrics through the `metrics` facade; the program chooses the exporter.
//!
//! | name | kind | labels |
//! |---|---|---|
//! | `palisade_acquire_total` | counter | engine, kind, outcome: held, busy, failed, cancelled |
//! | `palisade_wait_seconds` | histogram | engine, kind |
//! | `palisade_hold_seconds` | histogram | engine, kind |
//! | `palisade_renew_total` | counter | engine, outcome: held, lost, evicted, unknown |
//! | `palisade_renew_seconds` | histogram | engine |
//! | `palisade_lost_total` | counter | engine, reason: expired, taken, evicted |
//! | `palisade_deadlocks_total` | counter | engine, outcome: found (by a waiter in it), gave_way |
//! | `palisade_held`, `palisade_waiting` | gauge | engine |
//! | `palisade_fence_rejected_total` | counter | – |
//!
//! The name of a lock is never a label, because the number of names is unbounded.

use metrics::{
    Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram,
};

use crate::core::claim::Mode;
use crate::core::engine::BoxFuture;
use crate::core::error::Result;
use crate::core::events::{Ending, Event, Observer};
use crate::core::name::Name;
use crate::core::token::Token;
use crate::fence::{Fence, Fenced, Rule, Taken, Verdict, WriteToken};

/// Records the metrics of a client. See the module's table.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> palisade::Result<()> {
/// let palisade = palisade::connect("memory:").await?.observed_by(palisade::layers::Metrics);
/// palisade.mutex("x").lock().await?.release().await
/// # }
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct Metrics;

impl Metrics {
    /// Describes these metrics, and that of [`FenceMetrics`], to the recorder that is installed:
    /// exporters print the texts beside the figures. Call it once, after installing the recorder.
    pub fn describe() {
        describe_counter!(
            "palisade_acquire_total",
            "Completed acquires, by outcome: held, busy, failed or cancelled"
        );
        describe_histogram!(
            "palisade_wait_seconds",
            Unit::Seconds,
            "How long acquires took until they were held, or over"
        );
        describe_histogram!(
            "palisade_hold_seconds",
            Unit::Seconds,
            "How long locks were held"
        );
        describe_counter!(
            "palisade_renew_total",
            "Renewals of leases, by outcome: held, lost, evicted or unknown"
        );
        describe_histogram!(
            "palisade_renew_seconds",
            Unit::Seconds,
            "How long renewals of leases took"
        );
        describe_counter!(
            "palisade_lost_total",
            "Holds that were lost, by reason: expired, taken or evicted"
        );
        describe_counter!(
            "palisade_deadlocks_total",
            "Deadlocks that a waiter found itself in (found), and those that it ended (gave_way)"
        );
        describe_gauge!(
            "palisade_held",
            "Locks held now by this process, or by the clients of this gateway; not those of others"
        );
        describe_gauge!(
            "palisade_waiting",
            "Claims waiting now of this process, or of the clients of this gateway; not those of \
             others"
        );
        describe_counter!(
            "palisade_fence_rejected_total",
            "Stale tokens that a fence refused"
        );
    }
}

impl Observer for Metrics {
    fn see(&self, event: &Event<'_>) {
        match *event {
            Event::Acquiring { engine, .. } => {
                gauge!("palisade_waiting", "engine" => engine.to_owned()).increment(1);
            }
            Event::Acquired {
                engine,
                mode,
                ending,
                took,
                ..
            } => {
                let (engine, kind) = (engine.to_owned(), kind(mode));
                gauge!("palisade_waiting", "engine" => engine.clone()).decrement(1);
                if let Ending::Held(_) = ending {
                    gauge!("palisade_held", "engine" => engine.clone()).increment(1);
                }
                histogram!("palisade_wait_seconds", "engine" => engine.clone(), "kind" => kind)
                    .record(took);
                counter!(
                    "palisade_acquire_total",
                    "engine" => engine, "kind" => kind, "outcome" => ending.code()
                )
                .increment(1);
            }
            Event::Released {
                engine, mode, held, ..
            } => {
                let engine = engine.to_owned();
                gauge!("palisade_held", "engine" => engine.clone()).decrement(1);
                histogram!("palisade_hold_seconds", "engine" => engine, "kind" => kind(mode))
                    .record(held);
            }
            Event::Renewed {
                engine,
                outcome,
                took,
            } => {
                let engine = engine.to_owned();
                histogram!("palisade_renew_seconds", "engine" => engine.clone()).record(took);
                counter!(
                    "palisade_renew_total", "engine" => engine, "outcome" => outcome.code()
                )
                .increment(1);
            }
            Event::Lost { engine, reason, .. } => {
                counter!(
                    "palisade_lost_total",
                    "engine" => engine.to_owned(), "reason" => reason.code()
                )
                .increment(1);
            }
            // Each acquire counts once, by its outcome; the engine's state is that of its renewals.
            Event::Stalled { .. } => {}
            Event::Deadlocked {
                engine, gives_way, ..
            } => {
                let outcome = if gives_way { "gave_way" } else { "found" };
                counter!(
                    "palisade_deadlocks_total",
                    "engine" => engine.to_owned(), "outcome" => outcome
                )
                .increment(1);
            }
        }
    }
}

fn kind(mode: Mode) -> &'static str {
    match mode {
        Mode::Exclusive => "exclusive",
        Mode::Shared => "shared",
        Mode::Permits => "permits",
    }
}

/// A fence that counts refused tokens as `palisade_fence_rejected_total`.
#[derive(Debug, Clone)]
pub struct FenceMetrics<F>(pub F);

impl<F: Fence> FenceMetrics<F> {
    fn count<T: Send + 'static>(
        answer: BoxFuture<Result<T>>,
        verdict: impl FnOnce(&T) -> Verdict + Send + 'static,
    ) -> BoxFuture<Result<T>> {
        Box::pin(async move {
            let answer = answer.await?;
            if let Verdict::Stale { .. } = verdict(&answer) {
                counter!("palisade_fence_rejected_total").increment(1);
            }
            Ok(answer)
        })
    }
}

#[deny(clippy::missing_trait_methods)]
impl<F: Fence> Fence for FenceMetrics<F> {
    fn write(
        &self,
        resource: &Name,
        token: WriteToken,
        data: Vec<u8>,
    ) -> BoxFuture<Result<Verdict>> {
        Self::count(self.0.write(resource, token, data), |verdict| *verdict)
    }

    fn accept(&self, resource: &Name, token: WriteToken) -> BoxFuture<Result<Verdict>> {
        Self::count(self.0.accept(resource, token), |verdict| *verdict)
    }

    fn take(&self, resource: &Name, token: WriteToken) -> BoxFuture<Result<Taken>> {
        Self::count(self.0.take(resource, token), Taken::verdict)
    }

    fn read(&self, resource: &Name) -> BoxFuture<Result<Option<Fenced>>> {
        self.0.read(resource)
    }

    fn highest(&self, resource: &Name) -> BoxFuture<Result<Option<Token>>> {
        self.0.highest(resource)
    }

    fn forget(&self, resource: &Name) -> BoxFuture<Result<bool>> {
        self.0.forget(resource)
    }

    fn rule(&self) -> Rule {
        self.0.rule()
    }
}
