//! `Server`: the hosts, the login, the encryption, and how to connect.
//!
//! Passwords and certificates may be rotated, so they are read afresh for each connection. Of
//! several hosts the first one that accepts writes is used.

use std::future::poll_fn;
use std::io;
use std::task::Poll;
use std::time::Duration;

use rustix::net::sockopt;
use tokio::net::TcpStream;
use tokio_postgres::config::SslMode;
use tokio_postgres::tls::MakeTlsConnect;
use tokio_postgres::{Client, Config, NoTls};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::connection::{Connection, Listener, Protocol, Socket};
use super::error;
use super::schema::first_cell;
use palisade_core::engine::{Settings, Url, config_error, no_connection, rounded};
use palisade_core::{Error, Result};
use palisade_kit::{Host, Login, Tls};

/// The kernel drops a peer that is unresponsive for this long: 3 s of silence, then a probe every 2
/// s. Shorter times would also drop peers that are merely slow.
const IDLE: Duration = Duration::from_secs(3);
const PROBE: Duration = Duration::from_secs(2);
const PROBES: u32 = 3;
const UNACKNOWLEDGED: Duration = Duration::from_secs(9);

/// How to connect.
#[derive(Clone)]
pub(super) struct Server {
    /// Without the password.
    config: Config,
    login: Login,
    tls: Option<Encryption>,
    pub(super) hosts: Vec<Host>,
    /// The time limit for one host, so that all of them fit into `connect_timeout`.
    patience: Duration,
}

#[derive(Clone)]
struct Encryption {
    tls: Tls,
    /// With the certificates as they were when the URL was parsed.
    connector: MakeRustlsConnect,
}

/// A connection without a driver yet, and its socket.
type Dialled = (Client, Box<dyn Protocol>, Socket);

impl Server {
    /// Takes its options out of a URL.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](palisade_core::ErrorKind::Config) for hosts, logins, files or options that can't be used.
    pub(super) fn take(url: &mut Url, settings: &Settings) -> Result<Self> {
        let hosts = Host::all(url, 5432)?;
        let login = Login::take(url)?;
        let local = hosts.iter().all(Host::is_local);
        let encrypted = match url.take("tls").as_deref() {
            Some("require") => true,
            Some("disable") => false,
            Some(_) => return Err(config_error("option tls must be require or disable")),
            // The network to another machine may be tapped; the loopback interface can't be.
            None => !local || has_certificates(url),
        };
        let tls = match Tls::take(url, encrypted)? {
            None => None,
            Some(tls) => Some(Encryption {
                connector: MakeRustlsConnect::new(tls.client_config()?),
                tls,
            }),
        };
        let mut config = Config::new();
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
        let mode = if encrypted {
            SslMode::Require
        } else {
            SslMode::Disable
        };
        config.application_name("palisade").ssl_mode(mode);
        let count = u32::try_from(hosts.len()).unwrap_or(u32::MAX);
        Ok(Self {
            config,
            login,
            tls,
            patience: settings.connect_timeout / count,
            hosts,
        })
    }

    /// Whether connections are encrypted.
    pub(super) fn is_encrypted(&self) -> bool {
        self.tls.is_some()
    }

    /// The URL without secrets.
    pub(super) fn shown(&self, scheme: &str) -> String {
        let hosts: Vec<String> = self.hosts.iter().map(Host::to_string).collect();
        format!("{scheme}://{}", hosts.join(","))
    }

    /// Connects to the first host that accepts writes, or to the only one. `options` are session
    /// settings, as `-c name=value`.
    ///
    /// # Errors
    /// [`ErrorKind::Unreachable`](palisade_core::ErrorKind::Unreachable), [`ErrorKind::Denied`](palisade_core::ErrorKind::Denied) or [`ErrorKind::Config`](palisade_core::ErrorKind::Config), depending on the
    /// server's answer.
    pub(super) async fn connect(
        &self,
        options: Option<&str>,
        listener: Listener,
    ) -> Result<Connection> {
        let mut config = self.config.clone();
        if let Some(password) = self.login.fresh()?.password {
            config.password(password);
        }
        if let Some(options) = options {
            config.options(options);
        }
        let tls = self.connector()?;
        let mut told: Option<Error> = None;
        for at in 0..self.hosts.len() {
            let dialled = self.dial(at, &config, tls.as_ref());
            let dialled = tokio::time::timeout(self.patience, dialled).await;
            match dialled.unwrap_or_else(|_| Err(self.too_slow(at))) {
                Ok((client, protocol, socket)) => {
                    return Ok(Connection::new(client, protocol, socket, at, listener));
                }
                // An error that needs a fix by the user takes precedence over an unreachable host.
                Err(error) if told.as_ref().is_none_or(Error::is_transient) => told = Some(error),
                Err(_) => {}
            }
        }
        Err(told.unwrap_or_else(|| config_error("no host is named")))
    }

    fn too_slow(&self, at: usize) -> Error {
        let message = format!(
            "{} does not answer within {}",
            self.hosts[at],
            rounded(self.patience)
        );
        no_connection(message)
    }

    async fn dial(
        &self,
        at: usize,
        config: &Config,
        tls: Option<&MakeRustlsConnect>,
    ) -> Result<Dialled> {
        let host = &self.hosts[at];
        let socket = Socket::new(self.open(at).await?);
        let failed = |error| error::connecting(host, &error);
        let (client, mut protocol): (Client, Box<dyn Protocol>) = match tls {
            None => {
                let connected = config.connect_raw(socket.clone(), NoTls).await;
                let (client, connection) = connected.map_err(failed)?;
                (client, Box::new(connection))
            }
            Some(tls) => {
                let connected = config
                    .connect_raw(socket.clone(), self.tls_for(tls, at)?)
                    .await;
                let (client, connection) = connected.map_err(failed)?;
                (client, Box::new(connection))
            }
        };
        if self.hosts.len() > 1 && !takes_writes(&client, &mut *protocol).await? {
            let message = format!("{host} takes no writes: it is a standby");
            return Err(no_connection(message));
        }
        Ok((client, protocol, socket))
    }

    /// Opens a socket with keepalive and timeouts.
    async fn open(&self, at: usize) -> Result<TcpStream> {
        let host = &self.hosts[at];
        let failed = |error: io::Error| error::unreachable(host, &error);
        let found = tokio::net::lookup_host((host.name.as_str(), host.port)).await;
        let addresses: Vec<_> = found.map_err(|_| error::unknown_host(host))?.collect();
        let stream = TcpStream::connect(&*addresses).await.map_err(failed)?;
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

    /// The TLS connector with the certificates as their files are now.
    fn connector(&self) -> Result<Option<MakeRustlsConnect>> {
        let Some(Encryption { tls, connector }) = &self.tls else {
            return Ok(None);
        };
        // The system's certificate authorities are loaded only once, because there are many.
        if tls.ca.is_none() && tls.identity.is_none() {
            return Ok(Some(connector.clone()));
        }
        let fresh = tls.fresh()?.client_config()?;
        Ok(Some(MakeRustlsConnect::new(fresh)))
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

    /// Asks the server to cancel the statement that `connection` waits for.
    pub(super) async fn cancel(&self, connection: &Connection) -> Result<()> {
        let (at, cancel) = (connection.host, connection.client.cancel_token());
        let socket = Socket::new(self.open(at).await?);
        let cancelled = match self.connector()? {
            None => cancel.cancel_query_raw(socket, NoTls).await,
            Some(tls) => {
                let tls = self.tls_for(&tls, at)?;
                cancel.cancel_query_raw(socket, tls).await
            }
        };
        cancelled.map_err(|error| error::connecting(&self.hosts[at], &error))
    }
}

fn has_certificates(url: &Url) -> bool {
    ["tls_ca", "tls_cert", "tls_key"]
        .iter()
        .any(|option| url.has(option))
}

/// Asks a new connection, which has no driver yet, whether the server accepts writes.
async fn takes_writes(client: &Client, protocol: &mut dyn Protocol) -> Result<bool> {
    let ended = poll_fn(|cx| {
        loop {
            match protocol.poll(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Some(Ok(_))) => {}
                Poll::Ready(Some(Err(_)) | None) => return Poll::Ready(()),
            }
        }
    });
    let asked = client.simple_query("SHOW transaction_read_only");
    let rows = tokio::select! {
        biased;
        rows = asked => rows.map_err(|error| error::failed("connect", &error))?,
        () = ended => {
            let message = "the server ended the connection at once";
            return Err(no_connection(message));
        }
    };
    Ok(first_cell(&rows) == Some("off"))
}
