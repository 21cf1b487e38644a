//! `Mail`: what the server says unasked on one connection, and who waits for it.
//!
//! A notification is `g` or `e` and a claim: it was granted (or removed), or an operator takes it
//! away. It is a hint and never a grant. When the connection ends, everyone is woken and looks.

use std::collections::HashMap;
use std::sync::Arc;

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
    bells: Mutex<HashMap<ClaimId, Arc<Notify>>>,
    heard: broadcast::Sender<Heard>,
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
        let Ok(claim) = claim.replace('-', "").parse::<ClaimId>() else {
            return;
        };
        match kind {
            "g" => {
                if let Some(bell) = self.bells.lock().get(&claim) {
                    bell.notify_one();
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
            bell.notify_one();
        }
    }
}

/// Rings when a claim may have moved; taken away when it is dropped.
pub(super) struct Bell {
    bell: Arc<Notify>,
    claim: ClaimId,
    mail: Arc<Mail>,
}

impl Bell {
    pub(super) async fn rung(&self) {
        self.bell.notified().await;
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
        for noise in ["", "g", "gx", "é", "g00000000-0000-0000-0000-000000000008"] {
            mail.deliver(noise);
        }
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
