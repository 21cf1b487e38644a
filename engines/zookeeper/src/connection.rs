//! `Endpoints`: the servers, and how to connect to one of them. `Connection`: one after the session
//! handshake.
//!
//! Servers are tried in turn, starting with a random one. To continue a session, one server is
//! asked at a time, because a session lives on one connection. So a server that did not answer (it
//! hangs, and its connections stay open) is asked last and briefly from then on: a hold may have
//! little time left when the others have elected a leader. A server whose last zxid is lower
//! than what this client has seen refuses it, so neither a lagging server nor one restored from a
//! backup can show an older state.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::proto::{Greeted, greeting, log_in};
use palisade_core::engine::{config_error, no_connection, rounded};
use palisade_core::{BootTime, Error, ErrorKind, Result};
use palisade_kit::{Asked, Host, Login, Tls, about_tls, cause, refuses_ours, why};

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
    /// How often in a row each server did not answer in time.
    silent: Vec<AtomicU32>,
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
            silent: hosts.iter().map(|_| AtomicU32::new(0)).collect(),
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
        for at in self.order() {
            let (host, silent) = (&self.hosts[at], &self.silent[at]);
            let limit = brief(limit, silent.load(Ordering::Relaxed));
            let greet = self.greet(host, session, timeout_ms);
            let greeted = tokio::time::timeout(limit, greet).await;
            if greeted.is_ok() {
                silent.store(0, Ordering::Relaxed);
            } else {
                silent.fetch_add(1, Ordering::Relaxed);
            }
            let error = match greeted {
                Ok(Ok(connection)) if connection.greeted.session == 0 => {
                    return Err(NoConnection::Over);
                }
                Ok(Ok(connection)) => {
                    self.asked.served();
                    // The next connection of this client starts with this server.
                    self.next.store(at, Ordering::Relaxed);
                    return Ok(connection);
                }
                Ok(Err(error)) => error,
                Err(_) => no_connection(format!("{host} did not answer within {}", rounded(limit))),
            };
            // An error that needs a fix by the user takes precedence over a transient one.
            if refused.as_ref().is_none_or(Error::is_transient) {
                refused = Some(error);
            }
        }
        let refused = refused.unwrap_or_else(|| no_connection("there is no server to connect to"));
        Err(NoConnection::Failed(refused))
    }

    /// The servers in the order in which they are asked: in turn, the silent ones last.
    fn order(&self) -> Vec<usize> {
        let first = self.next.fetch_add(1, Ordering::Relaxed);
        let count = self.hosts.len();
        let mut order: Vec<usize> = (0..count).map(|at| (first + at) % count).collect();
        order.sort_by_key(|at| self.silent[*at].load(Ordering::Relaxed) > 0);
        order
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
                if let Some(packet) = take_packet(&mut inbox, GREETING)? {
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
        if error.kind() == io::ErrorKind::InvalidData {
            let message = format!("{host} does not answer as ZooKeeper does");
            return Error::new(ErrorKind::Unusable, "connect", message);
        }
        let hint = if self.is_encrypted() {
            ""
        } else {
            ", or speaks TLS (use zookeepers:)"
        };
        let message = format!(
            "{host} closed the connection: it is not in a majority, lags behind what this client \
             has seen, has as many connections from this address as its maxClientCnxns allows (60 \
             by default){hint}"
        );
        no_connection(message)
    }
}

/// How long a server is asked that was silent so many times: an eighth of the limit, then more, so
/// that one that is only slow is not shut out.
fn brief(limit: Duration, silent: u32) -> Duration {
    match silent.checked_sub(1) {
        None => limit,
        Some(again) => limit / (8 >> (again % 4)),
    }
}

/// The most that the answer to the session handshake has: ids, numbers and a password.
const GREETING: usize = 4 << 10;

/// Takes the first complete packet out of the inbox. One of more than `most` bytes is
/// [`io::ErrorKind::InvalidData`] before it has come.
pub(super) fn take_packet(inbox: &mut Vec<u8>, most: usize) -> io::Result<Option<Vec<u8>>> {
    let Some(length) = inbox.first_chunk::<4>() else {
        return Ok(None);
    };
    let length = u32::from_be_bytes(*length) as usize;
    if length > most {
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
    fn a_silent_server_is_asked_last_and_briefly() {
        let host = |port| Host {
            name: "h".to_owned(),
            port,
        };
        let hosts = [1, 2, 3].map(host).to_vec();
        let limit = Duration::from_millis(800);
        let servers = Endpoints::new(hosts, None, Login::default(), limit).unwrap();
        servers.next.store(0, Ordering::Relaxed);
        servers.silent[1].store(1, Ordering::Relaxed);
        for order in [[0, 2, 1], [2, 0, 1], [2, 0, 1], [0, 2, 1]] {
            assert_eq!(servers.order(), order);
        }
        let limits = [0, 1, 2, 3, 4, 5].map(|silent| brief(limit, silent).as_millis());
        assert_eq!(limits, [800, 100, 200, 400, 800, 100]);
    }

    #[test]
    fn packets_are_taken_whole() {
        let mut inbox = vec![0, 0, 0, 2, 7];
        assert!(take_packet(&mut inbox, 2).unwrap().is_none());
        inbox.extend([8, 0, 0]);
        assert!(take_packet(&mut inbox, 1).is_err());
        assert_eq!(take_packet(&mut inbox, 2).unwrap(), Some(vec![7, 8]));
        assert_eq!(inbox, [0, 0]);
        assert!(take_packet(&mut vec![0xff; 8], 64 << 20).is_err());
    }
}
