//! Holders as a majority of the servers reports them, and findings about the servers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::Redlock;
use super::ballot::{Token, lasting, token};
use super::node::Node;
use crate::check::merged as merged_checkups;
use palisade_core::report::{Checkup, ClaimReport, Finding, LineReport, Scope, Severity};
use palisade_core::{Name, Result};

pub(super) async fn survey(engine: &Arc<Redlock>, scope: &Scope) -> Result<Vec<LineReport>> {
    survey_during(engine, "survey", scope).await
}

async fn survey_during(
    engine: &Arc<Redlock>,
    operation: &'static str,
    scope: &Scope,
) -> Result<Vec<LineReport>> {
    let scope = scope.clone();
    let look = move |node: Arc<Node>| {
        let scope = scope.clone();
        async move { node.client.survey(&scope).await }
    };
    // All servers are awaited: a holder's majority may include those that answer last.
    let limit = engine.nodes[0].client.timeout;
    let answers = engine.gather(operation, limit, look, |_| false).await?;
    Ok(merged(
        answers.into_iter().flatten().collect(),
        engine.quorum,
    ))
}

/// The report of one line; empty when nobody holds it.
pub(super) async fn survey_line(
    engine: &Arc<Redlock>,
    operation: &'static str,
    name: &Name,
) -> Result<Vec<LineReport>> {
    survey_during(engine, operation, &Scope::Line(name.clone())).await
}

/// Merges the servers' reports: a holder needs a majority.
fn merged(answers: Vec<Vec<LineReport>>, quorum: usize) -> Vec<LineReport> {
    let mut lines: BTreeMap<String, BTreeMap<String, Vec<ClaimReport>>> = BTreeMap::new();
    let mut capacities: BTreeMap<String, u32> = BTreeMap::new();
    for line in answers.into_iter().flatten() {
        if let Some(capacity) = line.capacity {
            capacities.insert(line.name.clone(), capacity);
        }
        let claims = lines.entry(line.name).or_default();
        for holder in line.holders {
            claims.entry(holder.id.clone()).or_default().push(holder);
        }
    }
    let reports = lines.into_iter().map(|(name, claims)| {
        let agreed = claims.into_values().filter(|votes| votes.len() >= quorum);
        let mut holders: Vec<ClaimReport> = agreed.filter_map(|v| one(v, quorum)).collect();
        holders.sort_by_key(|holder| holder.sequence);
        let mut line = LineReport::empty(name);
        line.capacity = capacities.get(&line.name).copied();
        line.holders = holders;
        line
    });
    reports.filter(|line| !line.holders.is_empty()).collect()
}

/// Merges the votes for one claim.
fn one(votes: Vec<ClaimReport>, quorum: usize) -> Option<ClaimReport> {
    let counts: Vec<u64> = votes.iter().filter_map(|vote| vote.sequence).collect();
    let left: Vec<Duration> = votes.iter().filter_map(|vote| vote.expires_in).collect();
    let evicted = votes.iter().any(|vote| vote.evicted);
    let shown = votes.into_iter().next()?;
    Some({
        let mut claim = shown;
        claim.sequence = token(&counts, quorum).map(|token| match token {
            Token::Agreed(sequence) | Token::Raise(sequence) => sequence,
        });
        claim.expires_in = lasting(&left, quorum);
        claim.evicted = evicted;
        claim
    })
}

pub(super) async fn check(engine: &Arc<Redlock>) -> Result<Checkup> {
    let look = |node: Arc<Node>| async move { node.client.check().await };
    let limit = engine.nodes[0].client.timeout;
    let answers = engine.gather("check", limit, look, |_| false).await?;
    let mut abstaining = Vec::new();
    let down = answers.iter().filter(|answer| answer.is_none()).count();
    for (node, _) in engine
        .nodes
        .iter()
        .zip(&answers)
        .filter(|(_, up)| up.is_some())
    {
        let link = node.link().await.ok();
        abstaining.extend(link.and_then(|link| node.abstains(&link)));
    }
    let hosts = engine.nodes.iter().map(|node| node.host().clone());
    let mut whole = merged_checkups(hosts.zip(answers));
    if let Some(message) = engine.not_yet(&mut abstaining, down) {
        let remedy = "wait; restart_guard=off is for servers that write each command to disk \
                      before they answer";
        let found = Finding::new(Severity::Warning, "not_voting", message, remedy);
        whole.findings.push(found);
    }
    let nodes = engine.nodes.len();
    if nodes.is_multiple_of(2) {
        whole.findings.push(Finding::new(
            Severity::Warning,
            "even_servers",
            format!(
                "{nodes} servers tolerate no more failures than {} do",
                nodes - 1
            ),
            "use an odd number of servers".to_owned(),
        ));
    }
    Ok(whole)
}

#[cfg(test)]
mod tests {
    use super::*;
    use palisade_core::engine::Ask;

    #[test]
    fn a_line_is_shown_as_a_majority_shows_it() {
        let claim = |id: &str, sequence, seconds| {
            let mut claim = ClaimReport::new(id, Ask::Whole);
            claim.sequence = Some(sequence);
            claim.expires_in = Some(Duration::from_secs(seconds));
            claim
        };
        let line = |holder| {
            let mut line = LineReport::empty("a");
            line.holders = vec![holder];
            vec![line]
        };
        let shown = merged(
            vec![
                line(claim("x", 7, 9)),
                line(claim("y", 9, 9)),
                line(claim("x", 7, 3)),
                line(claim("x", 8, 5)),
                vec![],
            ],
            3,
        );
        assert_eq!(shown.len(), 1);
        assert_eq!(shown[0].holders.len(), 1, "{shown:?}");
        let holder = &shown[0].holders[0];
        assert_eq!((holder.id.as_str(), holder.sequence), ("x", Some(8)));
        assert_eq!(holder.expires_in, Some(Duration::from_secs(3)));
        let split = vec![line(claim("x", 7, 9)), line(claim("y", 9, 9)), vec![]];
        assert!(merged(split, 2).is_empty());
    }
}
