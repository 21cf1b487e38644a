//! The lease table's options, what it can do, and how a URL becomes an engine.

use std::sync::Arc;

use super::client::Client;
use super::connect::Server;
use super::pooler::Between;
use super::schema::Schema;
use super::{PostgresEngine, shedlock};
use palisade_core::engine::{EngineFactory, EngineInfo, Settings, SharedEngine, Url, config_error};
use palisade_core::{Capability, Result};
use palisade_kit::{Host, typed_config};

/// The engine's own options.
pub(super) const OPTIONS: &[&str] = &[
    "layout",
    "listen_url",
    "password_file",
    "pooler",
    "schema",
    "tls",
    "tls_ca",
    "tls_cert",
    "tls_key",
    "user",
];

pub(super) const CAPABILITY: Capability = {
    let mut can = Capability::FULL;
    can.queue = true;
    can
};

/// What `connect` knows of it.
pub const FACTORY: EngineFactory = EngineFactory {
    info: EngineInfo {
        name: "postgres",
        schemes: &["postgres", "postgresql"],
        needs: "a PostgreSQL database, 12 or newer; a transaction pooler may stand in between",
        example: "postgres://user@localhost/database",
        capability: CAPABILITY,
        options: OPTIONS,
    },
    open: |url, settings| Box::pin(async move { open(url, &settings) }),
    #[cfg(feature = "baseline")]
    baseline: Some(|url, settings| Box::pin(super::baseline::table(url, settings))),
};

typed_config! {
    /// A PostgreSQL database, as `palisade::connect` takes it: with a table of leases,
    /// or with [`advisory`](Self::advisory) locks.
    Postgres
    /// Servers of one cluster, of which the one that takes writes is used: `name`, `name:port` or
    /// `[address]:port` each. Connections to another machine are encrypted
    /// unless [`plain`](Self::plain) is set.
    hosts of "postgres"
    texts {
        /// The schema that the tables and functions are in.
        schema
        /// `palisade`, or `shedlock` for ShedLock's table.
        layout
        /// What the connection goes through: `none`, `transaction` or `session`.
        pooler
        /// The server itself as a `postgres://` URL, to listen on, where a pooler is in between.
        listen_url
        /// How names become the keys of advisory locks.
        key
    }
    numbers {
        /// How many connections advisory locks take at most.
        max_connections: u32
    }
    login { user }
    tls { |url| url.set("tls", "require") }
}

impl Postgres {
    /// The servers, database and login of an existing configuration. Connections of our own are
    /// made, with our own timeouts and no session settings.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](palisade_core::ErrorKind::Config) for Unix sockets and for a password that is no
    /// text.
    pub fn from_config(config: &tokio_postgres::Config) -> Result<Self> {
        use tokio_postgres::config::{Host as Server, SslMode};
        let ports = config.get_ports();
        let hosts = config
            .get_hosts()
            .iter()
            .enumerate()
            .map(|(at, host)| match host {
                Server::Tcp(name) => Ok(Host {
                    name: name.clone(),
                    // One port may stand for all.
                    port: ports.get(at).or(ports.first()).copied().unwrap_or(5432),
                }
                .to_string()),
                _ => Err(config_error(
                    "a PostgreSQL server is reached by TCP, not by a Unix socket",
                )),
            });
        let mut this = Self::new(hosts.collect::<Result<Vec<_>>>()?);
        this.0.user = config.get_user().map(str::to_owned);
        if let Some(name) = config.get_dbname() {
            this = this.database(name);
        }
        if let Some(password) = config.get_password() {
            let text = std::str::from_utf8(password);
            let text = text.map_err(|_| config_error("the password is not UTF-8"))?;
            this.0.password = Some(text.to_owned());
        }
        Ok(match config.get_ssl_mode() {
            SslMode::Require => this.tls(),
            SslMode::Disable => this.plain(),
            _ => this,
        })
    }

    /// Takes the server's advisory locks instead of a table of leases.
    pub fn advisory(mut self) -> Self {
        self.0.scheme = "postgres+advisory".to_owned();
        self
    }

    /// The name of the database.
    pub fn database(mut self, name: impl std::fmt::Display) -> Self {
        self.0.path = format!("/{name}");
        self
    }

    /// Does not encrypt, wherever the server is.
    pub fn plain(mut self) -> Self {
        self.0.set("tls", "disable");
        self
    }
}

/// What a URL says of the table.
pub(super) struct Config {
    pub(super) server: Server,
    /// The server to listen on, which a pooler hides.
    pub(super) listen: Option<Server>,
    pub(super) between: Option<Between>,
    pub(super) schema: Schema,
}

/// Opens the lease table; nothing is asked of the server before the first verb.
///
/// # Errors
/// [`ErrorKind::Config`](palisade_core::ErrorKind::Config) for a URL or option that can't be used.
pub fn open(mut url: Url, settings: &Settings) -> Result<SharedEngine> {
    let layout = url.take("layout");
    let config = Config::take(&mut url, settings)?;
    url.finish(OPTIONS)?;
    let shown = config.server.shown(&url.scheme);
    let client = Arc::new(Client::new(config, settings));
    match layout.as_deref() {
        None | Some("palisade") => Ok(Arc::new(PostgresEngine { client, shown })),
        Some("shedlock") => Ok(Arc::new(shedlock::ShedlockEngine::new(client, shown))),
        Some(_) => Err(config_error("option layout must be palisade or shedlock")),
    }
}

impl Config {
    pub(super) fn take(url: &mut Url, settings: &Settings) -> Result<Self> {
        let listen = url.take("listen_url").map(|text| {
            listener(&text, settings).map_err(|error| {
                let message = format!("option listen_url: {}", error.message());
                config_error(message)
            })
        });
        Ok(Self {
            schema: Schema::take(url)?,
            listen: listen.transpose()?,
            between: Between::take(url)?,
            server: Server::take(url, settings)?,
        })
    }
}

fn listener(text: &str, settings: &Settings) -> Result<Server> {
    let mut url = Url::parse(text)?;
    if !FACTORY.info.schemes.contains(&url.scheme.as_str()) {
        let message = "it is a postgres:// URL of the server itself, %-encoded";
        return Err(config_error(message));
    }
    let server = Server::take(&mut url, settings)?;
    url.finish(&[])?;
    Ok(server)
}

#[cfg(test)]
mod tests {
    use super::*;
    use palisade_core::ErrorKind;

    #[test]
    fn a_bad_listen_url_is_named_and_not_repeated() {
        for bad in [
            "secret",
            "redis%3A%2F%2Fsecret",
            "postgres%3A%2F%2F%3Asecret%40",
        ] {
            let mut url = Url::parse(&format!("postgres://h/d?listen_url={bad}")).unwrap();
            let settings = url.take_settings().unwrap();
            let error = Config::take(&mut url, &settings).err().unwrap();
            assert_eq!(error.kind(), ErrorKind::Config);
            let said = error.message();
            assert!(said.starts_with("option listen_url: "), "{said}");
            assert!(!said.contains("secret"), "{said}");
        }
    }
}
