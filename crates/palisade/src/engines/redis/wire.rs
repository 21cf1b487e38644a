//! `Wire`: one connection to the server, with its scripts loaded; `Server`: how to make them.
//!
//! RESP3, so that pushes come on the connection that asks. The library's own timeouts are off:
//! connecting is bounded by `Links`, each request by the caller.

use std::sync::Arc;

use redis::aio::MultiplexedConnection;
use redis::{
    AsyncConnectionConfig, Client, ClientTlsConfig, ConnectionAddr, IntoConnectionInfo,
    ProtocolVersion, PushInfo, RedisConnectionInfo, TlsCertificates,
};
use tokio::sync::{OnceCell, watch};

use super::fault::{fault, no_connection};
use super::hub::{Ear, Hub};
use super::scripts::{SOURCES, Script};
use super::turns::Turns;
use crate::core::error::{Error, Kind, Result};
use crate::engines::remote::{Host, Login, Tls, provide};

/// How to reach the server.
#[derive(Clone)]
pub(super) struct Server(Client);

impl Server {
    pub(super) fn new(host: &Host, login: &Login, tls: Option<&Tls>, db: i64) -> Result<Self> {
        let refused = |_| {
            let message = "the connection can't be set up; look at the TLS files";
            Error::new(Kind::Config, "connect", message)
        };
        let mut user = RedisConnectionInfo::default()
            .set_protocol(ProtocolVersion::RESP3)
            .set_lib_name("palisade", env!("CARGO_PKG_VERSION"))
            .set_db(db);
        if let Some(name) = &login.user {
            user = user.set_username(name);
        }
        if let Some(password) = &login.password {
            user = user.set_password(password);
        }
        let (name, port) = (host.name.clone(), host.port);
        let client = match tls {
            None => {
                let info = ConnectionAddr::Tcp(name, port).into_connection_info();
                Client::open(info.map_err(refused)?.set_redis_settings(user))
            }
            Some(tls) => {
                provide();
                // Names what is wrong with the files, which the library would not.
                tls.client_config()?;
                let address = ConnectionAddr::TcpTls {
                    host: name,
                    port,
                    insecure: false,
                    tls_params: None,
                };
                let info = address.into_connection_info().map_err(refused)?;
                let client_tls = tls.identity.clone().map(|(cert, key)| ClientTlsConfig {
                    client_cert: cert,
                    client_key: key,
                });
                let root_cert = tls.ca.clone();
                let certificates = TlsCertificates {
                    client_tls,
                    root_cert,
                };
                Client::build_with_tls(info.set_redis_settings(user), certificates)
            }
        };
        Ok(Self(client.map_err(refused)?))
    }

    /// A bare connection whose pushes go to `hear`.
    pub(super) async fn connect(
        &self,
        hear: impl Fn(PushInfo) + Send + Sync + 'static,
    ) -> Result<MultiplexedConnection> {
        let hear = move |push| {
            hear(push);
            Ok::<(), ()>(())
        };
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(None)
            .set_response_timeout(None)
            .set_push_sender(hear);
        self.0
            .get_multiplexed_async_connection_with_config(&config)
            .await
            .map_err(|error| no_connection(&error))
    }
}

/// One connection, shared by the tasks of one runtime.
#[derive(Clone)]
pub(super) struct Wire {
    pub(super) connection: MultiplexedConnection,
    shared: Arc<Shared>,
}

struct Shared {
    hashes: Vec<String>,
    over: watch::Receiver<bool>,
    /// Whether it hears of grants, and of evictions.
    wakes: OnceCell<()>,
    alarms: OnceCell<()>,
    enters: Turns,
    leaves: Turns,
}

impl Wire {
    pub(super) async fn connect(server: Server, hub: Arc<Hub>) -> Result<Self> {
        let (ear, over) = Ear::new(hub);
        let mut connection = server.connect(move |push| ear.hear(&push)).await?;
        let mut load = redis::pipe();
        for source in SOURCES {
            load.cmd("SCRIPT").arg("LOAD").arg(source);
        }
        let loaded: redis::RedisResult<Vec<String>> = load.query_async(&mut connection).await;
        let hashes = loaded.map_err(|error| no_connection(&error))?;
        Ok(Self {
            connection,
            shared: Arc::new(Shared {
                hashes,
                over,
                wakes: OnceCell::new(),
                alarms: OnceCell::new(),
                enters: Turns::default(),
                leaves: Turns::default(),
            }),
        })
    }

    /// What the server calls a script.
    pub(super) fn hash(&self, script: Script) -> &str {
        self.shared
            .hashes
            .get(script as usize)
            .map_or("", String::as_str)
    }

    /// The enters, or the leaves, that it is asked for.
    pub(super) fn turns(&self, script: Script) -> &Turns {
        match script {
            Script::Leave => &self.shared.leaves,
            _ => &self.shared.enters,
        }
    }

    /// Whether it is known to have ended.
    pub(super) fn is_over(&self) -> bool {
        *self.shared.over.borrow()
    }

    /// Learns of its end without keeping it open.
    pub(super) fn over(&self) -> watch::Receiver<bool> {
        self.shared.over.clone()
    }

    /// Whether it hears of grants already.
    pub(super) fn hears_wakes(&self) -> bool {
        self.shared.wakes.initialized()
    }

    /// Hears of grants from here on.
    pub(super) async fn hear_wakes(&self, hub: &Hub) -> Result<()> {
        let hear = || self.subscribe(hub.wake_channel());
        self.shared.wakes.get_or_try_init(hear).await.copied()
    }

    /// Hears of evictions from here on.
    pub(super) async fn hear_alarms(&self, hub: &Hub) -> Result<()> {
        let hear = || self.subscribe(hub.alarm_channel());
        self.shared.alarms.get_or_try_init(hear).await.copied()
    }

    async fn subscribe(&self, channel: String) -> Result<()> {
        match self.connection.clone().subscribe(channel).await {
            Ok(()) => Ok(()),
            // A user without the right to channels still locks: waiters look now and then, and
            // `check` says what is missing.
            Err(error) if error.code() == Some("NOPERM") => Ok(()),
            Err(error) => Err(fault("subscribe", &error)),
        }
    }
}
