//! What a set of votes amounts to. Pure functions.

use std::time::Duration;

use super::node::Vote;

/// The token of a claim with these votes, and whether it must be written back first.
///
/// Each server counts above every token that it has seen, and a majority has seen every earlier
/// grant. So both the greatest count of a majority and a count on which a majority agrees are above
/// all earlier tokens. A token is valid only once a majority has seen it; otherwise it is written
/// back to one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Token {
    /// A majority has counted this token.
    Agreed(u64),
    /// The greatest count, which no majority has seen yet.
    Raise(u64),
}

pub(super) fn token(counts: &[u64], quorum: usize) -> Option<Token> {
    let agree = |count: &&u64| counts.iter().filter(|c| c == count).count() >= quorum;
    let agreed = counts.iter().find(agree).map(|count| Token::Agreed(*count));
    agreed.or_else(|| counts.iter().max().map(|most| Token::Raise(*most)))
}

/// How long a majority of the votes lasts: the quorum-th largest time left.
pub(super) fn lasting(mut left: Vec<Duration>, quorum: usize) -> Option<Duration> {
    left.sort_unstable_by(|a, b| b.cmp(a));
    left.get(quorum - 1).copied()
}

/// When a majority may be free: the quorum-th smallest time until a server may be.
pub(super) fn free_in(votes: &[Option<Vote>], quorum: usize) -> Option<Duration> {
    let mut due: Vec<Duration> = votes
        .iter()
        .filter_map(|vote| match vote {
            // Retracted by then.
            Some(Vote::Held { .. }) => Some(Duration::ZERO),
            Some(Vote::Busy { due, .. }) => Some(*due),
            _ => None,
        })
        .collect();
    due.sort_unstable();
    due.get(quorum - 1).copied()
}

/// A permit that a majority of the servers can still give, preferring the one that the fewest have
/// given. `spread` breaks ties, so that clients do not all try the same permit.
pub(super) fn permit(
    votes: &[Option<Vote>],
    quorum: usize,
    capacity: u32,
    tried: &[u32],
    spread: u32,
) -> Option<u32> {
    let answered: Vec<&Vec<u32>> = votes
        .iter()
        .filter_map(|vote| match vote {
            Some(Vote::Held { permits, .. } | Vote::Busy { permits, .. }) => Some(permits),
            _ => None,
        })
        .collect();
    let in_use = |permit: u32| answered.iter().filter(|p| p.contains(&permit)).count();
    let spare = answered.len().checked_sub(quorum)?;
    (1..=capacity)
        .map(|step| (spread % capacity + step) % capacity + 1)
        .filter(|permit| !tried.contains(permit))
        .map(|permit| (in_use(permit), permit))
        .filter(|(users, _)| *users <= spare)
        .min_by_key(|(users, _)| *users)
        .map(|(_, permit)| permit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_that_a_majority_has_counted_needs_nothing_more() {
        assert_eq!(token(&[7, 7, 7], 3), Some(Token::Agreed(7)));
        assert_eq!(token(&[7, 9, 7, 7], 3), Some(Token::Agreed(7)));
        assert_eq!(token(&[7, 9, 7], 3), Some(Token::Raise(9)));
        assert_eq!(token(&[7, 9, 9, 7], 3), Some(Token::Raise(9)));
        assert_eq!(token(&[], 3), None);
    }

    #[test]
    fn a_majority_lasts_as_long_as_its_weakest_member() {
        let s = Duration::from_secs;
        assert_eq!(lasting(vec![s(1), s(9), s(5), s(7)], 3), Some(s(5)));
        assert_eq!(lasting(vec![s(1), s(9)], 3), None);
        let busy = |seconds| {
            Some(Vote::Busy {
                due: s(seconds),
                permits: vec![],
            })
        };
        assert_eq!(free_in(&[busy(4), None, busy(2), busy(3)], 2), Some(s(3)));
        assert_eq!(free_in(&[busy(4), None, None], 2), None);
    }

    #[test]
    fn a_permit_is_one_that_a_majority_may_give() {
        let busy = |permits: &[u32]| {
            Some(Vote::Busy {
                due: Duration::ZERO,
                permits: permits.to_vec(),
            })
        };
        let votes = [busy(&[1, 2]), busy(&[1, 3]), busy(&[1, 2, 3])];
        for spread in 0..9 {
            assert_eq!(permit(&votes, 2, 3, &[], spread), None, "all in use");
            assert_eq!(permit(&votes, 2, 4, &[], spread), Some(4));
            assert_eq!(permit(&votes, 2, 4, &[4], spread), None);
        }
        let some = [busy(&[1]), busy(&[1]), busy(&[3])];
        let found: std::collections::BTreeSet<_> = (0..9)
            .map(|spread| permit(&some, 2, 3, &[], spread))
            .collect();
        assert_eq!(found, [Some(2)].into(), "the one that all may give");
        assert_eq!(permit(&[busy(&[]), None, None], 2, 3, &[], 0), None);
    }
}
