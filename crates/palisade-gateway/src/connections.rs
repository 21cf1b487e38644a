//! `Connections`: accepts connections at the port and the socket, and serves each of them.
//!
//! The port and the socket have pools of their own, so that no crowd at the port shuts out the
//! programs of this user. Every connection has time limits for request heads (`Timed`) and for what
//! is written (`Written`): a slow one costs a few KiB and delays no other.

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper::Request;
use hyper::body::{Body as _, Incoming};
use hyper::header::{CONNECTION, HeaderValue, TRANSFER_ENCODING};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use serde_json::json;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot, watch};

use crate::access::Door;
use crate::audit::Source;
use crate::pool::{Place, Pool};
use crate::routes::Routes;
use crate::socket::Socket;
use crate::timed::{Phases, Timed};
use crate::tls::Tls;
use crate::written::Written;

/// The longest request head. Hyper uses the same buffer for a body, which is read in parts.
const HEAD: usize = 16 * 1024;
const HEADERS: usize = 64;
/// How long a head, or a TLS handshake, may take.
const HEAD_TIME: Duration = Duration::from_secs(10);
/// The same when places run short: several round trips around the world.
const HURRIED_HEAD_TIME: Duration = Duration::from_secs(2);
/// How long a connection may be idle between two requests: longer than load balancers and client
/// pools keep one, so that they close it. If we did, a request might just be in flight.
const IDLE: Duration = Duration::from_secs(90);
/// More than the waiting requests of one principal.
const CONNECTIONS: usize = 16_384;
/// Descriptors for other uses than connections: the engine's, the store's files, the access file.
const RESERVED: u64 = 512;
/// The pause after a failed accept; usually it is out of descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// What every connection needs.
pub(crate) struct Connections {
    pub(crate) routes: Arc<Routes>,
    pub(crate) port: Arc<Pool>,
    pub(crate) socket: Arc<Pool>,
    /// Signals that no more requests are to be read.
    pub(crate) stopped: watch::Receiver<bool>,
    /// Dropped with the last connection.
    pub(crate) alive: mpsc::Sender<()>,
}

/// How a request came in.
#[derive(Clone)]
pub(crate) struct Via {
    pub(crate) door: Door,
    /// The address at the port.
    pub(crate) peer: Option<IpAddr>,
    pub(crate) place: Arc<Place>,
    pub(crate) phases: Phases,
}

struct Connection {
    routes: Arc<Routes>,
    stopped: watch::Receiver<bool>,
    door: Door,
    peer: Option<IpAddr>,
    place: Arc<Place>,
    ended: oneshot::Receiver<()>,
    _alive: mpsc::Sender<()>,
}

/// The places at the port and at the socket: what the limit on descriptors leaves.
pub(crate) fn places(has_port: bool, has_socket: bool) -> (usize, usize) {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let limit = limit.current.unwrap_or(u64::MAX);
    // If the limit is too small for both, each gets a part.
    let left = limit.saturating_sub(RESERVED).max(limit / 2);
    let left = usize::try_from(left).unwrap_or(usize::MAX);
    let port = match (has_port, has_socket) {
        (true, true) => left - left / 4,
        (true, false) => left,
        (false, _) => 0,
    };
    let port = port.min(CONNECTIONS);
    (port, (left - port).min(CONNECTIONS))
}

impl Connections {
    fn enter(&self, door: Door, peer: Option<IpAddr>) -> Connection {
        let pool = match door {
            Door::Port => &self.port,
            Door::Socket => &self.socket,
        };
        let (place, ended) = pool.enter(peer);
        Connection {
            routes: Arc::clone(&self.routes),
            stopped: self.stopped.clone(),
            door,
            peer,
            place: Arc::new(place),
            ended,
            _alive: self.alive.clone(),
        }
    }

    pub(crate) async fn accept_tcp(&self, listener: Option<TcpListener>, tls: Option<&Tls>) {
        let Some(listener) = listener else {
            return std::future::pending().await;
        };
        loop {
            let Ok((stream, addr)) = listener.accept().await else {
                tokio::time::sleep(PAUSE).await;
                continue;
            };
            let _ = stream.set_nodelay(true);
            if self.port.is_full() {
                // Those before it may have sent their tokens, and only have to be read.
                tokio::task::yield_now().await;
            }
            let (stream, tls) = (Written::new(stream), tls.map(Tls::acceptor));
            let mut connection = self.enter(Door::Port, Some(addr.ip().to_canonical()));
            tokio::spawn(async move {
                let Some(tls) = tls else {
                    return connection.serve(stream).await;
                };
                let shaken = tokio::time::timeout(connection.head_time(), tls.accept(stream));
                let shaken = tokio::select! {
                    shaken = shaken => shaken,
                    _ = &mut connection.ended => return,
                };
                if let Ok(Ok(stream)) = shaken {
                    connection.serve(stream).await;
                }
            });
        }
    }

    pub(crate) async fn accept_unix(&self, socket: Option<&Socket>) {
        let Some(socket) = socket else {
            return std::future::pending().await;
        };
        let own = rustix::process::getuid().as_raw();
        loop {
            let Ok((stream, _)) = socket.listener.accept().await else {
                tokio::time::sleep(PAUSE).await;
                continue;
            };
            let uid = stream.peer_cred().map(|peer| peer.uid());
            if !matches!(uid, Ok(uid) if uid == own || uid == 0) {
                let details = json!({"code": "other_user", "uid": uid.ok()});
                self.routes.audit.refused(&Source::Socket, details);
                continue;
            }
            let connection = self.enter(Door::Socket, None);
            tokio::spawn(connection.serve(Written::new(stream)));
        }
    }
}

impl Connection {
    fn head_time(&self) -> Duration {
        if self.place.is_hurried() {
            HURRIED_HEAD_TIME
        } else {
            HEAD_TIME
        }
    }

    async fn serve(mut self, stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) {
        let (stream, phases) = Timed::new(stream, self.head_time());
        let routes = self.routes;
        let via = Via {
            door: self.door,
            peer: self.peer,
            place: self.place,
            phases,
        };
        let service = service_fn(move |request: Request<Incoming>| {
            // Hyper takes a body with both lengths by its chunks and hides the other one, so that
            // what follows may be meant as a part of it: nothing may follow.
            let chunked = request.headers().contains_key(TRANSFER_ENCODING);
            let (arrived, via) = (request.body().is_end_stream(), via.clone());
            let answer = Arc::clone(&routes).answer(via.clone(), request);
            async move {
                let mut response = via.phases.answering(arrived, answer).await.into_response();
                if chunked || via.place.is_hurried() {
                    let close = HeaderValue::from_static("close");
                    response.headers_mut().insert(CONNECTION, close);
                }
                Ok::<_, Infallible>(response)
            }
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
            // It gives way to another.
            _ = &mut self.ended => return,
            _ = self.stopped.wait_for(|stopped| *stopped) => {}
        }
        connection.as_mut().graceful_shutdown();
        let _ = connection.await;
    }
}
