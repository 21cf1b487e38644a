//! `survey` and `check`: holders as the store shows them, and the agent and its settings.
//!
//! Waiters have nothing in the store and are not shown. A survey also removes what dead holders
//! left behind.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use reqwest::{Method, StatusCode};
use serde_json::Value;

use super::Consul;
use super::client::{Client, Committed, Read};
use super::error::UNKNOWN_TOKEN;
use super::keys::Keys;
use super::kv::{Op, Pair, Record, SEMAPHORE, session_id, session_text};
use super::snapshot::{Snapshot, Spot};
use palisade_core::engine::{Ask, Mode, READERS, parse_duration, rounded};
use palisade_core::report::{Checkup, ClaimReport, Finding, LineReport, Scope, Severity};
use palisade_core::{ErrorKind, Name, Result};
use palisade_kit::plain_text;

/// The most lines that one sweep cleans up.
const LINES_SWEPT: usize = 64;

/// Consul's own default for `session_ttl_min`.
pub(super) const TTL_MIN: Duration = Duration::from_secs(10);

/// An operator's eviction mark on a claim.
pub(super) struct Mark {
    pub(super) claim: String,
    /// The lock key of the claim's line.
    line: String,
    index: u64,
}

/// The eviction marks of all claims.
pub(super) async fn marked(engine: &Consul) -> Result<Vec<Mark>> {
    let prefix = engine.keys.marks();
    let marks = engine.client.read("audit", &prefix, true, Read::Consistent);
    let mark = |pair: Pair| Mark {
        claim: pair.key[prefix.len()..].to_owned(),
        line: String::from_utf8_lossy(&pair.bytes()).into_owned(),
        index: pair.modify_index,
    };
    Ok(marks.await?.pairs.into_iter().map(mark).collect())
}

pub(super) async fn survey(engine: &Consul, scope: &Scope) -> Result<Vec<LineReport>> {
    let (keys, client) = (&engine.keys, &engine.client);
    let marked = marked(engine).await?;
    let lines = match scope {
        Scope::Line(name) => {
            let snapshot = Snapshot::read(client, &keys.line(name)?, Mode::Exclusive).await?;
            sweep_marks(engine, &snapshot, &marked).await;
            vec![(name.clone(), snapshot)]
        }
        Scope::Prefix(prefix) => {
            let from = keys.beginning(prefix);
            let seen = client.read("survey", &from, true, Read::Consistent);
            lines(keys, seen.await?.pairs)
        }
    };
    sweep_dead(engine, &lines).await;
    let marked = marked.into_iter().map(|mark| mark.claim).collect();
    let lines = lines
        .iter()
        .filter(|(name, _)| scope.includes(name.as_str()));
    let reports = lines.map(|(name, snapshot)| report(name, snapshot, &marked));
    Ok(reports
        .filter(|report| !report.holders.is_empty())
        .collect())
}

/// Removes the marks of claims that are no longer in their line: they left before they saw the
/// mark. The marks must have been read before the line.
async fn sweep_marks(engine: &Consul, snapshot: &Snapshot, marked: &[Mark]) {
    let lives = |claim: &str| {
        let is_its = |pair: &Pair| pair.record().is_some_and(|record| record.claim == claim);
        snapshot.claimed().any(is_its)
    };
    let gone = |mark: &&Mark| mark.line == snapshot.line.lock && !lives(&mark.claim);
    for mark in marked.iter().filter(gone) {
        let key = engine.keys.mark(&mark.claim);
        let ops = [Op::check_index(&key, mark.index), Op::delete(&key)];
        // The next survey retries.
        let _ = engine.client.transact("survey", &ops).await;
    }
}

/// Removes what dead holders left in empty lines of our namespace.
pub(super) async fn sweep_dead(engine: &Consul, lines: &[(Name, Snapshot)]) {
    if engine.keys.is_bare() {
        return;
    }
    let dead = lines.iter().filter_map(|(_, snapshot)| snapshot.remains());
    for ops in dead.take(LINES_SWEPT) {
        // The next survey retries; a client without the right to write leaves it.
        if engine.client.transact("sweep", &ops).await.is_err() {
            return;
        }
    }
}

/// Groups keys by line.
pub(super) fn lines(keys: &Keys, pairs: Vec<Pair>) -> Vec<(Name, Snapshot)> {
    let mut lines: BTreeMap<String, (Option<Pair>, Vec<Pair>)> = BTreeMap::new();
    for pair in pairs {
        let Some((mut name, below)) = keys.split(&pair.key) else {
            continue;
        };
        let mut is_lock = below.is_empty();
        // With `namespace=` only the flags distinguish a semaphore's keys from locks.
        if keys.is_bare()
            && is_lock
            && pair.flags == SEMAPHORE
            && let Some((of, last)) = name.rsplit_once('/')
            && (last == ".lock" || session_id(last).is_some())
        {
            (name, is_lock) = (of.to_owned(), false);
        }
        let (lock, tree) = lines.entry(name).or_default();
        if is_lock {
            *lock = Some(pair);
        } else {
            tree.push(pair);
        }
    }
    let line = |(name, (lock, tree))| {
        let name = Name::new(name).ok()?;
        let line = keys.line(&name).ok()?;
        Some((name, Snapshot::new(line, lock, tree)))
    };
    lines.into_iter().filter_map(line).collect()
}

fn report(name: &Name, snapshot: &Snapshot, marked: &HashSet<String>) -> LineReport {
    let list = snapshot.holders.as_ref();
    let claim = |pair: &Pair, session: &str, record: Option<Record>, ask: Ask| {
        let id = record.as_ref().map(|record| record.claim.clone());
        let id = id.unwrap_or_else(|| session.to_owned());
        let amended = snapshot.line.value(&id);
        let amended = snapshot.values.iter().find(|pair| pair.key == amended);
        let amended = amended.map(|pair| String::from_utf8_lossy(&pair.bytes()).into_owned());
        let sequence = record.as_ref().map(|record| record.granted_at(pair));
        let evicted = marked.contains(&id);
        let mut claim = ClaimReport::new(id, ask);
        claim.evicted = evicted;
        claim.value = amended.or_else(|| record.as_ref()?.value.clone());
        claim.sequence = Some(sequence.unwrap_or(pair.modify_index));
        // Renewals leave no trace in the store, so this is how long it lasts without another
        // renewal.
        claim.expires_in = record
            .as_ref()
            .map(|record| Duration::from_millis(record.ttl));
        claim.owner = record.map(|record| record.owner);
        claim
    };
    let mut holders = Vec::new();
    for (spot, pair, session, record) in snapshot.claims() {
        let ask = match (spot, list) {
            // A key of a semaphore, surveyed by its full name, is not a lock.
            (Spot::Whole, _) if pair.flags != SEMAPHORE => Ask::Whole,
            (Spot::Reader, _) if snapshot.is_gate() => Ask::READ,
            (Spot::Permit, Some(list)) if list.holders.contains_key(session) => Ask::Part {
                weight: 1,
                capacity: list.limit,
            },
            // Neither is a gate that a waiting writer keeps closed.
            _ => continue,
        };
        holders.push(claim(pair, session, record, ask));
    }
    holders.sort_by_key(|holder| holder.sequence);
    let reads = holders.iter().any(|holder| holder.ask == Ask::READ);
    let mut line = LineReport::empty(name.to_string());
    line.capacity = list.map(|list| list.limit).or(reads.then_some(READERS));
    line.holders = holders;
    line
}

/// What an agent reports about itself, as far as the token may read it.
#[derive(Debug, Clone, Default)]
pub(super) struct Agent {
    version: Option<String>,
    /// The shortest session ttl (`session_ttl_min`).
    pub(super) ttl_min: Option<Duration>,
    /// Whether it is a server that keeps its data in memory only.
    in_memory: bool,
}

impl Agent {
    /// Asks the agent; returns the default if the token may not read it.
    pub(super) async fn read(client: &Client) -> Result<Self> {
        let asked = client.send("connect", Method::GET, "/v1/agent/self?", Vec::new());
        let reply = match asked.await {
            Ok(reply) if reply.status == StatusCode::OK => reply,
            Ok(_) => return Ok(Self::default()),
            Err(error) if error.message() == UNKNOWN_TOKEN => return Err(error),
            Err(error) if error.kind() == ErrorKind::Denied => return Ok(Self::default()),
            Err(error) => return Err(error),
        };
        let says: Value = serde_json::from_slice(&reply.body).unwrap_or_default();
        let text = |path: &str| Some(says.pointer(path)?.as_str()?.to_owned());
        let ttl_min = text("/DebugConfig/SessionTTLMin");
        let ttl_min = ttl_min.and_then(|text| parse_duration(&text).ok());
        Ok(Self {
            version: text("/Config/Version"),
            ttl_min: ttl_min.filter(|ttl| !ttl.is_zero()),
            in_memory: says.pointer("/DebugConfig/DevMode") == Some(&Value::Bool(true)),
        })
    }
}

pub(super) async fn check(engine: &Consul) -> Result<Checkup> {
    let agent = Agent::read(&engine.client).await?;
    let mut findings = Vec::from_iter(plain_text(&engine.hosts, engine.encrypted));
    if agent.version.is_none() {
        findings.push(Finding::new(
            Severity::Info,
            "agent_unread",
            "the ACL token may not read the agent, so its version and session_ttl_min are not known",
            "give it agent:read, or leave it if ttls below 10s are not wanted",
        ));
    }
    if agent.in_memory {
        findings.push(Finding::new(
            Severity::Danger,
            "in_memory",
            "this agent runs with -dev: it keeps its data in memory, and a restart forgets locks and tokens",
            "run servers with a data_dir",
        ));
    }
    if agent.version.as_deref().is_some_and(is_old) {
        findings.push(Finding::new(
            Severity::Warning,
            "old_version",
            "this Consul is older than 1.4, with which palisade was never tested",
            "upgrade Consul",
        ));
    }
    let (ttl, delay) = (engine.default_ttl, engine.lock_delay);
    let mut message = format!(
        "with a ttl of {} a lock whose holder died is free after up to {}: Consul keeps a session for up to twice its ttl",
        rounded(ttl),
        rounded(ttl * 2 + delay)
    );
    if !delay.is_zero() {
        message += &format!(", and the lock for a lock_delay of {} more", rounded(delay));
    }
    findings.push(Finding::new(
        Severity::Info,
        "take_over",
        message,
        "choose a shorter ttl; session_ttl_min of the servers bounds it",
    ));
    findings.extend(rights(engine).await?);
    Ok({
        let mut checkup = Checkup::default();
        checkup.version = agent.version;
        checkup.findings = findings;
        checkup
    })
}

/// Tries what a lock needs: a session, and a write in the namespace.
async fn rights(engine: &Consul) -> Result<Vec<Finding>> {
    let (client, keys) = (&engine.client, &engine.keys);
    let denied = |what: &str, rule: &str| {
        let message = format!("the ACL token may not {what}");
        let remedy = format!("give it a policy with {rule}");
        Finding::new(Severity::Warning, "acl_denied", message, remedy)
    };
    let mut findings = Vec::new();
    let settings = engine.session_settings(engine.default_ttl);
    let session = match client.create_session(&settings).await {
        Ok(session) => Some(session_text(session)),
        Err(error) if error.kind() == ErrorKind::Denied => {
            findings.push(denied(
                "create sessions: it lacks session:write",
                "node_prefix \"\" { policy = \"read\" } session_prefix \"\" { policy = \"write\" }",
            ));
            None
        }
        Err(error) if error.kind() == ErrorKind::Config => {
            let remedy = "name checks of the agent's node, such as serfHealth, or omit node_checks";
            let message = error.message();
            findings.push(Finding::new(
                Severity::Warning,
                "node_check",
                message,
                remedy,
            ));
            None
        }
        Err(error) => return Err(error),
    };
    let probe = session.as_deref().unwrap_or("rights");
    let probe = keys.mark(&format!("check-{probe}"));
    let mut ops = match &session {
        Some(session) => vec![
            Op::lock(&probe, session, 0, ""),
            Op::unlock(&probe, session),
        ],
        None => vec![Op::set(&probe, 0, "")],
    };
    ops.push(Op::delete(&probe));
    let tried = client.transact("check", &ops).await;
    if let Some(session) = session {
        client.destroy_session(&session).await?;
    }
    match tried {
        Ok(Committed::Done(_)) => {}
        Err(error) if error.kind() != ErrorKind::Denied => return Err(error),
        Ok(Committed::Refused(_)) | Err(_) => findings.push(denied(
            "write keys of this namespace: it lacks key:write",
            &format!(
                "key_prefix {:?} {{ policy = \"write\" }}",
                keys.beginning("")
            ),
        )),
    }
    Ok(findings)
}

fn is_old(version: &str) -> bool {
    let mut numbers = version
        .split('.')
        .map(|part| part.parse::<u32>().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    version < (1, 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_by_number() {
        assert!(is_old("1.3.9") && !is_old("1.8.7") && !is_old("1.10.0") && !is_old("2.0"));
    }
}
