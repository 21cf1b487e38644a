//! Connecting: finds the URL, and is as patient with an engine that is down as the verb is.

use std::time::{Duration, Instant};

use palisade::{Client, Error, Kind, Patience, Prepared, Url};

use crate::args::Global;
use crate::config::Config;
use crate::exit::Failure;

/// Between two tries to connect: soon enough to be there when the engine comes up, rarely enough
/// not to be a burden while it is down.
const RETRY: Duration = Duration::from_millis(250);

/// Where the locks are, not yet connected to.
pub(crate) struct Place {
    url: String,
    wait: Option<Patience>,
}

impl Place {
    /// The engine that the arguments, the environment or the configuration name.
    pub(crate) fn find(global: &Global) -> Result<Self, Failure> {
        let config = Config::find(global.url.as_deref())?;
        Ok(Self {
            url: config.full_url()?,
            wait: config.wait(),
        })
    }

    /// The URL. May hold a secret.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// How long the configuration says to wait for a lock.
    pub(crate) fn wait(&self) -> Option<Patience> {
        self.wait
    }

    /// The ttl that the URL or the configuration asks for.
    pub(crate) fn ttl(&self) -> Result<Option<Duration>, Failure> {
        Ok(Url::parse(&self.url)?.take_duration("ttl")?)
    }

    /// Connects, trying once.
    pub(crate) async fn connect(&self) -> Result<Client, Failure> {
        Ok(palisade::connect(&self.url).await?)
    }

    /// Does what must be done before a fork, trying once.
    pub(crate) fn prepare(&self) -> palisade::Result<Prepared> {
        palisade::prepare(&self.url)
    }
}

/// Tries to connect while the engine can't be reached and patience lasts.
pub(crate) struct Tries<C> {
    patience: Patience,
    began: Instant,
    /// Hears of the first failure.
    complain: Option<C>,
}

impl<C: FnOnce(&Error)> Tries<C> {
    pub(crate) fn new(patience: Patience, complain: C) -> Self {
        Self {
            patience,
            began: Instant::now(),
            complain: Some(complain),
        }
    }

    /// What is left of the patience.
    pub(crate) fn left(&self) -> Patience {
        match self.patience {
            Patience::For(all) => Patience::For(all.saturating_sub(self.began.elapsed())),
            other => other,
        }
    }

    /// After a failure: how long to pause before the next try, if there is one.
    pub(crate) fn pause(&mut self, error: Error) -> Result<Duration, Failure> {
        let over = match self.left() {
            _ if error.kind() != Kind::Unreachable => true,
            Patience::NoWait => true,
            Patience::For(left) => left <= RETRY,
            Patience::Forever => false,
        };
        if over {
            return Err(error.into());
        }
        if let Some(complain) = self.complain.take() {
            complain(&error);
        }
        Ok(RETRY)
    }

    /// Connects.
    pub(crate) async fn connect(&mut self, prepared: &Prepared) -> Result<Client, Failure> {
        loop {
            match prepared.connect().await {
                Ok(client) => return Ok(client),
                Err(error) => tokio::time::sleep(self.pause(error)?).await,
            }
        }
    }
}
