//! `PushHub`: hands each push to the claim that waits for it, and alarms to the keeper.
//!
//! A push whose token is above the line's last, as it was when the claim was told that it waits, is
//! its grant; every other push is a hint, and whoever is woken looks. When a connection ends,
//! everybody is woken, because messages of the gap are lost.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{Notify, broadcast};

use crate::core::claim::ClaimId;
use crate::core::clock::BootTime;
use crate::core::engine::Alarm;

/// The receivers of the pushes of one client.
pub(crate) struct PushHub {
    /// A random name of this client, for the channels that only it listens to.
    pub(crate) channel: String,
    bells: Mutex<HashMap<ClaimId, Arc<Bell>>>,
    alarms: broadcast::Sender<Alarm>,
}

/// What wakes one waiting claim.
pub(crate) struct Bell {
    pub(crate) rung: Notify,
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

    pub(crate) fn due(&self) -> BootTime {
        self.told.lock().due
    }

    /// The claim waits, in a line whose last token was `last`.
    pub(crate) fn waits(&self, last: u64, due: BootTime) {
        let mut told = self.told.lock();
        (told.last, told.due) = (last, due);
    }

    /// The token of the claim's grant, if one was pushed. A push of an earlier stay of the same
    /// claim, late on another connection, has a token that the line had given before.
    pub(crate) fn granted(&self) -> Option<u64> {
        let told = self.told.lock();
        (told.pushed > told.last).then_some(told.pushed)
    }

    fn ring(&self, token: u64) {
        let mut told = self.told.lock();
        told.pushed = told.pushed.max(token);
        self.rung.notify_one();
    }
}

impl PushHub {
    pub(crate) fn new() -> Self {
        Self::named(format!("{:032x}", rand::random::<u128>()))
    }

    /// One of several hubs of a client, which share a name.
    pub(crate) fn named(channel: String) -> Self {
        Self {
            channel,
            bells: Mutex::default(),
            alarms: broadcast::channel(64).0,
        }
    }

    /// The bell of a claim.
    pub(crate) fn bell(&self, claim: ClaimId) -> Arc<Bell> {
        let mut bells = self.bells.lock();
        let bell = bells.entry(claim);
        Arc::clone(bell.or_insert_with(|| Arc::new(Bell::new())))
    }

    /// The bell of a claim that enters; it is taken away again unless it is kept.
    pub(crate) fn enter(&self, claim: ClaimId) -> Entering<'_> {
        Entering {
            hub: self,
            claim,
            bell: Some(self.bell(claim)),
        }
    }

    /// Takes the bell of a claim that waits no longer away.
    pub(crate) fn forget(&self, claim: ClaimId) {
        self.bells.lock().remove(&claim);
    }

    pub(crate) fn alarms(&self) -> broadcast::Receiver<Alarm> {
        self.alarms.subscribe()
    }

    /// Tells the keeper to look after the lease of a claim. Nobody listening is no error.
    pub(crate) fn alarm(&self, claim: ClaimId) {
        let _ = self.alarms.send(Alarm::Lease(claim.into()));
    }

    /// Tells the keeper to look after all leases.
    pub(crate) fn alarm_all(&self) {
        let _ = self.alarms.send(Alarm::All);
    }

    /// Wakes a claim that waits: granted with `token`, or 0 when the push does not say.
    pub(crate) fn wake(&self, claim: ClaimId, token: u64) {
        if let Some(bell) = self.bells.lock().get(&claim) {
            bell.ring(token);
        }
    }

    /// Wakes everyone, because pushes may have been lost.
    pub(crate) fn wake_all(&self) {
        self.bells
            .lock()
            .values()
            .for_each(|bell| bell.rung.notify_one());
    }
}

/// The bell of a claim that may come to wait.
pub(crate) struct Entering<'a> {
    hub: &'a PushHub,
    claim: ClaimId,
    bell: Option<Arc<Bell>>,
}

impl Entering<'_> {
    /// The claim waits.
    pub(crate) fn keep(mut self) -> Arc<Bell> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_claim_that_waits_keeps_its_bell() {
        let hub = PushHub::new();
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
}
