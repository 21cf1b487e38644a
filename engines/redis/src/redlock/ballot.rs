//! `Ballot`: one vote by all servers, and what their votes amount to.
//!
//! A ballot ends as soon as its result is certain, and it is completed even if its caller stops
//! waiting: votes that fall short of a majority are retracted, including those that may still be in
//! flight.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt};
use redis::Cmd;

use super::node::{Doubt, Node, Retracted};
use super::{Redlock, no_answer};
use crate::ROUNDING;
use crate::client::{Script, unexpected_reply};
use crate::keys::LineKeys;
use palisade_core::engine::{
    Ask, BoxFuture, Claim, ClaimId, LeaseStart, capacity_mismatch, sync, unix_time,
};
use palisade_core::{BootTime, Error, ErrorKind, Outcome, Result};

/// How many permits one attempt tries when others take them first.
const PERMITS_TRIED: usize = 16;

/// The pause before a failed retraction is retried.
const AGAIN: Duration = Duration::from_millis(200);

/// How long a ballot that is lost waits for one more server to say whether it votes at all: a server
/// that is connected to says so without a request.
const MOMENT: Duration = Duration::from_millis(5);

/// The votes that are still in flight.
type Asked = FuturesUnordered<BoxFuture<(usize, Vote)>>;

/// The result of an attempt.
pub(super) enum Tried {
    Held {
        sequence: u64,
        armed: LeaseStart,
    },
    /// Other claims hold it.
    Behind {
        /// When a majority may be free.
        due: Duration,
        /// Whether contenders split the votes.
        split: bool,
    },
    /// The claim was left during the attempt.
    Left,
}

/// Asks all servers until a majority has voted for the claim, or can no longer do so. A claim for a
/// permit tries one permit after another.
pub(super) async fn attempt(
    engine: Arc<Redlock>,
    claim: Arc<Claim>,
    keys: LineKeys,
) -> Result<Tried> {
    let Ask::Part { capacity, .. } = claim.ask else {
        let (tried, _) = ballot(&engine, &claim, &keys, None).await?;
        return Ok(tried);
    };
    let spread = rand::random();
    let mut tried = vec![spread % capacity + 1];
    loop {
        let permit = tried.last().copied();
        let (came_to, votes) = ballot(&engine, &claim, &keys, permit).await?;
        let Tried::Behind { .. } = came_to else {
            return Ok(came_to);
        };
        match next_permit(&votes, engine.quorum, capacity, &tried, spread) {
            Some(next) if tried.len() < PERMITS_TRIED => tried.push(next),
            _ => return Ok(came_to),
        }
    }
}

/// One vote by all servers; returns the result and each server's answer.
async fn ballot(
    engine: &Arc<Redlock>,
    claim: &Claim,
    keys: &LineKeys,
    permit: Option<u32>,
) -> Result<(Tried, Vec<Option<Vote>>)> {
    let (nodes, quorum) = (engine.nodes.len(), engine.quorum);
    let limit = engine.limit(claim.ttl);
    let ballot = Arc::new(Ballot::new(engine, claim, keys, permit));
    // Taken before anything is sent, because the lease counts from here.
    let sent = BootTime::now();
    let ask = |node: &Arc<Node>| {
        let (node, ballot) = (Arc::clone(node), Arc::clone(&ballot));
        Box::pin(async move { (node.at, ballot.ask(&node).await) }) as BoxFuture<_>
    };
    let mut asked: Asked = engine.nodes.iter().map(ask).collect();
    let mut votes: Vec<Option<Vote>> = (0..nodes).map(|_| None).collect();
    let (mut counts, mut left) = (Vec::new(), Vec::new());
    let limited = sync::sleep_until(sent + limit);
    tokio::pin!(limited);
    let mut late = false;
    while counts.len() < quorum {
        // Without a majority in reach it is over. Servers that abstain say so at once; then the
        // others have a moment, so that the error says how many do, and for how long.
        let abstains = |vote: &Option<Vote>| matches!(vote, Some(Vote::Abstains(_)));
        let lost = counts.len() + asked.len() < quorum;
        if asked.is_empty() || lost && !votes.iter().any(abstains) {
            break;
        }
        tokio::select! {
            biased;
            Some((at, vote)) = asked.next() => {
                if let Vote::Held { token, left: lasts, .. } = vote {
                    counts.push(token);
                    left.push(lasts);
                    engine.seen.fetch_max(token, Ordering::Relaxed);
                }
                votes[at] = Some(vote);
            }
            () = &mut limited => {
                late = true;
                break;
            }
            () = sync::sleep_until(BootTime::now() + MOMENT), if lost => break,
        }
    }
    if let (Some(token), Some(ttl)) = (token(&counts, quorum), lasting(&left, quorum)) {
        let sequence = match token {
            Token::Agreed(sequence) => Some(sequence),
            Token::Raise(sequence) => raise(engine, &ballot, sequence, limit).await,
        };
        let armed = LeaseStart { sent, ttl };
        if let Some(sequence) = sequence
            && !armed.deadline().has_passed()
            && !engine.was_left(claim.id)
        {
            await_the_rest(engine, ballot, asked, &votes, sequence);
            return Ok((Tried::Held { sequence, armed }, votes));
        }
    }
    let tried = failed(engine, claim, &ballot, asked, &votes, late).await?;
    Ok((tried, votes))
}

/// Writes a token on which no majority agrees back to a majority, where each server must still have
/// the claim. Returns the token, or `None` if that failed.
async fn raise(engine: &Redlock, ballot: &Ballot, token: u64, limit: Duration) -> Option<u64> {
    let (keys, id) = (&ballot.keys, ballot.id);
    let raises = engine.nodes.iter().map(|node| node.raise(keys, id, token));
    let mut raises: FuturesUnordered<_> = raises.collect();
    let raise = async {
        let mut seen = 0;
        while let Some(raised) = raises.next().await {
            seen += usize::from(matches!(raised, Ok(Some(_))));
            if seen == engine.quorum {
                return Some(token);
            }
        }
        None
    };
    tokio::time::timeout(limit, raise).await.unwrap_or(None)
}

/// Handles the votes that arrive after the grant: a server that counted another token is given the
/// token of the grant.
fn await_the_rest(
    engine: &Arc<Redlock>,
    ballot: Arc<Ballot>,
    mut asked: Asked,
    votes: &[Option<Vote>],
    sequence: u64,
) {
    let other = move |at: usize, vote: &Vote| match vote {
        Vote::Held { token, .. } => (*token != sequence).then_some(at),
        _ => None,
    };
    let known = votes.iter().enumerate();
    let known = known.filter_map(|(at, vote)| other(at, vote.as_ref()?));
    let mut others: Vec<usize> = known.collect();
    let unknown =
        |vote: &Option<Vote>| matches!(vote, Some(vote @ Vote::Failed(_)) if vote.may_hold());
    let doubtful = votes.iter().any(unknown);
    if asked.is_empty() && others.is_empty() && !doubtful {
        return;
    }
    engine
        .under_way
        .lock()
        .insert(ballot.id, Arc::clone(&ballot));
    let engine = Arc::clone(engine);
    tokio::spawn(async move {
        let mut doubtful = doubtful;
        while let Some((at, vote)) = asked.next().await {
            others.extend(other(at, &vote));
            doubtful |= matches!(&vote, Vote::Failed(_)) && vote.may_hold();
        }
        for at in others {
            let node = &engine.nodes[at];
            // A failure is harmless: `leave` can find this server's vote by the claim's id.
            let _ = node.raise(&ballot.keys, ballot.id, sequence).await;
        }
        // Votes with an unknown outcome stay listed for `leave` to retract.
        if !doubtful {
            engine.settled(&ballot);
        }
    });
}

/// Retracts the votes of a ballot that granted nothing, and says what it came to.
async fn failed(
    engine: &Arc<Redlock>,
    claim: &Claim,
    ballot: &Arc<Ballot>,
    mut asked: Asked,
    votes: &[Option<Vote>],
    late: bool,
) -> Result<Tried> {
    let (nodes, quorum) = (engine.nodes.len(), engine.quorum);
    let limit = engine.limit(claim.ttl);
    let returned = give_back(engine, ballot, votes, limit).await;
    if !asked.is_empty() {
        // The remaining requests run on, so that a connection without a reply is dropped in time.
        tokio::spawn(async move { while asked.next().await.is_some() {} });
    }
    let count = |is: fn(&Vote) -> bool| votes.iter().flatten().filter(|vote| is(vote)).count();
    if engine.was_left(claim.id) || count(|vote| matches!(vote, Vote::Left)) > 0 {
        return Ok(Tried::Left);
    }
    let mismatched = votes.iter().flatten().find_map(|vote| match vote {
        Vote::Mismatch(live) => Some(*live),
        _ => None,
    });
    if let (Some(live), Ask::Part { capacity, .. }) = (mismatched, claim.ask)
        && count(|vote| matches!(vote, Vote::Mismatch(_))) > nodes - quorum
    {
        return Err(capacity_mismatch(live, capacity));
    }
    let voted = count(|vote| !matches!(vote, Vote::Failed(_) | Vote::Abstains(_)));
    if voted < quorum {
        let error = no_majority(engine, votes, late.then_some(limit));
        return Err(if returned {
            error
        } else {
            error.maybe_applied()
        });
    }
    let due = free_in(votes, quorum).unwrap_or_default();
    let held = count(|vote| matches!(vote, Vote::Held { .. }));
    let split =
        held > 0 || due.is_zero() && count(|vote| matches!(vote, Vote::Busy { .. })) < quorum;
    Ok(Tried::Behind { due, split })
}

/// The error for a ballot in which fewer than a majority voted. A server without an answer counts
/// only if it was waited for, until `late`: a ballot that can't be won any more ends at once.
fn no_majority(engine: &Redlock, votes: &[Option<Vote>], late: Option<Duration>) -> Error {
    let mut errors = Vec::new();
    for (vote, node) in votes.iter().zip(&engine.nodes) {
        match (vote, late) {
            (Some(Vote::Failed(error)), _) => errors.push(node.blame(error)),
            (None, Some(limit)) => errors.push(node.blame(&no_answer("enter", limit))),
            _ => {}
        }
    }
    let abstaining = votes.iter().flatten().filter_map(|vote| match vote {
        Vote::Abstains(until) => Some(*until),
        _ => None,
    });
    let mut abstaining: Vec<BootTime> = abstaining.collect();
    let unknown = votes.iter().filter(|vote| vote.is_none()).count();
    let unknown = if late.is_some() { 0 } else { unknown };
    engine.no_majority("enter", unknown, &mut abstaining, &errors)
}

/// Retracts the votes of an attempt, wherever one was given or may have been given. Returns whether
/// all of them are known to be gone; what takes longer than `limit` continues in the background.
async fn give_back(
    engine: &Arc<Redlock>,
    ballot: &Arc<Ballot>,
    votes: &[Option<Vote>],
    limit: Duration,
) -> bool {
    ballot.given_up.store(true, Ordering::SeqCst);
    let mut returning: FuturesUnordered<BoxFuture<()>> = FuturesUnordered::new();
    for (at, vote) in votes.iter().enumerate() {
        let (count, doubt) = match vote {
            Some(Vote::Held { token, .. }) => (*token, Doubt::No),
            Some(vote) if !vote.may_hold() => continue,
            // Never sent.
            None if ballot.asked_on[at].load(Ordering::SeqCst) == 0 => continue,
            _ => (0, Doubt::Try(ballot.proposal)),
        };
        let (engine, ballot) = (Arc::clone(engine), Arc::clone(ballot));
        returning.push(Box::pin(async move {
            let over = BootTime::now() + ballot.ttl;
            let node = &engine.nodes[at];
            let mut count = count;
            while !over.has_passed() {
                match node.retract(&ballot.keys, ballot.id, count, doubt).await {
                    // The token was raised meanwhile.
                    Ok(Retracted::Other) => count = 0,
                    Ok(_) => return,
                    Err(_) => tokio::time::sleep(AGAIN).await,
                }
            }
        }));
    }
    let all = async { while returning.next().await.is_some() {} };
    let all = tokio::time::timeout(limit, all).await.is_ok();
    if !all {
        tokio::spawn(async move { while returning.next().await.is_some() {} });
    }
    all
}

/// One attempt of a claim, the same for all nodes.
pub(super) struct Ballot {
    pub(super) id: ClaimId,
    pub(super) keys: LineKeys,
    /// The proposed token; it also identifies the attempt.
    pub(super) proposal: u64,
    pub(super) ttl: Duration,
    /// The connection on which each node was asked; 0 before the request, and after the reply.
    pub(super) asked_on: Vec<AtomicU64>,
    /// Set before the votes are retracted: requests that were not sent by then are not sent at all.
    pub(super) given_up: AtomicBool,
    /// Weight and capacity, and the claim's record, as `vote.lua` takes them.
    ask: String,
    record: String,
}

impl Ballot {
    fn new(engine: &Redlock, claim: &Claim, keys: &LineKeys, permit: Option<u32>) -> Self {
        let (weight, capacity) = claim.ask.numbers();
        let ttl = claim.ttl.as_millis() as u64;
        let permit = permit.map_or_else(String::new, |permit| format!("@{permit} "));
        let owner = claim.owner.to_json();
        let mut record = format!(" {ttl} 0 {} {permit}{owner}", engine.channel);
        if let Some(value) = &claim.value {
            record.push('\n');
            record.push_str(value);
        }
        // Above all tokens that were seen or proposed, and above the clock, which is their floor.
        let clock = unix_time().as_micros() as u64;
        engine.seen.fetch_max(clock, Ordering::Relaxed);
        Self {
            id: claim.id,
            keys: keys.clone(),
            proposal: engine.seen.fetch_add(1, Ordering::Relaxed) + 1,
            ttl: claim.ttl,
            asked_on: engine.nodes.iter().map(|_| AtomicU64::new(0)).collect(),
            given_up: AtomicBool::new(false),
            ask: format!("{weight} {capacity} {}", ttl + ROUNDING),
            record,
        }
    }

    /// Asks for the vote of one server.
    async fn ask(&self, node: &Node) -> Vote {
        let mut link = match node.client.link(None).await {
            Ok(link) => link,
            Err(error) => return Vote::Failed(error),
        };
        if let Some(until) = node.abstains(&link) {
            return Vote::Abstains(until);
        }
        let asked_on = &self.asked_on[node.at];
        asked_on.store(link.generation(), Ordering::SeqCst);
        // Either this load sees that the attempt was given up, or the retraction sees that the
        // request was sent.
        if self.given_up.load(Ordering::SeqCst) {
            asked_on.store(0, Ordering::SeqCst);
            let message = "the attempt was given up before it was sent";
            return Vote::Failed(Error::new(ErrorKind::Unreachable, "enter", message));
        }
        let arguments = |command: &mut Cmd| {
            command.arg(self.id.to_string()).arg(&self.ask);
            command.arg(&self.record).arg(self.proposal);
        };
        // The reply also names the attempt: the claim may have tried before on this connection.
        let reply_to = format!("{} {}", self.id, self.proposal);
        let (client, keys) = (&node.client, &self.keys);
        let answer = client.run_for(&mut link, Script::Vote, keys, &reply_to, arguments);
        let vote = match answer.await {
            Ok(answer) => Vote::read(&answer, self.ttl)
                .unwrap_or_else(|| Vote::Failed(unexpected_reply("enter"))),
            Err(error) => Vote::Failed(error),
        };
        let known = match &vote {
            Vote::Failed(error) => error.outcome() == Outcome::NotApplied,
            _ => true,
        };
        if known {
            asked_on.store(0, Ordering::SeqCst);
        }
        vote
    }
}

/// The answer of one server.
#[derive(Debug)]
pub(super) enum Vote {
    /// The claim has this server's vote.
    Held {
        /// The token that the server counted for it.
        token: u64,
        /// The time left on it there.
        left: Duration,
        /// The permits that others hold there.
        permits: Vec<u32>,
    },
    /// Another claim has it.
    Busy {
        /// When that may change.
        due: Duration,
        permits: Vec<u32>,
    },
    /// The claim was left before the request for a vote arrived.
    Left,
    /// The line has another capacity on that server.
    Mismatch(u32),
    /// The server restarted recently, and does not vote before then. It was not asked.
    Abstains(BootTime),
    /// The server did not vote, or the outcome is unknown.
    Failed(Error),
}

impl Vote {
    /// Parses the reply of `vote.lua`.
    fn read(answer: &str, ttl: Duration) -> Option<Self> {
        let mut words = answer.split(' ');
        let word = words.next()?;
        let mut number = || {
            words
                .next()
                .map_or(Some(None), |w| w.parse().ok().map(Some))
        };
        let vote = match word {
            "held" => {
                let (token, left) = (number()??, number()?);
                let _due: Option<u64> = number()?;
                Self::Held {
                    token,
                    left: left.map_or(ttl, |left| Duration::from_micros(left).min(ttl)),
                    permits: permits(words.next()),
                }
            }
            "busy" => Self::Busy {
                due: Duration::from_micros(number()??),
                permits: permits(words.next()),
            },
            "left" => Self::Left,
            "mismatch" => Self::Mismatch(u32::try_from(number()??).ok()?),
            _ => return None,
        };
        Some(vote)
    }

    /// Whether the server may have a vote for the claim.
    pub(super) fn may_hold(&self) -> bool {
        match self {
            Self::Held { .. } => true,
            Self::Failed(error) => error.outcome() == Outcome::MaybeApplied,
            Self::Busy { .. } | Self::Left | Self::Mismatch(_) | Self::Abstains(_) => false,
        }
    }
}

fn permits(words: Option<&str>) -> Vec<u32> {
    words
        .into_iter()
        .flat_map(|words| words.split(','))
        .filter_map(|word| word.parse().ok())
        .collect()
}

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
    counts
        .iter()
        .find(|count| counts.iter().filter(|c| c == count).count() >= quorum)
        .map(|agreed| Token::Agreed(*agreed))
        .or_else(|| counts.iter().max().map(|most| Token::Raise(*most)))
}

/// How long a majority of the votes lasts: the longest time for which a quorum of them does.
pub(super) fn lasting(left: &[Duration], quorum: usize) -> Option<Duration> {
    left.iter()
        .filter(|time| left.iter().filter(|other| other >= time).count() >= quorum)
        .max()
        .copied()
}

/// When a majority may be free: the quorum-th smallest time until a server may be.
fn free_in(votes: &[Option<Vote>], quorum: usize) -> Option<Duration> {
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
fn next_permit(
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
        assert_eq!(lasting(&[s(1), s(9), s(5), s(7)], 3), Some(s(5)));
        assert_eq!(lasting(&[s(1), s(9)], 3), None);
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
            assert_eq!(next_permit(&votes, 2, 3, &[], spread), None, "all in use");
            assert_eq!(next_permit(&votes, 2, 4, &[], spread), Some(4));
            assert_eq!(next_permit(&votes, 2, 4, &[4], spread), None);
        }
        let some = [busy(&[1]), busy(&[1]), busy(&[3])];
        let found: std::collections::BTreeSet<_> = (0..9)
            .map(|spread| next_permit(&some, 2, 3, &[], spread))
            .collect();
        assert_eq!(found, [Some(2)].into(), "the one that all may give");
        assert_eq!(next_permit(&[busy(&[]), None, None], 2, 3, &[], 0), None);
    }
    #[test]
    fn answers_are_read() {
        let ttl = Duration::from_secs(9);
        let held = |answer: &str| match Vote::read(answer, ttl) {
            Some(Vote::Held {
                token,
                left,
                permits,
            }) => (token, left.as_millis(), permits),
            other => panic!("{answer}: {other:?}"),
        };
        assert_eq!(held("held 7"), (7, 9000, vec![]));
        assert_eq!(held("held 7 2000 0 "), (7, 2, vec![]));
        assert_eq!(held("held 7 2000 0 3,1"), (7, 2, vec![3, 1]));
        assert!(matches!(
            Vote::read("busy 5000 2", ttl),
            Some(Vote::Busy { due, permits }) if due.as_millis() == 5 && permits == [2]
        ));
        assert!(matches!(
            Vote::read("mismatch 3", ttl),
            Some(Vote::Mismatch(3))
        ));
        for bad in ["", "held", "held x", "busy", "busy x", "mismatch", "gone"] {
            assert!(Vote::read(bad, ttl).is_none(), "{bad}");
        }
    }

    #[test]
    fn only_what_is_known_not_to_hold_need_not_be_given_back() {
        let failed = || Error::new(ErrorKind::Unreachable, "enter", "x");
        assert!(!Vote::Failed(failed()).may_hold());
        assert!(Vote::Failed(failed().maybe_applied()).may_hold());
        assert!(!Vote::Left.may_hold());
    }
}
