//! `Hub`: where pushed messages go. Bells of waiting claims, alarms for the keeper.
//!
//! A connection's own task hands each push to the hub, so that no task of ours stands between a
//! message and its waiter. A push is a hint and never a grant: whoever is woken looks. When a
//! connection ends, everybody is woken, because messages of the gap are lost.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use redis::{PushInfo, PushKind, Value};
use tokio::sync::{Notify, broadcast, watch};

use crate::core::claim::ClaimId;
use crate::core::clock::BootTime;
use crate::core::engine::Alarm;

/// The length of a claim id as text: a message is one id after another.
const ID: usize = 32;

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
    /// When it should look by itself, as it was told last.
    due: Mutex<BootTime>,
}

impl Bell {
    pub(super) fn due(&self) -> BootTime {
        *self.due.lock()
    }

    pub(super) fn set_due(&self, due: BootTime) {
        *self.due.lock() = due;
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

    /// The bell of a claim; a new one says that it should look at once.
    pub(super) fn bell(&self, claim: ClaimId) -> Arc<Bell> {
        let mut bells = self.bells.lock();
        let bell = bells.entry(claim).or_insert_with(|| {
            Arc::new(Bell {
                rung: Notify::new(),
                due: Mutex::new(BootTime::PAST),
            })
        });
        Arc::clone(bell)
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
        let ids = message
            .chunks(ID)
            .filter_map(|id| std::str::from_utf8(id).ok());
        for claim in ids.filter_map(|id| id.parse::<ClaimId>().ok()) {
            if alarm {
                // Nobody listening is no error.
                let _ = self.alarms.send(Alarm::Lease(claim.into()));
            } else if let Some(bell) = self.bells.lock().get(&claim) {
                bell.rung.notify_one();
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
