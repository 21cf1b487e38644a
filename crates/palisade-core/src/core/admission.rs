//! `admit`: the one rule that decides who holds, as a pure function.
//!
//! **A claim is held iff the weights of all claims ahead of it, waiting ones included, plus its
//! own fit into the capacity.** Nobody overtakes. So sequence numbers that engines assign on entry
//! rise in the order of the grants, and a holder keeps its hold whatever enters behind it.

use super::claim::{Ask, ClaimId};

/// A claim as `admit` sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Standing {
    /// The claim.
    pub id: ClaimId,
    /// How much of the line it takes.
    pub ask: Ask,
}

/// The result of `admit`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// It holds.
    Held,
    /// It waits; the nearest claim ahead whose departure can change that.
    Behind(ClaimId),
    /// It is not in the line.
    Absent,
}

/// The capacity of a line: what its parts name, or 1 if no claim takes a part.
pub fn capacity(line: impl IntoIterator<Item = Ask>) -> u32 {
    line.into_iter()
        .find_map(|ask| match ask {
            Ask::Part { capacity, .. } => Some(capacity),
            Ask::Whole => None,
        })
        .unwrap_or(1)
}

/// Whether a claim is held when the claims ahead of it weigh `taken` together.
pub(crate) fn fits(taken: u64, ask: Ask, capacity: u32) -> bool {
    taken + u64::from(ask.weight_in(capacity)) <= u64::from(capacity)
}

/// Where `me` stands in `line`, which is in order of entry.
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

/// The nearest claim ahead that can't hold beside a claim of `weight`. If each of them could, the
/// nearest of all, since any departure may make room.
fn blocker(ahead: &[Standing], weight: u64, capacity: u32) -> ClaimId {
    let excludes =
        |claim: &&Standing| u64::from(claim.ask.weight_in(capacity)) + weight > u64::from(capacity);
    let nearest = ahead.iter().rev().find(excludes).or(ahead.last());
    // A claim that is not held has others ahead, or alone exceeds the capacity. The latter is
    // refused before it enters; here it would wait for ever.
    nearest.map_or(ClaimId(0), |claim| claim.id)
}
