//! Connecting: finds the URL, and is as patient with an engine that is down as the verb is.

use std::time::Duration;

use palisade::{Client, Error, Kind, Patience, Url};
use tokio::time::Instant;

use crate::args::Global;
use crate::config;
use crate::exit::Failure;

/// Between two tries to connect: soon enough to be there when the engine comes up, rarely enough
/// not to be a burden while it is down.
const RETRY: Duration = Duration::from_millis(250);

/// Where the locks are, not yet connected to.
pub(crate) struct Place {
    url: String,
}

impl Place {
    /// The engine that the arguments, the environment or the configuration name.
    pub(crate) fn find(global: &Global) -> Result<Self, Failure> {
        let url = config::url(global.url.as_deref())?;
        Ok(Self { url })
    }

    /// The ttl that the URL asks for.
    pub(crate) fn ttl(&self) -> Result<Option<Duration>, Failure> {
        Ok(Url::parse(&self.url)?.take_duration("ttl")?)
    }

    /// Connects, trying once.
    pub(crate) async fn connect(&self) -> Result<Client, Failure> {
        Ok(palisade::connect(&self.url).await?)
    }

    /// Connects, trying again while the engine can't be reached and `patience` lasts; `complain`
    /// hears of the first failure. Answers with what is left of the patience.
    pub(crate) async fn connect_within(
        &self,
        patience: Patience,
        complain: impl FnOnce(&Error),
    ) -> Result<(Client, Patience), Failure> {
        let began = Instant::now();
        let mut complain = Some(complain);
        loop {
            let left = match patience {
                Patience::For(all) => Patience::For(all.saturating_sub(began.elapsed())),
                other => other,
            };
            match palisade::connect(&self.url).await {
                Ok(client) => return Ok((client, left)),
                Err(error) if error.kind() == Kind::Unreachable => match left {
                    Patience::NoWait => return Err(error.into()),
                    Patience::For(left) if left <= RETRY => return Err(error.into()),
                    _ => {
                        if let Some(complain) = complain.take() {
                            complain(&error);
                        }
                        tokio::time::sleep(RETRY).await;
                    }
                },
                Err(error) => return Err(error.into()),
            }
        }
    }
}
