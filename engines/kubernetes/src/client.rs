//! `Client`: requests to the API server. Each has a timeout, and each error says whether the change
//! may have been applied.
//!
//! A write also tells the server its timeout, so that it is not applied long after the client gave
//! up. Only requests that the server says it did not execute (429, 401) are sent again; for any
//! other outcome the caller finds out by a read.

use std::sync::Arc;
use std::time::Duration;

use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use reqwest::header::{ACCEPT, CONTENT_TYPE, DATE, HeaderMap, RETRY_AFTER};
use reqwest::{Method, StatusCode};
use serde::Deserialize;
use serde_json::json;

use super::credentials::{Credential, Credentials};
use super::error::{broken, not_greeted, not_kubernetes, refused};
use super::kubeconfig::Target;
use super::lease::{API, Clock, Lease, micros};
use palisade_core::engine::{config_error, no_connection, rounded, unreachable};
use palisade_core::{BootTime, Error, Result};
use palisade_kit::replies::{LISTING, PAGES, REPLY, too_large};
use palisade_kit::{Answer, Host, Link, PerRuntime, ask_http, http_client, timed};

/// The page size of a list, and the bytes that a page counts for at least.
const PAGE: usize = 500;
const SMALLEST_PAGE: usize = 4 << 10;

/// The pause after a 429 without Retry-After.
const THROTTLED: Duration = Duration::from_secs(1);

/// An HTTP client, and the server that it talks to.
#[derive(Clone)]
struct Connection {
    http: reqwest::Client,
    base: Arc<str>,
    /// The credential whose certificate it presents, if a plugin gave one.
    credential: Arc<Credential>,
}

pub(super) struct Client {
    connections: PerRuntime<Connection>,
    credentials: Arc<Credentials>,
    pub(super) clock: Clock,
    namespace: String,
    /// The path of the namespace's Leases.
    leases: String,
    server: String,
    pub(super) timeout: Duration,
}

/// A reply, not interpreted yet.
pub(super) struct Reply {
    pub(super) status: StatusCode,
    pub(super) body: Vec<u8>,
}

/// The result of a write.
#[derive(Debug)]
pub(super) enum Written {
    /// It was applied, and this is the object now.
    Done(Box<Lease>),
    /// It was not applied: the object is not the one that the write was conditional on.
    Refused,
}

impl Target {
    /// An HTTP client for this runtime, with the certificates as their files are now.
    async fn connection(&self, credential: Arc<Credential>) -> Result<Connection> {
        let unusable = "the certificates of the kubeconfig can't be used";
        let tls = match self.tls(credential.identity.clone())? {
            Some(tls) => {
                let tls = tls.client_config();
                Some(tls.map_err(|error| config_error(unusable).because(error))?)
            }
            None => None,
        };
        let mut builder = http_client(tls)?;
        let mut base = self.server.clone();
        if let Some(name) = &self.server_name {
            let bad =
                || config_error("the kubeconfig's server and tls-server-name don't fit together");
            let mut url = reqwest::Url::parse(&self.server).map_err(|_| bad())?;
            let host = url.host_str().ok_or_else(bad)?;
            let host = host.trim_matches(['[', ']']).to_owned();
            let port = url.port_or_known_default().ok_or_else(bad)?;
            let found = tokio::net::lookup_host((host, port)).await;
            let found: Vec<_> = found.map_err(|_| unknown_host())?.collect();
            url.set_host(Some(name)).map_err(|_| bad())?;
            builder = builder.resolve_to_addrs(name, &found);
            base = url.as_str().trim_end_matches('/').to_owned();
        }
        let http = builder.build();
        Ok(Connection {
            http: http
                .map_err(|error| config_error("an HTTP client can't be set up").because(error))?,
            base: base.into(),
            credential,
        })
    }
}

fn unknown_host() -> Error {
    no_connection("the name of the API server's host is not known")
}

impl Client {
    pub(super) fn new(
        target: Target,
        namespace: String,
        timeout: Duration,
        connect_timeout: Duration,
    ) -> Self {
        let credentials = Credentials::new(target.source.clone());
        let server = target.server.clone();
        let (target, asks) = (Arc::new(target), Arc::clone(&credentials));
        let connections = PerRuntime::new(connect_timeout, move || {
            let (target, asks) = (Arc::clone(&target), Arc::clone(&asks));
            Box::pin(async move {
                let mut credential = asks.get().await?;
                loop {
                    let connection = target.connection(credential).await?;
                    match greet(&target.server, &connection).await? {
                        StatusCode::UNAUTHORIZED => {}
                        _ => return Ok(connection),
                    }
                    let other = asks.instead_of(&connection.credential).await;
                    let none = || refused("connect", StatusCode::UNAUTHORIZED, b"", "");
                    credential = other.ok_or_else(none)?;
                }
            })
        });
        Self {
            connections: connections.to(&server),
            credentials,
            clock: Clock::default(),
            leases: format!("/apis/{API}/namespaces/{namespace}/leases"),
            namespace,
            server,
            timeout,
        }
    }

    /// Connects, if this runtime has no connection yet.
    pub(super) async fn connect(&self) -> Result<()> {
        // A plugin may be slow the first time.
        self.credentials.get().await?;
        self.connections.get().await.map(drop)
    }

    /// The host of the server, and whether the connection is encrypted.
    pub(super) fn host(&self) -> (Option<Host>, bool) {
        let url = reqwest::Url::parse(&self.server).ok();
        let host = url.and_then(|url| {
            let name = url.host_str()?.trim_matches(['[', ']']).to_owned();
            let port = url.port_or_known_default()?;
            Some(Host { name, port })
        });
        (host, self.server.starts_with("https://"))
    }

    pub(super) fn close(&self) {
        self.connections.close();
    }

    /// Sends one request, with the time limit `within`.
    pub(super) async fn send(
        &self,
        operation: &'static str,
        method: Method,
        path: &str,
        body: &[u8],
        within: Duration,
    ) -> Result<Reply> {
        self.send_for(operation, method, path, body, (within, REPLY))
            .await
    }

    /// Sends one request, with bounds for the time until its reply and for its size.
    async fn send_for(
        &self,
        operation: &'static str,
        method: Method,
        path: &str,
        body: &[u8],
        (within, most): (Duration, usize),
    ) -> Result<Reply> {
        let until = BootTime::now() + within;
        let mut tries = 2;
        loop {
            let prepared = self.prepare(operation, &method, path, body, until).await;
            let (link, credential, request) = prepared?;
            let answer = timed(operation, until.remaining(), ask_http(request, most));
            let Answer {
                status,
                headers,
                body,
            } = match answer.await {
                Ok(Ok(answer)) => answer,
                Ok(Err(broke)) => {
                    self.connections.broken(&link).await;
                    return Err(broken(operation, &self.server, &broke));
                }
                Err(late) => {
                    self.connections.unanswered(operation, &link).await;
                    return Err(late);
                }
            };
            self.connections.answered(&link);
            let date = headers.get(DATE).and_then(|date| date.to_str().ok());
            let date = date.and_then(|date| httpdate::parse_http_date(date).ok());
            if let Some(date) = date.and_then(micros) {
                self.clock.tell(date);
            }
            match status {
                StatusCode::OK
                | StatusCode::CREATED
                | StatusCode::NOT_FOUND
                | StatusCode::CONFLICT => return Ok(Reply { status, body }),
                // Not executed: throttled, or the server is shutting down.
                StatusCode::TOO_MANY_REQUESTS => {
                    let pause = retry_after(&headers);
                    if pause >= until.remaining() {
                        let message =
                            format!("the API server accepts no requests for {}", rounded(pause));
                        return Err(unreachable(operation, message));
                    }
                    tokio::time::sleep(pause).await;
                }
                StatusCode::UNAUTHORIZED if tries > 0 => {
                    tries -= 1;
                    let other = self.credentials.instead_of(&credential);
                    let other = timed(operation, until.remaining(), other).await;
                    if !matches!(other, Ok(Some(_))) {
                        return Err(refused(operation, status, &body, &self.namespace));
                    }
                }
                status => return Err(refused(operation, status, &body, &self.namespace)),
            }
        }
    }

    /// A request with the current credential, on this runtime's connection with the current
    /// certificate.
    async fn prepare(
        &self,
        operation: &'static str,
        method: &Method,
        path: &str,
        body: &[u8],
        until: BootTime,
    ) -> Result<(Link<Connection>, Arc<Credential>, reqwest::RequestBuilder)> {
        loop {
            let credential = match self.credentials.fresh() {
                Some(fresh) => fresh,
                None => {
                    let other = timed(operation, until.remaining(), self.credentials.get());
                    other.await.map_err(Error::not_applied)??
                }
            };
            let link = timed(operation, until.remaining(), self.connections.get());
            let link = link.await.map_err(Error::not_applied)??;
            let Connection { http, base, .. } = &link.connection;
            if link.connection.credential.identity != credential.identity {
                self.connections.broken(&link).await;
                continue;
            }
            let request = http.request(method.clone(), format!("{base}{path}"));
            let mut request = request.header(ACCEPT, "application/json");
            if let Some(token) = &credential.token {
                request = request.bearer_auth(token);
            }
            if !body.is_empty() {
                let body = body.to_vec();
                request = request.header(CONTENT_TYPE, "application/json").body(body);
            }
            return Ok((link, credential, request));
        }
    }

    /// Reads a Lease, never from the server's cache.
    pub(super) async fn read(
        &self,
        operation: &'static str,
        name: &str,
        within: Duration,
    ) -> Result<Option<Lease>> {
        let path = format!("{}/{name}", self.leases);
        let reply = self.send(operation, Method::GET, &path, b"", within).await;
        let reply = reply.map_err(Error::not_applied)?;
        match reply.status {
            StatusCode::OK => parse(operation, &reply.body).map(Some),
            // Also if the namespace or the API is missing, which the write that follows finds out.
            StatusCode::NOT_FOUND => Ok(None),
            status => Err(self.unexpected(operation, status, &reply)),
        }
    }

    fn unexpected(&self, operation: &'static str, status: StatusCode, reply: &Reply) -> Error {
        refused(operation, status, &reply.body, &self.namespace)
    }

    /// Creates a Lease.
    pub(super) async fn create(
        &self,
        operation: &'static str,
        lease: &Lease,
        within: Duration,
    ) -> Result<Written> {
        let path = format!("{}?timeout={}", self.leases, server_limit(within));
        let body = serde_json::to_vec(lease).unwrap_or_default();
        let reply = self
            .send(operation, Method::POST, &path, &body, within)
            .await?;
        match reply.status {
            StatusCode::CREATED => written(operation, &reply),
            StatusCode::CONFLICT => Ok(Written::Refused),
            status => Err(self.unexpected(operation, status, &reply)),
        }
    }

    /// Replaces the Lease that `lease` was made from, by uid *and* resourceVersion: with the
    /// resourceVersion alone, a write would re-create a deleted Lease.
    pub(super) async fn replace(
        &self,
        operation: &'static str,
        lease: &Lease,
        within: Duration,
    ) -> Result<Written> {
        let name = &lease.metadata.name;
        if lease.metadata.uid.is_empty() || lease.metadata.resource_version.is_empty() {
            return Err(not_kubernetes(operation));
        }
        let path = format!("{}/{name}?timeout={}", self.leases, server_limit(within));
        let body = serde_json::to_vec(lease).unwrap_or_default();
        let reply = self
            .send(operation, Method::PUT, &path, &body, within)
            .await?;
        match reply.status {
            StatusCode::OK => written(operation, &reply),
            // Both mean that it is not the object that we know.
            StatusCode::CONFLICT | StatusCode::NOT_FOUND => Ok(Written::Refused),
            status => Err(self.unexpected(operation, status, &reply)),
        }
    }

    /// Deletes a Lease if it is unchanged since it was read.
    pub(super) async fn delete(&self, lease: &Lease) -> Result<bool> {
        let metadata = &lease.metadata;
        let limit = server_limit(self.timeout);
        let path = format!("{}/{}?timeout={limit}", self.leases, metadata.name);
        let body = json!({ "preconditions": {
            "uid": metadata.uid, "resourceVersion": metadata.resource_version,
        } });
        let body = body.to_string().into_bytes();
        let reply = self
            .send("sweep", Method::DELETE, &path, &body, self.timeout)
            .await?;
        Ok(reply.status == StatusCode::OK)
    }

    /// All Leases of the namespace.
    pub(super) async fn list(&self, operation: &'static str) -> Result<Vec<Lease>> {
        #[derive(Deserialize)]
        struct Page {
            #[serde(default)]
            items: Vec<Lease>,
            #[serde(default)]
            metadata: Next,
        }
        #[derive(Default, Deserialize)]
        struct Next {
            #[serde(default, rename = "continue")]
            more: String,
        }
        let mut all = Vec::new();
        let (mut from, mut read) = (String::new(), 0);
        loop {
            let path = format!("{}?limit={PAGE}{from}", self.leases);
            let bounds = (self.timeout, LISTING);
            let reply = self.send_for(operation, Method::GET, &path, b"", bounds);
            let reply = reply.await.map_err(Error::not_applied)?;
            // Empty pages without end are refused, too.
            read += reply.body.len().max(SMALLEST_PAGE);
            if read > PAGES {
                return Err(too_large(operation, "the API server", PAGES));
            }
            if reply.status != StatusCode::OK {
                return Err(self.unexpected(operation, reply.status, &reply));
            }
            let page: Page = parse(operation, &reply.body)?;
            all.extend(page.items);
            if page.metadata.more.is_empty() {
                return Ok(all);
            }
            from = format!("&continue={}", encoded(&page.metadata.more));
        }
    }

    /// Starts a watch of Leases; `selector` is a part of the query.
    pub(super) async fn watch(&self, selector: &str, lasts: Duration) -> Result<reqwest::Response> {
        let until = BootTime::now() + self.timeout;
        let path = format!(
            "{}?watch=1&allowWatchBookmarks=true&timeoutSeconds={}{selector}",
            self.leases,
            lasts.as_secs().max(1),
        );
        let prepared = self.prepare("watch", &Method::GET, &path, b"", until).await;
        let (link, _, request) = prepared?;
        let answer = timed("watch", until.remaining(), request.send()).await;
        let response = match answer.map_err(Error::not_applied)? {
            Ok(response) => response,
            Err(error) => {
                self.connections.broken(&link).await;
                return Err(broken("watch", &self.server, &error.into()).not_applied());
            }
        };
        match response.status() {
            StatusCode::OK => Ok(response),
            status => Err(refused("watch", status, b"", &self.namespace).not_applied()),
        }
    }

    /// Whether our identity may use this verb on the namespace's Leases.
    pub(super) async fn may(&self, verb: &str) -> Result<bool> {
        #[derive(Deserialize)]
        struct Review {
            status: Allowed,
        }
        #[derive(Deserialize)]
        struct Allowed {
            #[serde(default)]
            allowed: bool,
        }
        let body = json!({
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": { "resourceAttributes": {
                "namespace": self.namespace, "verb": verb,
                "group": "coordination.k8s.io", "resource": "leases",
            } },
        });
        let body = body.to_string().into_bytes();
        let path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
        let reply = self
            .send("check", Method::POST, path, &body, self.timeout)
            .await;
        let reply = reply.map_err(Error::not_applied)?;
        if reply.status != StatusCode::CREATED {
            return Err(self.unexpected("check", reply.status, &reply));
        }
        let review: Review = parse("check", &reply.body)?;
        Ok(review.status.allowed)
    }

    /// The version that the server reports.
    pub(super) async fn version(&self) -> Result<Option<String>> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Version {
            git_version: String,
        }
        let reply = self
            .send("check", Method::GET, "/version", b"", self.timeout)
            .await;
        let version = serde_json::from_slice::<Version>(&reply.map_err(Error::not_applied)?.body);
        Ok(version.ok().map(|version| version.git_version))
    }
}

/// Asks whether a server is there. It checks our identity, but not our rights.
async fn greet(server: &str, connection: &Connection) -> Result<StatusCode> {
    let Connection {
        http,
        base,
        credential,
    } = connection;
    let mut request = http.get(format!("{base}/version"));
    if let Some(token) = &credential.token {
        request = request.bearer_auth(token);
    }
    let answer = ask_http(request, REPLY).await;
    let answer = answer.map_err(|broke| broken("connect", server, &broke).not_applied())?;
    match answer.status {
        status if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS => {
            let message = format!("the API server answers with status {}", status.as_u16());
            Err(no_connection(message))
        }
        StatusCode::NOT_FOUND => Err(not_kubernetes("connect")),
        // Whoever may not read the version may still have rights to Leases.
        status @ (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) => Ok(status),
        status if status.is_success() => Ok(status),
        _ => Err(not_greeted(server, &answer)),
    }
}

fn written(operation: &'static str, reply: &Reply) -> Result<Written> {
    parse(operation, &reply.body)
        .map(|lease| Written::Done(Box::new(lease)))
        .map_err(Error::maybe_applied)
}

fn parse<T: for<'a> Deserialize<'a>>(operation: &'static str, body: &[u8]) -> Result<T> {
    serde_json::from_slice(body).map_err(|_| not_kubernetes(operation))
}

/// The server-side timeout of a write, as a Go duration.
fn server_limit(within: Duration) -> String {
    format!("{}ms", within.as_millis().max(1))
}

fn retry_after(headers: &HeaderMap) -> Duration {
    let header = headers
        .get(RETRY_AFTER)
        .and_then(|header| header.to_str().ok());
    let seconds = header.and_then(|seconds| seconds.trim().parse().ok());
    seconds.map_or(THROTTLED, Duration::from_secs)
}

/// Encodes a value for a path or query.
pub(super) fn encoded(text: &str) -> String {
    utf8_percent_encode(text, NON_ALPHANUMERIC).to_string()
}
