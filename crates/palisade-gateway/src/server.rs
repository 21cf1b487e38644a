//! `Gateway`: listens, serves and drains.
//!
//! The limits of each connection are in `connections.rs`, those of each principal in `Limits`.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use palisade::report::Finding;
use palisade::{Client, Error, ErrorKind, Result};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};

use crate::access::{Access, Door};
use crate::config::Config;
use crate::connections::{Connections, places};
use crate::limits::Counters;
use crate::pool::Pool;
use crate::routes::{Names, Routes, Views};
use crate::sessions::{Sessions, Stays};
use crate::socket::Socket;
use crate::spans::Spans;
use crate::tls::Tls;

/// How long responses in flight may take at the end.
const LAST_ANSWERS: Duration = Duration::from_secs(2);
/// The interval for checking whether a file has changed and whether all is drained.
const LOOK: Duration = Duration::from_millis(500);

/// A gateway that listens.
pub struct Gateway {
    routes: Arc<Routes>,
    tcp: Option<TcpListener>,
    unix: Option<Socket>,
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
        let tls = match settings.tls {
            Some((cert, key)) => Some(Tls::read(cert, key)?),
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
            tls,
            per_peer: settings.limits.per_peer,
        };
        Ok(Self {
            routes: Arc::new(routes),
            tcp,
            unix,
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

    /// What is unsafe about its files.
    pub fn findings(&self) -> Vec<Finding> {
        let finding = self.routes.tls.as_ref().and_then(|tls| tls.finding());
        finding.into_iter().collect()
    }

    /// Serves until `end` resolves and all is drained. After `end` no new sessions are opened;
    /// after the time to drain nothing is extended; it returns when nobody holds anything any more.
    pub async fn serve(self, end: impl Future<Output = ()>) {
        self.serve_until(end, std::future::pending()).await;
    }

    /// Like [`Gateway::serve`], but when `now` resolves it returns at once, with the holds that
    /// stay. Their clients rely on them, so they are left to their leases: end the process without
    /// dropping anything, which would release them.
    pub async fn serve_until(
        self,
        end: impl Future<Output = ()>,
        now: impl Future<Output = ()>,
    ) -> Vec<Stays> {
        let Self {
            routes,
            tcp,
            unix,
            drain,
        } = self;
        let (at_port, at_socket) = places(tcp.is_some(), unix.is_some());
        let (stop, stopped) = watch::channel(false);
        let (alive, mut all_closed) = mpsc::channel(1);
        let connections = Connections {
            routes: Arc::clone(&routes),
            port: Pool::new(at_port, routes.per_peer),
            socket: Pool::new(at_socket, 0),
            stopped,
            alive,
        };
        let tls = routes.tls.as_ref();
        let doors = async {
            let port = connections.accept_tcp(tcp, tls);
            let socket = connections.accept_unix(unix.as_ref());
            futures_util::future::join3(port, socket, refresh(&routes, tls)).await;
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
        let drained = async {
            tokio::select! {
                _ = doors => {}
                () = until_drained => {}
            }
            routes.sessions.end_all("drained").await;
            // Responses in flight are written, and no more requests are read.
            let _ = stop.send(true);
        };
        let stay = tokio::select! {
            () = drained => Vec::new(),
            () = now => routes.sessions.leave_at_once().await,
        };
        if stay.is_empty() {
            drop(connections);
            let _ = tokio::time::timeout(LAST_ANSWERS, all_closed.recv()).await;
            routes.client.flush().await;
        } else {
            let stay = json!({"holds": stay});
            routes.audit.tell("ended_at_once", stay);
        }
        routes.audit.flush();
        stay
    }
}

impl std::fmt::Debug for Gateway {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gateway")
            .field("url", &self.url())
            .finish_non_exhaustive()
    }
}

/// Reads the access file and the certificate again when they change; never returns.
async fn refresh(routes: &Routes, tls: Option<&Tls>) {
    let broken = |error: Error| json!({"detail": error.message(), "kept": "the one before"});
    loop {
        tokio::time::sleep(LOOK).await;
        match routes.access.refresh() {
            None => {}
            Some(Ok(count)) => routes
                .audit
                .tell("access_read", json!({"principals": count})),
            Some(Err(error)) => routes.audit.tell("access_broken", broken(error)),
        }
        match tls.and_then(Tls::refresh) {
            None => {}
            Some(Ok(())) => routes.audit.tell("tls_read", json!({})),
            Some(Err(error)) => routes.audit.tell("tls_broken", broken(error)),
        }
    }
}
