//! `PushHub`: dispatches each notification to the claim that waits for it, and alarms to the
//! keeper.
//!
//! When a claim is told to wait, it also learns the line's last token. A notification with a
//! greater token is its grant; any other is a hint to read its place. When a connection ends, all
//! waiters are woken, because notifications may have been lost.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{Notify, broadcast};

use palisade_core::BootTime;
use palisade_core::engine::{Alarm, ClaimId};

/// The receivers of one client's notifications.
pub struct PushHub {
    /// A random name of this client, for the channels that only it listens to.
    pub channel: String,
    waiters: Mutex<HashMap<ClaimId, Arc<Waiter>>>,
    alarms: broadcast::Sender<Alarm>,
}

/// The registration of one waiting claim.
pub struct Waiter {
    /// Notified when the claim should look.
    pub woken: Notify,
    told: Mutex<Told>,
}

/// What a waiting claim was told.
struct Told {
    /// When it should read its place without a notification.
    due: BootTime,
    /// The line's last token at the time when it was told to wait.
    last: u64,
    /// The greatest token in a notification.
    pushed: u64,
}

impl Waiter {
    /// When the claim looks without having been told to.
    pub fn due(&self) -> BootTime {
        self.told.lock().due
    }

    /// Records that the claim waits in a line whose last token was `last`.
    pub fn waits(&self, last: u64, due: BootTime) {
        let mut told = self.told.lock();
        (told.last, told.due) = (last, due);
    }

    /// The token of the claim's grant, if a notification brought it. A late notification for an
    /// earlier stay of the same claim has a token that the line had assigned before.
    pub fn granted(&self) -> Option<u64> {
        let told = self.told.lock();
        (told.pushed > told.last).then_some(told.pushed)
    }

    fn wake(&self, token: u64) {
        let mut told = self.told.lock();
        told.pushed = told.pushed.max(token);
        self.woken.notify_one();
    }
}

impl PushHub {
    /// A hub under a random name.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "each has a name of its own")]
    pub fn new() -> Self {
        Self::named(format!("{:032x}", rand::random::<u128>()))
    }

    /// One of several hubs of a client that share a name.
    pub fn named(channel: String) -> Self {
        Self {
            channel,
            waiters: Mutex::default(),
            alarms: broadcast::channel(64).0,
        }
    }

    /// The registration of a claim; a new one tells its claim to read at once.
    pub fn waiter(&self, claim: ClaimId) -> Arc<Waiter> {
        let mut waiters = self.waiters.lock();
        let waiter = waiters.entry(claim).or_insert_with(|| {
            let told = Told {
                due: BootTime::PAST,
                last: u64::MAX,
                pushed: 0,
            };
            Arc::new(Waiter {
                woken: Notify::new(),
                told: Mutex::new(told),
            })
        });
        Arc::clone(waiter)
    }

    /// Registers an entering claim; dropping this removes it again, unless the claim waits.
    pub fn enter(&self, claim: ClaimId) -> Entering<'_> {
        Entering {
            hub: self,
            claim,
            waiter: Some(self.waiter(claim)),
        }
    }

    /// Removes the registration of a claim that no longer waits.
    pub fn forget(&self, claim: ClaimId) {
        self.waiters.lock().remove(&claim);
    }

    /// The alarms from now on.
    pub fn alarms(&self) -> broadcast::Receiver<Alarm> {
        self.alarms.subscribe()
    }

    /// Tells the keeper to check the lease of a claim. It is no error if nobody listens.
    pub fn alarm(&self, claim: ClaimId) {
        let _ = self.alarms.send(Alarm::Lease(claim.into()));
    }

    /// Tells the keeper to check all leases.
    pub fn alarm_all(&self) {
        let _ = self.alarms.send(Alarm::All);
    }

    /// Wakes a waiting claim: granted with `token`, or 0 if the notification has none.
    pub fn wake(&self, claim: ClaimId, token: u64) {
        if let Some(waiter) = self.waiters.lock().get(&claim) {
            waiter.wake(token);
        }
    }

    /// Wakes all waiters, because notifications may have been lost.
    pub fn wake_all(&self) {
        let waiters = self.waiters.lock();
        waiters
            .values()
            .for_each(|waiter| waiter.woken.notify_one());
    }
}

/// The registration of a claim that may have to wait.
pub struct Entering<'a> {
    hub: &'a PushHub,
    claim: ClaimId,
    waiter: Option<Arc<Waiter>>,
}

impl Entering<'_> {
    /// The claim waits, in a line whose last token was `last`; see [`Waiter::waits`].
    pub fn waits(mut self, last: u64, due: BootTime) {
        if let Some(waiter) = self.waiter.take() {
            waiter.waits(last, due);
        }
    }
}

impl Drop for Entering<'_> {
    fn drop(&mut self) {
        if self.waiter.is_some() {
            self.hub.forget(self.claim);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_claim_that_waits_stays_registered() {
        let hub = PushHub::new();
        let waiters = || hub.waiters.lock().len();
        let claim = ClaimId::random();
        for _ in 0..100 {
            let entering = hub.enter(ClaimId::random());
            assert_eq!(waiters(), 1, "a push must find it");
            // The claim was busy, failed or was dropped.
            drop(entering);
            assert_eq!(waiters(), 0);
        }
        hub.enter(claim).waits(7, BootTime::NEVER);
        assert_eq!(waiters(), 1);
        hub.forget(claim);
        assert_eq!(waiters(), 0);
    }
}
