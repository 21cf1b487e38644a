//! How a worker observes its hold: every check, every loss and every end is recorded.

use std::convert::Infallible;
use std::future::Future;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use futures_util::FutureExt;
use palisade::{BootTime, Hold, Loss};

use crate::lab::history::{Recorder, What};

pub(super) fn id(hold: &Hold) -> (u64, String) {
    (hold.token().0, hold.claim().to_string())
}

/// Runs `body`, and records a loss when it is reported. The body continues.
pub(super) async fn guarded<T>(record: &Recorder, hold: &Hold, body: impl Future<Output = T>) -> T {
    let told = async {
        let loss = hold.lost().await;
        record_loss(record, hold, loss);
        std::future::pending::<Infallible>().await
    };
    tokio::select! {
        biased;
        never = told => match never {},
        done = body => done,
    }
}

/// Checks whether a hold is valid, and records the answer with the time before the check.
pub(super) fn look(record: &Recorder, hold: &Hold) -> bool {
    let at = BootTime::now();
    // The hold forgets its deadline when it becomes invalid.
    let deadline = hold.deadline();
    let valid = hold.is_valid();
    let (token, claim) = id(hold);
    if valid {
        record.record_as_of(at, What::Valid { token, claim })
    } else {
        // If the keeper ended it before this check, the loss has the time.
        let loss = || hold.lost().now_or_never();
        let valid_until = known(deadline).or_else(|| known(loss()?.lease_ends));
        record.record(What::Invalid {
            token,
            claim,
            valid_until,
        });
    }
    valid
}

fn record_loss(record: &Recorder, hold: &Hold, loss: Loss) {
    let (token, claim) = id(hold);
    record.record(What::Lost {
        token,
        claim,
        reason: loss.reason.code().to_owned(),
        valid_until: known(loss.lease_ends.min(BootTime::now())),
    });
}

/// When a hold became invalid, unless that is unknown.
pub(super) fn known(deadline: BootTime) -> Option<u64> {
    (deadline != BootTime::PAST).then_some(deadline.as_nanos())
}

/// Drops `future` after `polls` pending polls, or after `limit`.
pub(super) async fn dropped_after<T>(
    mut polls: u32,
    limit: Duration,
    future: impl Future<Output = T>,
) -> Option<T> {
    let sequence = async {
        let mut future = pin!(future);
        std::future::poll_fn(|context| match future.as_mut().poll(context) {
            Poll::Ready(done) => Poll::Ready(Some(done)),
            Poll::Pending => {
                polls -= 1;
                if polls == 0 {
                    Poll::Ready(None)
                } else {
                    Poll::Pending
                }
            }
        })
        .await
    };
    tokio::time::timeout(limit, sequence).await.ok().flatten()
}

/// Records a leader's work from its beginning to its end, including by a drop.
pub(super) struct Leading(Recorder, u64);

impl Leading {
    pub(super) fn begin(record: Recorder, token: u64) -> Self {
        record.record(What::LeadBegin { token });
        Self(record, token)
    }
}

impl Drop for Leading {
    fn drop(&mut self) {
        self.0.record(What::LeadEnd { token: self.1 });
    }
}
