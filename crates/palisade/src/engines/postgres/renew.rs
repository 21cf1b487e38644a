//! `Round`: one renewal of many leases, as both layouts do it.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use crate::core::clock::BootTime;
use crate::core::engine::Renewal;
use crate::core::error::{Error, Kind, Result};
use crate::core::ticket::{LeaseStart, Ticket};

/// What the functions answer beside a ttl in µs.
const EVICTED: i64 = -1;
const LOCKED: i64 = -2;

/// Who asks the server for renewals.
pub(super) trait Rows {
    /// Renews tickets, and answers for each with a number. Waits for locked rows so many ms; with
    /// 0 it passes them over.
    ///
    /// # Errors
    /// As asking; by `by` at the latest.
    fn renew_rows(
        &self,
        tickets: &[&Ticket],
        patience: i32,
        by: Instant,
    ) -> impl Future<Output = Result<Vec<i64>>> + Send;
}

/// The tickets of one call, and what is known of each.
pub(super) struct Round<'a> {
    tickets: Vec<Option<&'a Ticket>>,
    answers: Vec<Option<Renewal>>,
    by: Instant,
}

impl<'a> Round<'a> {
    pub(super) fn new(tickets: Vec<Option<&'a Ticket>>, within: Duration) -> Self {
        // All tickets here have their own leases: another kind was never given out.
        let unknown = |ticket: &Option<&Ticket>| ticket.is_none().then_some(Renewal::Lost);
        Self {
            answers: tickets.iter().map(unknown).collect(),
            tickets,
            by: Instant::now() + within,
        }
    }

    /// Answers for those of whom `known` knows without the server.
    pub(super) fn answer(&mut self, known: impl Fn(&Ticket) -> Option<Renewal>) {
        for (answer, ticket) in self.answers.iter_mut().zip(&self.tickets) {
            if answer.is_none() {
                *answer = ticket.and_then(&known);
            }
        }
    }

    /// Renews the others.
    ///
    /// Every holder first, so that a crowd of waiters can't delay it, then those who wait. Then
    /// the lines whose row another transaction has locked, one by one, each for its share of the
    /// time that is left: only they are unknown if it stays locked.
    pub(super) async fn run(mut self, rows: &impl Rows) -> Vec<Renewal> {
        let open = |round: &Self, holds: bool| -> Vec<usize> {
            let indexes = 0..round.tickets.len();
            let fits = |index: &usize| {
                let ticket = round.tickets[*index];
                let like = ticket.is_some_and(|ticket| (ticket.sequence > 0) == holds);
                like && round.answers[*index].is_none()
            };
            indexes.filter(fits).collect()
        };
        let mut locked: Vec<Vec<usize>> = Vec::new();
        for holds in [true, false] {
            let indexes = open(&self, holds);
            let skipped = self.ask(&indexes, 0, rows).await;
            let mut lines: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
            for index in skipped {
                let name = self.tickets[index].map_or("", |ticket| ticket.name.as_str());
                lines.entry(name).or_default().push(index);
            }
            locked.extend(lines.into_values());
        }
        for (at, line) in locked.iter().enumerate() {
            let left = self.by.saturating_duration_since(Instant::now());
            // A little less than its share, for the way there and back.
            let share = left * 3 / 4 / u32::try_from(locked.len() - at).unwrap_or(u32::MAX);
            let patience = i32::try_from(share.as_millis()).unwrap_or(i32::MAX);
            self.ask(line, patience.max(1), rows).await;
        }
        let unknown = || {
            let message = "the line's row came and went";
            Renewal::Unknown(Error::new(Kind::Unreachable, "renew", message))
        };
        let answers = self.answers.into_iter();
        answers
            .map(|answer| answer.unwrap_or_else(unknown))
            .collect()
    }

    /// Asks for some, and says whose rows are locked by others.
    async fn ask(&mut self, indexes: &[usize], patience: i32, rows: &impl Rows) -> Vec<usize> {
        if indexes.is_empty() {
            return Vec::new();
        }
        let tickets: Vec<&Ticket> = indexes.iter().filter_map(|i| self.tickets[*i]).collect();
        let sent = BootTime::now();
        let mut locked = Vec::new();
        match rows.renew_rows(&tickets, patience, self.by).await {
            Ok(numbers) => {
                let mut numbers = numbers.into_iter();
                for index in indexes {
                    self.answers[*index] = match numbers.next() {
                        Some(EVICTED) => Some(Renewal::Evicted),
                        Some(LOCKED) => {
                            locked.push(*index);
                            None
                        }
                        Some(ttl) if ttl > 0 => Some(Renewal::Held(LeaseStart {
                            sent,
                            ttl: Duration::from_micros(ttl.unsigned_abs()),
                        })),
                        _ => Some(Renewal::Lost),
                    };
                }
            }
            Err(error) => {
                for index in indexes {
                    self.answers[*index] = Some(Renewal::Unknown(error.clone()));
                }
            }
        }
        locked
    }
}
