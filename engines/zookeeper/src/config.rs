//! From a URL to an engine: what ZooKeeper can do, which options it takes, and how it is opened.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::broadcast;

use super::client::Client;
use super::connection::Endpoints;
use super::keys::{Keys, Layout};
use super::proto::Acl;
use super::renewals::Renewals;
use super::{Inner, ZooKeeperEngine};
use palisade_core::engine::{EngineFactory, EngineInfo, Settings, TtlRange, Url, config_error};
use palisade_core::{Capability, Guarantee, Result};
use palisade_kit::{Host, Login, Tls, typed_config};

/// Those of the servers, without and with TLS.
const PORT: u16 = 2181;
const TLS_PORT: u16 = 2281;

const OPTIONS: &[&str] = &[
    "acl",
    "layout",
    "password_file",
    "tls_ca",
    "tls_cert",
    "tls_key",
    "user",
];

pub(super) const CAPABILITY: Capability = {
    let mut can = Capability::FULL;
    can.class = Guarantee::Consensus;
    // A node's name says what it weighs, and only its own session can replace it.
    can.resize = false;
    // A session lives with one connection of one process.
    can.detached = false;
    // At the usual tickTime of 2 s; the servers tell what they allow when they are connected to.
    can.ttl = TtlRange {
        min: Duration::from_millis(2_667),
        max: Duration::from_millis(26_666),
        step: Duration::from_millis(1),
    };
    can
};

/// What `connect` knows of it.
pub const FACTORY: EngineFactory = EngineFactory {
    info: EngineInfo {
        name: "zookeeper",
        schemes: &["zookeeper", "zookeepers"],
        needs: "a ZooKeeper ensemble, 3.6 or newer",
        example: "zookeeper://localhost:2181",
        capability: CAPABILITY,
        options: OPTIONS,
    },
    open: |url, settings| {
        Box::pin(async move {
            let inner = open(url, &settings).await?;
            Ok(Arc::new(ZooKeeperEngine(Arc::new(inner))) as _)
        })
    },
    #[cfg(feature = "baseline")]
    baseline: Some(|url, settings| {
        Box::pin(async move { super::baseline::open(url, &settings).await })
    }),
};

typed_config! {
    /// A ZooKeeper ensemble, as `palisade::connect` takes it.
    ZooKeeper
    /// Servers of the ensemble: `name`, `name:port` or `[address]:port` each.
    hosts of "zookeeper"
    texts {
        /// `mutex`, or `readwrite` for the names of Curator's read-write lock.
        layout
        /// Who may change our nodes: `open`, or `creator`, which needs a login.
        acl
    }
    login { user }
    tls { |url| url.scheme = "zookeepers".to_owned() }
}

impl ZooKeeper {
    /// Puts everything below this node, as in `/locks`.
    pub fn chroot(mut self, path: impl Into<String>) -> Self {
        self.0.path = path.into();
        self
    }
}

/// Opens what the URL names, and begins a session.
///
/// # Errors
/// [`ErrorKind::Config`](palisade_core::ErrorKind::Config) for hosts, options or certificates that can't be used;
/// [`ErrorKind::Unreachable`](palisade_core::ErrorKind::Unreachable) when no server takes a session.
pub(super) async fn open(mut url: Url, settings: &Settings) -> Result<Inner> {
    let encrypted = url.scheme == "zookeepers";
    let login = Login::take(&mut url)?;
    let tls = Tls::take(&mut url, encrypted)?;
    let layout = match url.take("layout").as_deref() {
        None | Some("mutex") => Layout::Mutex,
        Some("readwrite") => Layout::ReadWrite,
        Some(_) => return Err(config_error("option layout must be mutex or readwrite")),
    };
    let acl = match url.take("acl").as_deref() {
        None if login.user.is_some() => Acl::Creator,
        Some("creator") if login.user.is_some() => Acl::Creator,
        Some("creator") => return Err(config_error("acl=creator needs user= and password_file=")),
        None | Some("open") => Acl::Open,
        Some(_) => return Err(config_error("option acl must be open or creator")),
    };
    url.finish(OPTIONS)?;
    let hosts = Host::all(&url, if encrypted { TLS_PORT } else { PORT })?;
    let keys = Keys::new(&url.path, &settings.namespace, layout)?;
    let endpoints = Endpoints::new(hosts, tls, login, settings.connect_timeout)?;
    let alarms = broadcast::channel(64).0;
    let (client, min, max) = Client::open(endpoints, settings.timeout, acl, alarms).await?;
    let mut capability = CAPABILITY;
    (capability.ttl.min, capability.ttl.max) = (min, max);
    Ok(Inner {
        keys,
        client,
        shown: url.shown(),
        ttl: capability.ttl,
        default_ttl: settings.ttl.unwrap_or_else(|| capability.default_ttl()),
        claims: Mutex::default(),
        renewals: Renewals::default(),
    })
}
