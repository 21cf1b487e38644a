//! Renews many leases with one statement, for both layouts of the table.

use std::collections::HashSet;
use std::time::Duration;

use tokio::time::Instant;

use super::client::Client;
use super::statements::{Parameters, Verb};
use super::{from_micros, signed};
use palisade_core::engine::{Lease, LeaseStart, Renewal, Ticket};
use palisade_core::{BootTime, Error, ErrorKind, Result};

/// What the functions return instead of a ttl in µs.
const EVICTED: i64 = -1;
const LOCKED: i64 = -2;

/// Into how many parts the time is divided at the most, in which locked rows are waited for: with
/// more, none would get enough of it to be worth the wait.
const SHARES: u32 = 8;

/// Renews leases of palisade's own layout. Claims in the local queue need no request.
pub(super) async fn renew(client: &Client, leases: &[Lease], within: Duration) -> Vec<Renewal> {
    let mut round = Round::new(leases, within);
    round.answer(|ticket| {
        let armed = client.queue.armed(&ticket.name, ticket.claim)?;
        Some(Renewal::Held(armed))
    });
    let ask = |tickets: Vec<&Ticket>, patience: i32, by| {
        let (claims, counts) = incarnations(&tickets);
        let names: Vec<String> = tickets.iter().map(|t| t.name.to_string()).collect();
        async move {
            let namespace = &client.namespace;
            let parameters: Parameters<'_> = &[namespace, &names, &claims, &counts, &patience];
            client.renewals(Verb::Renew, parameters, by).await
        }
    };
    round.run(ask).await
}

/// The claims and tokens of tickets, as statement parameters.
pub(super) fn incarnations(tickets: &[&Ticket]) -> (Vec<String>, Vec<i64>) {
    let both = |ticket: &&Ticket| (ticket.claim.to_string(), signed(ticket.sequence));
    tickets.iter().map(both).unzip()
}

/// The tickets of one call, and what is known about each.
pub(super) struct Round<'a> {
    tickets: Vec<Option<&'a Ticket>>,
    answers: Vec<Option<Renewal>>,
    by: Instant,
}

impl<'a> Round<'a> {
    pub(super) fn new(leases: &'a [Lease], within: Duration) -> Self {
        let tickets: Vec<_> = leases.iter().map(|lease| lease.ticket.as_ref()).collect();
        // Every ticket of this engine has a lease of its own, so one without was never issued.
        let lost = |ticket: &Option<&Ticket>| ticket.is_none().then_some(Renewal::Lost);
        Self {
            answers: tickets.iter().map(lost).collect(),
            tickets,
            by: Instant::now() + within,
        }
    }

    /// Answers for the tickets that `known` decides without the server.
    fn answer(&mut self, known: impl Fn(&Ticket) -> Option<Renewal>) {
        for (answer, ticket) in self.answers.iter_mut().zip(&self.tickets) {
            if answer.is_none() {
                *answer = ticket.and_then(&known);
            }
        }
    }

    /// Renews the others. `ask` returns a number for each ticket by the given time. It waits for
    /// locked rows up to the given milliseconds; with 0 it skips them.
    ///
    /// Holders come first, so that a crowd of waiters can't delay them, then waiters. Last come the
    /// lines whose row another transaction has locked.
    pub(super) async fn run<F>(
        mut self,
        ask: impl Fn(Vec<&'a Ticket>, i32, Instant) -> F,
    ) -> Vec<Renewal>
    where
        F: Future<Output = Result<Vec<i64>>>,
    {
        let mut locked: Vec<usize> = Vec::new();
        for holds in [true, false] {
            let open = |index: &usize| {
                let ticket = self.tickets[*index];
                let fits = ticket.is_some_and(|ticket| (ticket.sequence > 0) == holds);
                fits && self.answers[*index].is_none()
            };
            let indexes: Vec<usize> = (0..self.tickets.len()).filter(open).collect();
            locked.extend(self.ask(&indexes, 0, &ask).await);
        }
        self.insist(locked, &ask).await;
        let unknown = || {
            let message = "another transaction keeps the line's row locked";
            Renewal::Unknown(Error::new(ErrorKind::Unreachable, "renew", message))
        };
        let answers = self.answers.into_iter();
        answers
            .map(|answer| answer.unwrap_or_else(unknown))
            .collect()
    }

    /// Renews those whose rows were locked. It waits for one line at a time, with a share of the
    /// time left, so that a row that stays locked leaves only its own line unknown; then it asks all
    /// others at once, because one transaction may have kept them all.
    async fn insist<F>(
        &mut self,
        mut locked: Vec<usize>,
        ask: impl Fn(Vec<&'a Ticket>, i32, Instant) -> F,
    ) where
        F: Future<Output = Result<Vec<i64>>>,
    {
        while let Some(ticket) = locked.first().and_then(|first| self.tickets[*first]) {
            let name = |at: &usize| self.tickets[*at].map(|ticket| &ticket.name);
            let lines: HashSet<_> = locked.iter().map(name).collect();
            let left = self.by.saturating_duration_since(Instant::now());
            // A bit less than its share, to allow for the round trips.
            let share = left * 3 / 4 / u32::try_from(lines.len()).map_or(SHARES, |n| n.min(SHARES));
            let Ok(patience @ 1..) = i32::try_from(share.as_millis()) else {
                return;
            };
            let (line, others): (Vec<_>, Vec<_>) = locked
                .into_iter()
                .partition(|at| name(at) == Some(&ticket.name));
            self.ask(&line, patience, &ask).await;
            locked = self.ask(&others, 0, &ask).await;
        }
    }

    /// Renews some, and returns those whose rows are locked.
    async fn ask<F>(
        &mut self,
        indexes: &[usize],
        patience: i32,
        ask: impl Fn(Vec<&'a Ticket>, i32, Instant) -> F,
    ) -> Vec<usize>
    where
        F: Future<Output = Result<Vec<i64>>>,
    {
        if indexes.is_empty() {
            return Vec::new();
        }
        let tickets = indexes.iter().filter_map(|index| self.tickets[*index]);
        let sent = BootTime::now();
        let answer = ask(tickets.collect(), patience, self.by).await;
        let mut locked = Vec::new();
        for (at, index) in indexes.iter().enumerate() {
            let renewal = match answer.as_ref().map(|numbers| numbers.get(at)) {
                Ok(Some(&LOCKED)) => {
                    locked.push(*index);
                    continue;
                }
                Ok(Some(&EVICTED)) => Renewal::Evicted,
                Ok(Some(&ttl)) if ttl > 0 => Renewal::Held(LeaseStart {
                    sent,
                    ttl: from_micros(ttl),
                }),
                Ok(_) => Renewal::Lost,
                Err(error) => Renewal::Unknown(error.clone()),
            };
            self.answers[*index] = Some(renewal);
        }
        locked
    }
}
