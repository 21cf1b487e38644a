//! `Access`: the agents that a URL names and how they are asked; `connect` picks one.
//!
//! Of several agents the first is taken that knows a leader; when it fails, all are asked again.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use reqwest::{Client, StatusCode};
use rustls::{ClientConfig, RootCertStore};

use super::verdict::{Verdict, WHO, broken, unreachable};
use crate::core::error::{Error, Kind, Result};
use crate::engines::remote::{Asked, Host, SecretFile, Tls, refuses_ours};

/// What the URL says about requests.
#[derive(Clone)]
pub(super) struct Access {
    pub(super) hosts: Vec<Host>,
    pub(super) tls: Option<Tls>,
    pub(super) asked: Asked,
    pub(super) token: Token,
    pub(super) datacenter: Option<String>,
    pub(super) consul_namespace: Option<String>,
    pub(super) timeout: Duration,
    pub(super) connect_timeout: Duration,
}

/// Where the ACL token comes from.
#[derive(Clone)]
pub(super) enum Token {
    None,
    /// A secret.
    Given(String),
    File(SecretFile),
    /// The file that `CONSUL_HTTP_TOKEN_FILE` names.
    EnvironmentFile(PathBuf),
}

impl Token {
    /// The token as it is now: files are rotated.
    ///
    /// # Errors
    /// [`Kind::Config`] when its file can't be read.
    pub(super) fn read(&self) -> Result<Option<String>> {
        match self {
            Self::None => Ok(None),
            Self::Given(token) => Ok(Some(token.clone())),
            Self::File(file) => file.read().map(Some),
            Self::EnvironmentFile(path) => {
                let read = std::fs::read_to_string(path).map_err(|error| {
                    let message = "the file that CONSUL_HTTP_TOKEN_FILE names can't be read";
                    Error::new(Kind::Config, "connect", message).because(error)
                })?;
                Ok(Some(read.trim().to_owned()))
            }
        }
    }
}

/// A client, and the agent that it asks.
#[derive(Clone)]
pub(super) struct Wire {
    pub(super) client: Client,
    pub(super) base: Arc<str>,
    /// The token that it sends; a secret.
    pub(super) token: Option<Arc<str>>,
}

impl Access {
    /// An HTTP client of this runtime, with token and certificates as their files have them now.
    pub(super) fn client(&self, token: Option<&str>) -> Result<Client> {
        let mut headers = HeaderMap::new();
        if let Some(token) = token {
            let mut value = HeaderValue::from_str(token).map_err(|_| {
                let message = "the ACL token holds characters that no header can";
                Error::new(Kind::Config, "connect", message)
            })?;
            value.set_sensitive(true);
            headers.insert(HeaderName::from_static("x-consul-token"), value);
        }
        let builder = Client::builder()
            .default_headers(headers)
            .connect_timeout(self.connect_timeout)
            .http1_only()
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .retry(reqwest::retry::never())
            .tcp_nodelay(true);
        // Without one of ours reqwest would make its own, and panic where no provider is set.
        let tls = match &self.tls {
            None => trusts_nobody()?,
            Some(tls) => {
                let mut tls = tls.fresh()?.client_config()?;
                self.asked.watch(&mut tls);
                tls
            }
        };
        let builder = builder.tls_backend_preconfigured(tls);
        builder.build().map_err(|error| {
            Error::new(Kind::Config, "connect", "an HTTP client can't be set up").because(error)
        })
    }
}

/// For connections without TLS, which never ask it.
fn trusts_nobody() -> Result<ClientConfig> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| {
            Error::new(Kind::Internal, "connect", "TLS can't be set up").because(error)
        })?;
    Ok(builder
        .with_root_certificates(RootCertStore::empty())
        .with_no_client_auth())
}

/// Asks all agents who leads, and takes the first that knows.
pub(super) async fn connect(access: &Access) -> Result<Wire> {
    // A little earlier than the caller gives up, who does not know whom it waits for.
    let limit = access.connect_timeout - access.connect_timeout / 20;
    let connected = tokio::time::timeout(limit, connect_to_any(access)).await;
    connected.unwrap_or_else(|_| {
        let hosts: Vec<String> = access.hosts.iter().map(Host::to_string).collect();
        let (hosts, limit) = (hosts.join(", "), access.connect_timeout);
        let message = format!("no answer from {hosts} within {limit:?}");
        Err(unreachable("connect", &message))
    })
}

async fn connect_to_any(access: &Access) -> Result<Wire> {
    let token: Option<Arc<str>> = access.token.read()?.map(Into::into);
    let client = access.client(token.as_deref())?;
    let scheme = match access.tls {
        Some(_) => "https",
        None => "http",
    };
    let ask = |host: &Host| {
        ask(
            client.clone(),
            format!("{scheme}://{host}"),
            access.asked.clone(),
        )
    };
    let mut asked: FuturesUnordered<_> = access.hosts.iter().map(ask).collect();
    let mut last = unreachable("connect", "no Consul agent was named");
    while let Some(answer) = asked.next().await {
        match answer {
            Ok(wire) => return Ok(Wire { token, ..wire }),
            Err(error) => last = error,
        }
    }
    Err(last)
}

async fn ask(client: Client, base: String, asked: Asked) -> Result<Wire> {
    // Nothing was asked for that could have been applied.
    let failed = |error: reqwest::Error| {
        let error = broken("connect", &base, &error);
        match error.kind() {
            Kind::Unreachable if asked.in_vain() => {
                Error::new(Kind::Config, "connect", refuses_ours(WHO))
            }
            kind => Error::new(kind, "connect", error.message()),
        }
    };
    let answer = client.get(format!("{base}/v1/status/leader")).send().await;
    let response = answer.map_err(failed)?;
    asked.served();
    let status = response.status();
    let leader = response.text().await.map_err(failed)?;
    match leader.trim() {
        text if status != StatusCode::OK => {
            let verdict = Verdict {
                operation: "connect",
                has_token: true,
            };
            if let Some((error, _)) = verdict.of(status, text)
                && error.kind() == Kind::Config
            {
                return Err(error);
            }
            let status = status.as_u16();
            let message = format!("{base} answers with status {status}; is it Consul's HTTP port?");
            Err(Error::new(Kind::Unusable, "connect", message))
        }
        "" | "\"\"" => {
            let message = format!("the Consul cluster of {base} has no leader");
            Err(unreachable("connect", &message))
        }
        _ => Ok(Wire {
            client,
            base: base.into(),
            token: None,
        }),
    }
}
