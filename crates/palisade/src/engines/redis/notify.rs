//! Notifications: bells of waiting claims, alarms for the keeper, changes for whoever watches.
//!
//! A connection's own task hands each push to the `Hub`, so that no task of ours stands between a
//! message and its waiter. A push with a token above the line's last, as it was when the claim was
//! told that it waits, is its grant; every other push is a hint, and whoever is woken looks. When
//! a connection ends, everybody is woken, because messages of the gap are lost. Alarms come on the
//! keeper's own connection; a watch has one of its own, which ends with it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt, stream};
use parking_lot::Mutex;
use redis::aio::MultiplexedConnection;
use redis::{PushInfo, PushKind, Value};
use tokio::sync::{Notify, broadcast, watch};

use super::client::Client;
use super::error::fault;
use crate::core::claim::ClaimId;
use crate::core::clock::BootTime;
use crate::core::engine::{Alarm, BoxStream};
use crate::core::error::{Error, Kind, Result};
use crate::core::report::Scope;

/// The receivers of one engine's messages.
pub(super) struct Hub {
    /// Our name in channels.
    pub(super) channel: String,
    bells: Mutex<HashMap<ClaimId, Arc<Bell>>>,
    alarms: broadcast::Sender<Alarm>,
}

/// What wakes one waiting claim.
pub(super) struct Bell {
    pub(super) rung: Notify,
    told: Mutex<Told>,
}

/// What a waiting claim was told.
struct Told {
    /// When it should look by itself.
    due: BootTime,
    /// The line's last token, when it was told that it waits.
    last: u64,
    /// The greatest token that was pushed.
    pushed: u64,
}

impl Bell {
    /// A new one says that its claim should look at once.
    fn new() -> Self {
        let told = Told {
            due: BootTime::PAST,
            last: u64::MAX,
            pushed: 0,
        };
        Self {
            rung: Notify::new(),
            told: Mutex::new(told),
        }
    }

    pub(super) fn due(&self) -> BootTime {
        self.told.lock().due
    }

    /// The claim waits, in a line whose last token was `last`.
    pub(super) fn waits(&self, last: u64, due: BootTime) {
        let mut told = self.told.lock();
        (told.last, told.due) = (last, due);
    }

    /// The token of the claim's grant, if one was pushed. A push of an earlier stay of the same
    /// claim, late on another connection, has a token that the line had given before.
    pub(super) fn granted(&self) -> Option<u64> {
        let told = self.told.lock();
        (told.pushed > told.last).then_some(told.pushed)
    }

    fn ring(&self, token: u64) {
        let mut told = self.told.lock();
        told.pushed = told.pushed.max(token);
        self.rung.notify_one();
    }
}

impl Hub {
    pub(super) fn new() -> Self {
        Self {
            channel: format!("{:032x}", rand::random::<u128>()),
            bells: Mutex::default(),
            alarms: broadcast::channel(64).0,
        }
    }

    /// Where grants are told.
    pub(super) fn wake_channel(&self) -> String {
        format!("palisade:wake:{}", self.channel)
    }

    /// Where evictions are told.
    pub(super) fn alarm_channel(&self) -> String {
        format!("palisade:alarm:{}", self.channel)
    }

    /// The bell of a claim.
    pub(super) fn bell(&self, claim: ClaimId) -> Arc<Bell> {
        let mut bells = self.bells.lock();
        let bell = bells.entry(claim);
        Arc::clone(bell.or_insert_with(|| Arc::new(Bell::new())))
    }

    /// The bell of a claim that enters; it is taken away again unless it is kept.
    pub(super) fn enter(&self, claim: ClaimId) -> Entering<'_> {
        Entering {
            hub: self,
            claim,
            bell: Some(self.bell(claim)),
        }
    }

    /// Takes the bell of a claim that waits no longer away.
    pub(super) fn forget(&self, claim: ClaimId) {
        self.bells.lock().remove(&claim);
    }

    pub(super) fn alarms(&self) -> broadcast::Receiver<Alarm> {
        self.alarms.subscribe()
    }

    fn hear(&self, push: &PushInfo) {
        let PushKind::Message = push.kind else { return };
        let [Value::BulkString(channel), Value::BulkString(message)] = push.data.as_slice() else {
            return;
        };
        let alarm = channel.starts_with(b"palisade:alarm:");
        let message = std::str::from_utf8(message).unwrap_or_default();
        for told in message.split(',') {
            let (id, token) = told.split_once(' ').unwrap_or((told, ""));
            let Ok(claim) = id.parse::<ClaimId>() else {
                continue;
            };
            if alarm {
                // Nobody listening is no error.
                let _ = self.alarms.send(Alarm::Lease(claim.into()));
            } else if let Some(bell) = self.bells.lock().get(&claim) {
                bell.ring(token.parse().unwrap_or(0));
            }
        }
    }

    fn wake_all(&self) {
        self.bells
            .lock()
            .values()
            .for_each(|bell| bell.rung.notify_one());
    }
}

/// The bell of a claim that may come to wait.
pub(super) struct Entering<'a> {
    hub: &'a Hub,
    claim: ClaimId,
    bell: Option<Arc<Bell>>,
}

impl Entering<'_> {
    /// The claim waits.
    pub(super) fn keep(mut self) -> Arc<Bell> {
        self.bell
            .take()
            .unwrap_or_else(|| self.hub.bell(self.claim))
    }
}

impl Drop for Entering<'_> {
    fn drop(&mut self) {
        if self.bell.is_some() {
            self.hub.forget(self.claim);
        }
    }
}

/// Receives the pushes of one connection. It is dropped with the task that drives the connection,
/// however that ends.
pub(super) struct Ear {
    hub: Arc<Hub>,
    over: watch::Sender<bool>,
}

impl Ear {
    /// An ear, and how to learn that its connection is over.
    pub(super) fn new(hub: Arc<Hub>) -> (Self, watch::Receiver<bool>) {
        let (over, told) = watch::channel(false);
        (Self { hub, over }, told)
    }

    pub(super) fn hear(&self, push: &PushInfo) {
        match push.kind {
            PushKind::Disconnection => self.end(),
            _ => self.hub.hear(push),
        }
    }

    fn end(&self) {
        if !self.over.send_replace(true) {
            self.hub.wake_all();
        }
    }
}

impl Drop for Ear {
    fn drop(&mut self) {
        self.end();
    }
}

/// Between two tries to listen again: soon enough for an eviction to be told in time, rarely
/// enough not to be a burden while the server is down.
const PAUSE: Duration = Duration::from_millis(500);

/// Alarms of one client. Whenever listening begins, everything is looked after: what was said
/// before was not heard.
pub(super) fn alarms(client: Arc<Client>) -> BoxStream<Alarm> {
    struct Listening {
        heard: broadcast::Receiver<Alarm>,
        over: Option<watch::Receiver<bool>>,
    }
    let listening = Listening {
        heard: client.hub.alarms(),
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
            return Some((alarm, (client, listening)));
        }
    })
    .boxed()
}

/// Waits until a connection is over.
async fn ended(over: &mut watch::Receiver<bool>) {
    // An error says that even the teller is gone.
    let _ = over.wait_for(|over| *over).await;
}

async fn begin(client: &Client) -> Result<watch::Receiver<bool>> {
    let link = client.link().await?;
    let hear = link.connection.hear_alarms(&client.hub);
    let heard = tokio::time::timeout(client.timeout, hear).await;
    match heard {
        Ok(Ok(())) => Ok(link.connection.over()),
        Ok(Err(error)) => Err(error),
        Err(_) => {
            client.links.late(&link).await;
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
pub(super) fn changes(client: Arc<Client>, scope: Scope) -> BoxStream<Result<()>> {
    let start = (client, scope, None::<Watching>, false);
    stream::unfold(start, |(client, scope, watching, failed)| async move {
        let Some(now) = watching else {
            if failed {
                tokio::time::sleep(PAUSE).await;
            }
            // Whatever happened before is not known: look.
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
        let (told, now) = match ended {
            false => (Ok(()), Some(now)),
            true => {
                let message = "the connection broke";
                (Err(Error::new(Kind::Unreachable, "watch", message)), None)
            }
        };
        let failed = now.is_none();
        Some((told, (client, scope, now, failed)))
    })
    .boxed()
}

/// Asks the server to tell of every change to keys of the lines in `scope`: the broadcasts that
/// client-side caches live on. They cost nothing while nobody watches, and tell of what other
/// tools do too.
async fn watch_changes(client: &Client, scope: &Scope) -> Result<Watching> {
    let (changed, over) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (rings, ends) = (Arc::clone(&changed), Arc::clone(&over));
    let mut track = redis::cmd("CLIENT");
    track.arg("TRACKING").arg("ON").arg("BCAST");
    let prefix = match scope {
        Scope::Prefix(prefix) => prefix.as_str(),
        Scope::Line(name) => name.as_str(),
    };
    for beginning in client.keys.beginnings(prefix) {
        track.arg("PREFIX").arg(beginning);
    }
    let (keys, scope) = (client.keys.clone(), scope.clone());
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
        let (mut connection, _) = client.target.server.connect(hear).await?;
        let tracked: redis::RedisResult<()> = track.query_async(&mut connection).await;
        tracked.map_err(|error| fault("watch", &error))?;
        Ok(connection)
    };
    let connection = tokio::time::timeout(client.links.connect_timeout(), listen)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_claim_that_waits_keeps_its_bell() {
        let hub = Hub::new();
        let bells = || hub.bells.lock().len();
        let claim = ClaimId::random();
        for _ in 0..100 {
            let entering = hub.enter(ClaimId::random());
            assert_eq!(bells(), 1, "a push must find it");
            // Busy, an error, or dropped on the way.
            drop(entering);
            assert_eq!(bells(), 0);
        }
        hub.enter(claim).keep();
        assert_eq!(bells(), 1);
        hub.forget(claim);
        assert_eq!(bells(), 0);
    }

    #[test]
    fn a_push_grants_only_what_the_line_had_not_given_before() {
        let hub = Hub::new();
        let claim = ClaimId::random();
        let bell = hub.bell(claim);
        let push = |token: &str| {
            let other = ClaimId::random();
            let told = [
                hub.wake_channel(),
                format!("{other} 99,{claim}{token},nonsense"),
            ];
            hub.hear(&PushInfo {
                kind: PushKind::Message,
                data: told
                    .map(|text| Value::BulkString(text.into_bytes()))
                    .to_vec(),
            });
        };
        push(" 7");
        assert_eq!(bell.granted(), None, "nobody has said yet that it waits");
        bell.waits(7, BootTime::NEVER);
        assert_eq!(bell.granted(), None, "that was before");
        push(" x");
        push("");
        assert_eq!(bell.granted(), None, "these say nothing");
        push(" 8");
        assert_eq!(bell.granted(), Some(8));
        push(" 7");
        assert_eq!(bell.granted(), Some(8), "late");
    }
}
