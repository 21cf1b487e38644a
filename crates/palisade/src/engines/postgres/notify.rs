//! What the server pushes to one client, and who waits for it.
//!
//! A notification is `g` and a claim, granted with the token behind it or, without one, removed; or
//! `e` and a claim that an operator takes away. The server tells of a grant when it is committed:
//! with a token above the line's last, as it was when the claim was seen waiting, it is the grant.
//! When a connection ends, everyone is woken and looks.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::{StreamExt, stream};
use parking_lot::Mutex;
use tokio::sync::{Notify, broadcast};

use super::client::Client;
use super::connection::{Listener, Notice};
use crate::core::claim::ClaimId;
use crate::core::engine::{Alarm, BoxStream};

/// The pause between two tries to listen for alarms while the server is away.
const RETRY: Duration = Duration::from_millis(250);

/// The receivers of one client's notifications.
pub(super) struct Hub {
    waiters: Mutex<HashMap<ClaimId, Arc<Waiter>>>,
    alarms: broadcast::Sender<Alarm>,
}

/// What wakes one waiting claim.
#[derive(Default)]
struct Waiter {
    woken: Notify,
    /// The greatest token that came with a notification.
    token: AtomicU64,
}

impl Default for Hub {
    fn default() -> Self {
        Self {
            waiters: Mutex::default(),
            alarms: broadcast::channel(256).0,
        }
    }
}

/// Reads a notification: its kind, its claim and what follows.
pub(super) fn parse(text: &str) -> Option<(&str, ClaimId, &str)> {
    let (kind, rest) = text.split_at_checked(1)?;
    let (claim, token) = rest.split_once(' ').unwrap_or((rest, ""));
    Some((kind, claim.replace('-', "").parse().ok()?, token))
}

impl Hub {
    /// Hears what a connection is told.
    pub(super) fn listener(self: &Arc<Self>) -> Listener {
        let hub = Arc::clone(self);
        Arc::new(move |notice| hub.hear(&notice))
    }

    fn hear(&self, notice: &Notice<'_>) {
        match notice {
            Notice::Text(text) => match parse(text) {
                Some(("g", claim, token)) => {
                    if let Some(waiter) = self.waiters.lock().get(&claim) {
                        let token = token.parse().unwrap_or(0);
                        waiter.token.fetch_max(token, Ordering::Relaxed);
                        waiter.woken.notify_one();
                    }
                }
                // Nobody listening is no error.
                Some(("e", claim, _)) => drop(self.alarms.send(Alarm::Lease(claim.into()))),
                _ => {}
            },
            Notice::End => {
                let _ = self.alarms.send(Alarm::All);
                let waiters = self.waiters.lock();
                waiters
                    .values()
                    .for_each(|waiter| waiter.woken.notify_one());
            }
        }
    }

    /// Wakes `claim` until the answer is dropped.
    pub(super) fn wait(self: &Arc<Self>, claim: ClaimId) -> Waiting {
        let waiter = Arc::clone(self.waiters.lock().entry(claim).or_default());
        Waiting {
            waiter,
            claim,
            hub: Arc::clone(self),
        }
    }
}

/// A claim that is woken when it may have moved.
pub(super) struct Waiting {
    waiter: Arc<Waiter>,
    claim: ClaimId,
    hub: Arc<Hub>,
}

impl Waiting {
    pub(super) async fn woken(&self) {
        self.waiter.woken.notified().await;
    }

    /// The token of the claim's grant, if one above `last` was told.
    pub(super) fn granted_after(&self, last: u64) -> Option<u64> {
        let token = self.waiter.token.load(Ordering::Relaxed);
        (token > last).then_some(token)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let mut waiters = self.hub.waiters.lock();
        // The map's and this one: nobody else waits for the same claim.
        if Arc::strong_count(&self.waiter) <= 2 {
            waiters.remove(&self.claim);
        }
    }
}

/// What the keeper must hear of at once. Whenever listening begins, everything is looked after:
/// what was told before was not heard.
pub(super) fn alarms(client: Arc<Client>) -> BoxStream<Alarm> {
    let start = (client.hub.alarms.subscribe(), client, false);
    stream::unfold(start, |(mut alarms, client, mut listening)| async move {
        loop {
            if listening {
                match alarms.recv().await {
                    Ok(Alarm::All) => listening = false,
                    Ok(alarm) => return Some((alarm, (alarms, client, true))),
                    Err(_) => return Some((Alarm::All, (alarms, client, true))),
                }
                continue;
            }
            match client.listen().await {
                Ok(true) => return Some((Alarm::All, (alarms, client, true))),
                // Without pushes renewals tell, a little later.
                Ok(false) => std::future::pending().await,
                Err(_) => tokio::time::sleep(RETRY).await,
            }
        }
    })
    .boxed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_waiter_is_woken_for_its_claim_and_at_the_end() {
        let hub = Arc::new(Hub::default());
        let claim = ClaimId(7);
        let waiting = hub.wait(claim);
        let say = |text| hub.hear(&Notice::Text(text));
        say("g00000000-0000-0000-0000-000000000007");
        waiting.woken().await;
        assert_eq!(waiting.granted_after(0), None, "it says no token");
        say("g00000000-0000-0000-0000-000000000007 12");
        waiting.woken().await;
        assert_eq!(waiting.granted_after(11), Some(12));
        assert_eq!(waiting.granted_after(12), None, "of an earlier stay");
        let other = "g00000000-0000-0000-0000-000000000008 13";
        for noise in ["", "g", "gx", "g 13", "é", other] {
            say(noise);
        }
        assert_eq!(waiting.granted_after(12), None);
        let mut alarms = hub.alarms.subscribe();
        say("e00000000-0000-0000-0000-000000000007");
        assert_eq!(alarms.recv().await.unwrap(), Alarm::Lease(claim.into()));
        hub.hear(&Notice::End);
        waiting.woken().await;
        assert_eq!(alarms.recv().await.unwrap(), Alarm::All);
        drop(waiting);
        assert!(hub.waiters.lock().is_empty());
    }
}
