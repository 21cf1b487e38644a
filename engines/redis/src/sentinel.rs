//! `Sentinel`: follows the master that the sentinels name.
//!
//! All sentinels are asked, and the answer with the highest config epoch (the latest failover)
//! wins, because a sentinel that was cut off still names the old master. A connection goes to the
//! master of the moment. Once another master is named, replies from the old one no longer count.
//! The keeper subscribes to the sentinels and also polls them once a second, so that a switch is
//! noticed soon and holds that it lost are reported.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use futures_util::{StreamExt, stream};
use parking_lot::Mutex;
use redis::RedisResult;
use redis::aio::MultiplexedConnection;
use tokio::sync::Notify;

use super::client::Client;
use super::config::Access;
use super::connection::{Connection, Role, Server};
use super::error::fault;
use palisade_core::engine::{Alarm, BoxStream, config_error};
use palisade_core::{Error, ErrorKind, Result};
use palisade_kit::push::PushHub;
use palisade_kit::{Host, PerRuntime};

/// How often the sentinels are polled besides the subscription: a message can be lost.
const POLL: Duration = Duration::from_secs(1);

pub(crate) struct Sentinel {
    pub(super) links: PerRuntime<Connection>,
    named: Arc<Named>,
}

/// The sentinels, and the master that they named last.
struct Named {
    name: String,
    access: Access,
    db: u16,
    sentinels: Vec<Asked>,
    limit: Duration,
    master: Mutex<Option<Master>>,
    /// Notified when a sentinel announces a switch of the master.
    switched: Arc<Notify>,
}

/// One sentinel.
struct Asked {
    server: Server,
    links: PerRuntime<MultiplexedConnection>,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Master {
    /// The config epoch: which failover made it the master.
    epoch: u64,
    address: (String, u16),
}

impl Master {
    fn host(&self) -> Host {
        let (name, port) = self.address.clone();
        Host { name, port }
    }

    /// Parses the reply to `SENTINEL MASTER`.
    fn read(fields: &HashMap<String, String>) -> Option<Self> {
        let address = (fields.get("ip")?.clone(), fields.get("port")?.parse().ok()?);
        let epoch = fields.get("config-epoch")?.parse().ok()?;
        Some(Self { epoch, address })
    }
}

impl Sentinel {
    pub(super) fn new(
        name: String,
        access: Access,
        db: u16,
        sentinels: Vec<Server>,
        hub: &Arc<PushHub>,
        limit: Duration,
    ) -> Self {
        let switched = Arc::new(Notify::new());
        let asked = |server: Server| {
            let (to, tells) = (server.clone(), Arc::clone(&switched));
            let links = PerRuntime::new(limit, move || {
                let (to, tells) = (to.clone(), Arc::clone(&tells));
                Box::pin(async move {
                    // Any message, and the end of the connection, is a reason to poll.
                    let (connection, _) = to.connect(move |_| tells.notify_one()).await?;
                    let mut listening = connection.clone();
                    let listening = listening.subscribe("+switch-master").await;
                    listening.map_err(|error| fault("connect", &error))?;
                    Ok(connection)
                })
            });
            Asked {
                links: links.to(&server.host),
                server,
            }
        };
        let named = Arc::new(Named {
            name,
            access,
            db,
            sentinels: sentinels.into_iter().map(asked).collect(),
            limit,
            master: Mutex::default(),
            switched,
        });
        let (names, hub) = (Arc::clone(&named), Arc::clone(hub));
        let links = PerRuntime::new(limit * 2, move || {
            let (names, hub) = (Arc::clone(&names), Arc::clone(&hub));
            Box::pin(async move {
                let master = names.ask().await?;
                let server = names.access.to(master.host(), names.db);
                Connection::open(server, hub, Role::Master).await
            })
        });
        Self {
            links: links.to(format!("the master of {}", named.sentinels[0].server.host)),
            named,
        }
    }

    /// Whether `host` is the master that was named last.
    pub(super) fn is_master(&self, host: &Host) -> bool {
        let master = self.named.master.lock();
        master.as_ref().is_none_or(|master| master.host() == *host)
    }

    pub(super) async fn master(&self) -> Result<Server> {
        let master = self.named.ask().await?;
        Ok(self.named.access.to(master.host(), self.named.db))
    }

    /// The replicas that the first answering sentinel knows.
    pub(super) async fn replicas(&self) -> Vec<Server> {
        let named = &self.named;
        for sentinel in &named.sentinels {
            let mut ask = redis::cmd("SENTINEL");
            ask.arg("REPLICAS").arg(&named.name);
            let answer: Result<Vec<HashMap<String, String>>> =
                sentinel.ask(named.limit, &ask).await;
            if let Ok(replicas) = answer {
                let host = |fields: HashMap<String, String>| {
                    let port = fields.get("port")?.parse().ok()?;
                    let name = fields.get("ip")?.clone();
                    Some(named.access.to(Host { name, port }, named.db))
                };
                return replicas.into_iter().filter_map(host).collect();
            }
        }
        Vec::new()
    }

    pub(super) fn named(&self) -> (Vec<Host>, bool) {
        let sentinels = self.named.sentinels.iter();
        let hosts = sentinels.map(|sentinel| sentinel.server.host.clone());
        (hosts.collect(), self.named.access.is_encrypted())
    }

    pub(super) fn close(&self) {
        self.links.close();
        for sentinel in &self.named.sentinels {
            sentinel.links.close();
        }
    }

    /// Waits for the next switch, announced or found by polling.
    async fn switch(&self) {
        let before = self.named.master.lock().clone();
        loop {
            let told = self.named.switched.notified();
            let _ = tokio::time::timeout(POLL, told).await;
            // While no sentinel answers, the last named master stays.
            let Ok(master) = self.named.ask().await else {
                continue;
            };
            if before
                .as_ref()
                .is_none_or(|before| before.address != master.address)
            {
                // Every runtime reconnects. The outcome of requests in flight is unknown.
                self.links.close();
                return;
            }
        }
    }
}

impl Asked {
    async fn ask<T: redis::FromRedisValue>(
        &self,
        limit: Duration,
        command: &redis::Cmd,
    ) -> Result<T> {
        let asking = async {
            let link = self.links.get().await?;
            let mut connection = link.connection.clone();
            let answer: RedisResult<T> = command.query_async(&mut connection).await;
            if answer.as_ref().is_err_and(super::error::is_broken) {
                self.links.broken(&link).await;
            }
            answer.map_err(|error| match error.detail() {
                Some(detail) if detail.contains("No such master") => {
                    let message = format!(
                        "{} knows no master of this name; the path of the URL is its name",
                        self.server.host
                    );
                    config_error(message)
                }
                _ => fault("connect", &error),
            })
        };
        match tokio::time::timeout(limit, asking).await {
            Ok(answer) => answer,
            Err(_) => {
                // A frozen sentinel keeps its connection open, so the connection is dropped here.
                if let Ok(Ok(link)) = tokio::time::timeout(Duration::ZERO, self.links.get()).await {
                    self.links.broken(&link).await;
                }
                let message = format!("{} does not answer", self.server.host);
                Err(Error::new(ErrorKind::Unreachable, "connect", message))
            }
        }
    }
}

impl Named {
    /// Asks all sentinels and adopts the answer with the highest epoch.
    async fn ask(&self) -> Result<Master> {
        let asked = self.sentinels.iter().map(|sentinel| async move {
            let mut ask = redis::cmd("SENTINEL");
            ask.arg("MASTER").arg(&self.name);
            let fields: HashMap<String, String> = sentinel.ask(self.limit / 2, &ask).await?;
            Master::read(&fields).ok_or_else(|| {
                let message = format!(
                    "{}: unexpected reply to SENTINEL MASTER",
                    sentinel.server.host
                );
                Error::new(ErrorKind::Unusable, "connect", message)
            })
        });
        let (mut latest, mut errors): (Option<Master>, Vec<Error>) = (None, Vec::new());
        for answer in join_all(asked).await {
            match answer {
                Ok(master) => latest = latest.max(Some(master)),
                Err(error) => errors.push(error),
            }
        }
        let Some(latest) = latest else {
            let worst = errors.iter().find(|error| !error.is_transient());
            return Err(match worst.or(errors.first()) {
                Some(error) => error.clone(),
                None => Error::new(ErrorKind::Unreachable, "connect", "there is no sentinel"),
            });
        };
        let mut master = self.master.lock();
        let older = |known: &Master| known.epoch > latest.epoch;
        Ok(match &*master {
            // The sentinels that know the later epoch did not answer this time.
            Some(known) if older(known) => known.clone(),
            _ => master.insert(latest).clone(),
        })
    }
}

/// Raises an alarm for all leases after each switch, because the new master may lack some grants.
pub(super) fn switches(client: Arc<Client>) -> BoxStream<Alarm> {
    let switch = |client: Arc<Client>| async move {
        client.servers.sentinel()?.switch().await;
        client.hub.wake_all();
        Some((Alarm::All, client))
    };
    stream::unfold(client, switch).boxed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_failover_is_believed() {
        let fields = |port: &str, epoch: &str| {
            let pairs = [("ip", "10.0.0.1"), ("port", port), ("config-epoch", epoch)];
            let pairs = pairs.map(|(key, value)| (key.to_owned(), value.to_owned()));
            HashMap::from(pairs)
        };
        let old = Master::read(&fields("9", "1")).unwrap();
        let new = Master::read(&fields("7", "2")).unwrap();
        assert!(new > old, "whatever their addresses");
        assert_eq!(new.host().to_string(), "10.0.0.1:7");
        assert!(Master::read(&HashMap::new()).is_none());
    }
}
