//! What `connect` knows of this engine before it is opened, and what a URL says.

use std::time::Duration;

use super::connection::Server;
use crate::core::capability::{Capability, Guarantee, Tokens};
use crate::core::error::{Error, ErrorKind, Result};
use crate::core::registry::{EngineFactory, EngineInfo};
use crate::core::url::Url;
use crate::engines::kit::{Host, Login, Tls, typed_config};

/// The engine's own options.
pub(super) const OPTIONS: &[&str] = &[
    "password_file",
    "replicas",
    "tls_ca",
    "tls_cert",
    "tls_key",
    "user",
];

pub(super) const CAPABILITY: Capability = Capability {
    class: Guarantee::Timed,
    tokens: Tokens::Floored,
    ..Capability::FULL
};

/// What `connect` knows of it.
pub(crate) const FACTORY: EngineFactory = EngineFactory {
    info: EngineInfo {
        name: "redis",
        schemes: &["redis", "rediss"],
        needs: "a Redis server, 6.2 or newer, or Valkey",
        example: "redis://localhost",
        capability: CAPABILITY,
        options: OPTIONS,
    },
    open: |url, settings| Box::pin(super::open(url, settings)),
    #[cfg(feature = "baseline")]
    baseline: Some(|url, settings| Box::pin(super::baseline::open(url, settings))),
};

typed_config! {
    /// A Redis server, as [`connect`](crate::connect()) takes it.
    Redis
    numbers {
        /// How many replicas must have a grant before it counts.
        replicas: u32
    }
    login { user }
    tls { |url| url.scheme = "rediss".to_owned() }
}

impl Redis {
    /// The server at `host`: `name`, `name:port` or `[address]:port`.
    pub fn new(host: impl Into<String>) -> Self {
        Self(Url::new("redis", vec![host.into()]))
    }

    /// The server that an existing client leads to, with its login and database. Connections of
    /// our own are made: a lock can't wait behind the program's other traffic. Certificates of
    /// the client can't be read back; give them with [`tls_ca`](Self::tls_ca),
    /// [`tls_identity`](Self::tls_identity) or [`tls_config`](Self::tls_config).
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for a Unix socket, and for a client that does not verify the host.
    pub fn from_client(client: &redis::Client) -> Result<Self> {
        use redis::ConnectionAddr::{Tcp, TcpTls};
        let config = |message| Err(Error::new(ErrorKind::Config, "connect", message));
        let info = client.get_connection_info();
        let (host, port, encrypted) = match info.addr() {
            Tcp(host, port) => (host, *port, false),
            TcpTls { insecure: true, .. } => {
                return config(
                    "the client does not verify the host; a lock needs to know whom it asks",
                );
            }
            TcpTls { host, port, .. } => (host, *port, true),
            _ => return config("a Redis server is reached by TCP, not by a Unix socket"),
        };
        let mut this = Self::new(
            Host {
                name: host.clone(),
                port,
            }
            .to_string(),
        );
        let login = info.redis_settings();
        this.0.user = login.username().map(str::to_owned);
        this.0.password = login.password().map(str::to_owned);
        this = this.database(login.db());
        Ok(if encrypted { this.tls() } else { this })
    }

    /// The number of a database, 0 unless it is set.
    pub fn database(mut self, number: impl std::fmt::Display) -> Self {
        self.0.path = format!("/{number}");
        self
    }
}

/// Where a URL leads, and how.
pub(super) struct Target {
    pub(super) server: Server,
    /// How many replicas must have a grant before it counts.
    pub(super) replicas: u32,
}

impl Target {
    /// # Errors
    /// [`ErrorKind::Config`] for what can't be used.
    pub(super) fn take(mut url: Url, connect_timeout: Duration) -> Result<Self> {
        let config = |message| Error::new(ErrorKind::Config, "connect", message);
        let encrypted = url.scheme == "rediss";
        let login = Login::take(&mut url)?;
        let tls = Tls::take(&mut url, encrypted)?;
        let replicas = match url.take("replicas").map(|text| text.parse()) {
            None => 0,
            Some(Ok(replicas @ 0..=100)) => replicas,
            Some(_) => return Err(config("replicas must be a whole number, 0 to 100")),
        };
        url.finish(OPTIONS)?;
        let host = match <[Host; 1]>::try_from(Host::all(&url, 6379)?) {
            Ok([host]) => host,
            Err(_) => return Err(config("redis: takes one host")),
        };
        let db = match url.path.trim_start_matches('/') {
            "" => 0,
            number => number
                .parse::<u16>()
                .map_err(|_| config("the path is the number of a database, as in /0"))?,
        };
        if let Some(tls) = &tls {
            // Says what is wrong with the files before anything is asked.
            tls.client_config()?;
        }
        let server = Server {
            host,
            login,
            tls,
            db,
            connect_timeout,
        };
        Ok(Self { server, replicas })
    }
}
