//! `Gateway`: listens, serves and drains.
//!
//! Every limit is here or in `Limits`: request heads of 16 KiB within 10 s, 90 s between requests,
//! and no more connections than the process may have. A slow connection costs a few KiB and delays
//! no other.

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use palisade::{Client, Error, ErrorKind, Result};
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::json;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio_rustls::TlsAcceptor;

use crate::access::{Access, Door};
use crate::config::Config;
use crate::limits::Counters;
use crate::routes::{Names, Routes, Views};
use crate::sessions::Sessions;
use crate::socket::Socket;
use crate::spans::Spans;
use crate::timed::Timed;

/// The longest request head. Hyper uses the same buffer for a body, which is read in parts.
const HEAD: usize = 16 * 1024;
const HEADERS: usize = 64;
/// How long a head, or a TLS handshake, may take.
const HEAD_TIME: Duration = Duration::from_secs(10);
/// How long a connection may be idle between two requests: longer than load balancers and client
/// pools keep one, so that they close it. If we did, a request might just be in flight.
const IDLE: Duration = Duration::from_secs(90);
/// More than the waiting requests of one principal.
const CONNECTIONS: usize = 16_384;
/// Descriptors for other uses than connections: the engine's, the store's files, the access file.
const RESERVED: u64 = 512;
/// How long responses in flight may take at the end.
const LAST_ANSWERS: Duration = Duration::from_secs(2);
/// The interval for checking whether the access file has changed and whether all is drained.
const LOOK: Duration = Duration::from_millis(500);

/// A gateway that listens.
pub struct Gateway {
    routes: Arc<Routes>,
    tcp: Option<TcpListener>,
    unix: Option<Socket>,
    tls: Option<TlsAcceptor>,
    drain: Duration,
}

fn config(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Config, "serve", message)
}

impl Gateway {
    /// Listens as `config` says, in front of the engine that `client` is connected to.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for an address that can't be listened at, and for an address beyond
    /// this machine without TLS and an access file.
    pub async fn bind(client: Client, settings: Config) -> Result<Self> {
        if settings.listen.is_none() && settings.socket.is_none() {
            return Err(config("give an address or a socket to listen at"));
        }
        let beyond = settings.listen.is_some_and(|addr| !addr.ip().is_loopback());
        if beyond && !settings.insecure && (settings.tls.is_none() || settings.access.is_none()) {
            return Err(config(
                "a port beyond this machine needs --tls-cert, --tls-key and --access; use \
                 --insecure if something in front of the gateway sees to both",
            ));
        }
        let unspecified = settings
            .listen
            .is_some_and(|addr| addr.ip().is_unspecified());
        if unspecified && settings.public_urls.is_empty() {
            return Err(config(
                "listening at every address needs --public-url: it says what Host must be",
            ));
        }
        let access = match &settings.access {
            Some(path) => Access::from_file(path)?,
            None if settings.listen.is_some() && settings.token.is_none() && !settings.insecure => {
                return Err(config("a port needs a token or an access file"));
            }
            None => Access::local(settings.token.as_deref(), settings.insecure),
        };
        let tls = match &settings.tls {
            Some((cert, key)) => Some(acceptor(cert, key)?),
            None => None,
        };
        let tcp = match settings.listen {
            Some(addr) => Some(TcpListener::bind(addr).await.map_err(|error| {
                config(format!("can't listen at {addr}; is another gateway there?")).because(error)
            })?),
            None => None,
        };
        let unix = settings.socket.map(Socket::bind).transpose()?;
        let bound = tcp.as_ref().and_then(|tcp| tcp.local_addr().ok());
        let socket = unix.as_ref().map(|socket| &*socket.path);
        let names = Names::new(bound, tls.is_some(), socket, &settings.public_urls)?;
        let audit = settings.audit;
        let counters = Counters::new(settings.limits);
        let routes = Routes {
            access,
            sessions: Arc::new(Sessions::new(counters, audit.clone())),
            audit,
            names,
            client,
            metrics: settings.metrics,
            views: Views::default(),
            spans: Spans::by(settings.tracer),
        };
        Ok(Self {
            routes: Arc::new(routes),
            tcp,
            unix,
            tls,
            drain: settings.drain,
        })
    }

    /// The address of the port.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.tcp.as_ref().and_then(|tcp| tcp.local_addr().ok())
    }

    /// The URL for clients; that of the socket if there is no port.
    pub fn url(&self) -> &str {
        let door = match self.tcp {
            Some(_) => Door::Port,
            None => Door::Socket,
        };
        self.routes.names.url(door)
    }

    /// Serves until `end` resolves and all is drained. After `end` no new sessions are opened;
    /// after the time to drain nothing is extended; it returns when nobody holds anything any more.
    pub async fn serve(self, end: impl Future<Output = ()>) {
        let Self {
            routes,
            tcp,
            unix,
            tls,
            drain,
        } = self;
        let most = connections();
        let (stop, stopped) = watch::channel(false);
        let connections = Connections {
            routes: Arc::clone(&routes),
            permits: Arc::new(Semaphore::new(most)),
            stopped,
        };
        let doors = async {
            let port = accept_tcp(tcp, tls, &connections);
            let socket = accept_unix(unix.as_ref(), &connections);
            futures_util::future::join3(port, socket, refresh_access(&routes)).await;
        };
        let until_drained = async {
            end.await;
            routes.sessions.drain();
            routes
                .audit
                .tell("draining", json!({"claims": routes.sessions.live()}));
            let drained = async {
                // One more check, for requests that arrived before.
                tokio::time::sleep(LOOK / 5).await;
                while routes.sessions.live() > 0 {
                    tokio::time::sleep(LOOK / 5).await;
                }
            };
            tokio::pin!(drained);
            if tokio::time::timeout(drain, &mut drained).await.is_err() {
                routes.sessions.freeze();
                drained.await;
            }
        };
        tokio::select! {
            _ = doors => {}
            () = until_drained => {}
        }
        routes.sessions.end_all("drained").await;
        // Responses in flight are written, and no more requests are read.
        let _ = stop.send(true);
        let all = u32::try_from(most).unwrap_or(u32::MAX);
        let closed = connections.permits.acquire_many(all);
        let _ = tokio::time::timeout(LAST_ANSWERS, closed).await;
        routes.client.flush().await;
        routes.audit.flush();
    }
}

/// The maximum number of connections: what the limit on descriptors leaves.
fn connections() -> usize {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let limit = limit.current.unwrap_or(u64::MAX);
    // If the limit is too small for both, each gets a part.
    let left = limit.saturating_sub(RESERVED).max(limit / 2);
    usize::try_from(left)
        .unwrap_or(CONNECTIONS)
        .min(CONNECTIONS)
}

impl std::fmt::Debug for Gateway {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gateway")
            .field("url", &self.url())
            .finish_non_exhaustive()
    }
}

/// Reads the access file again when it changes; never returns.
async fn refresh_access(routes: &Routes) {
    loop {
        tokio::time::sleep(LOOK).await;
        match routes.access.refresh() {
            None => {}
            Some(Ok(count)) => routes
                .audit
                .tell("access_read", json!({"principals": count})),
            Some(Err(error)) => {
                let details = json!({"detail": error.message(), "kept": "the one before"});
                routes.audit.tell("access_broken", details);
            }
        }
    }
}

/// What every connection needs.
struct Connections {
    routes: Arc<Routes>,
    permits: Arc<Semaphore>,
    /// Signals that no more requests are to be read.
    stopped: watch::Receiver<bool>,
}

impl Connections {
    /// Counts one more connection, unless there are too many.
    fn one(&self) -> Option<Connection> {
        let permit = Arc::clone(&self.permits).try_acquire_owned().ok()?;
        Some(Connection {
            routes: Arc::clone(&self.routes),
            stopped: self.stopped.clone(),
            _permit: permit,
        })
    }
}

struct Connection {
    routes: Arc<Routes>,
    stopped: watch::Receiver<bool>,
    _permit: OwnedSemaphorePermit,
}

async fn accept_tcp(
    listener: Option<TcpListener>,
    tls: Option<TlsAcceptor>,
    connections: &Connections,
) {
    let Some(listener) = listener else {
        return std::future::pending().await;
    };
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            // Usually out of descriptors: existing connections continue.
            tokio::time::sleep(LOOK / 5).await;
            continue;
        };
        let Some(connection) = connections.one() else {
            continue;
        };
        let _ = stream.set_nodelay(true);
        match tls.clone() {
            None => drop(tokio::spawn(connection.serve(stream, Door::Port))),
            Some(tls) => drop(tokio::spawn(async move {
                if let Ok(Ok(stream)) = tokio::time::timeout(HEAD_TIME, tls.accept(stream)).await {
                    connection.serve(stream, Door::Port).await;
                }
            })),
        }
    }
}

async fn accept_unix(socket: Option<&Socket>, connections: &Connections) {
    let Some(socket) = socket else {
        return std::future::pending().await;
    };
    let own = rustix::process::getuid().as_raw();
    loop {
        let Ok((stream, _)) = socket.listener.accept().await else {
            tokio::time::sleep(LOOK / 5).await;
            continue;
        };
        let uid = stream.peer_cred().map(|peer| peer.uid());
        if !matches!(uid, Ok(uid) if uid == own || uid == 0) {
            let details = json!({"code": "other_user"});
            connections.routes.audit.refused(details);
            continue;
        }
        if let Some(connection) = connections.one() {
            tokio::spawn(connection.serve(stream, Door::Socket));
        }
    }
}

impl Connection {
    async fn serve(
        mut self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        door: Door,
    ) {
        let routes = self.routes;
        let (stream, phases) = Timed::new(stream, HEAD_TIME);
        let service = service_fn(move |request| {
            let answer = Arc::clone(&routes).answer(door, request);
            let phases = phases.clone();
            async move { Ok::<_, Infallible>(phases.answering(answer).await.into_response()) }
        });
        let mut builder = http1::Builder::new();
        builder
            .timer(TokioTimer::new())
            .header_read_timeout(IDLE)
            .max_headers(HEADERS)
            .max_buf_size(HEAD);
        let connection = builder.serve_connection(TokioIo::new(stream), service);
        tokio::pin!(connection);
        // A connection error concerns only its client.
        tokio::select! {
            _ = connection.as_mut() => return,
            _ = self.stopped.wait_for(|stopped| *stopped) => {}
        }
        connection.as_mut().graceful_shutdown();
        let _ = connection.await;
    }
}

fn acceptor(cert: &Path, key: &Path) -> Result<TlsAcceptor> {
    let unusable = |path: &Path| {
        let message = format!("{} can't be used for TLS; it must be PEM", path.display());
        move |error: rustls::pki_types::pem::Error| {
            config(message.clone()).because(error.to_string())
        }
    };
    let chain: std::result::Result<Vec<_>, _> = CertificateDer::pem_file_iter(cert)
        .map_err(unusable(cert))?
        .collect();
    let chain = chain.map_err(unusable(cert))?;
    let key = PrivateKeyDer::from_pem_file(key).map_err(unusable(key))?;
    // The crypto provider is passed explicitly: with two in one program, rustls panics at the first
    // handshake.
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let tls = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, key))
        .map_err(|error| config("the certificate and the key don't fit").because(error))?;
    Ok(TlsAcceptor::from(Arc::new(tls)))
}
