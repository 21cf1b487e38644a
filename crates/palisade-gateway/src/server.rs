//! `Gateway`: listens, serves and drains.
//!
//! Every bound is here or in `Limits`: heads of 16 KiB within 10 s, and no more connections than
//! a process can have. A connection that is slow costs a few KiB and nobody's turn.

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
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
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_rustls::TlsAcceptor;

use crate::access::{Access, Door};
use crate::config::Config;
use crate::routes::Routes;
use crate::session::Sessions;

/// The longest head. Hyper's buffer for it is also that of a body, which is read in parts.
const HEAD: usize = 16 * 1024;
const HEADERS: usize = 64;
/// How long a head, or a TLS handshake, may take.
const HEAD_TIME: Duration = Duration::from_secs(10);
/// More than the waiting requests of one principal, and below usual limits of descriptors.
const CONNECTIONS: usize = 16_384;
/// How often a changed access file is looked for, and whether all is drained.
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
    /// Listens where `config` says, for clients of what `client` is connected to.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for a place that can't be listened at, and for a port beyond this
    /// machine without TLS and an access file.
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
        if unspecified && settings.public_url.is_none() {
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
        let scheme = if tls.is_some() { "https" } else { "http" };
        let url = match (&settings.public_url, bound, &unix) {
            (Some(url), ..) => url.trim_end_matches('/').to_owned(),
            (None, Some(addr), _) => format!("{scheme}://{addr}"),
            (None, None, Some(socket)) => format!("http+unix:{}", socket.path.display()),
            (None, None, None) => String::new(),
        };
        let audit = settings.audit;
        let routes = Routes {
            access,
            sessions: Arc::new(Sessions::new(settings.limits, audit.clone())),
            audit,
            hosts: hosts(bound, settings.public_url.as_deref())?,
            url,
            client,
            metrics: settings.metrics,
        };
        Ok(Self {
            routes: Arc::new(routes),
            tcp,
            unix,
            tls,
            drain: settings.drain,
        })
    }

    /// Where the port is.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.tcp.as_ref().and_then(|tcp| tcp.local_addr().ok())
    }

    /// What clients call it.
    pub fn url(&self) -> &str {
        &self.routes.url
    }

    /// Serves until `end` resolves and all is drained: no new sessions from then on; after the
    /// time to drain nothing is extended; when nobody holds anything more, it returns.
    pub async fn serve(self, end: impl Future<Output = ()>) {
        let Self {
            routes,
            tcp,
            unix,
            tls,
            drain,
        } = self;
        let connections = Arc::new(Semaphore::new(CONNECTIONS));
        let doors = async {
            let port = accept_tcp(tcp, tls, &routes, &connections);
            let socket = accept_unix(unix.as_ref(), &routes, &connections);
            futures_util::future::join(port, socket).await;
        };
        let until_drained = async {
            tokio::select! {
                () = end => {}
                () = refresh_access(&routes) => {}
            }
            routes.sessions.drain();
            routes
                .audit
                .tell("draining", json!({"claims": routes.sessions.live()}));
            let drained = async {
                // One look more, for requests that came in before.
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
            () = doors => {}
            () = until_drained => {}
        }
        routes.client.flush().await;
    }
}

impl std::fmt::Debug for Gateway {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gateway")
            .field("url", &self.routes.url)
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

async fn accept_tcp(
    listener: Option<TcpListener>,
    tls: Option<TlsAcceptor>,
    routes: &Arc<Routes>,
    connections: &Arc<Semaphore>,
) {
    let Some(listener) = listener else {
        return std::future::pending().await;
    };
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            // Out of descriptors, mostly: whoever is there goes on.
            tokio::time::sleep(LOOK / 5).await;
            continue;
        };
        let Ok(permit) = Arc::clone(connections).try_acquire_owned() else {
            continue;
        };
        let _ = stream.set_nodelay(true);
        let routes = Arc::clone(routes);
        match tls.clone() {
            None => drop(tokio::spawn(serve(stream, Door::Port, routes, permit))),
            Some(tls) => drop(tokio::spawn(async move {
                if let Ok(Ok(stream)) = tokio::time::timeout(HEAD_TIME, tls.accept(stream)).await {
                    serve(stream, Door::Port, routes, permit).await;
                }
            })),
        }
    }
}

async fn accept_unix(socket: Option<&Socket>, routes: &Arc<Routes>, connections: &Arc<Semaphore>) {
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
            routes.audit.tell("refused", json!({"code": "other_user"}));
            continue;
        }
        let Ok(permit) = Arc::clone(connections).try_acquire_owned() else {
            continue;
        };
        tokio::spawn(serve(stream, Door::Socket, Arc::clone(routes), permit));
    }
}

async fn serve(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    door: Door,
    routes: Arc<Routes>,
    _permit: OwnedSemaphorePermit,
) {
    let service = service_fn(move |request| {
        let routes = Arc::clone(&routes);
        async move { Ok::<_, Infallible>(routes.answer(door, request).await.into_response()) }
    });
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .max_headers(HEADERS)
        .max_buf_size(HEAD);
    // A connection that fails is the client's matter.
    let _ = builder
        .serve_connection(TokioIo::new(stream), service)
        .await;
}

/// What `Host` may be: the address itself, its names where it is this machine, the public URL's.
fn hosts(bound: Option<SocketAddr>, public: Option<&str>) -> Result<Vec<String>> {
    let mut hosts = Vec::new();
    if let Some(addr) = bound {
        hosts.push(addr.to_string());
        if addr.ip().is_loopback() {
            let port = addr.port();
            hosts.extend([
                format!("localhost:{port}"),
                format!("127.0.0.1:{port}"),
                format!("[::1]:{port}"),
            ]);
        }
    }
    if let Some(url) = public {
        let rest = url
            .strip_prefix("https://")
            .or_else(|| url.strip_prefix("http://"));
        let host = rest.and_then(|rest| rest.split('/').next());
        let Some(host) = host.filter(|host| !host.is_empty() && !host.contains('@')) else {
            return Err(config("--public-url is http:// or https:// and a host"));
        };
        hosts.push(host.to_owned());
    }
    Ok(hosts)
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
    // One crypto provider, given by hand: two in one program panic at the first handshake.
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let tls = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, key))
        .map_err(|error| config("the certificate and the key don't fit").because(error))?;
    Ok(TlsAcceptor::from(Arc::new(tls)))
}

/// A socket in a folder of this user's, removed at the end.
struct Socket {
    path: PathBuf,
    listener: UnixListener,
}

impl Socket {
    fn bind(path: PathBuf) -> Result<Self> {
        let refuse = |why: String| config(format!("socket {}: {why}", path.display()));
        let folder = path
            .parent()
            .filter(|folder| !folder.as_os_str().is_empty());
        let Some(folder) = folder else {
            return Err(refuse("give it a folder of its own".into()));
        };
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(folder)
            .map_err(|error| refuse(error.to_string()))?;
        let found = std::fs::symlink_metadata(folder).map_err(|error| refuse(error.to_string()))?;
        let own = found.uid() == rustix::process::getuid().as_raw();
        if !found.is_dir() || !own || found.permissions().mode() & 0o077 != 0 {
            return Err(refuse(
                "its folder must be this user's alone (mode 0700)".into(),
            ));
        }
        // A socket that nobody listens at is left from a gateway that was killed.
        if std::os::unix::net::UnixStream::connect(&path).is_ok() {
            return Err(refuse("another gateway listens there".into()));
        }
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).map_err(|error| refuse(error.to_string()))?;
        Ok(Self { path, listener })
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}
