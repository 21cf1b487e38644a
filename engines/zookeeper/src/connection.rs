//! `Endpoints`: the servers, and how to connect to one of them. `Connection`: one after the session
//! handshake.
//!
//! Servers are tried in turn, starting with a random one. To continue a session, one server is
//! asked at a time, because a session lives on one connection. A server whose last zxid is lower
//! than what this client has seen refuses it, so neither a lagging server nor one restored from a
//! backup can show an older state.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::time::Duration;

use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::proto::{Greeted, greeting, log_in};
use palisade_core::engine::{config_error, no_connection};
use palisade_core::{BootTime, Error, Result};
use palisade_kit::{Asked, Host, Login, Tls, about_tls, cause, refuses_ours, why};

/// More than any packet that a server sends (`jute.maxbuffer` is 1 MiB by default).
const PACKET_MAX: usize = 64 << 20;

/// A byte stream to a server.
pub(super) trait Bytes: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Bytes for T {}

/// The servers of one ensemble.
pub(super) struct Endpoints {
    pub(super) hosts: Vec<Host>,
    tls: Option<Tls>,
    login: Login,
    pub(super) connect_timeout: Duration,
    next: AtomicUsize,
    /// The highest zxid that any session of this client has seen.
    seen: AtomicI64,
    asked: Asked,
}

/// The credentials to continue a session.
#[derive(Debug, Clone)]
pub(super) struct Ticket {
    pub(super) session: i64,
    pub(super) password: Vec<u8>,
}

/// A connection on which the server has accepted a session.
pub(super) struct Connection {
    pub(super) stream: Box<dyn Bytes>,
    pub(super) inbox: Vec<u8>,
    pub(super) greeted: Greeted,
    /// When the connect request was sent.
    pub(super) sent: BootTime,
    /// The auth packet, if there is a login.
    pub(super) login: Option<Vec<u8>>,
}

/// Why there is no connection.
#[derive(Debug)]
pub(super) enum NoConnection {
    /// The session has ended.
    Over,
    Failed(Error),
}

impl Endpoints {
    /// # Errors
    /// [`ErrorKind::Config`](palisade_core::ErrorKind::Config) when the certificate files can't be used.
    pub(super) fn new(
        hosts: Vec<Host>,
        tls: Option<Tls>,
        login: Login,
        connect_timeout: Duration,
    ) -> Result<Self> {
        // Fails now and not at the first connection.
        if let Some(tls) = &tls {
            tls.client_config()?;
        }
        Ok(Self {
            // Clients of one ensemble spread over its servers.
            next: AtomicUsize::new(rand::random_range(0..hosts.len())),
            hosts,
            tls,
            login,
            connect_timeout,
            seen: AtomicI64::new(0),
            asked: Asked::default(),
        })
    }

    pub(super) fn is_encrypted(&self) -> bool {
        self.tls.is_some()
    }

    /// Records a zxid that a server had applied.
    pub(super) fn saw(&self, zxid: i64) {
        self.seen.fetch_max(zxid, Ordering::Relaxed);
    }

    /// Connects to the first server that accepts the session, or opens a new session; `limit` is
    /// per server.
    pub(super) async fn connect(
        &self,
        session: Option<&Ticket>,
        timeout_ms: i32,
        limit: Duration,
    ) -> std::result::Result<Connection, NoConnection> {
        let mut refused: Option<Error> = None;
        for _ in &self.hosts {
            let next = self.next.fetch_add(1, Ordering::Relaxed);
            let host = &self.hosts[next % self.hosts.len()];
            let greet = self.greet(host, session, timeout_ms);
            let error = match tokio::time::timeout(limit, greet).await {
                Ok(Ok(connection)) if connection.greeted.session == 0 => {
                    return Err(NoConnection::Over);
                }
                Ok(Ok(connection)) => {
                    self.asked.served();
                    // The next connection of this client starts with this server.
                    self.next.fetch_sub(1, Ordering::Relaxed);
                    return Ok(connection);
                }
                Ok(Err(error)) => error,
                Err(_) => no_connection(format!("{host} did not answer within {limit:?}")),
            };
            // An error that needs a fix by the user takes precedence over a transient one.
            if refused.as_ref().is_none_or(Error::is_transient) {
                refused = Some(error);
            }
        }
        let refused = refused.unwrap_or_else(|| no_connection("there is no server to connect to"));
        Err(NoConnection::Failed(refused))
    }

    async fn greet(
        &self,
        host: &Host,
        session: Option<&Ticket>,
        timeout_ms: i32,
    ) -> Result<Connection> {
        // The login may have been rotated since the last connection.
        let login = self.login.fresh()?;
        let login = login.user.map(|user| {
            let secret = format!("{user}:{}", login.password.unwrap_or_default());
            log_in("digest", secret.as_bytes())
        });
        let mut stream = self.dial(host).await?;
        let (id, password) = session.map_or((0, &[0; 16][..]), |ticket| {
            (ticket.session, ticket.password.as_slice())
        });
        let seen = self.seen.load(Ordering::Relaxed);
        let greeting = greeting(seen, timeout_ms, id, password);
        let sent = BootTime::now();
        let greeted = async {
            stream.write_all(&greeting).await?;
            stream.flush().await?;
            let mut inbox = Vec::new();
            loop {
                if let Some(packet) = take_packet(&mut inbox)? {
                    return Ok((packet, inbox));
                }
                if stream.read_buf(&mut inbox).await? == 0 {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
            }
        };
        let (packet, inbox) = greeted
            .await
            .map_err(|error| self.no_greeting(host, &error))?;
        let greeted = Greeted::read(&packet)
            .map_err(|_| no_connection(format!("{host} does not answer as ZooKeeper does")))?;
        Ok(Connection {
            stream,
            inbox,
            greeted,
            sent,
            login,
        })
    }

    /// Opens a byte stream, before the session handshake.
    ///
    /// # Errors
    /// [`ErrorKind::Unreachable`](palisade_core::ErrorKind::Unreachable) when the server can't be reached; [`ErrorKind::Config`](palisade_core::ErrorKind::Config) when TLS
    /// can't be negotiated.
    pub(super) async fn dial(&self, host: &Host) -> Result<Box<dyn Bytes>> {
        let no_tcp = |error: io::Error| {
            let why = why(&error, true);
            let message = format!("{host} can't be connected to{why}; is ZooKeeper running there?");
            no_connection(message)
        };
        let stream = TcpStream::connect((host.name.as_str(), host.port)).await;
        let stream = stream.map_err(no_tcp)?;
        stream.set_nodelay(true).map_err(no_tcp)?;
        let Some(tls) = &self.tls else {
            return Ok(Box::new(stream));
        };
        let client = self.asked.config(tls)?;
        let whom = ServerName::try_from(host.name.clone());
        let whom = whom.map_err(|_| config_error("the host's name can't be in a certificate"))?;
        let connected = TlsConnector::from(Arc::new(client))
            .connect(whom, stream)
            .await;
        let stream = connected.map_err(|error| match cause::<rustls::Error>(&error) {
            Some(tls) => config_error(about_tls("ZooKeeper", "zookeeper", tls)),
            None => self.no_greeting(host, &error),
        })?;
        Ok(Box::new(stream))
    }

    /// Explains why a server did not accept the session handshake.
    fn no_greeting(&self, host: &Host, error: &io::Error) -> Error {
        if let Some(tls) = cause::<rustls::Error>(error) {
            return config_error(about_tls("ZooKeeper", "zookeeper", tls));
        }
        if self.is_encrypted() && self.asked.in_vain() {
            return config_error(refuses_ours("ZooKeeper"));
        }
        let hint = if self.is_encrypted() {
            ""
        } else {
            ", or speaks TLS (use zookeepers:)"
        };
        let message = format!(
            "{host} closed the connection: it is not in a majority, lags behind what this client \
             has seen{hint}"
        );
        no_connection(message)
    }
}

/// Takes the first complete packet out of the inbox.
pub(super) fn take_packet(inbox: &mut Vec<u8>) -> io::Result<Option<Vec<u8>>> {
    let Some(length) = inbox.first_chunk::<4>() else {
        return Ok(None);
    };
    let length = u32::from_be_bytes(*length) as usize;
    if length > PACKET_MAX {
        return Err(io::ErrorKind::InvalidData.into());
    }
    if inbox.len() < 4 + length {
        return Ok(None);
    }
    let packet = inbox[4..4 + length].to_vec();
    inbox.drain(..4 + length);
    Ok(Some(packet))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_are_taken_whole() {
        let mut inbox = vec![0, 0, 0, 2, 7];
        assert!(take_packet(&mut inbox).unwrap().is_none());
        inbox.extend([8, 0, 0]);
        assert_eq!(take_packet(&mut inbox).unwrap(), Some(vec![7, 8]));
        assert_eq!(inbox, [0, 0]);
        assert!(take_packet(&mut vec![0xff; 8]).is_err());
    }
}
