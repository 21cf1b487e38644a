//! Streams of messages: alarms for the keeper, on its own connection; changes for whoever
//! watches, on a connection of the watch's own, which ends with it.

use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt, stream};
use redis::aio::MultiplexedConnection;
use redis::{PushInfo, PushKind, Value};
use tokio::sync::{Notify, broadcast, watch};

use super::fault::fault;
use super::store::Store;
use crate::core::engine::{Alarm, BoxStream};
use crate::core::error::{Error, Kind, Result};
use crate::core::report::Scope;

/// Between two tries to listen again: soon enough for an eviction to be told in time, rarely
/// enough not to be a burden while the server is down.
const PAUSE: Duration = Duration::from_millis(500);

/// Alarms of one client. Whenever listening begins, everything is looked after: what was said
/// before was not heard.
pub(super) fn alarms(store: Arc<Store>) -> BoxStream<Alarm> {
    struct Listening {
        heard: broadcast::Receiver<Alarm>,
        over: Option<watch::Receiver<bool>>,
    }
    let listening = Listening {
        heard: store.hub.alarms(),
        over: None,
    };
    stream::unfold((store, listening), |(store, mut listening)| async move {
        loop {
            let Some(over) = &mut listening.over else {
                match begin(&store).await {
                    Ok(over) => {
                        listening.over = Some(over);
                        return Some((Alarm::All, (store, listening)));
                    }
                    Err(_) => tokio::time::sleep(PAUSE).await,
                }
                continue;
            };
            let alarm = tokio::select! {
                () = ended(over) => None,
                alarm = listening.heard.recv() => Some(alarm),
            };
            let alarm = match alarm {
                None => {
                    listening.over = None;
                    continue;
                }
                Some(Ok(alarm)) => alarm,
                Some(Err(broadcast::error::RecvError::Lagged(_))) => Alarm::All,
                Some(Err(broadcast::error::RecvError::Closed)) => return None,
            };
            return Some((alarm, (store, listening)));
        }
    })
    .boxed()
}

/// Waits until a connection is over.
async fn ended(over: &mut watch::Receiver<bool>) {
    // An error says that even the teller is gone.
    let _ = over.wait_for(|over| *over).await;
}

async fn begin(store: &Store) -> Result<watch::Receiver<bool>> {
    let link = store.link().await?;
    let hear = link.connection.hear_alarms(&store.hub);
    let heard = tokio::time::timeout(store.timeout, hear).await;
    match heard {
        Ok(Ok(())) => Ok(link.connection.over()),
        Ok(Err(error)) => Err(error),
        Err(_) => {
            store.links.late(&link).await;
            let message = "no answer in time";
            Err(Error::new(Kind::Unreachable, "subscribe", message))
        }
    }
}

/// A watch's own connection; it ends when this is dropped.
struct Watching {
    _connection: MultiplexedConnection,
    changed: Arc<Notify>,
    over: Arc<Notify>,
}

/// Changes of the lines in `scope`, many as one.
pub(super) fn changes(store: Arc<Store>, scope: Scope) -> BoxStream<Result<()>> {
    let start = (store, scope, None::<Watching>, false);
    stream::unfold(start, |(store, scope, watching, failed)| async move {
        let Some(now) = watching else {
            if failed {
                tokio::time::sleep(PAUSE).await;
            }
            // Whatever happened before is not known: look.
            return Some(match watch_changes(&store, &scope).await {
                Ok(now) => (Ok(()), (store, scope, Some(now), false)),
                Err(error) => (Err(error), (store, scope, None, true)),
            });
        };
        let ended = tokio::select! {
            biased;
            () = now.changed.notified() => false,
            () = now.over.notified() => true,
        };
        let (told, now) = match ended {
            false => (Ok(()), Some(now)),
            true => {
                let message = "the connection broke";
                (Err(Error::new(Kind::Unreachable, "watch", message)), None)
            }
        };
        let failed = now.is_none();
        Some((told, (store, scope, now, failed)))
    })
    .boxed()
}

/// Asks the server to tell of every change to keys of the lines in `scope`: the broadcasts that
/// client-side caches live on. They cost nothing while nobody watches, and tell of what other
/// tools do too.
async fn watch_changes(store: &Store, scope: &Scope) -> Result<Watching> {
    let (changed, over) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (rings, ends) = (Arc::clone(&changed), Arc::clone(&over));
    let mut track = redis::cmd("CLIENT");
    track.arg("TRACKING").arg("ON").arg("BCAST");
    let prefix = match scope {
        Scope::Prefix(prefix) => prefix.as_str(),
        Scope::Line(name) => name.as_str(),
    };
    for beginning in store.keys.beginnings(prefix) {
        track.arg("PREFIX").arg(beginning);
    }
    let (keys, scope) = (store.keys.clone(), scope.clone());
    let included = move |key: &Value| {
        let Value::BulkString(key) = key else {
            return false;
        };
        let key = String::from_utf8_lossy(key);
        let name = match keys.name_of(&key) {
            Some((name, _)) => Some(name),
            None => keys.name(&key),
        };
        name.is_some_and(|name| scope.includes(name.as_str()))
    };
    let hear = move |push: PushInfo| match (&push.kind, push.data.first()) {
        (PushKind::Disconnection, _) => ends.notify_one(),
        (PushKind::Invalidate, Some(Value::Array(keys))) if !keys.iter().any(&included) => {}
        // Some of them, or all that there were.
        (PushKind::Invalidate, _) => rings.notify_one(),
        _ => {}
    };
    let listen = async {
        let mut connection = store.target.server.connect(hear).await?;
        let tracked: redis::RedisResult<()> = track.query_async(&mut connection).await;
        tracked.map_err(|error| fault("watch", &error))?;
        Ok(connection)
    };
    let connection = tokio::time::timeout(store.links.connect_timeout(), listen)
        .await
        .unwrap_or_else(|_| {
            let message = "no answer in time";
            Err(Error::new(Kind::Unreachable, "watch", message))
        })?;
    Ok(Watching {
        _connection: connection,
        changed,
        over,
    })
}
