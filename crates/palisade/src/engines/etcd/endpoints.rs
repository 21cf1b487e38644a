//! Which member to talk to: the first that answers and knows a leader.
//!
//! All are asked, one a little after the other or as soon as it has failed, beginning with another
//! one each time, so that a member that is frozen, cut off from the others or down costs some
//! milliseconds and no more.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use rustls::pki_types::ServerName;
use tokio_rustls::TlsConnector;
use tonic::codegen::http::Uri;
use tonic::transport::Endpoint;

use super::rpc::Connection;
use super::transport::Connector;
use super::wire::{AuthenticateRequest, AuthenticateResponse, Empty, StatusResponse};
use crate::core::error::{Error, Kind, Result};
use crate::engines::remote::{Asked, Host, Login, Tls, about_tls, cause, refuses_ours};

/// How long the next member waits for the one before it: longer than an answer takes on a local
/// network, and far shorter than any ttl.
const STAGGER: Duration = Duration::from_millis(100);

/// Members ask clients not to ping more often than every 5 s. Requests and looks have timeouts
/// of their own; this ends connections of which nothing is asked.
const PING: Duration = Duration::from_secs(10);
const PONG: Duration = Duration::from_secs(5);

/// How we call the other side.
const WHO: &str = "etcd";

/// Where the members are and how to talk to them.
pub(super) struct Endpoints {
    hosts: Vec<Host>,
    tls: Option<Tls>,
    login: Login,
    connect_timeout: Duration,
    asked: Asked,
    next: AtomicUsize,
}

fn config(message: impl Into<String>) -> Error {
    Error::new(Kind::Config, "connect", message)
}

fn unreachable(message: impl Into<String>) -> Error {
    Error::new(Kind::Unreachable, "connect", message)
}

impl Endpoints {
    /// # Errors
    /// [`Kind::Config`] for a host or certificate that can't be used.
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

    /// How to reach a member, with certificates as their files have them now.
    fn endpoint(&self, host: &Host) -> Result<(Endpoint, Connector)> {
        let unfit = || config("a host is written name, name:port or [address]:port");
        // TLS is ours: the library is to leave it to us, and to say so to the other side.
        let endpoint = Endpoint::from_shared(format!("http://{host}"))
            .map_err(|_| unfit())?
            .connect_timeout(self.connect_timeout)
            .http2_keep_alive_interval(PING)
            .keep_alive_timeout(PONG);
        let Some(tls) = &self.tls else {
            return Ok((endpoint, Connector { tls: None }));
        };
        let mut client = tls.fresh()?.client_config()?;
        client.alpn_protocols = vec![b"h2".to_vec()];
        self.asked.watch(&mut client);
        let origin: Uri = format!("https://{host}").parse().map_err(|_| unfit())?;
        let whom = ServerName::try_from(host.name.clone());
        let whom = whom.map_err(|_| config("the host's name can't be in a certificate"))?;
        let tls = Some((TlsConnector::from(Arc::new(client)), whom));
        Ok((endpoint.origin(origin), Connector { tls }))
    }

    pub(super) fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// Connects to the first member that answers.
    ///
    /// # Errors
    /// [`Kind::Unreachable`] when none does, [`Kind::Denied`] when the login is refused.
    pub(super) async fn connect(self: Arc<Self>) -> Result<Connection> {
        // A little earlier than the caller gives up, who does not know whom it waits for.
        let limit = self.connect_timeout - self.connect_timeout / 20;
        let connected = tokio::time::timeout(limit, self.connect_to_any()).await;
        connected.unwrap_or_else(|_| {
            let hosts: Vec<String> = self.hosts.iter().map(Host::to_string).collect();
            let (hosts, limit) = (hosts.join(", "), self.connect_timeout);
            Err(unreachable(format!(
                "no answer from {hosts} within {limit:?}"
            )))
        })
    }

    async fn connect_to_any(&self) -> Result<Connection> {
        let count = self.hosts.len();
        let first = self.next.fetch_add(1, Ordering::Relaxed);
        let mut others = (0..count).map(|offset| (first + offset) % count).peekable();
        let mut attempts = FuturesUnordered::new();
        let mut refused: Option<Error> = None;
        loop {
            if let Some(index) = others.next() {
                attempts.push(async move { (index, self.attempt(index).await) });
            }
            let answered = tokio::select! {
                answered = attempts.next() => answered,
                // One that has answered with a failure is not waited for.
                () = tokio::time::sleep(STAGGER), if others.peek().is_some() => continue,
            };
            match answered {
                Some((index, Ok(connection))) => {
                    self.next.store(index + 1, Ordering::Relaxed);
                    return Ok(connection);
                }
                // What a person must mend is told rather than what may pass.
                Some((_, Err(error))) => match &refused {
                    Some(told) if !told.is_transient() => {}
                    _ => refused = Some(error),
                },
                None => break,
            }
        }
        Err(refused.unwrap_or_else(|| unreachable("there is no member to connect to")))
    }

    async fn attempt(&self, index: usize) -> Result<Connection> {
        let host = &self.hosts[index];
        let (endpoint, connector) = self.endpoint(host)?;
        let channel = endpoint.connect_with_connector(connector).await;
        let channel = channel.map_err(|error| match cause::<rustls::Error>(&error) {
            Some(tls) => config(about_tls(WHO, "etcd", tls)),
            None => unreachable(format!(
                "{host} can't be connected to{}; is etcd running there{}?",
                why(&error),
                if self.tls.is_some() { ", with TLS" } else { "" }
            )),
        })?;
        let first = self.first_questions(Connection::new(channel), host).await;
        match first {
            Err(error) if error.kind() == Kind::Unreachable && self.asked.in_vain() => {
                Err(config(refuses_ours(WHO)))
            }
            first => {
                if first.is_ok() {
                    self.asked.served();
                }
                first
            }
        }
    }

    /// Logs in, and asks whether the member knows a leader.
    async fn first_questions(&self, connection: Connection, host: &Host) -> Result<Connection> {
        let connection = self.log_in(connection, host).await?;
        let status: std::result::Result<StatusResponse, _> = connection
            .ask("/etcdserverpb.Maintenance/Status", Empty {})
            .await;
        match status {
            Ok(status) if status.leader == 0 => Err(unreachable(format!(
                "{host} knows no leader of its cluster"
            ))),
            Ok(_) => Ok(connection),
            // Without the right to see the status, a member that refuses is one that answers.
            Err(status) if status.code() == tonic::Code::PermissionDenied => Ok(connection),
            Err(status) if status.code() == tonic::Code::Unimplemented => Err(Error::new(
                Kind::Unusable,
                "connect",
                format!("{host} is no etcd 3.4 or newer"),
            )),
            Err(_) => Err(unreachable(format!(
                "{host} does not answer as etcd does{}",
                if self.tls.is_some() {
                    ""
                } else {
                    "; if it speaks TLS, use etcds: in place of etcd:"
                }
            ))),
        }
    }

    async fn log_in(&self, connection: Connection, host: &Host) -> Result<Connection> {
        let Login {
            user: Some(user),
            password,
            ..
        } = self.login.fresh()?
        else {
            return Ok(connection);
        };
        let request = AuthenticateRequest {
            name: user,
            password: password.unwrap_or_default(),
        };
        let is_empty = request.password.is_empty();
        let answer: std::result::Result<AuthenticateResponse, tonic::Status> = connection
            .ask("/etcdserverpb.Auth/Authenticate", request)
            .await;
        match answer {
            Ok(answer) => {
                let token = answer.token.parse();
                let token = token.map_err(|_| unreachable(format!("{host} sent no login")))?;
                Ok(connection.with_token(token))
            }
            // Logins are switched off: everybody may do everything.
            Err(status) if status.message().contains("authentication is not enabled") => {
                Ok(connection)
            }
            Err(status) if status.code() == tonic::Code::InvalidArgument => {
                let why = match status.message() {
                    said if said.contains("no password user") => {
                        "this user has no password and logs in with a certificate; omit the password"
                    }
                    _ if is_empty => "it wants a password for this user; give password_file",
                    _ => "the user is not known, or the password is wrong; etcd does not say which",
                };
                let message = format!("{host} refuses the login: {why}");
                Err(Error::new(Kind::Denied, "connect", message))
            }
            Err(_) => Err(unreachable(format!("{host} does not take the login now"))),
        }
    }
}

/// Why a connection failed, as far as the system tells.
fn why(error: &tonic::transport::Error) -> &'static str {
    cause::<io::Error>(error).map_or("", |io| match io.kind() {
        io::ErrorKind::ConnectionRefused => ": the connection is refused",
        io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable => {
            ": there is no way to this host"
        }
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => ": it closed the connection",
        // The resolver's errors have no number.
        _ if io.raw_os_error().is_none() => ": the host's name is not known",
        _ => "",
    })
}
