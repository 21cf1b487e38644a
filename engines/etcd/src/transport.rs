//! Connects to a member: which one, by TCP and TLS, with a login.
//!
//! Members are tried in turn, each a little after the previous one or as soon as that has failed,
//! starting with another member each time. The first one that answers and knows a leader is used.
//! So a member that is frozen, partitioned or down costs some milliseconds only. TLS is set up here
//! and not by the gRPC library, so that its errors arrive unchanged and the crypto provider is
//! ours.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tonic::Code;
use tonic::codegen::Service;
use tonic::codegen::http::Uri;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Channel, Endpoint};

use super::client::Connection;
use super::proto::{AuthenticateRequest, AuthenticateResponse, StatusRequest, StatusResponse};
use palisade_core::engine::{BoxFuture, config_error, no_connection};
use palisade_core::{Error, ErrorKind, Result};
use palisade_kit::{Asked, Host, Login, Tls, about_tls, cause, first_to_answer, refuses_ours, why};

/// The head start of each member over the next: longer than a reply takes on a local network, and
/// far shorter than any ttl.
const STAGGER: Duration = Duration::from_millis(100);

/// Members ask clients to ping no more often than every 5 s. Requests and reads have timeouts of
/// their own; the pings end idle connections that are dead.
const PING: Duration = Duration::from_secs(10);
const PONG: Duration = Duration::from_secs(5);

/// etcd's client port.
pub(super) const PORT: u16 = 2379;

/// The members, and how to connect to them.
pub(super) struct Endpoints {
    pub(super) hosts: Vec<Host>,
    tls: Option<Tls>,
    login: Login,
    connect_timeout: Duration,
    asked: Asked,
    next: AtomicUsize,
}

impl Endpoints {
    /// # Errors
    /// [`ErrorKind::Config`] for a host or certificate that can't be used.
    pub(super) fn new(
        hosts: Vec<Host>,
        tls: Option<Tls>,
        login: Login,
        connect_timeout: Duration,
    ) -> Result<Self> {
        let endpoints = Self {
            // Clients of one cluster spread over its members.
            next: AtomicUsize::new(rand::random_range(0..hosts.len())),
            hosts,
            tls,
            login,
            connect_timeout,
            asked: Asked::default(),
        };
        // Fails now rather than at the first request.
        for host in &endpoints.hosts {
            endpoints.endpoint(host)?;
        }
        Ok(endpoints)
    }

    pub(super) fn is_encrypted(&self) -> bool {
        self.tls.is_some()
    }

    /// The endpoint of a member, with the certificates as their files are now.
    fn endpoint(&self, host: &Host) -> Result<(Endpoint, Connector)> {
        let unfit = || config_error("a host is written name, name:port or [address]:port");
        // TLS is set up by our connector, but requests must still say https.
        let endpoint = Endpoint::from_shared(format!("http://{host}"))
            .map_err(|_| unfit())?
            .connect_timeout(self.connect_timeout)
            .http2_keep_alive_interval(PING)
            .keep_alive_timeout(PONG);
        let Some(tls) = &self.tls else {
            return Ok((endpoint, Connector(None)));
        };
        let mut client = self.asked.config(tls)?;
        client.alpn_protocols = vec![b"h2".to_vec()];
        let origin: Uri = format!("https://{host}").parse().map_err(|_| unfit())?;
        let server = ServerName::try_from(host.name.clone());
        let server =
            server.map_err(|_| config_error("the host's name can't be in a certificate"))?;
        let tls = (TlsConnector::from(Arc::new(client)), server);
        Ok((endpoint.origin(origin), Connector(Some(tls))))
    }

    /// Connects to the first member that answers.
    ///
    /// # Errors
    /// [`ErrorKind::Unreachable`] when none does, [`ErrorKind::Denied`] when the login is refused.
    pub(super) async fn connect(self: Arc<Self>) -> Result<Connection> {
        first_to_answer(&self.hosts, self.connect_timeout, self.connect_to_any()).await
    }

    async fn connect_to_any(&self) -> Result<Connection> {
        let count = self.hosts.len();
        let first = self.next.fetch_add(1, Ordering::Relaxed);
        let mut others = (0..count).map(|offset| (first + offset) % count).peekable();
        let mut attempts = FuturesUnordered::new();
        let mut refused: Option<Error> = None;
        loop {
            if let Some(index) = others.next() {
                attempts.push(async move { (index, self.attempt(&self.hosts[index]).await) });
            }
            let answered = tokio::select! {
                answered = attempts.next() => answered,
                // A failure starts the next attempt at once, without the delay.
                () = tokio::time::sleep(STAGGER), if others.peek().is_some() => continue,
            };
            match answered {
                Some((index, Ok(connection))) => {
                    self.next.store(index + 1, Ordering::Relaxed);
                    return Ok(connection);
                }
                // An error that needs a fix by the user takes precedence over a transient one.
                Some((_, Err(error))) => match &refused {
                    Some(told) if !told.is_transient() => {}
                    _ => refused = Some(error),
                },
                None => break,
            }
        }
        Err(refused.unwrap_or_else(|| no_connection("there is no member to connect to")))
    }

    async fn attempt(&self, host: &Host) -> Result<Connection> {
        let (endpoint, connector) = self.endpoint(host)?;
        let channel = endpoint.connect_with_connector(connector).await;
        let channel = channel.map_err(|error| match cause::<rustls::Error>(&error) {
            Some(tls) => config_error(about_tls("etcd", "etcd", tls)),
            None => no_connection(format!(
                "{host} can't be connected to{}; is etcd running there{}?",
                why(&error, true),
                if self.is_encrypted() {
                    ", with TLS"
                } else {
                    ""
                }
            )),
        })?;
        let first = self.first_calls(channel, host).await;
        match first {
            Err(error) if error.kind() == ErrorKind::Unreachable && self.asked.in_vain() => {
                Err(config_error(refuses_ours("etcd")))
            }
            Ok(connection) => {
                self.asked.served();
                Ok(connection)
            }
            refused => refused,
        }
    }

    /// Logs in, and asks whether the member knows a leader.
    async fn first_calls(&self, channel: Channel, host: &Host) -> Result<Connection> {
        let token = self.log_in(channel.clone(), host).await?;
        let connection = Connection::new(channel, token);
        let status = match connection.clone().call(StatusRequest {}).await {
            Ok(StatusResponse { leader: 0, .. }) => {
                let message = format!("{host} knows no leader of its cluster");
                return Err(no_connection(message));
            }
            Ok(_) => return Ok(connection),
            Err(status) => status,
        };
        match status.code() {
            // Without the right to read the status, a refusal still proves that the member answers.
            Code::PermissionDenied => Ok(connection),
            Code::Unimplemented => {
                let message = format!("{host} is not etcd 3.4 or newer");
                Err(Error::new(ErrorKind::Unusable, "connect", message))
            }
            _ => {
                let hint = "; if it speaks TLS, use etcds: in place of etcd:";
                let hint = if self.is_encrypted() { "" } else { hint };
                let message = format!("{host} does not answer as etcd does{hint}");
                Err(no_connection(message))
            }
        }
    }

    /// The token that requests must carry.
    async fn log_in(&self, channel: Channel, host: &Host) -> Result<Option<MetadataValue<Ascii>>> {
        let login = self.login.fresh()?;
        let Some(name) = login.user else {
            return Ok(None);
        };
        let password = login.password.unwrap_or_default();
        let is_empty = password.is_empty();
        let request = AuthenticateRequest { name, password };
        let status = match Connection::new(channel, None).call(request).await {
            Ok(AuthenticateResponse { token }) => {
                let token = token.parse();
                let token =
                    token.map_err(|_| no_connection(format!("{host} sent no login token")))?;
                return Ok(Some(token));
            }
            Err(status) => status,
        };
        let why = match status.message() {
            // Authentication is off, so everybody may do everything.
            said if said.contains("authentication is not enabled") => return Ok(None),
            _ if status.code() != Code::InvalidArgument => {
                return Err(no_connection(format!("{host} can't process the login now")));
            }
            said if said.contains("no password user") => {
                "this user has no password and logs in with a certificate; omit the password"
            }
            _ if is_empty => "it requires a password for this user; set password_file",
            _ => "the user is not known, or the password is wrong; etcd does not say which",
        };
        let message = format!("{host} refuses the login: {why}");
        Err(Error::new(ErrorKind::Denied, "connect", message))
    }
}

/// Connects by TCP, then by TLS to the server of this name.
struct Connector(Option<(TlsConnector, ServerName<'static>)>);

/// A byte stream to a member.
trait Bytes: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Bytes for T {}

impl Service<Uri> for Connector {
    type Response = TokioIo<Box<dyn Bytes>>;
    type Error = io::Error;
    type Future = BoxFuture<io::Result<Self::Response>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let tls = self.0.clone();
        Box::pin(async move {
            let host = uri.host().unwrap_or_default();
            let host = host.trim_start_matches('[').trim_end_matches(']');
            let port = uri.port_u16().unwrap_or(PORT);
            let stream = TcpStream::connect((host, port)).await?;
            stream.set_nodelay(true)?;
            let bytes: Box<dyn Bytes> = match tls {
                None => Box::new(stream),
                Some((tls, server)) => Box::new(tls.connect(server, stream).await?),
            };
            Ok(TokioIo::new(bytes))
        })
    }
}
