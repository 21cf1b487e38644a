//! `connect`: from a URL to a client. The only place that names all engines.

#[cfg(any(feature = "baseline", feature = "file"))]
use std::sync::Arc;

use crate::client::Client;
#[cfg(feature = "baseline")]
use crate::core::baseline::Baseline;
use crate::core::dyn_engine::SharedEngine;
use crate::core::error::{Error, ErrorKind, Result};
use crate::core::registry::{EngineFactory, EngineInfo};
use crate::core::url::{Settings, Url, nearest};
use crate::fence::FileFence;

/// Connects to the engine that the URL's scheme names.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> palisade::Result<()> {
/// let palisade = palisade::connect("memory:?ttl=10s").await?;
/// assert!(palisade.mutex("x").try_lock().await?.is_some());
/// # Ok(()) }
/// ```
///
/// # Errors
/// [`ErrorKind::Config`] for a URL, scheme or option that can't be used, with the nearest spelling and
/// never with the value; [`ErrorKind::Unreachable`] and [`ErrorKind::Unusable`] from the engine.
pub async fn connect(url: &str) -> Result<Client> {
    let mut url = Url::parse(url)?;
    let settings = url.take_settings()?;
    let engine = open(url, &settings).await?;
    client(engine, &settings)
}

/// A client of `engine`. A ttl that the engine can't have is the URL's fault here.
fn client(engine: SharedEngine, settings: &Settings) -> Result<Client> {
    Client::new(engine, settings).map_err(|error| match error.kind() {
        ErrorKind::InvalidArgument => {
            Error::new(ErrorKind::Config, "connect", error.message().to_owned())
        }
        _ => error,
    })
}

/// As [`connect`], but makes nothing: `None` when the URL names an embedded store (`file:`) that
/// is not there. For whoever only looks.
///
/// # Errors
/// As [`connect`].
pub async fn connect_existing(url: &str) -> Result<Option<Client>> {
    #[cfg(feature = "file")]
    {
        let mut parsed = Url::parse(url)?;
        parsed.take_settings()?;
        if parsed.scheme == "file" && !crate::engines::file::exists(parsed)? {
            return Ok(None);
        }
    }
    connect(url).await.map(Some)
}

/// Does what must be done before a fork, so that a process forked afterwards (one that guards
/// the work of this one) keeps the holds of this process alive until both are gone. Call it while
/// there is no other thread, fork, then [`Prepared::connect`] in one of the two.
///
/// Only `file:` notices the death of processes, so only there anything is done: it blocks for
/// `connect_timeout` at the longest. On other engines leases end by their ttl.
///
/// # Errors
/// As [`connect`].
pub fn prepare(url: &str) -> Result<Prepared> {
    let mut parsed = Url::parse(url)?;
    let settings = parsed.take_settings()?;
    Ok(Prepared {
        #[cfg(feature = "file")]
        liveness: match parsed.scheme.as_str() {
            "file" => {
                let liveness = crate::engines::file::sign_of_life(parsed, &settings)?;
                Some(Arc::new(liveness))
            }
            _ => None,
        },
        settings,
        url: url.to_owned(),
    })
}

/// What [`prepare`] made, to be connected with.
pub struct Prepared {
    url: String,
    #[cfg_attr(not(feature = "file"), allow(dead_code))]
    settings: Settings,
    #[cfg(feature = "file")]
    liveness: Option<Arc<crate::engines::file::Liveness>>,
}

impl Prepared {
    /// Connects; as [`connect`]. A failure leaves what was prepared as it is, to try again.
    ///
    /// # Errors
    /// As [`connect`].
    pub async fn connect(&self) -> Result<Client> {
        #[cfg(feature = "file")]
        if let Some(liveness) = &self.liveness {
            let mut url = Url::parse(&self.url)?;
            url.take_settings()?;
            let liveness = Some(Arc::clone(liveness));
            let engine = crate::engines::file::open_with(url, &self.settings, liveness).await?;
            return client(engine, &self.settings);
        }
        connect(&self.url).await
    }
}

impl std::fmt::Debug for Prepared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Prepared").finish_non_exhaustive()
    }
}

/// Opens the fence that is kept beside the embedded store: one for each namespace, in files of
/// their own, which a reboot leaves as they are. For data that can't compare tokens itself; see
/// [`FileFence::accept`] for what that is worth.
///
/// # Errors
/// [`ErrorKind::Unsupported`] on an engine other than `file:`; [`ErrorKind::Config`] as [`connect`].
pub fn open_fence(url: &str) -> Result<FileFence> {
    let mut url = Url::parse(url)?;
    let _settings = url.take_settings()?;
    match url.scheme.as_str() {
        #[cfg(feature = "file")]
        "file" => {
            let folder = crate::fence::encode(&_settings.namespace);
            let fences = crate::engines::file::fences(url)?;
            FileFence::open(fences.join(folder))
        }
        scheme if schemes().contains(&scheme) => {
            let message = "only file: keeps a fence beside its locks; with other engines the \
                           storage itself must compare the tokens";
            Err(Error::new(ErrorKind::Unsupported, "fence", message).with("engine", url.shown()))
        }
        _ => Err(unknown(&url)),
    }
}

/// The engines of this build. Adding one is one line here; of two that do the same, the first is
/// advised.
const OFFERS: &[EngineFactory] = &[
    #[cfg(feature = "etcd")]
    crate::engines::etcd::FACTORY,
    #[cfg(feature = "consul")]
    crate::engines::consul::FACTORY,
    #[cfg(feature = "file")]
    crate::engines::file::FACTORY,
    #[cfg(feature = "memory")]
    crate::engines::memory::FACTORY,
    #[cfg(feature = "redis")]
    crate::engines::redis::FACTORY,
    #[cfg(feature = "redis")]
    crate::engines::redis::SENTINEL,
    #[cfg(feature = "redis")]
    crate::engines::redis::CLUSTER,
    #[cfg(feature = "redis")]
    crate::engines::redlock::FACTORY,
    #[cfg(feature = "postgres")]
    crate::engines::postgres::FACTORY,
    #[cfg(feature = "postgres")]
    crate::engines::postgres::advisory::FACTORY,
];

/// What this build can connect to, by name.
pub fn registry() -> Vec<EngineInfo> {
    OFFERS.iter().map(|offer| offer.info).collect()
}

/// The schemes that this build knows.
pub fn schemes() -> Vec<&'static str> {
    OFFERS
        .iter()
        .flat_map(|offer| offer.info.schemes)
        .copied()
        .collect()
}

fn offer(url: &Url) -> Result<&'static EngineFactory> {
    let offered = |offer: &&EngineFactory| offer.info.schemes.contains(&url.scheme.as_str());
    OFFERS.iter().find(offered).ok_or_else(|| unknown(url))
}

async fn open(url: Url, settings: &Settings) -> Result<SharedEngine> {
    let offer = offer(&url)?;
    (offer.open)(url, settings.clone()).await
}

/// Connects to the raw operations of the engine that the URL's scheme names; `None` when it has
/// none.
///
/// # Errors
/// As [`connect`].
#[cfg(feature = "baseline")]
pub async fn baseline(url: &str) -> Result<Option<Arc<dyn Baseline>>> {
    let mut url = Url::parse(url)?;
    let settings = url.take_settings()?;
    match offer(&url)?.baseline {
        Some(open) => open(url, settings).await.map(Some),
        None => Ok(None),
    }
}

/// The features that bring engines, with their schemes and the port of their servers.
const FEATURES: &[(&str, &[&str], Option<&str>)] = &[
    (
        "redis",
        &[
            "redis",
            "rediss",
            "redis+sentinel",
            "rediss+sentinel",
            "redis+cluster",
            "rediss+cluster",
            "redlock",
            "rediss+redlock",
        ],
        Some("6379"),
    ),
    (
        "postgres",
        &[
            "postgres",
            "postgresql",
            "postgres+advisory",
            "postgresql+advisory",
        ],
        Some("5432"),
    ),
    ("etcd", &["etcd", "etcds"], Some("2379")),
    ("consul", &["consul", "consuls"], Some("8500")),
    ("file", &["file"], None),
    ("memory", &["memory"], None),
];

fn unknown(url: &Url) -> Error {
    let scheme = url.scheme.as_str();
    let refuse = |message: String| Error::new(ErrorKind::Config, "connect", message);
    if let Some((feature, ..)) = FEATURES.iter().find(|known| known.1.contains(&scheme)) {
        return refuse(format!(
            "this build lacks {scheme}:; build it with the feature {feature}, as in \
             `cargo build --features {feature}`"
        ));
    }
    // A host and a port are no URL. Any other number may be a password.
    let port = Some(url.path.as_str()).filter(|_| url.hosts.is_empty());
    if let Some((meant, ..)) = FEATURES
        .iter()
        .find(|known| known.2.is_some() && known.2 == port)
    {
        let is_host = |c: char| c.is_ascii_alphanumeric() || "-.".contains(c);
        let host = Some(scheme).filter(|host| host.len() < 64 && host.chars().all(is_host));
        let (host, port) = (host.unwrap_or("HOST"), url.path.as_str());
        return refuse(format!(
            "a URL starts with its scheme; did you mean {meant}://{host}:{port}?"
        ));
    }
    // Someone may have pasted a secret where the URL belongs: show only what could be a scheme.
    let is_word = |c: char| c.is_ascii_alphanumeric() || "+-.".contains(c);
    let shown = match scheme.len() <= 20 && scheme.chars().all(is_word) {
        true => format!("scheme {scheme:?}"),
        false => "scheme".to_owned(),
    };
    let hint = match nearest(scheme, schemes()) {
        Some(near) => format!("did you mean {near}:? "),
        None => String::new(),
    };
    let known = schemes().join(":, ");
    refuse(format!("unknown {shown}; {hint}this build has {known}:"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_scheme_has_its_feature() {
        for scheme in schemes() {
            assert!(
                FEATURES.iter().any(|known| known.1.contains(&scheme)),
                "{scheme}"
            );
        }
    }

    #[test]
    fn what_is_no_scheme_of_this_build_is_explained() {
        for (url, word) in [
            ("redis://h", "feature redis"),
            ("postgres+advisory://h/d", "feature postgres"),
            ("localhost:6379", "redis://localhost:6379"),
            ("db1.example.org:5432", "postgres://db1.example.org:5432"),
            ("me:4711", "unknown scheme"),
            ("fil:x", "did you mean file:"),
        ] {
            let said = unknown(&Url::parse(url).unwrap()).to_string();
            assert!(said.contains(word), "{word:?} in {said}");
            assert!(!said.contains("4711"), "{said}");
        }
    }
}
