//! `Lane`: one connection, of palisade or to the raw operations; `Door`: one name on it.
//! Both sides of a comparison do the same through these, so that only what is behind differs.

use std::sync::Arc;
use std::time::Duration;

use palisade::core::baseline::Baseline;
use palisade::{Client, Error, Hold, Kind, Mutex};

use super::figure::Who;
use super::stuck;
use super::traces::Traces;
use crate::exit::Failure;

/// Nobody waits this long in a measurement: something was lost.
const LONGEST: Duration = Duration::from_secs(30);

/// The engine's raw operations.
pub(super) async fn raw(url: &str) -> Result<Arc<dyn Baseline>, Failure> {
    palisade::baseline(url).await?.ok_or_else(|| {
        let message = "this engine has no raw operations to compare with; leave out --baseline";
        Error::new(Kind::Unsupported, "bench", message).into()
    })
}

/// One connection.
pub(super) enum Lane {
    Ours(Client),
    Raw(Arc<dyn Baseline>),
}

impl Lane {
    pub(super) async fn open(url: &str, who: Who, traces: &Traces) -> Result<Self, Failure> {
        Ok(match who {
            Who::Palisade => Self::Ours(traces.of(palisade::connect(url).await?)),
            Who::Raw => Self::Raw(raw(url).await?),
        })
    }

    pub(super) fn door(&self, name: &str) -> Result<Door, Failure> {
        Ok(match self {
            Self::Ours(client) => Door::Ours(client.mutex(name)),
            Self::Raw(baseline) => Door::Raw(Arc::clone(baseline), name.to_owned()),
        })
    }
}

/// One name.
#[derive(Clone)]
pub(super) enum Door {
    Ours(Mutex),
    Raw(Arc<dyn Baseline>, String),
}

/// A name that is taken.
pub(super) enum Taken {
    Hold(Hold),
    Baton(Arc<dyn Baseline>, String),
}

impl Door {
    /// Takes what is free, and gives it back.
    pub(super) async fn cycle(&self) -> Result<(), Failure> {
        let cycle = async {
            match self {
                Self::Ours(mutex) => mutex.lock().await?.release().await,
                Self::Raw(baseline, key) => baseline.cycle(key.clone()).await,
            }
        };
        Ok(within(cycle).await??)
    }

    /// Waits for it.
    pub(super) async fn take(&self) -> Result<Taken, Failure> {
        let take = async {
            Ok::<_, Error>(match self {
                Self::Ours(mutex) => Taken::Hold(mutex.lock().await?),
                Self::Raw(baseline, key) => {
                    baseline.take(key.clone()).await?;
                    Taken::Baton(Arc::clone(baseline), key.clone())
                }
            })
        };
        Ok(within(take).await??)
    }

    /// Puts the baton of the raw operations there before the first round.
    pub(super) async fn lay_baton(&self) -> Result<(), Failure> {
        if let Self::Raw(baseline, key) = self {
            within(baseline.give(key.clone())).await??;
        }
        Ok(())
    }

    /// Takes the baton away after the last round, so that nothing is left.
    pub(super) async fn take_baton_away(&self) {
        if let Self::Raw(baseline, key) = self {
            let _ = baseline.take(key.clone()).await;
        }
    }
}

impl Taken {
    /// Gives it to the next.
    pub(super) async fn give(self) -> Result<(), Failure> {
        let give = async {
            match self {
                Self::Hold(hold) => hold.release().await,
                Self::Baton(baseline, key) => baseline.give(key).await,
            }
        };
        Ok(within(give).await??)
    }
}

async fn within<T>(work: impl Future<Output = T>) -> Result<T, Failure> {
    let done = tokio::time::timeout(LONGEST, work).await;
    done.map_err(|_| stuck("the engine did not answer for 30 s in the middle of a measurement"))
}
