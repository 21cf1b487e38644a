//! What a `consul:` URL says, what the engine can do, and how it is opened.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::broadcast;

use super::ConsulEngine;
use super::client::{Access, Client, Read, Token};
use super::inspect::{Agent, TTL_MIN};
use super::keys::Keys;
use palisade_core::engine::{
    EngineFactory, EngineInfo, Permits, Settings, SharedEngine, TtlRange, Url, config_error,
    parse_duration, rounded,
};
use palisade_core::{Capability, Error, ErrorKind, Guarantee, Result};
use palisade_kit::{Asked, Host, SecretFile, Tls, typed_config};

/// The engine's own options.
const OPTIONS: &[&str] = &[
    "consul_namespace",
    "datacenter",
    "lock_delay",
    "node_checks",
    "tls_ca",
    "tls_cert",
    "tls_key",
    "token",
    "token_file",
];

/// The longest lock-delay that Consul takes.
const LOCK_DELAY_MAX: Duration = Duration::from_secs(60);

const CAPABILITY: Capability = {
    let mut can = Capability::FULL;
    can.class = Guarantee::Consensus;
    can.permits = Permits::Slots;
    can.fair = false;
    can.waiters_visible = false;
    can.detached = false;
    can.ttl = TtlRange {
        min: TTL_MIN,
        ..Capability::FULL.ttl
    };
    can.reentrant_session = true;
    can
};

/// What `connect` knows of it.
pub const FACTORY: EngineFactory = EngineFactory {
    info: EngineInfo {
        name: "consul",
        schemes: &["consul", "consuls"],
        needs: "a Consul agent, 1.4 or newer",
        example: "consul://localhost:8500",
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
    /// A Consul agent, as `palisade::connect` takes it.
    Consul
    /// Agents of one datacenter: `name`, `name:port` or `[address]:port` each.
    hosts of "consul"
    texts {
        /// The datacenter, where it is not the agent's own.
        datacenter
        /// The namespace of Consul Enterprise.
        consul_namespace
        /// Health checks of the node, by comma, that a session depends on.
        node_checks
        /// The ACL token. It is never shown.
        token
        /// A file with the ACL token in it.
        token_file
    }
    durations {
        /// How long Consul refuses a lock after its session was invalidated.
        lock_delay
    }
    tls { |url| url.scheme = "consuls".to_owned() }
}

/// What a URL says.
pub(super) struct Options {
    pub(super) access: Access,
    lock_delay: Duration,
    checks: Vec<String>,
}

impl Options {
    pub(super) fn take(url: &mut Url, settings: &Settings) -> Result<Self> {
        let encrypted = url.scheme == "consuls";
        if url.user.is_some() || url.password.is_some() {
            return Err(config_error(
                "Consul has no users; pass the ACL token with token_file= or CONSUL_HTTP_TOKEN",
            ));
        }
        if !matches!(url.path.as_str(), "" | "/") {
            return Err(config_error(
                "a consul: URL has no path; what locks are put under is namespace=",
            ));
        }
        let lock_delay = match url.take("lock_delay").map(|text| parse_duration(&text)) {
            None => Duration::ZERO,
            Some(Ok(delay)) if delay <= LOCK_DELAY_MAX => delay,
            Some(Ok(_)) => {
                return Err(config_error(
                    "option lock_delay: Consul takes 60s at the most",
                ));
            }
            Some(Err(why)) => return Err(config_error(format!("option lock_delay: {why}"))),
        };
        let checks = url.take("node_checks").unwrap_or_default();
        let checks = checks.split(',').filter(|check| !check.is_empty());
        let tls = Tls::take(url, encrypted)?;
        let options = Self {
            lock_delay,
            checks: checks.map(str::to_owned).collect(),
            access: Access {
                hosts: Host::all(url, if encrypted { 8501 } else { 8500 })?,
                tls,
                asked: Asked::default(),
                token: token(url)?,
                datacenter: url.take("datacenter"),
                consul_namespace: url.take("consul_namespace"),
                timeout: settings.timeout,
                connect_timeout: settings.connect_timeout,
            },
        };
        url.finish(OPTIONS)?;
        Ok(options)
    }
}

/// The ACL token: from the URL's options, else from what Consul's own tools read.
fn token(url: &mut Url) -> Result<Token> {
    let variable = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
    let token = match (url.take("token"), SecretFile::take(url, "token_file")) {
        (Some(_), Some(_)) => {
            return Err(config_error("the URL gives the token twice; give it once"));
        }
        (Some(token), None) => Token::Given(token),
        (None, Some(file)) => Token::File(file),
        (None, None) => match variable("CONSUL_HTTP_TOKEN") {
            Some(token) => Token::Given(token),
            None => variable("CONSUL_HTTP_TOKEN_FILE")
                .map_or(Token::None, |path| Token::EnvironmentFile(path.into())),
        },
    };
    // Fails now rather than at the first request.
    token.read()?;
    Ok(token)
}

async fn open(mut url: Url, settings: &Settings) -> Result<SharedEngine> {
    let shown = url.shown();
    let options = Options::take(&mut url, settings)?;
    let keys = Keys::new(&settings.namespace)?;
    let (hosts, encrypted) = (options.access.hosts.clone(), options.access.tls.is_some());
    let client = Client::new(options.access)?;
    client.connect().await?;
    let agent = Agent::read(&client).await?;
    if client.is_elsewhere() {
        // What is asked of the agent itself does not tell.
        let marks = keys.marks();
        let read = client.read("connect", &marks, true, Read::Consistent);
        read.await?;
    }
    let capability = {
        let mut can = CAPABILITY;
        can.ttl = TtlRange {
            min: agent.ttl_min.unwrap_or(TTL_MIN),
            ..CAPABILITY.ttl
        };
        can
    };
    if let Some(ttl) = settings.ttl.filter(|ttl| *ttl < capability.ttl.min) {
        return Err(Error::new(
            ErrorKind::InvalidArgument,
            "ttl",
            format!(
                "a ttl of {} is below the session_ttl_min of this Consul, {}; take a longer one, or lower session_ttl_min on its servers",
                rounded(ttl),
                rounded(capability.ttl.min)
            ),
        ));
    }
    let default_ttl = settings.ttl.unwrap_or_else(|| capability.default_ttl());
    Ok(Arc::new(ConsulEngine(Arc::new(super::Consul {
        client,
        keys,
        sessions: Default::default(),
        flight: Default::default(),
        maker: Default::default(),
        alarms: broadcast::channel(64).0,
        capability,
        default_ttl,
        lock_delay: options.lock_delay,
        checks: options.checks,
        hosts,
        encrypted,
        shown,
    }))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(text: &str) -> Result<Options> {
        let mut url = Url::parse(text)?;
        let settings = url.take_settings()?;
        Options::take(&mut url, &settings)
    }

    #[test]
    fn options_are_read() {
        let read = options(
            "consul://a,b:9?token=hunter2&lock_delay=15s&datacenter=dc2&node_checks=serfHealth",
        )
        .unwrap();
        assert_eq!(read.access.hosts[0].to_string(), "a:8500");
        assert_eq!(read.access.hosts[1].to_string(), "b:9");
        let token = read.access.token.read().unwrap();
        assert_eq!(token.as_deref(), Some("hunter2"));
        assert_eq!(read.lock_delay, Duration::from_secs(15));
        assert_eq!(read.checks, ["serfHealth"]);
    }

    #[test]
    fn bad_options_are_refused_without_repeating_them() {
        for bad in [
            "consul://a?lock_delay=61s",
            "consul://a?lock_delay=hunter2",
            "consul://hunter2@a",
            "consul://a/hunter2",
            "consul://a?token_file=/hunter2",
            "consul://a?tokn=hunter2",
            "consul://a?tls_ca=/hunter2",
            "consul://",
        ] {
            let error = options(bad).err().unwrap();
            assert_eq!(error.kind(), ErrorKind::Config, "{bad}");
            assert!(!error.to_string().contains("hunter2"), "{error}");
        }
    }
}
