//! What `connect` knows of this engine before it is opened, and what a URL says.

use std::time::Duration;

use super::connection::Server;
use crate::core::capability::{Capability, Guarantee, Tokens};
use crate::core::error::{Error, ErrorKind, Result};
use crate::core::registry::{EngineFactory, EngineInfo};
use crate::core::url::Url;
use crate::engines::kit::{Host, Login, Tls};

/// The engine's own options.
pub(in crate::engines) const OPTIONS: &[&str] = &[
    "password_file",
    "replicas",
    "tls_ca",
    "tls_cert",
    "tls_key",
    "user",
];

pub(in crate::engines) const CAPABILITY: Capability = Capability {
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

/// Where a URL leads, and how.
pub(in crate::engines) struct Target {
    pub(in crate::engines) server: Server,
    /// How many replicas must have a grant before it counts.
    pub(in crate::engines) replicas: u32,
}

impl Target {
    /// # Errors
    /// [`ErrorKind::Config`] for what can't be used.
    pub(in crate::engines) fn take(mut url: Url, connect_timeout: Duration) -> Result<Self> {
        let config = |message| Error::new(ErrorKind::Config, "connect", message);
        let encrypted = url.scheme == "rediss";
        let access = Access::take(&mut url, encrypted, connect_timeout)?;
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
        let db = database(&url.path)?;
        let server = access.to(host, db);
        Ok(Self { server, replicas })
    }
}

/// How servers are reached, whichever they are.
#[derive(Clone)]
pub(in crate::engines) struct Access {
    login: Login,
    tls: Option<Tls>,
    connect_timeout: Duration,
}

impl Access {
    /// # Errors
    /// [`ErrorKind::Config`] for a login or files that can't be used.
    pub(in crate::engines) fn take(
        url: &mut Url,
        encrypted: bool,
        connect_timeout: Duration,
    ) -> Result<Self> {
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

    /// One of the servers.
    pub(in crate::engines) fn to(&self, host: Host, db: u16) -> Server {
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
/// [`ErrorKind::Config`] for any other path.
pub(in crate::engines) fn database(path: &str) -> Result<u16> {
    match path.trim_start_matches('/') {
        "" => Ok(0),
        number => number.parse().map_err(|_| {
            let message = "the path is the number of a database, as in /0";
            Error::new(ErrorKind::Config, "connect", message)
        }),
    }
}
