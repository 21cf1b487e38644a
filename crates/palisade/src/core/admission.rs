//! `admit`: the one rule of who holds, as a pure function.
//!
//! **A claim is held iff the weights of all claims ahead of it, waiting ones included, plus its
//! own fit into the capacity.** Nobody overtakes, so counts that engines assign on entry rise in
//! the order of the grants, and a claim that holds goes on holding whatever enters behind it.

use super::claim::{Ask, ClaimId};

/// A claim as `admit` sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Standing {
    /// Who.
    pub id: ClaimId,
    /// How much of the line.
    pub ask: Ask,
}

/// What `admit` answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// It holds.
    Held,
    /// It waits; the nearest claim ahead whose departure can change that.
    Behind(ClaimId),
    /// It is not in the line.
    Absent,
}

/// The capacity of a line: what its parts name, or 1 when nobody takes a part.
pub fn capacity(line: impl IntoIterator<Item = Ask>) -> u32 {
    line.into_iter()
        .find_map(|ask| match ask {
            Ask::Part { capacity, .. } => Some(capacity),
            Ask::Whole => None,
        })
        .unwrap_or(1)
}

/// Whether a claim is held when what is ahead of it takes so much.
pub(crate) fn fits(taken: u64, ask: Ask, capacity: u32) -> bool {
    taken + u64::from(ask.weight_in(capacity)) <= u64::from(capacity)
}

/// Where `me` stands in `line`, which is in the order of entry.
pub fn admit(line: impl IntoIterator<Item = Standing>, me: ClaimId, capacity: u32) -> Admission {
    let mut ahead: Vec<Standing> = Vec::new();
    let mut taken: u64 = 0;
    for claim in line {
        let weight = u64::from(claim.ask.weight_in(capacity));
        if claim.id != me {
            taken += weight;
            ahead.push(claim);
            continue;
        }
        if fits(taken, claim.ask, capacity) {
            return Admission::Held;
        }
        return Admission::Behind(blocker(&ahead, weight, capacity));
    }
    Admission::Absent
}

/// The nearest claim ahead that could never hold beside a claim of `weight`; when each alone
/// could, the nearest of all, since any departure may make room.
fn blocker(ahead: &[Standing], weight: u64, capacity: u32) -> ClaimId {
    let excludes =
        |claim: &&Standing| u64::from(claim.ask.weight_in(capacity)) + weight > u64::from(capacity);
    let nearest = ahead.iter().rev().find(excludes).or(ahead.last());
    // Not held means that something is ahead, or that the claim alone is too heavy for the line,
    // which claims are checked for before they enter; such a claim waits behind itself for ever.
    nearest.map_or(ClaimId(0), |claim| claim.id)
}
