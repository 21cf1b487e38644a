//! What `connect` knows of this engine before it is opened, and what a URL says.

use std::time::Duration;

use super::connection::Server;
use palisade_core::engine::{EngineFactory, EngineInfo, Tokens, Url, config_error};
use palisade_core::{Capability, Guarantee, Result};
use palisade_kit::{Host, Login, Tls, typed_config};

/// The engine's own options.
pub(crate) const OPTIONS: &[&str] = &[
    "password_file",
    "replicas",
    "tls_ca",
    "tls_cert",
    "tls_key",
    "user",
];

pub(crate) const CAPABILITY: Capability = {
    let mut can = Capability::FULL;
    can.class = Guarantee::Timed;
    can.tokens = Tokens::Floored;
    can.queue = true;
    can
};

/// What `connect` knows of it.
pub const FACTORY: EngineFactory = EngineFactory {
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
    /// A Redis server, as `palisade::connect` takes it.
    Redis
    numbers {
        /// How many replicas must have a grant before it counts.
        replicas: u32
    }
    login { user }
    tls { |url| {
        if !url.scheme.starts_with("rediss") {
            url.scheme = url.scheme.replacen("redis", "rediss", 1);
        }
    } }
}

impl Redis {
    /// The server at `host`: `name`, `name:port` or `[address]:port`.
    pub fn new(host: impl Into<String>) -> Self {
        Self(Url::new("redis", vec![host.into()]))
    }

    /// The master that these Sentinels know by a name.
    pub fn sentinel(
        sentinels: impl IntoIterator<Item = impl Into<String>>,
        master: impl std::fmt::Display,
    ) -> Self {
        let hosts = sentinels.into_iter().map(Into::into).collect();
        let mut url = Url::new("redis+sentinel", hosts);
        url.path = format!("/{master}");
        Self(url)
    }

    /// The Cluster that some of its nodes lead to.
    pub fn cluster(nodes: impl IntoIterator<Item = impl Into<String>>) -> Self {
        let hosts = nodes.into_iter().map(Into::into).collect();
        Self(Url::new("redis+cluster", hosts))
    }

    /// The server that an existing client leads to, with its login and database. Connections of
    /// our own are made: a lock can't wait behind the program's other traffic. Certificates of
    /// the client can't be read back; give them with [`tls_ca`](Self::tls_ca),
    /// [`tls_identity`](Self::tls_identity) or [`tls_config`](Self::tls_config).
    ///
    /// # Errors
    /// [`Config`](palisade_core::ErrorKind::Config) for a Unix socket, and for a client that does not verify
    /// the host.
    pub fn from_client(client: &redis::Client) -> Result<Self> {
        use redis::ConnectionAddr::{Tcp, TcpTls};
        let info = client.get_connection_info();
        let (host, port, encrypted) = match info.addr() {
            Tcp(host, port) => (host, *port, false),
            TcpTls { insecure: true, .. } => {
                return Err(config_error(
                    "the client does not verify the host; a lock needs to know whom it asks",
                ));
            }
            TcpTls { host, port, .. } => (host, *port, true),
            _ => {
                return Err(config_error(
                    "a Redis server is reached by TCP, not by a Unix socket",
                ));
            }
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
        // Behind Sentinel the name of the master comes first.
        let path = if self.0.scheme.ends_with("+sentinel") {
            self.0.path.split('/').nth(1).unwrap_or_default()
        } else {
            ""
        };
        self.0.path = format!("{}{path}/{number}", if path.is_empty() { "" } else { "/" });
        self
    }
}
/// What `connect` knows of it behind Sentinel.
pub const SENTINEL: EngineFactory = EngineFactory {
    info: EngineInfo {
        name: "redis+sentinel",
        schemes: &["redis+sentinel", "rediss+sentinel"],
        needs: "Redis 6.2 or newer, or Valkey, with Sentinel",
        example: "redis+sentinel://sentinel1,sentinel2,sentinel3/MASTER",
        capability: CAPABILITY,
        options: SENTINEL_OPTIONS,
    },
    open: |url, settings| Box::pin(super::open(url, settings)),
    #[cfg(feature = "baseline")]
    baseline: None,
};

const SENTINEL_OPTIONS: &[&str] = &[
    "password_file",
    "replicas",
    "sentinel_password_file",
    "sentinel_user",
    "tls_ca",
    "tls_cert",
    "tls_key",
    "user",
];

/// What `connect` knows of it as a Cluster.
pub const CLUSTER: EngineFactory = EngineFactory {
    info: EngineInfo {
        name: "redis+cluster",
        schemes: &["redis+cluster", "rediss+cluster"],
        needs: "a Redis Cluster, 6.2 or newer, or Valkey",
        example: "redis+cluster://redis1,redis2,redis3",
        capability: CAPABILITY,
        options: OPTIONS,
    },
    open: |url, settings| Box::pin(super::open(url, settings)),
    #[cfg(feature = "baseline")]
    baseline: None,
};

/// Where a URL leads, and how.
pub(super) struct Target {
    pub(super) way: Way,
    /// How many replicas must have a grant before it counts.
    pub(super) replicas: u32,
}

/// How the server of a line is found.
pub(super) enum Way {
    One(Server),
    Sentinel {
        /// What the sentinels call the master.
        name: String,
        sentinels: Vec<Server>,
        access: Access,
        db: u16,
    },
    Cluster {
        seeds: Vec<Host>,
        access: Access,
    },
}

impl Target {
    /// # Errors
    /// [`ErrorKind::Config`](palisade_core::ErrorKind::Config) for what can't be used.
    pub(super) fn take(mut url: Url, connect_timeout: Duration) -> Result<Self> {
        let encrypted = url.scheme.starts_with("rediss");
        let access = Access::take(&mut url, encrypted, connect_timeout)?;
        let replicas = match url.take("replicas").map(|text| text.parse()) {
            None => 0,
            Some(Ok(replicas @ 0..=100)) => replicas,
            Some(_) => return Err(config_error("replicas must be a whole number, 0 to 100")),
        };
        let way = match url.scheme.split_once('+').map(|(_, way)| way) {
            Some("sentinel") => sentinel(&mut url, access)?,
            Some(_) => Way::Cluster {
                seeds: Host::all(&url, 6379)?,
                access,
            },
            None => match <[Host; 1]>::try_from(Host::all(&url, 6379)?) {
                Ok([host]) => Way::One(access.to(host, database(&url.path)?)),
                Err(_) => {
                    return Err(config_error(
                        "redis: takes one host; several are redlock:, redis+sentinel: or redis+cluster:",
                    ));
                }
            },
        };
        if let Way::Cluster { .. } = way
            && database(&url.path)? != 0
        {
            let message = "a Redis Cluster has no database but 0; name no other in the URL";
            return Err(config_error(message));
        }
        let known = match way {
            Way::Sentinel { .. } => SENTINEL_OPTIONS,
            Way::One(_) | Way::Cluster { .. } => OPTIONS,
        };
        url.finish(known)?;
        Ok(Self { way, replicas })
    }

    /// The one server.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](palisade_core::ErrorKind::Config) when there are more.
    #[cfg(feature = "baseline")]
    pub(super) fn server(self) -> Result<Server> {
        match self.way {
            Way::One(server) => Ok(server),
            _ => Err(config_error("there is no baseline of several servers")),
        }
    }
}

/// `redis+sentinel://H1,H2,H3/MASTER[/DB]`.
fn sentinel(url: &mut Url, access: Access) -> Result<Way> {
    let path = url.path.trim_matches('/');
    let (name, db) = path.split_once('/').unwrap_or((path, ""));
    if name.is_empty() {
        return Err(config_error(
            "redis+sentinel: needs the name of the master as its path, as in redis+sentinel://HOSTS/mymaster",
        ));
    }
    let (name, db) = (name.to_owned(), database(db)?);
    let login = Login::take_apart(url, "sentinel_user", "sentinel_password_file")?;
    let to_sentinels = access.logging_in(login);
    let hosts = Host::all(url, 26379)?.into_iter();
    Ok(Way::Sentinel {
        name,
        sentinels: hosts.map(|host| to_sentinels.to(host, 0)).collect(),
        access,
        db,
    })
}

/// How servers are reached, whichever they are.
#[derive(Clone)]
pub(crate) struct Access {
    login: Login,
    tls: Option<Tls>,
    connect_timeout: Duration,
}

impl Access {
    /// # Errors
    /// [`ErrorKind::Config`](palisade_core::ErrorKind::Config) for a login or files that can't be used.
    pub(crate) fn take(url: &mut Url, encrypted: bool, connect_timeout: Duration) -> Result<Self> {
        let login = Login::take(url)?;
        let tls = Tls::take(url, encrypted)?;
        if let Some(tls) = &tls {
            // Says what is wrong with the files before anything is asked.
            tls.client_config()?;
        }
        Ok(Self {
            login,
            tls,
            connect_timeout,
        })
    }

    pub(crate) fn is_encrypted(&self) -> bool {
        self.tls.is_some()
    }

    /// The same for servers with another login.
    fn logging_in(&self, login: Login) -> Self {
        Self {
            login,
            ..self.clone()
        }
    }

    /// One of the servers.
    pub(crate) fn to(&self, host: Host, db: u16) -> Server {
        Server {
            host,
            login: self.login.clone(),
            tls: self.tls.clone(),
            db,
            connect_timeout: self.connect_timeout,
        }
    }
}

/// The number of the database that a path names.
///
/// # Errors
/// [`ErrorKind::Config`](palisade_core::ErrorKind::Config) for any other path.
pub(crate) fn database(path: &str) -> Result<u16> {
    match path.trim_start_matches('/') {
        "" => Ok(0),
        number => number.parse().map_err(|_| {
            let message = "the path is the number of a database, as in /0";
            config_error(message)
        }),
    }
}
