//! What a `kubernetes:` URL says, what the engine can do, and how it is opened.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::broadcast;

use super::client::Client;
use super::keys::Keys;
use super::kubeconfig::Target;
use super::{Kubernetes, KubernetesEngine};
use palisade_core::engine::{
    EngineFactory, EngineInfo, Permits, Settings, SharedEngine, TtlRange, Url, config_error,
};
use palisade_core::{Capability, Guarantee, Result};
use palisade_kit::typed_config;

/// The engine's own options.
const OPTIONS: &[&str] = &["context", "kubeconfig", "service_account"];

const CAPABILITY: Capability = {
    let mut can = Capability::FULL;
    can.class = Guarantee::Consensus;
    can.shared = false;
    can.permits = Permits::Slots;
    can.fair = false;
    can.waiters_visible = false;
    can.ttl = TtlRange {
        min: Duration::from_secs(1),
        // A Lease counts whole seconds.
        step: Duration::from_secs(1),
        ..Capability::FULL.ttl
    };
    can
};

/// What `connect` knows of it.
pub const FACTORY: EngineFactory = EngineFactory {
    info: EngineInfo {
        name: "kubernetes",
        schemes: &["kubernetes"],
        needs: "a Kubernetes cluster, 1.20 or newer, and a Role for its Leases",
        example: "kubernetes://default",
        capability: CAPABILITY,
        options: OPTIONS,
    },
    open: |url, settings| Box::pin(async move { open(url, &settings).await }),
    #[cfg(feature = "baseline")]
    baseline: Some(|url, settings| {
        Box::pin(async move { super::baseline::open_baseline(url, &settings).await })
    }),
};

typed_config! {
    /// The Leases of a Kubernetes cluster, as `palisade::connect` takes them.
    Cluster
    texts {
        /// The kubeconfig, where it is neither the user's nor that of the environment.
        kubeconfig
        /// The context of the kubeconfig, where it is not the current one.
        context
        /// The folder of the service account, where it is not where pods have it.
        service_account
    }
}

impl Cluster {
    /// The Leases in this namespace of Kubernetes.
    pub fn new(namespace: impl Into<String>) -> Self {
        Self(Url::new("kubernetes", vec![namespace.into()]))
    }
}

/// A client of the Kubernetes namespace that a URL names.
pub(super) fn client(url: &mut Url, settings: &Settings) -> Result<Client> {
    if url.user.is_some() || url.password.is_some() {
        return Err(config_error(
            "a kubernetes: URL has no login; the kubeconfig has it",
        ));
    }
    if !matches!(url.path.as_str(), "" | "/") || url.hosts.len() > 1 {
        return Err(config_error(
            "a kubernetes: URL names one namespace of Kubernetes and nothing else, as in kubernetes://default",
        ));
    }
    let named = url.hosts.first().filter(|host| !host.is_empty()).cloned();
    let target = Target::find(url)?;
    url.finish(OPTIONS)?;
    let namespace = named.or_else(|| target.namespace.clone());
    let namespace = namespace.unwrap_or_else(|| "default".to_owned());
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    if namespace.len() > 63 || !namespace.bytes().all(plain) {
        return Err(config_error(
            "a namespace of Kubernetes is at most 63 of a-z, 0-9 and -, as in kubernetes://default",
        ));
    }
    let (timeout, connect_timeout) = (settings.timeout, settings.connect_timeout);
    Ok(Client::new(target, namespace, timeout, connect_timeout))
}

async fn open(mut url: Url, settings: &Settings) -> Result<SharedEngine> {
    let shown = url.shown();
    let client = client(&mut url, settings)?;
    let keys = Keys::new(&settings.namespace)?;
    client.connect().await?;
    let default_ttl = settings.ttl.unwrap_or_else(|| CAPABILITY.default_ttl());
    Ok(Arc::new(KubernetesEngine(Arc::new(Kubernetes {
        client,
        keys,
        lines: Default::default(),
        members: Default::default(),
        alarms: broadcast::channel(64).0,
        default_ttl,
        shown,
    }))))
}

impl Kubernetes {
    pub(super) const CAPABILITY: Capability = CAPABILITY;
}

#[cfg(test)]
mod tests {
    use super::*;
    use palisade_core::ErrorKind;

    #[test]
    fn bad_urls_are_refused_without_repeating_them() {
        for bad in [
            "kubernetes://me:hunter2@default",
            "kubernetes://default/hunter2",
            "kubernetes://a,b",
            "kubernetes://a?kubeconfig=/nosuch/hunter2",
            "kubernetes://a?contxt=hunter2&kubeconfig=/nosuch",
        ] {
            let mut url = Url::parse(bad).unwrap();
            let settings = url.take_settings().unwrap();
            let error = client(&mut url, &settings).err().unwrap();
            assert_eq!(error.kind(), ErrorKind::Config, "{bad}");
            assert!(!format!("{error:?}").contains("hunter2"), "{error:?}");
        }
    }
}
