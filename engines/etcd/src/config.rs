//! From a URL to an engine: what etcd can do, which options it takes, and how it is opened.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{OnceCell, broadcast};

use super::client::Client;
use super::keys::Keys;
use super::leases::Leases;
use super::transport::{Endpoints, PORT};
use super::{EtcdEngine, Inner};
use palisade_core::engine::{
    BoxFuture, EngineFactory, EngineInfo, Settings, TtlRange, Url, config_error,
};
use palisade_core::{Capability, Guarantee, Result};
use palisade_kit::{self as kit, Host, Login, PerRuntime, Tls, typed_config};

pub(super) const CAPABILITY: Capability = {
    let mut can = Capability::FULL;
    can.class = Guarantee::Consensus;
    can.ttl = TtlRange {
        // At the usual election timeout of 1 s etcd grants nothing shorter than 2 s, and whole
        // seconds only.
        min: Duration::from_secs(2),
        // Far less than etcd takes, and as much as anyone should wait for a machine that is lost.
        max: Duration::from_secs(24 * 60 * 60),
        step: Duration::from_secs(1),
    };
    can
};

/// What `connect` knows of it.
pub const FACTORY: EngineFactory = EngineFactory {
    info: EngineInfo {
        name: "etcd",
        schemes: &["etcd", "etcds"],
        needs: "an etcd cluster, 3.4 or newer",
        example: "etcd://localhost:2379",
        capability: CAPABILITY,
        options: kit::OPTIONS,
    },
    open: |url, settings| {
        Box::pin(async move {
            let inner = open(url, &settings).await?;
            Ok(Arc::new(EtcdEngine(Arc::new(inner))) as _)
        })
    },
    #[cfg(feature = "baseline")]
    baseline: Some(|url, settings| {
        Box::pin(async move { super::baseline::open(url, &settings).await })
    }),
};

typed_config! {
    /// An etcd cluster, as `palisade::connect` takes it.
    Etcd
    /// Members of the cluster: `name`, `name:port` or `[address]:port` each.
    hosts of "etcd"
    login { user }
    tls { |url| url.scheme = "etcds".to_owned() }
}

/// Opens what the URL names, and sees that a member of it answers.
///
/// # Errors
/// [`ErrorKind::Config`](palisade_core::ErrorKind::Config) for hosts, options or certificates that can't be used; [`ErrorKind::Unreachable`](palisade_core::ErrorKind::Unreachable)
/// when no member answers; [`ErrorKind::Denied`](palisade_core::ErrorKind::Denied) when the login is refused.
pub(super) async fn open(mut url: Url, settings: &Settings) -> Result<Inner> {
    let encrypted = url.scheme == "etcds";
    let login = Login::take(&mut url)?;
    let tls = Tls::take(&mut url, encrypted)?;
    url.finish(kit::OPTIONS)?;
    // etcd has no databases to choose from; a path would be a mistake that goes unnoticed.
    if !url.path.trim_matches('/').is_empty() {
        let scheme = &url.scheme;
        let message =
            format!("{scheme}: takes no path; choose where keys are kept with namespace=");
        return Err(config_error(message));
    }
    let hosts = Host::all(&url, PORT)?;
    let (several, logs_in) = (hosts.len() > 1, login.user.is_some());
    let limit = settings.connect_timeout;
    let endpoints = Arc::new(Endpoints::new(hosts, tls, login, limit)?);
    let members = Arc::clone(&endpoints);
    let connect = move || -> BoxFuture<_> { Box::pin(Arc::clone(&members).connect()) };
    let inner = Inner {
        keys: Keys::new(&settings.namespace)?,
        client: Client {
            links: PerRuntime::new(limit, connect),
            timeout: settings.timeout,
            several,
            logs_in,
        },
        endpoints,
        shown: url.shown(),
        leases: Leases::default(),
        known: Mutex::new(HashMap::new()),
        allowed: OnceCell::new(),
        alarms: broadcast::channel(64).0,
    };
    inner.client.links.get().await?;
    Ok(inner)
}
