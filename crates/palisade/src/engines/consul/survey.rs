//! `survey`: holders as the store shows them. Waiters have nothing in it and are not shown.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use super::ConsulEngine;
use super::api::Read;
use super::keep::Mark;
use super::keys::Line;
use super::view::View;
use super::wire::{Op, Pair, SEMAPHORE, session_id};
use crate::core::claim::{Ask, READERS};
use crate::core::error::Result;
use crate::core::name::Name;
use crate::core::report::{ClaimReport, LineReport, Scope};

/// How many lines one look sweeps at the most.
const LINES_SWEPT: usize = 64;

impl ConsulEngine {
    pub(super) async fn do_survey(self: Arc<Self>, scope: Scope) -> Result<Vec<LineReport>> {
        let marked = self.marked().await?;
        let lines: Vec<(Name, View)> = match &scope {
            Scope::Line(name) => {
                let line = self.keys.line(name)?;
                let view = self.look(&line).await?;
                self.sweep_marks(&line, &view, &marked).await;
                vec![(name.clone(), view)]
            }
            Scope::Prefix(prefix) => {
                let from = self.keys.beginning(prefix);
                let seen = self
                    .api
                    .read("survey", &from, true, Read::Consistent)
                    .await?;
                self.lines(seen.pairs)
            }
        };
        self.sweep_dead(&lines).await;
        let marked = marked.into_iter().map(|mark| mark.claim).collect();
        let mut reports = Vec::new();
        for (name, view) in lines {
            let line = self.keys.line(&name)?;
            let report = report(&name, &line, &view, &marked);
            if !report.holders.is_empty() && scope.includes(name.as_str()) {
                reports.push(report);
            }
        }
        Ok(reports)
    }

    /// Removes marks of claims that are in their line no more: they left before they knew. The
    /// marks were read before the line.
    async fn sweep_marks(&self, line: &Line, view: &View, marked: &[Mark]) {
        let lives = |claim: &str| {
            let mut pairs = view.lock.iter().chain(&view.tree);
            pairs.any(|pair| pair.record().is_some_and(|record| record.claim == claim))
        };
        let gone = |mark: &&Mark| mark.line == line.lock && !lives(&mark.claim);
        for mark in marked.iter().filter(gone) {
            let key = self.keys.mark(&mark.claim);
            let ops = [Op::check_index(&key, mark.index), Op::delete(&key)];
            // Another survey can do it as well.
            let _ = self.api.transact("survey", &ops).await;
        }
    }

    /// Removes what holders that died have left in lines of our own namespace in which nobody is.
    pub(super) async fn sweep_dead(&self, lines: &[(Name, View)]) {
        if self.keys.is_bare() {
            return;
        }
        let dead = lines.iter().filter_map(|(name, view)| {
            let line = self.keys.line(name).ok()?;
            view.remains(&line)
        });
        for ops in dead.take(LINES_SWEPT) {
            // Whoever looks next can do it as well, and whoever may not write leaves it.
            if self.api.transact("sweep", &ops).await.is_err() {
                return;
            }
        }
    }

    /// Sorts keys into lines.
    pub(super) fn lines(&self, pairs: Vec<Pair>) -> Vec<(Name, View)> {
        let mut lines: BTreeMap<String, View> = BTreeMap::new();
        for pair in pairs {
            let Some((name, below)) = self.keys.split(&pair.key) else {
                continue;
            };
            // With `namespace=` nothing but the flags tells a semaphore's keys from locks.
            let semaphore = |name: &str| -> Option<String> {
                let (name, last) = name.rsplit_once('/')?;
                let is = pair.flags == SEMAPHORE && (last == ".lock" || session_id(last).is_some());
                is.then(|| name.to_owned())
            };
            match (below, semaphore(&name)) {
                ("", Some(name)) if self.keys.is_bare() => {
                    lines.entry(name).or_default().tree.push(pair);
                }
                ("", _) => lines.entry(name).or_default().lock = Some(pair),
                _ => lines.entry(name).or_default().tree.push(pair),
            }
        }
        let valid = |(name, view)| Some((Name::new(name).ok()?, view));
        let lines = lines.into_iter().filter_map(valid);
        lines
            .filter(|(name, _)| self.keys.line(name).is_ok())
            .collect()
    }
}

fn report(name: &Name, line: &Line, view: &View, marked: &HashSet<String>) -> LineReport {
    let claim = |pair: &Pair, ask: Ask| -> Option<ClaimReport> {
        let session = pair.holder()?;
        let record = pair.record();
        let id = record
            .as_ref()
            .map_or_else(|| session.to_owned(), |record| record.claim.clone());
        let amended = line.value(&id);
        let amended = view.tree.iter().find(|pair| pair.key == amended);
        let amended = amended.map(|pair| String::from_utf8_lossy(&pair.bytes()).into_owned());
        let sequence = match &record {
            Some(record) => pair.sequence(record),
            None => pair.modify_index,
        };
        let ttl = record
            .as_ref()
            .map(|record| Duration::from_millis(record.ttl));
        Some(ClaimReport {
            evicted: marked.contains(&id),
            id,
            value: amended.or_else(|| record.as_ref()?.value.clone()),
            owner: record.map(|record| record.owner),
            ask,
            sequence: Some(sequence),
            // Renewals leave no trace in the store: this is how long it can last without another.
            expires_in: ttl,
        })
    };
    let mut report = LineReport {
        name: name.to_string(),
        capacity: None,
        holders: Vec::new(),
        waiters: Vec::new(),
    };
    if let Some(lock) = &view.lock {
        // A semaphore's own key, asked for by its whole name, is no lock, and neither is a gate
        // that a waiting writer keeps closed.
        let lock = Some(lock).filter(|lock| lock.flags != SEMAPHORE && !view.is_gate());
        report
            .holders
            .extend(lock.and_then(|lock| claim(lock, Ask::Whole)));
    }
    if report.holders.is_empty() {
        let readers = view.readers(line).filter_map(|pair| claim(pair, Ask::READ));
        report.holders.extend(readers);
        report.capacity = (!report.holders.is_empty()).then_some(READERS);
    }
    if let Some(holders) = view.holders(line) {
        let ask = Ask::Part {
            weight: 1,
            capacity: holders.limit,
        };
        let held = view
            .permits(line)
            .filter(|(session, _)| holders.holders.contains_key(*session))
            .filter_map(|(_, pair)| claim(pair, ask));
        report.holders.extend(held);
        report.capacity = Some(holders.limit);
    }
    report.holders.sort_by_key(|holder| holder.sequence);
    report
}
