//! `Tombstones`: claims that were left before their enter arrived, for as long as it may still
//! arrive.

use std::collections::HashMap;
use std::time::Duration;

use crate::core::claim::ClaimId;
use crate::core::clock::BootTime;

/// The claims, and until when each is remembered.
#[derive(Debug, Default)]
pub struct Tombstones(HashMap<ClaimId, BootTime>);

impl Tombstones {
    /// Remembers a claim for `lasts`, and removes expired ones from time to time.
    pub fn add(&mut self, claim: ClaimId, now: BootTime, lasts: Duration) {
        // Only when the map would grow otherwise: a scan for every claim would cost more.
        if self.0.len() == self.0.capacity() {
            self.0.retain(|_, until| *until > now);
        }
        self.0.insert(claim, now + lasts);
    }

    /// Whether the claim was left before it arrived.
    pub fn has(&self, claim: ClaimId, now: BootTime) -> bool {
        self.0.get(&claim).is_some_and(|until| *until > now)
    }
}
