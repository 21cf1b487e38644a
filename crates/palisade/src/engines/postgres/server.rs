//! `Server`: where PostgreSQL is, who asks, whether encrypted, and one connection to it.
//!
//! Every connection is driven by a task of the runtime that made it, which ends when the client
//! is dropped. What the server says unasked (notifications, the end) goes to its [`Mail`].

use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_postgres::config::{SslMode, TargetSessionAttrs};
use tokio_postgres::tls::MakeTlsConnect;
use tokio_postgres::{AsyncMessage, Client, Config, Connection, NoTls};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::fault;
use super::mail::Mail;
use super::schema::first_cell;
use super::wire::{Socket, Wire};
use crate::core::error::{Error, Kind, Result};
use crate::core::url::{Settings, Url};
use crate::engines::remote::{Host, Login, Tls};

/// A peer that does not answer for this long is given up by the kernel: 3 s of silence, then a
/// probe every 2 s. Shorter would give up peers that are only slow.
const IDLE: Duration = Duration::from_secs(3);
const PROBE: Duration = Duration::from_secs(2);
const PROBES: u32 = 3;
const UNACKNOWLEDGED: Duration = Duration::from_secs(9);

fn config_error(message: impl Into<String>) -> Error {
    Error::new(Kind::Config, "connect", message)
}

/// How to connect.
#[derive(Clone)]
pub(super) struct Server {
    config: Config,
    tls: Option<MakeRustlsConnect>,
    pub(super) hosts: Vec<Host>,
}

impl Server {
    /// Takes what it needs out of a URL.
    ///
    /// # Errors
    /// [`Kind::Config`] for hosts, logins, files or options that can't be used.
    pub(super) fn take(url: &mut Url, settings: &Settings) -> Result<Self> {
        let hosts = Host::all(url, 5432)?;
        let login = Login::take(url)?;
        let local = hosts.iter().all(Host::is_local);
        let encrypted = match url.take("tls").as_deref() {
            Some("require") => true,
            Some("disable") => false,
            Some(_) => return Err(config_error("option tls must be require or disable")),
            // On the way to another machine anyone may read; here nobody can.
            None => !local || has_certificates(url),
        };
        let tls = match Tls::take(url, encrypted)? {
            None => None,
            Some(tls) => Some(MakeRustlsConnect::new(tls.client_config()?)),
        };
        let mut config = Config::new();
        for host in &hosts {
            config.host(&host.name).port(host.port);
        }
        if hosts.len() > 1 {
            config.target_session_attrs(TargetSessionAttrs::ReadWrite);
        }
        let database = url.path.trim_matches('/');
        if database.contains('/') {
            return Err(config_error(
                "the path is the name of a database, as in postgres://host/database",
            ));
        }
        if !database.is_empty() {
            config.dbname(database);
        }
        if let Some(user) = &login.user {
            config.user(user);
        }
        if let Some(password) = &login.password {
            config.password(password);
        }
        config
            .application_name("palisade")
            .ssl_mode(match encrypted {
                true => SslMode::Require,
                false => SslMode::Disable,
            })
            .connect_timeout(settings.connect_timeout)
            .tcp_user_timeout(UNACKNOWLEDGED)
            .keepalives(true)
            .keepalives_idle(IDLE)
            .keepalives_interval(PROBE)
            .keepalives_retries(PROBES);
        Ok(Self { config, tls, hosts })
    }

    /// Whether connections are encrypted.
    pub(super) fn is_encrypted(&self) -> bool {
        self.tls.is_some()
    }

    /// All of it that may be shown.
    pub(super) fn shown(&self, scheme: &str) -> String {
        let hosts: Vec<String> = self.hosts.iter().map(Host::to_string).collect();
        format!("{scheme}://{}", hosts.join(","))
    }

    /// Connects, and drives the connection until the client is dropped.
    ///
    /// # Errors
    /// [`Kind::Unreachable`], [`Kind::Denied`] or [`Kind::Config`], as the server answers.
    pub(super) async fn connect(&self, mail: Arc<Mail>) -> Result<Client> {
        match &self.tls {
            None => {
                let connected = self.config.connect(NoTls).await;
                let (client, connection) = connected.map_err(fault::connecting)?;
                drive(connection, mail);
                Ok(client)
            }
            Some(tls) => {
                let connected = self.config.connect(tls.clone()).await;
                let (client, connection) = connected.map_err(fault::connecting)?;
                drive(connection, mail);
                Ok(client)
            }
        }
    }
}

impl Server {
    /// Connects to the first server that takes writes, or to the only one, with a connection that
    /// can move between runtimes; and says which it is.
    ///
    /// # Errors
    /// As [`Server::connect`].
    pub(super) async fn connect_wire(&self, mail: Arc<Mail>) -> Result<(Client, Arc<Wire>, usize)> {
        let mut last = None;
        for at in 0..self.hosts.len() {
            match self.connect_to(at, Arc::clone(&mail)).await {
                Ok((client, wire)) => return Ok((client, wire, at)),
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(|| config_error("no host is named")))
    }

    async fn connect_to(&self, at: usize, mail: Arc<Mail>) -> Result<(Client, Arc<Wire>)> {
        let socket = Socket::new(self.dial(at).await?);
        let stream = socket.clone();
        let (client, wire) = match &self.tls {
            None => {
                let connected = self.config.connect_raw(stream, NoTls).await;
                let (client, connection) = connected.map_err(fault::connecting)?;
                (client, Wire::new(connection, socket, mail))
            }
            Some(tls) => {
                let connected = self
                    .config
                    .connect_raw(stream, self.tls_for(tls, at)?)
                    .await;
                let (client, connection) = connected.map_err(fault::connecting)?;
                (client, Wire::new(connection, socket, mail))
            }
        };
        wire.settle_here();
        if self.hosts.len() > 1 {
            let asked = client.simple_query("SHOW transaction_read_only").await;
            let rows = asked.map_err(|error| fault::reading("connect", &error))?;
            if first_cell(&rows) != Some("off") {
                let message = "none of the servers takes writes: all are standbys";
                return Err(Error::new(Kind::Unreachable, "connect", message));
            }
        }
        Ok((client, wire))
    }

    /// A socket to a server, with the timeouts of every connection of ours.
    async fn dial(&self, at: usize) -> Result<TcpStream> {
        let failed = |error: std::io::Error| {
            let message = "the server can't be reached";
            Error::new(Kind::Unreachable, "connect", message).because(error)
        };
        let host = &self.hosts[at];
        let stream = TcpStream::connect((host.name.as_str(), host.port)).await;
        let stream = stream.map_err(failed)?;
        stream.set_nodelay(true).map_err(failed)?;
        let millis = u32::try_from(UNACKNOWLEDGED.as_millis()).unwrap_or(u32::MAX);
        sockopt::set_socket_keepalive(&stream, true)
            .and_then(|()| sockopt::set_tcp_keepidle(&stream, IDLE))
            .and_then(|()| sockopt::set_tcp_keepintvl(&stream, PROBE))
            .and_then(|()| sockopt::set_tcp_keepcnt(&stream, PROBES))
            .and_then(|()| sockopt::set_tcp_user_timeout(&stream, millis))
            .map_err(|error| failed(error.into()))?;
        Ok(stream)
    }

    fn tls_for(
        &self,
        tls: &MakeRustlsConnect,
        at: usize,
    ) -> Result<<MakeRustlsConnect as MakeTlsConnect<Socket>>::TlsConnect> {
        let host = &self.hosts[at].name;
        let made = MakeTlsConnect::<Socket>::make_tls_connect(&mut tls.clone(), host);
        made.map_err(|_| config_error("the host's name can't be in a certificate"))
    }

    /// Asks the server `at` to give up what `client` waits for.
    ///
    /// # Errors
    /// As connecting.
    pub(super) async fn cancel(&self, client: &Client, at: usize) -> Result<()> {
        let cancel = client.cancel_token();
        let socket = Socket::new(self.dial(at).await?);
        match &self.tls {
            None => cancel.cancel_query_raw(socket, NoTls).await,
            Some(tls) => {
                cancel
                    .cancel_query_raw(socket, self.tls_for(tls, at)?)
                    .await
            }
        }
        .map_err(fault::connecting)
    }
}

fn has_certificates(url: &Url) -> bool {
    ["tls_ca", "tls_cert", "tls_key"]
        .iter()
        .any(|option| url.has(option))
}

/// Drives a connection and delivers its mail.
fn drive<S, T>(mut connection: Connection<S, T>, mail: Arc<Mail>)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    tokio::spawn(async move {
        // However this ends, a runtime that is shut down included, whoever waits is told.
        let _end = mail.end_when_dropped();
        while let Some(Ok(message)) = poll_fn(|cx| connection.poll_message(cx)).await {
            if let AsyncMessage::Notification(notification) = message {
                mail.deliver(notification.payload());
            }
        }
    });
}
