//! `Claims`: the claims of this client, each from its enter to its leave.
//!
//! Invariant: a claim is listed under its line as long as it is known. So an enter sees in one step
//! whether other claims of this client are in the line, however many names the client holds.

use std::collections::HashMap;
use std::sync::Arc;

use super::acquire::{Known, Node};
use crate::core::claim::ClaimId;

#[derive(Default)]
pub(super) struct Claims {
    known: HashMap<ClaimId, Known>,
    lines: HashMap<Arc<str>, Vec<ClaimId>>,
}

impl Claims {
    pub(super) fn get(&self, claim: ClaimId) -> Option<&Known> {
        self.known.get(&claim)
    }

    pub(super) fn get_mut(&mut self, claim: ClaimId) -> Option<&mut Known> {
        self.known.get_mut(&claim)
    }

    pub(super) fn insert(&mut self, claim: ClaimId, known: Known) {
        let line = Arc::clone(&known.line);
        if self.known.insert(claim, known).is_none() {
            self.lines.entry(line).or_default().push(claim);
        }
    }

    pub(super) fn remove(&mut self, claim: ClaimId) {
        let Some(known) = self.known.remove(&claim) else {
            return;
        };
        if let Some(claims) = self.lines.get_mut(&known.line) {
            claims.retain(|other| *other != claim);
            if claims.is_empty() {
                self.lines.remove(&known.line);
            }
        }
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    pub(super) fn of_session(&self, session: i64) -> impl Iterator<Item = &Known> {
        let known = self.known.values();
        known.filter(move |known| known.session.id() == session)
    }

    fn in_line(&self, line: &str) -> impl Iterator<Item = ClaimId> {
        self.lines.get(line).into_iter().flatten().copied()
    }

    /// Whether other claims of this client are in the line.
    pub(super) fn has_others(&self, line: &str, claim: ClaimId) -> bool {
        self.in_line(line).any(|other| other != claim)
    }

    /// The last of our znodes in the line before `node`. An older znode is further ahead.
    pub(super) fn ahead_of(&self, line: &str, node: &Node) -> Option<String> {
        let own = self.in_line(line).filter_map(|claim| self.get(claim));
        let own = own.filter_map(|known| known.node.as_ref());
        let ahead = own.filter(|other| other.token < node.token);
        let last = ahead.max_by_key(|other| other.token);
        last.map(|other| other.name.clone())
    }
}
