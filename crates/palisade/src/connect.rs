//! `connect`: from a URL to a client. The only file that names all engines.

#[cfg(any(feature = "baseline", feature = "file", feature = "redis"))]
use std::sync::Arc;

use crate::fence::{Rule, SharedFence};
use palisade_core::command::nearest;
#[cfg(feature = "baseline")]
use palisade_core::engine::Baseline;
use palisade_core::engine::{
    BoxFuture, EngineFactory, EngineInfo, IntoUrl, Settings, SharedEngine, Url, config_error,
};
use palisade_core::{Client, Error, ErrorKind, Result};
#[cfg(feature = "file")]
use palisade_file::FileFence;

/// Typed configuration of each engine, for [`connect`]: the same options as in a URL, and also a
/// TLS configuration, a client or the like that the program already has.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> palisade::Result<()> {
/// use std::time::Duration;
/// # #[cfg(feature = "file")] {
/// # let directory = tempfile::tempdir().unwrap();
/// # let directory = directory.path().to_str().unwrap();
/// let store = palisade::config::File::new(directory).ttl(Duration::from_secs(10));
/// let palisade = palisade::connect(store).await?;
/// assert!(palisade.mutex("x").try_lock().await?.is_some());
/// # }
/// # Ok(()) }
/// ```
pub mod config {
    #[cfg(feature = "consul")]
    pub use palisade_consul::config::Consul;
    #[cfg(feature = "etcd")]
    pub use palisade_etcd::Etcd;
    #[cfg(feature = "file")]
    pub use palisade_file::File;
    #[cfg(feature = "http")]
    pub use palisade_http::config::Http;
    #[cfg(feature = "kubernetes")]
    pub use palisade_kubernetes::config::Cluster as Kubernetes;
    #[cfg(feature = "postgres")]
    pub use palisade_postgres::Postgres;
    #[cfg(feature = "redis")]
    pub use palisade_redis::Redis;
    #[cfg(feature = "redis")]
    pub use palisade_redis::redlock::config::Redlock;
    #[cfg(feature = "zookeeper")]
    pub use palisade_zookeeper::ZooKeeper;
    // Re-exports of the crate versions whose types the configurations accept.
    #[cfg(feature = "redis")]
    #[doc(no_inline)]
    pub use redis;
    #[cfg(feature = "remote")]
    #[doc(no_inline)]
    pub use rustls;
    #[cfg(feature = "postgres")]
    #[doc(no_inline)]
    pub use tokio_postgres;
}

/// Connects to the engine that a URL's scheme names, or to that of a typed [`config`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> palisade::Result<()> {
/// let palisade = palisade::connect("memory:?ttl=10s").await?;
/// assert!(palisade.mutex("x").try_lock().await?.is_some());
/// # Ok(()) }
/// ```
///
/// # Errors
/// [`ErrorKind::Config`] for an invalid URL, scheme or option, with the nearest spelling and never
/// with the value; [`ErrorKind::Unreachable`] and [`ErrorKind::Unusable`] from the engine.
pub async fn connect(target: impl IntoUrl) -> Result<Client> {
    connect_to(target.into_url()?).await
}

async fn connect_to(mut url: Url) -> Result<Client> {
    let settings = url.take_settings()?;
    let engine = open(url, &settings).await?;
    client(engine, &settings)
}

/// A client of `engine`. Here an invalid ttl is an error in the URL.
fn client(engine: SharedEngine, settings: &Settings) -> Result<Client> {
    Client::new(engine, settings).map_err(|error| match error.kind() {
        ErrorKind::InvalidArgument => config_error(error.message().to_owned()),
        _ => error,
    })
}

/// As [`connect`], but creates nothing: `None` when the URL names an embedded store (`file:`) that
/// does not exist. For read-only callers.
///
/// # Errors
/// As [`connect`].
pub async fn connect_existing(url: &str) -> Result<Option<Client>> {
    #[cfg(feature = "file")]
    {
        let mut parsed = Url::parse(url)?;
        parsed.take_settings()?;
        if parsed.scheme == "file" && !palisade_file::exists(parsed)? {
            return Ok(None);
        }
    }
    connect(url).await.map(Some)
}

/// Prepares for a fork, so that a process forked afterwards (one that guards this one's work) keeps
/// the holds of this process alive until both are gone. Call it while there is no other thread,
/// fork, then call [`Prepared::connect`] in one of the two.
///
/// Only `file:` notices the death of processes, so only there is anything done: it blocks for at
/// most `connect_timeout`. On other engines leases end by their ttl.
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
                let liveness = palisade_file::sign_of_life(parsed, &settings)?;
                Some(Arc::new(liveness))
            }
            _ => None,
        },
        settings,
        url: url.to_owned(),
    })
}

/// The result of [`prepare`], to connect with.
pub struct Prepared {
    url: String,
    #[cfg_attr(not(feature = "file"), allow(dead_code))]
    settings: Settings,
    #[cfg(feature = "file")]
    liveness: Option<Arc<palisade_file::Liveness>>,
}

impl Prepared {
    /// Connects; as [`connect`]. After a failure it can be called again.
    ///
    /// # Errors
    /// As [`connect`].
    pub async fn connect(&self) -> Result<Client> {
        #[cfg(feature = "file")]
        if let Some(liveness) = &self.liveness {
            let mut url = Url::parse(&self.url)?;
            url.take_settings()?;
            let liveness = Some(Arc::clone(liveness));
            let engine = palisade_file::open_with(url, &self.settings, liveness).await?;
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

/// Opens the fenced store that an engine keeps beside its locks, one for each namespace: `file:`,
/// `redis:`, `etcd:`, `zookeeper:` and `postgres:` have one.
///
/// ```no_run
/// use palisade::fence::{self, Verdict};
/// # async fn example() -> palisade::Result<()> {
/// let url = "redis://localhost";
/// let (client, fence) = (palisade::connect(url).await?, fence::open(url).await?);
/// let hold = client.mutex("stock").lock().await?;
/// let written = fence.write(hold.name(), hold.write_token()?, b"9 left".into()).await?;
/// assert_eq!(written, Verdict::Accepted);
/// # Ok(()) }
/// ```
///
/// # Errors
/// [`ErrorKind::Unsupported`] on an engine without a fence; [`ErrorKind::Config`] and the engine's
/// errors as for [`connect`].
pub async fn open_fence(url: &str) -> Result<SharedFence> {
    open_fence_by(url, Rule::default()).await
}

/// As [`open_fence`], but accepts each token only once.
///
/// # Errors
/// As [`open_fence`].
pub async fn open_strict_fence(url: &str) -> Result<SharedFence> {
    open_fence_by(url, Rule::Strict).await
}

async fn open_fence_by(url: &str, rule: Rule) -> Result<SharedFence> {
    let mut url = Url::parse(url)?;
    let settings = url.take_settings()?;
    let scheme = url.scheme.as_str();
    if let Some((_, open)) = FENCES.iter().find(|(known, _)| known.contains(&scheme)) {
        return open(url, settings, rule).await;
    }
    if !schemes().contains(&scheme) {
        return Err(unknown(&url));
    }
    let message = "this engine keeps no fence beside its locks; let the storage itself compare \
                   the tokens (docs/fences.md), or name another engine's URL";
    Err(Error::new(ErrorKind::Unsupported, "fence", message).with("engine", url.shown()))
}

/// Opens a fence.
type FenceOpener = fn(Url, Settings, Rule) -> BoxFuture<Result<SharedFence>>;

#[cfg(feature = "redis")]
fn redis_fence(url: Url, settings: Settings, rule: Rule) -> BoxFuture<Result<SharedFence>> {
    Box::pin(async move {
        let fence = palisade_redis::RedisFence::connect(url, &settings, rule);
        Ok(Arc::new(fence.await?) as _)
    })
}

/// The engines of this build that keep a fence, by their schemes.
const FENCES: &[(&[&str], FenceOpener)] = &[
    #[cfg(feature = "file")]
    (
        palisade_file::FACTORY.info.schemes,
        |url, settings, rule| {
            Box::pin(async move {
                let folder = palisade_file::encode(&settings.namespace);
                let fence = FileFence::open(palisade_file::fences(url)?.join(folder))?;
                Ok(match rule {
                    Rule::Strict => Arc::new(fence.strict()) as _,
                    Rule::NotOlder => Arc::new(fence) as _,
                })
            })
        },
    ),
    #[cfg(feature = "redis")]
    (palisade_redis::FACTORY.info.schemes, redis_fence),
    #[cfg(feature = "redis")]
    (palisade_redis::SENTINEL.info.schemes, redis_fence),
    #[cfg(feature = "redis")]
    (palisade_redis::CLUSTER.info.schemes, redis_fence),
    #[cfg(feature = "etcd")]
    (
        palisade_etcd::FACTORY.info.schemes,
        |url, settings, rule| {
            Box::pin(async move { palisade_etcd::open_fence(url, &settings, rule).await })
        },
    ),
    #[cfg(feature = "zookeeper")]
    (
        palisade_zookeeper::FACTORY.info.schemes,
        |url, settings, rule| {
            Box::pin(async move { palisade_zookeeper::open_fence(url, &settings, rule).await })
        },
    ),
    #[cfg(feature = "postgres")]
    (
        palisade_postgres::FACTORY.info.schemes,
        |url, settings, rule| {
            Box::pin(async move { palisade_postgres::open_fence(url, &settings, rule) })
        },
    ),
    #[cfg(feature = "postgres")]
    (
        palisade_postgres::advisory::FACTORY.info.schemes,
        |url, settings, rule| {
            Box::pin(async move { palisade_postgres::open_fence(url, &settings, rule) })
        },
    ),
];

/// The engines of this build. Adding one takes one line here. If two fit equally, the first is
/// recommended.
const OFFERS: &[EngineFactory] = &[
    #[cfg(feature = "etcd")]
    palisade_etcd::FACTORY,
    #[cfg(feature = "consul")]
    palisade_consul::FACTORY,
    #[cfg(feature = "zookeeper")]
    palisade_zookeeper::FACTORY,
    #[cfg(feature = "kubernetes")]
    palisade_kubernetes::FACTORY,
    #[cfg(feature = "file")]
    palisade_file::FACTORY,
    #[cfg(feature = "memory")]
    palisade_core::memory::FACTORY,
    #[cfg(feature = "redis")]
    palisade_redis::FACTORY,
    #[cfg(feature = "redis")]
    palisade_redis::SENTINEL,
    #[cfg(feature = "redis")]
    palisade_redis::CLUSTER,
    #[cfg(feature = "redis")]
    palisade_redis::redlock::FACTORY,
    #[cfg(feature = "postgres")]
    palisade_postgres::FACTORY,
    #[cfg(feature = "postgres")]
    palisade_postgres::advisory::FACTORY,
    #[cfg(feature = "http")]
    palisade_http::FACTORY,
];

/// The engines of this build.
pub fn registry() -> Vec<EngineInfo> {
    OFFERS.iter().map(|offer| offer.info).collect()
}

/// The schemes that this build supports.
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

/// Connects to the raw operations of the engine that the URL's scheme names; `None` if it has none.
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

/// The features of all engines, with their schemes and the default port of their servers.
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
    ("zookeeper", &["zookeeper", "zookeepers"], Some("2181")),
    ("kubernetes", &["kubernetes"], None),
    ("http", &["http", "https", "http+unix"], Some("7420")),
    ("file", &["file"], None),
    ("memory", &["memory"], None),
];

fn unknown(url: &Url) -> Error {
    let scheme = url.scheme.as_str();
    if let Some((feature, ..)) = FEATURES.iter().find(|known| known.1.contains(&scheme)) {
        return config_error(format!(
            "this build lacks {scheme}:; add the feature {feature} of the crate palisade in \
             Cargo.toml, as `cargo add palisade --features {feature}` does"
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
        return config_error(format!(
            "a URL starts with its scheme; did you mean {meant}://{host}:{port}?"
        ));
    }
    // A secret may have been pasted in place of the URL: show only what could be a scheme.
    let is_word = |c: char| c.is_ascii_alphanumeric() || "+-.".contains(c);
    let shown = if scheme.len() <= 20 && scheme.chars().all(is_word) {
        format!("scheme {scheme:?}")
    } else {
        "scheme".to_owned()
    };
    let hint = match nearest(scheme, schemes()) {
        Some(near) => format!("did you mean {near}:? "),
        None => String::new(),
    };
    let known = schemes().join(":, ");
    config_error(format!("unknown {shown}; {hint}this build has {known}:"))
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

    /// Asserts that a typed configuration and a URL have the same content.
    #[cfg(feature = "remote")]
    fn says_the_same(typed: impl IntoUrl, text: &str) {
        let said = |url: Url| {
            let own = offer(&url).unwrap().info.options.iter().copied();
            let parts = (url.scheme.clone(), url.hosts.clone(), url.path.clone());
            let login = (url.user.clone(), url.password.clone());
            let mut url = url;
            let settings = format!("{:?}", url.take_settings().unwrap());
            let own: Vec<_> = own.map(|option| (option, url.take(option))).collect();
            url.finish(&[]).unwrap();
            (parts, login, settings, own)
        };
        assert_eq!(
            said(typed.into_url().unwrap()),
            said(text.into_url().unwrap())
        );
    }

    #[cfg(feature = "redis")]
    #[test]
    fn redis_is_configured_by_types_or_from_a_client() {
        let ttl = std::time::Duration::from_millis(1500);
        let typed = config::Redis::new("h:1").user("me").password("p/w");
        let typed = typed.ttl(ttl).replicas(2).era(3).database(5);
        says_the_same(typed, "redis://me:p%2Fw@h:1/5?ttl=1.5s&replicas=2&era=3");
        says_the_same(
            config::Redis::new("h")
                .tls_ca("/ca")
                .tls_identity("/c", "/k"),
            "rediss://h?tls_ca=/ca&tls_cert=/c&tls_key=/k",
        );
        let client = redis::Client::open("redis://me:secret@[::1]:7/4").unwrap();
        let typed = config::Redis::from_client(&client).unwrap();
        assert!(!format!("{typed:?}").contains("secret"));
        says_the_same(typed, "redis://me:secret@[::1]:7/4");
        let socket = redis::Client::open("redis+unix:///tmp/redis.sock").unwrap();
        let error = config::Redis::from_client(&socket).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
    }

    #[cfg(feature = "postgres")]
    #[test]
    fn postgres_is_configured_by_types_or_from_a_configuration() {
        let typed = config::Postgres::new(["a", "b:2"]).database("d").advisory();
        says_the_same(
            typed.max_connections(7).plain(),
            "postgres+advisory://a,b:2/d?max_connections=7&tls=disable",
        );
        let with = |text: &str| config::Postgres::from_config(&text.parse().unwrap());
        let typed = with("postgresql://me:secret@a:1,b:2/d?sslmode=require").unwrap();
        assert!(!format!("{typed:?}").contains("secret"));
        says_the_same(typed, "postgres://me:secret@a:1,b:2/d?tls=require");
        let error = with("host=/run/postgresql user=me").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
    }

    #[cfg(feature = "redis")]
    #[test]
    fn several_redis_servers_are_configured_by_types() {
        let sentinels = config::Redis::sentinel(["a", "b"], "main").tls();
        says_the_same(
            sentinels.database(1).database(2),
            "rediss+sentinel://a,b/main/2",
        );
        says_the_same(config::Redis::cluster(["a:1"]), "redis+cluster://a:1");
        let typed = config::Redlock::new(["a", "b", "c"]).without_restart_guard();
        says_the_same(typed.tls(), "rediss+redlock://a,b,c?restart_guard=off");
    }

    #[cfg(all(feature = "kubernetes", feature = "zookeeper"))]
    #[test]
    fn kubernetes_and_zookeeper_are_configured_by_types() {
        let typed = config::ZooKeeper::new(["a", "b:1"])
            .chroot("/x")
            .layout("readwrite");
        says_the_same(typed.tls(), "zookeepers://a,b:1/x?layout=readwrite");
        let typed = config::Kubernetes::new("jobs").context("c");
        says_the_same(typed, "kubernetes://jobs?context=c");
    }

    #[cfg(all(feature = "consul", feature = "etcd"))]
    #[test]
    fn consul_and_etcd_are_configured_by_types() {
        let delay = std::time::Duration::from_secs(1);
        let typed = config::Consul::new(["a"])
            .token_file("/t")
            .lock_delay(delay);
        says_the_same(
            typed.tls(),
            "consuls://a?token_file=/t&lock_delay=1.000000000s",
        );
        let typed = config::Etcd::new(["a", "b"]).user("me").password_file("/p");
        says_the_same(
            typed.label("x y"),
            "etcd://me@a,b?password_file=/p&label=x%20y",
        );
    }

    #[cfg(feature = "http")]
    #[test]
    fn gateways_are_configured_by_types() {
        let typed = config::Http::new(["a", "b:1"]).token_file("/t");
        says_the_same(
            typed.tls().namespace("billing"),
            "https://a,b:1?token_file=/t&namespace=billing",
        );
        says_the_same(config::Http::unix("/run/g.sock"), "http+unix:/run/g.sock");
        let given = config::Http::new(["a"]).token("hunter2");
        assert!(!format!("{given:?}").contains("hunter2"));
    }

    #[test]
    fn what_is_no_scheme_of_this_build_is_explained() {
        for (url, word) in [
            ("redis://h", "cargo add palisade --features redis"),
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
