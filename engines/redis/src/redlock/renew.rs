//! Renews leases: a lease lives on when a majority of all servers has renewed it, not just of those
//! that voted for it. A renewal never re-creates a vote.

use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt};

use super::Redlock;
use super::ballot::lasting;
use super::waiter::Stage;
use palisade_core::engine::{BoxFuture, Lease, LeaseStart, Renewal};
use palisade_core::{BootTime, Error, ErrorKind};

/// The servers' answers for one lease.
#[derive(Default)]
struct Count {
    held: Vec<Duration>,
    lost: usize,
    evicted: usize,
    error: Option<Error>,
}

impl Count {
    fn add(&mut self, renewal: Renewal) {
        match renewal {
            Renewal::Held(armed) => self.held.push(armed.ttl),
            Renewal::Evicted => self.evicted += 1,
            Renewal::Lost | Renewal::Revoked(_) => self.lost += 1,
            Renewal::Unknown(error) => self.error = Some(error),
        }
    }

    /// The majority's answer; `None` while it is still open.
    fn decided(&self, nodes: usize, quorum: usize, sent: BootTime) -> Option<Renewal> {
        if let Some(ttl) = lasting(&self.held, quorum) {
            return Some(Renewal::Held(LeaseStart { sent, ttl }));
        }
        let against = self.lost + self.evicted;
        (against > nodes - quorum).then_some(match self.evicted {
            0 => Renewal::Lost,
            _ => Renewal::Evicted,
        })
    }
}

pub(super) async fn renew(
    engine: &Arc<Redlock>,
    leases: &[Lease],
    within: Duration,
) -> Vec<Renewal> {
    let here = |lease: &Lease| {
        let waiter = engine.waiting.get(lease.ticket.as_ref()?.claim)?;
        // The lease of a claim that was granted just now is on the servers.
        let held = matches!(waiter.stage(), Stage::Held(_));
        (!held).then(|| waiter.renew())
    };
    let mut answers: Vec<Option<Renewal>> = leases.iter().map(here).collect();
    let open = |answers: &[Option<Renewal>]| {
        let open = answers.iter().enumerate();
        open.filter_map(|(at, answer)| answer.is_none().then_some(at))
            .collect::<Vec<_>>()
    };
    let remote = open(&answers);
    if remote.is_empty() {
        return answers.into_iter().flatten().collect();
    }
    let asked: Vec<Lease> = remote.iter().map(|at| leases[*at].clone()).collect();
    let sent = BootTime::now();
    let mut renewing: FuturesUnordered<BoxFuture<Vec<Renewal>>> = engine
        .nodes
        .iter()
        .map(|node| {
            let (client, asked) = (Arc::clone(&node.client), asked.clone());
            Box::pin(async move { client.renew(&asked, within).await }) as BoxFuture<_>
        })
        .collect();
    let mut counts: Vec<Count> = asked.iter().map(|_| Count::default()).collect();
    let (nodes, quorum) = (engine.nodes.len(), engine.quorum);
    while let Some(renewals) = renewing.next().await {
        for (count, renewal) in counts.iter_mut().zip(renewals) {
            count.add(renewal);
        }
        let decided = |count: &Count| count.decided(nodes, quorum, sent).is_some();
        if counts.iter().all(decided) {
            break;
        }
    }
    if !renewing.is_empty() {
        // The remaining requests run on, so that a connection without a reply is dropped in time.
        tokio::spawn(async move { while renewing.next().await.is_some() {} });
    }
    for (at, count) in remote.into_iter().zip(counts) {
        let decided = count.decided(nodes, quorum, sent);
        answers[at] = Some(decided.unwrap_or_else(|| {
            let message = "no majority of the servers has answered";
            let unknown = Error::new(ErrorKind::Unreachable, "renew", message).maybe_applied();
            Renewal::Unknown(match count.error {
                Some(error) => unknown.because(error.message().to_owned()),
                None => unknown,
            })
        }));
    }
    answers.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_majority_of_all_servers_decides() {
        let sent = BootTime::PAST;
        let count = |held: usize, lost, evicted| Count {
            held: vec![Duration::from_secs(1); held],
            lost,
            evicted,
            error: None,
        };
        let said = |count: Count| count.decided(5, 3, sent);
        assert!(matches!(said(count(3, 2, 0)), Some(Renewal::Held(_))));
        assert!(
            said(count(2, 2, 0)).is_none(),
            "of those that answered, not of all"
        );
        assert!(matches!(said(count(2, 3, 0)), Some(Renewal::Lost)));
        assert!(matches!(said(count(0, 2, 1)), Some(Renewal::Evicted)));
    }
}
