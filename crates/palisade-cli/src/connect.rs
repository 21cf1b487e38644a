//! Connecting: finds the URL, and is as patient with an engine that is down as the verb is.

use std::time::{Duration, Instant};

use palisade::command::Prepared;
use palisade::engine::{EngineInfo, Url};
use palisade::{Client, Error, ErrorKind, Patience};

use crate::args::Global;
use crate::config::Config;
use crate::exit::Failure;
use crate::sys::Withheld;

/// Between two tries to connect: soon enough to be there when the engine comes up, rarely enough
/// not to be a burden while it is down.
const RETRY: Duration = Duration::from_millis(250);

/// Where the locks are, not yet connected to.
pub(crate) struct Target {
    url: String,
    wait: Option<Patience>,
    for_correctness: bool,
    exposed: Option<String>,
}

impl Target {
    /// The engine that the arguments, the environment or the configuration name.
    pub(crate) fn find(global: &Global) -> Result<Self, Failure> {
        let config = Config::find(global.url.as_deref())?;
        Ok(Self {
            url: config.full_url()?,
            wait: config.wait(),
            for_correctness: config.for_correctness(),
            exposed: config.exposed(),
        })
    }

    /// The same, with `--for-correctness` if it is given.
    pub(crate) fn demand(mut self, for_correctness: bool) -> Self {
        self.for_correctness |= for_correctness;
        self
    }

    /// What to say about a configuration that shows a password to other users, if it does.
    pub(crate) fn exposed(&self) -> Option<&str> {
        self.exposed.as_deref()
    }

    /// What is known of the engine before it is connected to.
    pub(crate) fn info(&self) -> Result<EngineInfo, Failure> {
        let scheme = Url::parse(&self.url)?.scheme;
        let mut infos = palisade::command::registry().into_iter();
        let info = infos.find(|info| info.schemes.contains(&scheme.as_str()));
        info.ok_or_else(|| Failure::Defect("no engine is registered for this scheme (bug)".into()))
    }

    /// Whether its locks are those of one process, so that two commands never meet there.
    pub(crate) fn is_private(&self) -> Result<bool, Failure> {
        Ok(Url::parse(&self.url)?.scheme == "memory")
    }

    /// Scheme and hosts, and the directory of `file:`, which is no secret.
    pub(crate) fn shown(&self) -> Result<String, Failure> {
        shown_url(&self.url)
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

    /// Makes ready what must be there before a fork. A signal ends the wait for it.
    pub(crate) fn prepare(
        &self,
        tries: &mut Tries,
        withheld: &Withheld,
        tell: impl Fn(&Error),
    ) -> Result<Prepared, Failure> {
        loop {
            let pause = match palisade::command::prepare(&self.url) {
                Ok(engine) => return Ok(engine),
                Err(error) => tries.pause(error, &tell)?,
            };
            if let Some(signal) = withheld.next(pause) {
                return Err(Failure::Interrupted(signal.as_raw()));
            }
        }
    }

    /// Connects to what was prepared, and refuses an engine that can't be relied on if one was
    /// asked for.
    pub(crate) async fn connect(
        &self,
        engine: &Prepared,
        tries: &mut Tries,
        tell: impl Fn(&Error),
    ) -> Result<Client, Failure> {
        let client = loop {
            match engine.connect().await {
                Ok(client) => break client,
                Err(error) => tokio::time::sleep(tries.pause(error, &tell)?).await,
            }
        };
        Ok(if self.for_correctness {
            client.for_correctness().await?
        } else {
            client
        })
    }

    /// Connects for a look, trying once; `None` when there is nothing to look at, since no lock was
    /// ever taken in the embedded store. It is not made then.
    pub(crate) async fn connect_existing(&self) -> Result<Option<Client>, Failure> {
        Ok(palisade::connect_existing(&self.url).await?)
    }
}

/// As [`Target::shown`].
pub(crate) fn shown_url(url: &str) -> Result<String, Failure> {
    let url = Url::parse(url)?;
    Ok(match url.scheme.as_str() {
        scheme @ ("file" | "http+unix") => format!("{scheme}:{}", url.path),
        scheme if palisade::command::schemes().contains(&scheme) => url.shown(),
        // Somebody may have pasted a secret here.
        _ => "(an unknown scheme)".to_owned(),
    })
}

/// Counts the time while the engine can't be reached and patience lasts.
pub(crate) struct Tries {
    patience: Patience,
    began: Instant,
    told: bool,
}

impl Tries {
    pub(crate) fn new(patience: Patience) -> Self {
        Self {
            patience,
            began: Instant::now(),
            told: false,
        }
    }

    /// What is left of the patience.
    pub(crate) fn left(&self) -> Patience {
        match self.patience {
            Patience::For(all) => Patience::For(all.saturating_sub(self.began.elapsed())),
            other => other,
        }
    }

    /// After a failure: how long to pause before the next try, if there is one. The first failure
    /// is told.
    pub(crate) fn pause(
        &mut self,
        error: Error,
        tell: impl FnOnce(&Error),
    ) -> Result<Duration, Failure> {
        let over = match self.left() {
            _ if error.kind() != ErrorKind::Unreachable => true,
            Patience::NoWait => true,
            Patience::For(left) => left <= RETRY,
            Patience::Forever => false,
        };
        if over {
            return Err(error.into());
        }
        if !std::mem::replace(&mut self.told, true) {
            tell(&error);
        }
        Ok(RETRY)
    }
}
