//! `Side`: one connection, of palisade or for the engine's raw operations. Both sides of a
//! comparison run the same code on it, so that only the implementation differs.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use palisade::command::Baseline;
use palisade::{Client, Error, ErrorKind, Hold};

use crate::exit::Failure;

/// No wait in a measurement takes this long unless something was lost.
const LONGEST: Duration = Duration::from_secs(30);

/// An engine that does not answer must not keep palisade from ending.
const FAREWELL: Duration = Duration::from_secs(2);

/// The side that a figure belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Who {
    Palisade,
    Raw,
}

impl Who {
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Palisade => "palisade",
            Self::Raw => "raw",
        }
    }
}

#[derive(Clone)]
pub(super) enum Side {
    Palisade(Client),
    Raw(Arc<dyn Baseline>),
}

/// A lock that is held.
pub(super) enum Taken {
    Hold(Hold),
    Raw(Arc<dyn Baseline>, String),
}

impl Side {
    pub(super) async fn open(url: &str, who: Who, cleanup: &Cleanup) -> Result<Self, Failure> {
        Ok(match who {
            Who::Palisade => Self::Palisade(cleanup.client(palisade::connect(url).await?)),
            Who::Raw => Self::Raw(raw(url).await?),
        })
    }

    /// Acquires a free lock, and releases it.
    pub(super) async fn cycle(&self, name: &str) -> Result<(), Failure> {
        let cycle = async {
            match self {
                Self::Palisade(client) => client.mutex(name).lock().await?.release().await,
                Self::Raw(baseline) => baseline.cycle(name.to_owned()).await,
            }
        };
        Ok(within(cycle).await??)
    }

    /// Waits for the lock.
    pub(super) async fn take(&self, name: &str) -> Result<Taken, Failure> {
        let take = async {
            Ok::<_, Error>(match self {
                Self::Palisade(client) => Taken::Hold(client.mutex(name).lock().await?),
                Self::Raw(baseline) => {
                    baseline.take(name.to_owned()).await?;
                    Taken::Raw(Arc::clone(baseline), name.to_owned())
                }
            })
        };
        Ok(within(take).await??)
    }
}

impl Taken {
    /// Releases the lock to the next waiter.
    pub(super) async fn give(self) -> Result<(), Failure> {
        let give = async {
            match self {
                Self::Hold(hold) => hold.release().await,
                Self::Raw(baseline, name) => baseline.give(name).await,
            }
        };
        Ok(within(give).await??)
    }
}

/// The engine's raw operations.
pub(super) async fn raw(url: &str) -> Result<Arc<dyn Baseline>, Failure> {
    palisade::command::baseline(url).await?.ok_or_else(|| {
        let message = "this engine has no raw operations to compare with; omit --baseline";
        Error::new(ErrorKind::Unsupported, "bench", message).into()
    })
}

async fn within<T>(work: impl Future<Output = T>) -> Result<T, Failure> {
    let done = tokio::time::timeout(LONGEST, work).await;
    done.map_err(|_| stuck("the engine did not answer for 30 s in the middle of a measurement"))
}

/// A failure of the engine to do what the measurement needs.
pub(super) fn stuck(message: &str) -> Failure {
    Error::new(ErrorKind::Unreachable, "bench", message).into()
}

/// What a measurement has in the engine while it runs, and removes when it ends or a signal ends
/// it: claims of clients that go away, and batons of raw operations.
#[derive(Default)]
pub(super) struct Cleanup {
    clients: Mutex<Vec<Client>>,
    batons: Mutex<Vec<(Arc<dyn Baseline>, String)>>,
}

impl Cleanup {
    /// Adds a client, whose background releases are awaited at the end.
    pub(super) fn client(&self, client: Client) -> Client {
        lock(&self.clients).push(client.clone());
        client
    }

    /// Creates the baton that raw operations pass on, to be removed at the end.
    pub(super) async fn baton(&self, side: Side, name: &str) -> Result<(), Failure> {
        if let Side::Raw(baseline) = side {
            within(baseline.give(name.to_owned())).await??;
            lock(&self.batons).push((baseline, name.to_owned()));
        }
        Ok(())
    }

    /// To be called when nobody else uses the clients and batons any more.
    pub(super) async fn run(&self) {
        // An aborted task drops what it holds only when the runtime next runs it.
        tokio::task::yield_now().await;
        let batons = std::mem::take(&mut *lock(&self.batons));
        let clients = std::mem::take(&mut *lock(&self.clients));
        let clean = async {
            for (baseline, name) in batons {
                let _ = baseline.take(name).await;
            }
            for client in clients {
                client.close().await;
            }
        };
        let _ = tokio::time::timeout(FAREWELL, clean).await;
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
