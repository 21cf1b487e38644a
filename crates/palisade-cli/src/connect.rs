//! Connecting: finds the URL, and retries an engine that is down as long as the verb waits.

use std::time::{Duration, Instant};

use palisade::command::Prepared;
use palisade::engine::{EngineInfo, Url};
use palisade::{Client, Error, ErrorKind, Patience};

use crate::args::Global;
use crate::config::Config;
use crate::exit::Failure;
use crate::sys::Withheld;

/// The pause between two connection attempts: short enough to notice soon that the engine is up,
/// long enough not to load it while it is down.
const RETRY: Duration = Duration::from_millis(250);

/// The engine to use, not yet connected to.
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

    /// A warning if the config file shows a password to other users.
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

    /// Whether its locks exist in one process only, so that two commands never share one.
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

    /// Prepares what must exist before a fork. A signal ends the wait for it.
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

    /// Connects to what was prepared. With `--for-correctness` it refuses an engine that is not fit
    /// for it.
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

    /// Connects for reading, with one attempt. `None` if the embedded store does not exist, because
    /// no lock was ever taken in it; it is not created.
    pub(crate) async fn connect_existing(&self) -> Result<Option<Client>, Failure> {
        Ok(palisade::connect_existing(&self.url).await?)
    }
}

/// As [`Target::shown`].
pub(crate) fn shown_url(url: &str) -> Result<String, Failure> {
    let url = Url::parse(url)?;
    Ok(match url.scheme.as_str() {
        "file" if url.path.is_empty() => match palisade::command::locate(&url) {
            Ok(directory) => format!("file:{}", directory.display()),
            Err(_) => url.shown(),
        },
        scheme @ ("file" | "http+unix") => format!("{scheme}:{}", url.path),
        scheme if palisade::command::schemes().contains(&scheme) => url.shown(),
        // An unknown scheme may be a secret that was pasted by mistake.
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

    /// After a failure: the pause before the next attempt, if there is one. The first failure is
    /// reported.
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
