//! The raw operations that `bench` compares with: what a hand-written client would send.

use std::sync::Arc;

use parking_lot::Mutex;
use redis::aio::MultiplexedConnection;
use redis::{Cmd, RedisResult, Value};

use super::config::Target;
use super::connection::Server;
use super::error::fault;
use palisade_core::engine::{Baseline, BoxFuture, Settings, Url};
use palisade_core::{Error, ErrorKind, Result};
use palisade_kit::PerRuntime;

/// The usual compare-and-delete release script.
const RELEASE: &str = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) else return 0 end";

/// Long enough that no key expires during a cycle.
const TTL_MS: u32 = 30_000;

pub(crate) struct RedisBaseline {
    links: Arc<PerRuntime<(MultiplexedConnection, String)>>,
    server: Server,
    /// Idle connections for BLPOP, which blocks the connection that it runs on.
    idle: Arc<Mutex<Vec<MultiplexedConnection>>>,
}

pub(super) async fn open(url: Url, settings: Settings) -> Result<Arc<dyn Baseline>> {
    let server = Target::take(url, settings.connect_timeout)?.server()?;
    Ok(Arc::new(of_server(server, &settings)))
}

/// The raw operations of one server.
pub(crate) fn of_server(server: Server, settings: &Settings) -> RedisBaseline {
    let connecting = server.clone();
    let links = PerRuntime::new(settings.connect_timeout, move || {
        let server = connecting.clone();
        Box::pin(async move {
            let (mut connection, _) = server.connect(|_| ()).await?;
            let mut load = redis::cmd("SCRIPT");
            load.arg("LOAD").arg(RELEASE);
            let hash: RedisResult<String> = load.query_async(&mut connection).await;
            let hash = hash.map_err(|error| fault("baseline", &error))?;
            Ok((connection, hash))
        })
    });
    RedisBaseline {
        links: Arc::new(links),
        server,
        idle: Arc::default(),
    }
}

async fn ask(connection: &mut MultiplexedConnection, command: &Cmd) -> Result<Value> {
    let answer = command.query_async(connection).await;
    answer.map_err(|error| fault("baseline", &error))
}

impl RedisBaseline {
    /// Sets `key` to `id`; an error if the key exists.
    pub(crate) async fn set(&self, key: &str, id: &str) -> Result<()> {
        let (mut connection, _) = self.links.get().await?.connection;
        let mut set = redis::cmd("SET");
        set.arg(key).arg(id).arg("NX").arg("PX").arg(TTL_MS);
        if ask(&mut connection, &set).await? == Value::Nil {
            let message = "the key is in use";
            return Err(Error::new(ErrorKind::Unusable, "baseline", message));
        }
        Ok(())
    }

    /// Deletes `key` if its value is `id`.
    pub(crate) async fn release(&self, key: &str, id: &str) -> Result<()> {
        let (mut connection, hash) = self.links.get().await?.connection;
        let mut release = redis::cmd("EVALSHA");
        release.arg(&hash).arg(1).arg(key).arg(id);
        ask(&mut connection, &release).await.map(drop)
    }
}

impl Baseline for RedisBaseline {
    fn describe(&self) -> String {
        "SET NX PX, EVALSHA compare-and-delete; RPUSH, BLPOP".to_owned()
    }

    fn cycle(&self, key: String) -> BoxFuture<Result<()>> {
        let links = Arc::clone(&self.links);
        Box::pin(async move {
            let (mut connection, hash) = links.get().await?.connection;
            let id = format!("{:032x}", rand::random::<u128>());
            let mut set = redis::cmd("SET");
            set.arg(&key).arg(&id).arg("NX").arg("PX").arg(TTL_MS);
            if ask(&mut connection, &set).await? == Value::Nil {
                let message = "the key is in use";
                return Err(Error::new(ErrorKind::Unusable, "baseline", message));
            }
            let mut release = redis::cmd("EVALSHA");
            release.arg(&hash).arg(1).arg(&key).arg(&id);
            ask(&mut connection, &release).await.map(drop)
        })
    }

    fn take(&self, key: String) -> BoxFuture<Result<()>> {
        let (server, idle) = (self.server.clone(), Arc::clone(&self.idle));
        Box::pin(async move {
            let free = idle.lock().pop();
            let mut connection = match free {
                Some(connection) => connection,
                None => server.connect(|_| ()).await?.0,
            };
            let mut pop = redis::cmd("BLPOP");
            pop.arg(&key).arg(0);
            ask(&mut connection, &pop).await?;
            idle.lock().push(connection);
            Ok(())
        })
    }

    fn give(&self, key: String) -> BoxFuture<Result<()>> {
        let links = Arc::clone(&self.links);
        Box::pin(async move {
            let (mut connection, _) = links.get().await?.connection;
            let mut push = redis::cmd("RPUSH");
            push.arg(&key).arg(1);
            ask(&mut connection, &push).await.map(drop)
        })
    }
}
