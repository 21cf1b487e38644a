//! `Mail`: what the server says unasked on one connection, and who waits for it.
//!
//! A notification is `g` and a claim, granted with the token behind it or, without one, removed; or
//! `e` and a claim that an operator takes away. The server tells of a grant when it is committed:
//! with a token above the line's last, as it was when the claim was seen waiting, it is the grant.
//! When the connection ends, everyone is woken and looks.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use tokio::sync::{Notify, broadcast};

use crate::core::claim::ClaimId;

/// What was heard on a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Heard {
    /// An operator takes this claim away.
    Evicted(ClaimId),
    /// The connection is over.
    End,
}

/// The bells of those who wait on one connection.
pub(super) struct Mail {
    bells: Mutex<HashMap<ClaimId, Arc<Rope>>>,
    heard: broadcast::Sender<Heard>,
}

/// What the mail pulls to ring a bell.
#[derive(Default)]
struct Rope {
    pulled: Notify,
    /// The greatest token that came with a notification.
    token: AtomicU64,
}

impl Default for Mail {
    fn default() -> Self {
        Self {
            bells: Mutex::default(),
            heard: broadcast::channel(256).0,
        }
    }
}

impl Mail {
    /// Hears a notification's text.
    pub(super) fn deliver(&self, text: &str) {
        let Some((kind, claim)) = text.split_at_checked(1) else {
            return;
        };
        let (claim, token) = claim.split_once(' ').unwrap_or((claim, ""));
        let Ok(claim) = claim.replace('-', "").parse::<ClaimId>() else {
            return;
        };
        match kind {
            "g" => {
                if let Some(bell) = self.bells.lock().get(&claim) {
                    let token = token.parse().unwrap_or(0);
                    bell.token.fetch_max(token, Ordering::Relaxed);
                    bell.pulled.notify_one();
                }
            }
            // Nobody listening is no error.
            "e" => drop(self.heard.send(Heard::Evicted(claim))),
            _ => {}
        }
    }

    /// What is heard from now on.
    pub(super) fn listen(&self) -> broadcast::Receiver<Heard> {
        self.heard.subscribe()
    }

    /// A bell for a claim that waits.
    pub(super) fn bell(self: &Arc<Self>, claim: ClaimId) -> Bell {
        let mut bells = self.bells.lock();
        let bell = bells.entry(claim).or_default();
        Bell {
            bell: Arc::clone(bell),
            claim,
            mail: Arc::clone(self),
        }
    }

    /// Wakes everyone when the answer is dropped.
    pub(super) fn end_when_dropped(self: &Arc<Self>) -> impl Drop + use<> {
        End(Arc::clone(self))
    }
}

struct End(Arc<Mail>);

impl Drop for End {
    fn drop(&mut self) {
        let _ = self.0.heard.send(Heard::End);
        for bell in self.0.bells.lock().values() {
            bell.pulled.notify_one();
        }
    }
}

/// Rings when a claim may have moved; taken away when it is dropped.
pub(super) struct Bell {
    bell: Arc<Rope>,
    claim: ClaimId,
    mail: Arc<Mail>,
}

impl Bell {
    pub(super) async fn rung(&self) {
        self.bell.pulled.notified().await;
    }

    /// The token of the claim's grant, if one was told that is above `last`.
    pub(super) fn granted_after(&self, last: u64) -> Option<u64> {
        let token = self.bell.token.load(Ordering::Relaxed);
        (token > last).then_some(token)
    }
}

impl Drop for Bell {
    fn drop(&mut self) {
        let mut bells = self.mail.bells.lock();
        // The map and this one: nobody else waits for the same claim.
        if Arc::strong_count(&self.bell) <= 2 {
            bells.remove(&self.claim);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_bell_rings_for_its_claim_and_at_the_end() {
        let mail = Arc::new(Mail::default());
        let claim = ClaimId(7);
        let bell = mail.bell(claim);
        mail.deliver("g00000000-0000-0000-0000-000000000007");
        bell.rung().await;
        assert_eq!(bell.granted_after(0), None, "it says no token");
        mail.deliver("g00000000-0000-0000-0000-000000000007 12");
        bell.rung().await;
        assert_eq!(bell.granted_after(11), Some(12));
        assert_eq!(bell.granted_after(12), None, "of an earlier stay");
        let other = "g00000000-0000-0000-0000-000000000008 13";
        for noise in ["", "g", "gx", "g 13", "é", other] {
            mail.deliver(noise);
        }
        assert_eq!(bell.granted_after(12), None);
        let mut heard = mail.listen();
        mail.deliver("e00000000-0000-0000-0000-000000000007");
        assert_eq!(heard.recv().await.unwrap(), Heard::Evicted(claim));
        drop(mail.end_when_dropped());
        bell.rung().await;
        assert_eq!(heard.recv().await.unwrap(), Heard::End);
        drop(bell);
        assert!(mail.bells.lock().is_empty());
    }
}
