//! Notifications: grants for waiting claims, alarms for the keeper, changes for watches.
//!
//! The task that drives a connection hands each push straight to the [`PushHub`], without a task in
//! between. Alarms arrive on the keeper's connection. A watch has connections of its own, which end
//! with it.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::try_join_all;
use futures_util::{StreamExt, stream};
use redis::aio::MultiplexedConnection;
use redis::{PushInfo, PushKind, Value};
use tokio::sync::{Notify, broadcast, watch};

use super::client::{Client, Servers};
use super::connection::Freed;
use super::error::fault;
use super::sentinel::switches;
use super::watched::{Watch, Watched};
use palisade_core::engine::{Alarm, BoxStream, ClaimId};
use palisade_core::report::Scope;
use palisade_core::{Error, ErrorKind, Result};
use palisade_kit::push::PushHub;

/// The channel of grants for this client.
pub(crate) fn wake_channel(hub: &PushHub) -> String {
    format!("palisade:wake:{}", hub.channel)
}

/// The channel of evictions for this client.
pub(crate) fn alarm_channel(hub: &PushHub) -> String {
    format!("palisade:alarm:{}", hub.channel)
}

/// The channel that tells that a line of `redlock:` is free is this, followed by the line's key.
pub(crate) const FREE: &str = "palisade:free:";

/// Dispatches a message: grants with their tokens, evictions, or a line that is free.
fn dispatch(hub: &PushHub, freed: Option<&Freed>, push: &PushInfo) {
    let PushKind::Message = push.kind else { return };
    let [Value::BulkString(channel), Value::BulkString(message)] = push.data.as_slice() else {
        return;
    };
    if let (Some(freed), Some(key)) = (freed, channel.strip_prefix(FREE.as_bytes())) {
        return freed(&String::from_utf8_lossy(key));
    }
    let alarm = channel.starts_with(b"palisade:alarm:");
    let message = std::str::from_utf8(message).unwrap_or_default();
    for told in message.split(',') {
        let (id, token) = told.split_once(' ').unwrap_or((told, ""));
        match id.parse::<ClaimId>() {
            Ok(claim) if alarm => hub.alarm(claim),
            Ok(claim) => hub.wake(claim, token.parse().unwrap_or(0)),
            Err(_) => {}
        }
    }
}

/// Receives the pushes of one connection. It is dropped with the task that drives the connection,
/// however that task ends.
pub(crate) struct PushReceiver {
    hub: Arc<PushHub>,
    freed: Option<Freed>,
    over: watch::Sender<bool>,
}

impl PushReceiver {
    /// A receiver, and the signal that its connection has ended.
    pub(crate) fn new(hub: Arc<PushHub>, freed: Option<Freed>) -> (Self, watch::Receiver<bool>) {
        let (over, told) = watch::channel(false);
        (Self { hub, freed, over }, told)
    }

    pub(crate) fn receive(&self, push: &PushInfo) {
        match push.kind {
            PushKind::Disconnection => self.end(),
            _ => dispatch(&self.hub, self.freed.as_ref(), push),
        }
    }

    fn end(&self) {
        if !self.over.send_replace(true) {
            self.hub.wake_all();
        }
    }
}

impl Drop for PushReceiver {
    fn drop(&mut self) {
        self.end();
    }
}

/// The pause before another attempt to listen: short enough to hear of an eviction in time, long
/// enough not to burden a server that is down.
const PAUSE: Duration = Duration::from_millis(500);

/// The alarms of one client. Each time listening begins, all leases are checked, because earlier
/// messages were missed.
pub(crate) fn alarms(client: &Arc<Client>) -> BoxStream<Alarm> {
    let client = Arc::clone(client);
    match client.servers.sentinel() {
        Some(_) => stream::select(evictions(Arc::clone(&client)), switches(client)).boxed(),
        None => evictions(client),
    }
}

fn evictions(client: Arc<Client>) -> BoxStream<Alarm> {
    struct Listening {
        alarms: broadcast::Receiver<Alarm>,
        over: Option<watch::Receiver<bool>>,
    }
    let listening = Listening {
        alarms: client.hub.alarms(),
        over: None,
    };
    stream::unfold((client, listening), |(client, mut listening)| async move {
        loop {
            let Some(over) = &mut listening.over else {
                match begin(&client).await {
                    Ok(over) => {
                        listening.over = Some(over);
                        return Some((Alarm::All, (client, listening)));
                    }
                    Err(_) => tokio::time::sleep(PAUSE).await,
                }
                continue;
            };
            let alarm = tokio::select! {
                () = ended(over) => None,
                alarm = listening.alarms.recv() => Some(alarm),
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
            return Some((alarm, (client, listening)));
        }
    })
    .boxed()
}

async fn ended(over: &mut watch::Receiver<bool>) {
    // An error means that the sender is gone, so the connection has ended too.
    let _ = over.wait_for(|over| *over).await;
}

async fn begin(client: &Client) -> Result<watch::Receiver<bool>> {
    let link = client.link(None).await?;
    let subscribe = link.connection.subscribe_to_alarms(&client.hub);
    client.subscribed(&link, subscribe).await?;
    Ok(link.connection.over())
}

/// A watch's connections, one per server; they close when this is dropped.
struct Watching {
    _connections: Vec<MultiplexedConnection>,
    /// For the surveys beside it.
    _watch: Option<Arc<Watch>>,
    changed: Arc<Notify>,
    over: Arc<Notify>,
}

/// Changes to the lines in `scope`, coalesced.
pub(crate) fn watch(client: &Arc<Client>, scope: &Scope) -> BoxStream<Result<()>> {
    let start = (Arc::clone(client), scope.clone(), None::<Watching>, false);
    stream::unfold(start, |(client, scope, watching, failed)| async move {
        let Some(now) = watching else {
            if failed {
                tokio::time::sleep(PAUSE).await;
            }
            // Earlier changes were missed, so a watch that begins reports one at once.
            return Some(match watch_changes(&client, &scope).await {
                Ok(now) => (Ok(()), (client, scope, Some(now), false)),
                Err(error) => (Err(error), (client, scope, None, true)),
            });
        };
        let ended = tokio::select! {
            biased;
            () = now.changed.notified() => false,
            () = now.over.notified() => true,
        };
        let (told, now) = if ended {
            let message = "the connection broke";
            (
                Err(Error::new(ErrorKind::Unreachable, "watch", message)),
                None,
            )
        } else {
            (Ok(()), Some(now))
        };
        let failed = now.is_none();
        Some((told, (client, scope, now, failed)))
    })
    .boxed()
}

/// Subscribes to changes of the keys of the lines in `scope`, with `CLIENT TRACKING` in broadcast
/// mode. It costs the server nothing while nobody watches, and it covers the writes of other tools.
async fn watch_changes(client: &Client, scope: &Scope) -> Result<Watching> {
    let (changed, over) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (changes, ends) = (Arc::clone(&changed), Arc::clone(&over));
    let mut track = redis::cmd("CLIENT");
    track.arg("TRACKING").arg("ON").arg("BCAST");
    let prefix = match scope {
        Scope::Prefix(prefix) => prefix.as_str(),
        Scope::Line(name) => name.as_str(),
    };
    for beginning in client.keys.beginnings(prefix) {
        track.arg("PREFIX").arg(beginning);
    }
    let watched = match (scope, &client.servers) {
        (Scope::Prefix(prefix), Servers::One { .. }) => Some(Watched::new(prefix.clone())),
        _ => None,
    };
    let (keys, scope, hears) = (client.keys.clone(), scope.clone(), watched.clone());
    let included = move |key: &Value| {
        let Value::BulkString(key) = key else {
            return false;
        };
        let key = String::from_utf8_lossy(key);
        match keys.name_of(&key) {
            Some((name, line)) => {
                let includes = scope.includes(name.as_str());
                if let Some(watched) = hears.as_ref().filter(|_| includes) {
                    watched.hear(name, line);
                }
                includes
            }
            // A lock's own key, which is no part of another's records.
            None => keys
                .name(&key)
                .is_some_and(|name| scope.includes(name.as_str()) && keys.line(&name).is_ok()),
        }
    };
    let ended = watched.clone();
    let on_push = Arc::new(
        move |push: PushInfo| match (&push.kind, push.data.first()) {
            (PushKind::Disconnection, _) => {
                if let Some(watched) = &ended {
                    watched.end();
                }
                ends.notify_one();
            }
            // All of them, so that the surveys hear of each.
            (PushKind::Invalidate, Some(Value::Array(keys)))
                if keys.iter().filter(|key| included(key)).count() == 0 => {}
            // A key in scope, or all keys (a flush).
            (PushKind::Invalidate, _) => changes.notify_one(),
            _ => {}
        },
    );
    let listen = async {
        let masters = client.servers.masters().await?;
        let connections = masters.iter().map(|server| async {
            let on_push = Arc::clone(&on_push);
            let (mut connection, _) = server.connect(move |push| on_push(push)).await?;
            let tracked: redis::RedisResult<()> = track.query_async(&mut connection).await;
            tracked.map_err(|error| fault("watch", &error))?;
            Ok(connection)
        });
        try_join_all(connections).await
    };
    let connections = tokio::time::timeout(client.servers.connect_timeout(), listen)
        .await
        .unwrap_or_else(|_| {
            let message = "no answer in time";
            Err(Error::new(ErrorKind::Unreachable, "watch", message))
        })?;
    let watch = watched.zip(connections.first().cloned());
    let watch = watch.map(|(lines, connection)| Arc::new(Watch { lines, connection }));
    watch.iter().for_each(|watch| client.watches.add(watch));
    Ok(Watching {
        _connections: connections,
        _watch: watch,
        changed,
        over,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use palisade_core::BootTime;

    #[test]
    fn a_push_grants_only_what_the_line_had_not_given_before() {
        let hub = PushHub::new();
        let claim = ClaimId::random();
        let waiter = hub.waiter(claim);
        let push = |token: &str| {
            let other = ClaimId::random();
            let told = [
                wake_channel(&hub),
                format!("{other} 99,{claim}{token},unreadable"),
            ];
            let push = PushInfo {
                kind: PushKind::Message,
                data: told
                    .map(|text| Value::BulkString(text.into_bytes()))
                    .to_vec(),
            };
            dispatch(&hub, None, &push);
        };
        push(" 7");
        assert_eq!(waiter.granted(), None, "nobody has said yet that it waits");
        waiter.waits(7, BootTime::NEVER);
        assert_eq!(waiter.granted(), None, "that was before");
        push(" x");
        push("");
        assert_eq!(waiter.granted(), None, "these say nothing");
        push(" 8");
        assert_eq!(waiter.granted(), Some(8));
        push(" 7");
        assert_eq!(waiter.granted(), Some(8), "late");
    }
}
