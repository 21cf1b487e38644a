//! `Connection`: one connection to a server, with its scripts loaded. `Server`: how to connect.
//!
//! The connection uses RESP3, so pushes arrive on the connection that sends requests. TCP and TLS
//! are set up here and not by the library, so that errors name the step that failed, and so that
//! secrets and certificates are read afresh for each connection. The library's own timeouts are
//! off: `PerRuntime` bounds connecting, and the caller bounds each request.

use std::sync::Arc;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{
    AsyncConnectionConfig, ProtocolVersion, PushInfo, RedisConnectionInfo, RedisError, RedisResult,
};
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{OnceCell, watch};
use tokio::task::AbortHandle;
use tokio_rustls::TlsConnector;

use super::client::{OF_ONE_SERVER, SOURCES, Script, WORK};
use super::error::{fault, no_connection, no_login, no_tcp, no_tls};
use super::limit::{Limit, Limited, Room};
use super::notify::{PushReceiver, alarm_channel, wake_channel};
use palisade_core::engine::{config_error, rounded};
use palisade_core::{BootTime, Error, ErrorKind, Result};
use palisade_kit::push::PushHub;
use palisade_kit::{Asked, Host, Login, Tls, refuses_ours};

/// A plain-text server takes the TLS hello for an unfinished command and waits for the rest. After
/// this fraction of the connect timeout, a plain `PING` tells whether it is one.
const HANDSHAKE: (u32, u32) = (2, 3);

#[derive(Clone)]
pub(crate) struct Server {
    pub(crate) host: Host,
    pub(crate) login: Login,
    pub(crate) tls: Option<Tls>,
    pub(crate) db: u16,
    pub(crate) connect_timeout: Duration,
}

impl Server {
    /// A connection whose pushes go to `on_push`, and the handle of the task that drives it.
    pub(crate) async fn connect(
        &self,
        on_push: impl Fn(PushInfo) + Send + Sync + 'static,
    ) -> Result<(MultiplexedConnection, AbortHandle)> {
        self.connect_within(&Arc::default(), on_push).await
    }

    /// The same, with a limit for its replies.
    async fn connect_within(
        &self,
        within: &Arc<Limit>,
        on_push: impl Fn(PushInfo) + Send + Sync + 'static,
    ) -> Result<(MultiplexedConnection, AbortHandle)> {
        let host = &self.host;
        // Both may have been rotated since the last connection.
        let login = self.login.fresh()?;
        let tls = self.tls.as_ref().map(Tls::fresh).transpose()?;
        let stream = TcpStream::connect((host.name.as_str(), host.port)).await;
        let stream = stream.map_err(|error| no_tcp(host, &error))?;
        stream
            .set_nodelay(true)
            .map_err(|error| no_tcp(host, &error))?;
        let Some(tls) = tls else {
            return self.greet(stream, &login, within, on_push).await;
        };
        let asked = Asked::default();
        let mut config = tls.client_config()?;
        asked.watch(&mut config);
        let whom = ServerName::try_from(host.name.clone()).map_err(|_| {
            let message = format!("{host}: no certificate can name this host");
            config_error(message)
        })?;
        let handshake = TlsConnector::from(Arc::new(config)).connect(whom, stream);
        let limit = self.connect_timeout * HANDSHAKE.0 / HANDSHAKE.1;
        let stream = match tokio::time::timeout(limit, handshake).await {
            Ok(stream) => stream.map_err(|error| no_tls(host, &error))?,
            Err(_) => return Err(self.no_handshake(limit).await),
        };
        let greeted = self.greet(stream, &login, within, on_push).await;
        greeted.map_err(|error| match error.kind() {
            ErrorKind::Unreachable if asked.in_vain() => {
                let message = refuses_ours(&format!("Redis at {host}"));
                config_error(message)
            }
            _ => error,
        })
    }

    /// Logs in over an open stream.
    async fn greet<S>(
        &self,
        stream: S,
        login: &Login,
        within: &Arc<Limit>,
        on_push: impl Fn(PushInfo) + Send + Sync + 'static,
    ) -> Result<(MultiplexedConnection, AbortHandle)>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let mut user = RedisConnectionInfo::default()
            .set_protocol(ProtocolVersion::RESP3)
            .set_lib_name("palisade", env!("CARGO_PKG_VERSION"))
            .set_db(i64::from(self.db));
        if let Some(name) = &login.user {
            // Without a password the library would log in as the default user. A `nopass` user
            // accepts any.
            user = user.set_username(name).set_password("");
        }
        if let Some(password) = &login.password {
            user = user.set_password(password);
        }
        let on_push = move |push| {
            on_push(push);
            Ok::<(), ()>(())
        };
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(None)
            .set_response_timeout(None)
            .set_push_sender(on_push);
        let stream = Limited::new(stream, Arc::clone(within));
        let greeted = MultiplexedConnection::new_with_config(&user, stream, config).await;
        let (connection, driver) = greeted.map_err(|error| {
            let too_large = within.error("connect", &self.host);
            too_large.unwrap_or_else(|| no_login(self, login, &error))
        })?;
        Ok((connection, tokio::spawn(driver).abort_handle()))
    }

    /// Explains why a TLS handshake timed out.
    async fn no_handshake(&self, waited: Duration) -> Error {
        let host = &self.host;
        let plain = async {
            let mut stream = TcpStream::connect((host.name.as_str(), host.port)).await?;
            stream.write_all(b"PING\r\n").await?;
            let mut answer = [0; 1];
            stream.read_exact(&mut answer).await?;
            Ok::<_, std::io::Error>(answer[0])
        };
        let limit = (self.connect_timeout - waited) / 2;
        match tokio::time::timeout(limit, plain).await {
            Ok(Ok(b'+' | b'-')) => {
                let message = format!(
                    "{host} does not speak TLS; use redis: in place of rediss:, or the port for TLS"
                );
                config_error(message)
            }
            _ => {
                let message = format!(
                    "{host} did not answer to TLS within {}; is it a port for TLS?",
                    rounded(waited)
                );
                Error::new(ErrorKind::Unreachable, "connect", message)
            }
        }
    }
}

/// Called with the key of a line when a message says that the line is free.
pub(crate) type Freed = Arc<dyn Fn(&str) + Send + Sync>;

/// The role of a connection's server.
#[derive(Clone)]
pub(crate) enum Role {
    /// A single server.
    Alone,
    /// The master that Sentinel names.
    Master,
    /// One of the masters of a Cluster.
    Shard,
    /// One of the independent servers of `redlock:`.
    Voter(Freed),
}

/// One run of a server process: `run_id` changes with every restart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) run_id: String,
    pub(crate) started: BootTime,
}

impl Identity {
    /// Parses the reply to `INFO server`, sent at `asked`.
    fn read(info: &str, asked: BootTime) -> Option<Self> {
        let field = |name: &str| info.lines().find_map(|line| line.strip_prefix(name));
        let up: u64 = field("uptime_in_seconds:")?.trim().parse().ok()?;
        let up = Duration::from_secs(up).as_nanos() as u64;
        Some(Self {
            run_id: field("run_id:")?.trim().to_owned(),
            // The uptime is in whole seconds, rounded down, so the server may have started up to a
            // second earlier.
            started: BootTime::from_nanos(asked.as_nanos().saturating_sub(up)),
        })
    }
}

/// One connection, shared by the tasks of one runtime.
#[derive(Clone)]
pub(crate) struct Connection {
    pub(crate) multiplexed: MultiplexedConnection,
    shared: Arc<Shared>,
}

struct Shared {
    host: Host,
    limit: Arc<Limit>,
    identity: Option<Identity>,
    hashes: Vec<String>,
    /// The hashes of the scripts of work queues, once a queue was used.
    work: OnceCell<Vec<String>>,
    over: watch::Receiver<bool>,
    /// Set once the connection is subscribed to grants, or to evictions (`alarms`).
    grants: OnceCell<()>,
    alarms: OnceCell<()>,
    driver: AbortHandle,
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Otherwise the driver would run until an unresponsive server has taken what is in flight.
        self.driver.abort();
    }
}

impl Connection {
    pub(crate) async fn open(server: Server, hub: Arc<PushHub>, role: Role) -> Result<Self> {
        let (scripts, freed) = match &role {
            Role::Alone | Role::Master | Role::Shard => (OF_ONE_SERVER, None),
            Role::Voter(freed) => (SOURCES.len(), Some(Arc::clone(freed))),
        };
        let (receiver, over) = PushReceiver::new(hub, freed);
        let on_push = move |push| receiver.receive(&push);
        let limit = Arc::default();
        let (multiplexed, driver) = server.connect_within(&limit, on_push).await?;
        let no_connection = |host: &Host, error: &RedisError| {
            let too_large = limit.error("connect", host);
            too_large.unwrap_or_else(|| no_connection(host, error))
        };
        let (mut loading, mut asking) = (multiplexed.clone(), multiplexed.clone());
        let mut load = redis::pipe();
        for source in &SOURCES[..scripts] {
            load.cmd("SCRIPT").arg("LOAD").arg(source);
        }
        let mut cluster = redis::cmd("CLUSTER");
        cluster.arg("INFO");
        let (loaded, cluster): (RedisResult<Vec<String>>, RedisResult<String>) = tokio::join!(
            load.query_async(&mut loading),
            cluster.query_async(&mut asking),
        );
        let hashes = loaded.map_err(|error| no_connection(&server.host, &error))?;
        if let (Ok(info), false) = (cluster, matches!(role, Role::Shard)) {
            one_node(&server.host, &info)?;
        }
        if let Role::Master = role {
            is_master(&server.host, &multiplexed).await?;
        }
        let mut identity = None;
        if let Role::Voter(_) = role {
            let mut info = redis::cmd("INFO");
            info.arg("server");
            let asked = BootTime::now();
            let told: RedisResult<String> = info.query_async(&mut multiplexed.clone()).await;
            let told = told.map_err(|error| no_connection(&server.host, &error))?;
            identity = Identity::read(&told, asked);
        }
        Ok(Self {
            multiplexed,
            shared: Arc::new(Shared {
                host: server.host.clone(),
                limit: Arc::clone(&limit),
                identity,
                hashes,
                work: OnceCell::new(),
                over,
                grants: OnceCell::new(),
                alarms: OnceCell::new(),
                driver,
            }),
        })
    }

    /// The hash that the server knows a script by. With an unknown one the server answers NOSCRIPT,
    /// and the script is sent in full.
    pub(crate) fn hash(&self, script: Script) -> &str {
        match (script as usize).checked_sub(SOURCES.len()) {
            None => self.shared.hashes.get(script as usize),
            Some(at) => self.shared.work.get().and_then(|hashes| hashes.get(at)),
        }
        .map_or("", String::as_str)
    }

    /// Loads the scripts of work queues, once. A failure surfaces when one of them is run.
    pub(super) async fn load_work(&self) {
        let load = || async {
            let mut load = redis::pipe();
            for source in &WORK {
                load.cmd("SCRIPT").arg("LOAD").arg(source);
            }
            load.query_async(&mut self.multiplexed.clone()).await
        };
        let _: RedisResult<_> = self.shared.work.get_or_try_init(load).await;
    }

    /// Allows a larger reply until the guard is dropped.
    pub(super) fn expect(&self, more: usize) -> Room {
        self.shared.limit.expect(more)
    }

    /// The error if the connection ended because a reply was too large.
    pub(super) fn too_large(&self, operation: &'static str) -> Option<Error> {
        let error = self.shared.limit.error(operation, self.host())?;
        Some(error.maybe_applied())
    }

    pub(crate) fn host(&self) -> &Host {
        &self.shared.host
    }

    /// The server's identity, which is read only from the servers of `redlock:`.
    pub(crate) fn identity(&self) -> Option<&Identity> {
        self.shared.identity.as_ref()
    }

    /// Whether the connection is known to have ended.
    pub(crate) fn is_over(&self) -> bool {
        *self.shared.over.borrow()
    }

    /// Signals the end of the connection without keeping it open.
    pub(crate) fn over(&self) -> watch::Receiver<bool> {
        self.shared.over.clone()
    }

    /// Whether the connection is subscribed to grants.
    pub(super) fn receives_grants(&self) -> bool {
        self.shared.grants.initialized()
    }

    /// Subscribes to grants, once.
    pub(super) async fn subscribe_to_grants(&self, hub: &PushHub) -> Result<()> {
        let subscribe = || self.subscribe(wake_channel(hub));
        self.shared.grants.get_or_try_init(subscribe).await.copied()
    }

    /// Subscribes to evictions, once.
    pub(super) async fn subscribe_to_alarms(&self, hub: &PushHub) -> Result<()> {
        let subscribe = || self.subscribe(alarm_channel(hub));
        self.shared.alarms.get_or_try_init(subscribe).await.copied()
    }

    pub(crate) async fn subscribe(&self, channel: String) -> Result<()> {
        match self.multiplexed.clone().subscribe(channel).await {
            Ok(()) => Ok(()),
            // A user without the right to subscribe can still lock: waiters poll, and `check`
            // reports the missing right.
            Err(error) if error.code() == Some("NOPERM") => Ok(()),
            Err(error) => Err(fault("subscribe", &error)),
        }
    }
}

/// Refuses a server whose own role is not master: the sentinels' view may be ahead of it or behind
/// it.
async fn is_master(host: &Host, connection: &MultiplexedConnection) -> Result<()> {
    let mut info = redis::cmd("INFO");
    info.arg("replication");
    let told: RedisResult<String> = info.query_async(&mut connection.clone()).await;
    let told = told.map_err(|error| no_connection(host, &error))?;
    if told.lines().any(|line| line.trim_end() == "role:master") {
        return Ok(());
    }
    let message = format!("{host} is named as the master, but is not one (yet)");
    Err(Error::new(ErrorKind::Unreachable, "connect", message))
}

/// Refuses one of several masters of a cluster: it serves only the lines of its own slots. A
/// cluster node that owns all slots works like a single server.
fn one_node(host: &Host, info: &str) -> Result<()> {
    let number = |key: &str| {
        let line = info.lines().find_map(|line| line.strip_prefix(key))?;
        line.trim().parse::<u32>().ok()
    };
    let message = match (number("cluster_size:"), number("cluster_slots_assigned:")) {
        (Some(nodes @ 2..), _) => format!(
            "{host} is one of {nodes} primaries of a Redis Cluster, and has the lines of its own slots only; use redis+cluster:"
        ),
        (_, Some(slots @ 0..16384)) => format!(
            "{host} is in cluster mode and has only {slots} of 16384 slots; give it all of them (CLUSTER ADDSLOTSRANGE 0 16383), or turn cluster mode off"
        ),
        _ => return Ok(()),
    };
    Err(config_error(message))
}
