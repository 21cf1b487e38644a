//! How a worker watches its hold: every look, every loss and every end is recorded.

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

/// Does `body`, and records a loss when it is told. The body goes on.
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

/// Asks a hold whether it is valid, and records the answer with the time before the question.
pub(super) fn look(record: &Recorder, hold: &Hold) -> bool {
    let at = BootTime::now();
    // The hold forgets its deadline when it says no.
    let deadline = hold.deadline();
    let valid = hold.is_valid();
    let (token, claim) = id(hold);
    if valid {
        record.record_as_of(at, What::Valid { token, claim })
    } else {
        // The keeper may have ended it before this look: then the loss knows since when.
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

/// When a hold turned invalid, unless that was forgotten.
pub(super) fn known(deadline: BootTime) -> Option<u64> {
    (deadline != BootTime::PAST).then_some(deadline.as_nanos())
}

/// Drops `future` after so many polls that left it pending, or after `limit`.
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

/// A leader's work, from its begin to its end, also by being dropped.
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
