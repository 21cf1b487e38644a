//! `Cluster`: the masters of a Redis Cluster, and the slots that each one owns.
//!
//! A line is in one slot and a call is about one line, so each call goes to one server. Any server
//! can be asked for the slot map. The map is only a hint: a server that no longer owns a slot
//! redirects the call without having executed it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use parking_lot::Mutex;
use redis::{RedisError, RedisResult, Value};
use tokio::sync::Mutex as AsyncMutex;

use super::client::live;
use super::config::Access;
use super::connection::{Connection, Role, Server};
use super::error::fault;
use super::keys::{LineKeys, hash_tag};
use palisade_core::engine::config_error;
use palisade_core::{BootTime, Error, ErrorKind, Result};
use palisade_kit::push::PushHub;
use palisade_kit::{Host, Link, PerRuntime, timed};

const SLOTS: u16 = 16_384;

/// A map younger than this is not read again: many calls find out at the same time that it is
/// stale.
const FRESH: Duration = Duration::from_millis(100);

/// How many redirects one call follows.
pub(super) const REDIRECTS: u32 = 8;

/// The pause before a retry while the keys of a line are on both sides of a migration (TRYAGAIN).
pub(super) const MOVING: Duration = Duration::from_millis(20);

type Links = Arc<PerRuntime<Connection>>;

pub(crate) struct Cluster {
    access: Access,
    seeds: Vec<Host>,
    hub: Arc<PushHub>,
    connect_timeout: Duration,
    nodes: Mutex<HashMap<Host, Links>>,
    map: Mutex<Map>,
    reading: AsyncMutex<()>,
}

/// Slot ranges and their owners, first and last slot inclusive; later entries are newer.
#[derive(Default)]
struct Map {
    ranges: Vec<(u16, u16, Host)>,
    read: Option<BootTime>,
}

impl Map {
    fn of(&self, slot: u16) -> Option<Host> {
        let has = |range: &&(u16, u16, Host)| (range.0..=range.1).contains(&slot);
        self.ranges
            .iter()
            .rev()
            .find(has)
            .map(|range| range.2.clone())
    }

    fn masters(&self) -> Vec<Host> {
        let mut masters = Vec::new();
        for (_, _, host) in &self.ranges {
            if !masters.contains(host) {
                masters.push(host.clone());
            }
        }
        masters
    }
}

/// Where to send a call that a server refused without executing it.
pub(super) enum Redirect {
    /// MOVED: to this server from now on; ASK, if `asking`: for this call only.
    To {
        there: Link<Connection>,
        asking: bool,
    },
    /// TRYAGAIN: to the same server, after [`MOVING`].
    Again,
}

impl Cluster {
    pub(super) fn new(
        access: Access,
        seeds: Vec<Host>,
        hub: Arc<PushHub>,
        connect_timeout: Duration,
    ) -> Self {
        Self {
            access,
            seeds,
            hub,
            connect_timeout,
            nodes: Mutex::default(),
            map: Mutex::default(),
            reading: AsyncMutex::default(),
        }
    }

    pub(super) fn connect_timeout(&self) -> Duration {
        self.connect_timeout
    }

    pub(super) fn named(&self) -> (Vec<Host>, bool) {
        (self.seeds.clone(), self.access.is_encrypted())
    }

    fn node(&self, host: &Host) -> Links {
        let mut nodes = self.nodes.lock();
        let node = nodes.entry(host.clone()).or_insert_with(|| {
            let (server, hub) = (self.access.to(host.clone(), 0), Arc::clone(&self.hub));
            let links = PerRuntime::new(self.connect_timeout, move || {
                Box::pin(Connection::open(
                    server.clone(),
                    Arc::clone(&hub),
                    Role::Shard,
                ))
            });
            Arc::new(links.to(host))
        });
        Arc::clone(node)
    }

    /// A connection to the server that owns the line's slot, or to any server.
    pub(super) async fn link(&self, line: Option<&LineKeys>) -> Result<Link<Connection>> {
        if self.map.lock().read.is_none() {
            self.read_map().await?;
        }
        let Some(line) = line else {
            return self.any().await;
        };
        let slot = slot(&line.key);
        let owner = || {
            let owner = self.map.lock().of(slot);
            owner.ok_or_else(|| {
                let message = "no server owns the slot of this name; is the cluster complete?";
                Error::new(ErrorKind::Unreachable, "connect", message)
            })
        };
        let host = owner()?;
        match live(&self.node(&host)).await {
            // A replica may have been promoted in its place.
            Err(error) if error.is_transient() => {
                self.read_map().await?;
                let now = owner()?;
                if now == host {
                    Err(error)
                } else {
                    live(&self.node(&now)).await
                }
            }
            link => link,
        }
    }

    async fn any(&self) -> Result<Link<Connection>> {
        let mut why = None;
        let masters = self.map.lock().masters();
        for host in masters {
            match live(&self.node(&host)).await {
                Err(error) if error.is_transient() => why = Some(error),
                link => return link,
            }
        }
        let none = || {
            Error::new(
                ErrorKind::Unreachable,
                "connect",
                "the cluster has no server",
            )
        };
        Err(why.unwrap_or_else(none))
    }

    /// A connection to each master.
    pub(super) async fn all(&self) -> Result<Vec<Link<Connection>>> {
        let masters = self.current_masters().await?;
        let links = masters.iter().map(|host| {
            let node = self.node(host);
            async move { live(&node).await }
        });
        join_all(links).await.into_iter().collect()
    }

    pub(super) async fn masters(&self) -> Result<Vec<Server>> {
        let masters = self.current_masters().await?.into_iter();
        Ok(masters.map(|host| self.access.to(host, 0)).collect())
    }

    async fn current_masters(&self) -> Result<Vec<Host>> {
        self.read_map().await?;
        Ok(self.map.lock().masters())
    }

    pub(super) async fn broken(&self, link: &Link<Connection>) {
        self.node(link.connection.host()).broken(link).await;
    }

    pub(super) fn close(&self) {
        for node in std::mem::take(&mut *self.nodes.lock()).into_values() {
            node.close();
        }
    }

    /// Where to send a call that a server refused without executing it; `None` for other errors.
    ///
    /// # Errors
    /// When the other server can't be reached.
    pub(super) async fn redirect(&self, error: &RedisError) -> Result<Option<Redirect>> {
        if error.code() == Some("TRYAGAIN") {
            return Ok(Some(Redirect::Again));
        }
        let Some((address, slot)) = error.redirect_node() else {
            return Ok(None);
        };
        let Some(host) = parse(address) else {
            return Ok(None);
        };
        let there = live(&self.node(&host)).await?;
        let asking = error.code() == Some("ASK");
        if !asking {
            self.map.lock().ranges.push((slot, slot, host));
            // Usually more than one slot has moved.
            let _ = self.read_map().await;
        }
        Ok(Some(Redirect::To { there, asking }))
    }

    /// Reads the slot map from the first server that answers.
    async fn read_map(&self) -> Result<()> {
        let _turn = self.reading.lock().await;
        let now = BootTime::now();
        let fresh = |read: BootTime| now.saturating_since(read) < FRESH;
        let mut hosts = {
            let map = self.map.lock();
            if map.read.is_some_and(fresh) {
                return Ok(());
            }
            map.masters()
        };
        for seed in &self.seeds {
            if !hosts.contains(seed) {
                hosts.push(seed.clone());
            }
        }
        let mut why = None;
        for host in hosts {
            match self.slots_by(&host).await {
                Ok(ranges) => {
                    let read = Some(BootTime::now());
                    *self.map.lock() = Map { ranges, read };
                    return Ok(());
                }
                Err(error) if error.is_transient() => why = Some(error),
                Err(error) => return Err(error),
            }
        }
        let none = || {
            Error::new(
                ErrorKind::Unreachable,
                "connect",
                "the cluster has no server",
            )
        };
        Err(why.unwrap_or_else(none))
    }

    async fn slots_by(&self, host: &Host) -> Result<Vec<(u16, u16, Host)>> {
        let link = live(&self.node(host)).await?;
        let mut ask = redis::cmd("CLUSTER");
        ask.arg("SLOTS");
        let mut connection = link.connection.multiplexed.clone();
        let answer = ask.query_async::<Value>(&mut connection);
        let answer: RedisResult<Value> = match timed("connect", self.connect_timeout, answer).await
        {
            Ok(answer) => answer,
            Err(late) => {
                self.broken(&link).await;
                return Err(late);
            }
        };
        let not = || {
            let message =
                format!("{host} is not in cluster mode; use redis:, or name servers of a cluster");
            config_error(message)
        };
        let answer = answer.map_err(|error| match error.detail() {
            Some(detail) if detail.contains("cluster support disabled") => not(),
            _ => fault("connect", &error),
        })?;
        let ranges = read_slots(&answer, host).ok_or_else(|| {
            let message = format!("{host}: unexpected reply to CLUSTER SLOTS");
            Error::new(ErrorKind::Unusable, "connect", message)
        })?;
        if ranges.is_empty() {
            let message = format!("{host} knows of no slots; is the cluster set up?");
            return Err(Error::new(ErrorKind::Unreachable, "connect", message));
        }
        Ok(ranges)
    }
}

/// Parses the reply to `CLUSTER SLOTS`. A server without a host name is the one that was asked.
fn read_slots(answer: &Value, asked: &Host) -> Option<Vec<(u16, u16, Host)>> {
    let Value::Array(ranges) = answer else {
        return None;
    };
    let range = |range: &Value| {
        let Value::Array(parts) = range else {
            return None;
        };
        let [Value::Int(from), Value::Int(to), Value::Array(master), ..] = parts.as_slice() else {
            return None;
        };
        let [name, Value::Int(port), ..] = master.as_slice() else {
            return None;
        };
        let name = match name {
            Value::BulkString(name) if !name.is_empty() && name != b"?" => {
                String::from_utf8(name.clone()).ok()?
            }
            Value::SimpleString(name) if !name.is_empty() => name.clone(),
            _ => asked.name.clone(),
        };
        let host = Host {
            name,
            port: u16::try_from(*port).ok()?,
        };
        Some((u16::try_from(*from).ok()?, u16::try_from(*to).ok()?, host))
    };
    ranges.iter().map(range).collect()
}

/// Parses `host:port`; the host may be an IPv6 address.
fn parse(address: &str) -> Option<Host> {
    let (name, port) = address.rsplit_once(':')?;
    let name = name.trim_matches(['[', ']']).to_owned();
    let port = port.parse().ok()?;
    (!name.is_empty()).then_some(Host { name, port })
}

/// The slot of a key: the checksum of its hash tag, or of the whole key.
fn slot(key: &str) -> u16 {
    // CRC16/XMODEM.
    let checksum = hash_tag(key)
        .unwrap_or(key)
        .bytes()
        .fold(0u16, |crc, byte| {
            let mixed = crc ^ (u16::from(byte) << 8);
            (0..8).fold(mixed, |crc, _| match crc & 0x8000 {
                0 => crc << 1,
                _ => (crc << 1) ^ 0x1021,
            })
        });
    checksum % SLOTS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_those_of_redis() {
        assert_eq!(slot("123456789"), 0x31c3);
        assert_eq!(slot("foo"), 12182);
        assert_eq!(slot("{user1000}.following"), slot("{user1000}.followers"));
        assert_eq!(slot("foo{}{bar}"), 8363);
        assert_eq!(slot("{palisade:a}:palisade"), slot("palisade:a"));
    }

    #[test]
    fn the_map_is_read_and_the_newest_word_counts() {
        let text = |text: &str| Value::BulkString(text.as_bytes().to_vec());
        let node = |name: &str, port| Value::Array(vec![text(name), Value::Int(port), text("id")]);
        let range = |from, to, node| Value::Array(vec![Value::Int(from), Value::Int(to), node]);
        let answer = Value::Array(vec![
            range(0, 99, node("a", 1)),
            range(100, 16383, node("", 2)),
        ]);
        let asked = parse("[::1]:9").unwrap();
        assert_eq!(asked.to_string(), "[::1]:9");
        let mut map = Map {
            ranges: read_slots(&answer, &asked).unwrap(),
            read: None,
        };
        assert_eq!(map.of(5).unwrap().to_string(), "a:1");
        assert_eq!(map.of(100).unwrap().to_string(), "[::1]:2");
        map.ranges.push((5, 5, parse("b:3").unwrap()));
        assert_eq!(map.of(5).unwrap().to_string(), "b:3");
        assert_eq!(map.masters().len(), 3);
        assert!(read_slots(&Value::Int(1), &asked).is_none());
    }
}
