//! Holders and waiters: one script call per line. Lines are found by SCAN, because an index of them
//! would be in another hash slot.

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::future::try_join_all;
use redis::{RedisResult, Value};

use super::client::{Client, Script, garbled};
use super::connection::Connection;
use super::error::fault;
use super::keys::LineKeys;
use super::watched::Watch;
use palisade_core::engine::{Ask, ClaimId};
use palisade_core::report::{ClaimReport, LineReport, Owner, Scope};
use palisade_core::{Name, Result};
use palisade_kit::Link;

/// How many keys one SCAN call visits, and how many lines are surveyed at once. Each takes the
/// server a millisecond or two.
const STEP: usize = 2000;
const AT_ONCE: usize = 100;

impl Client {
    pub(crate) async fn survey(&self, scope: &Scope) -> Result<Vec<LineReport>> {
        let found = match scope {
            Scope::Line(name) => vec![(name.clone(), self.keys.line(name)?)],
            Scope::Prefix(prefix) => match self.watches.of(prefix) {
                Some(watch) => return self.survey_beside(&watch).await,
                None => self.find(prefix).await?,
            },
        };
        let mut reports = Vec::new();
        for some in found.chunks(AT_ONCE) {
            let asked = some.iter().map(|(name, keys)| self.report(name, keys));
            reports.extend(try_join_all(asked).await?.into_iter().flatten());
        }
        Ok(reports)
    }

    /// As [`Client::survey`], beside a watch.
    async fn survey_beside(&self, watch: &Watch) -> Result<Vec<LineReport>> {
        let watched = &watch.lines;
        let known = match watch.all(self.timeout).await {
            Some(known) => known,
            None => {
                let found = self.find(&watched.prefix).await?;
                watched.scanned(&found);
                let found = found.into_iter().map(|(name, keys)| (name, keys, 0));
                found.collect()
            }
        };
        let mut reports = Vec::new();
        for some in known.chunks(AT_ONCE) {
            let asked = some.iter().map(|(name, keys, _)| self.report(name, keys));
            for ((name, _, heard), report) in some.iter().zip(try_join_all(asked).await?) {
                if report.is_none() {
                    watched.is_empty(name, *heard);
                }
                reports.extend(report);
            }
        }
        Ok(reports)
    }

    /// The lines on all servers that have a state key and whose names begin with `prefix`.
    async fn find(&self, prefix: &str) -> Result<Vec<(Name, LineKeys)>> {
        let links = self.links().await?;
        let lines = links.iter().map(|link| self.lines(link, prefix));
        // A line that migrates during the scan may be found on both servers.
        let mut found = BTreeMap::new();
        for lines in try_join_all(lines).await? {
            found.extend(lines);
        }
        Ok(found.into_iter().collect())
    }

    /// The lines on one server that have a state key and whose names begin with `prefix`, in order
    /// of name.
    async fn lines(&self, link: &Link<Connection>, prefix: &str) -> Result<Vec<(Name, LineKeys)>> {
        let mut found = BTreeMap::new();
        let mut cursor = 0u64;
        loop {
            let mut scan = redis::cmd("SCAN");
            scan.arg(cursor).arg("MATCH").arg(self.keys.pattern(prefix));
            scan.arg("COUNT").arg(STEP).arg("TYPE").arg("string");
            let step: RedisResult<(u64, Vec<Vec<u8>>)> = self.ask("survey", link, &scan).await?;
            let (next, states) = step.map_err(|error| fault("survey", &error))?;
            let names = states.into_iter().filter_map(|state| {
                let state = String::from_utf8(state).ok()?;
                self.keys.name_of(&state)
            });
            found.extend(names.filter(|(name, _)| name.as_str().starts_with(prefix)));
            cursor = next;
            if cursor == 0 {
                return Ok(found.into_iter().collect());
            }
        }
    }

    /// The report of one line; `None` when it is empty.
    async fn report(&self, name: &Name, keys: &LineKeys) -> Result<Option<LineReport>> {
        let mut link = self.link(Some(keys)).await?;
        let answer: Value = self.run(&mut link, Script::Survey, keys, |_| ()).await?;
        let (capacity, mut holders, waiters) =
            read(&answer).ok_or_else(|| garbled("survey", &answer))?;
        if holders.is_empty() && waiters.is_empty() {
            return Ok(None);
        }
        holders.sort_by_key(|holder| holder.sequence);
        Ok(Some({
            let mut line = LineReport::empty(name.to_string());
            line.capacity = capacity;
            line.holders = holders;
            line.waiters = waiters;
            line
        }))
    }
}

type Shown = (Option<u32>, Vec<ClaimReport>, Vec<ClaimReport>);

fn text(value: &Value) -> Option<&str> {
    match value {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok(),
        Value::SimpleString(text) => Some(text),
        _ => None,
    }
}

fn number<T: std::str::FromStr>(value: &Value) -> Option<T> {
    text(value)?.parse().ok()
}

/// Parses the reply of `survey.lua`.
fn read(answer: &Value) -> Option<Shown> {
    let Value::Array(items) = answer else {
        return None;
    };
    let [
        capacity,
        parts,
        Value::BulkString(foreign),
        lasts,
        holders,
        waiters,
    ] = items.as_slice()
    else {
        return None;
    };
    let capacity = (number::<u64>(parts)? > 0).then_some(number(capacity)?);
    let mut holders = claims(holders)?;
    if !foreign.is_empty() {
        let lasts: i64 = number(lasts)?;
        holders.push({
            let mut claim = ClaimReport::new(foreign_id(foreign), Ask::Whole);
            claim.expires_in = u64::try_from(lasts).ok().map(Duration::from_millis);
            claim
        });
    }
    Some((capacity, holders, claims(waiters)?))
}

fn claims(value: &Value) -> Option<Vec<ClaimReport>> {
    let Value::Array(items) = value else {
        return None;
    };
    items.iter().map(claim).collect()
}

/// Parses `{id, record, lease left}`; `line.lua` describes the record.
fn claim(value: &Value) -> Option<ClaimReport> {
    let Value::Array(items) = value else {
        return None;
    };
    let [id, record, left] = items.as_slice() else {
        return None;
    };
    let mut words = text(record)?.splitn(7, ' ');
    let mut next = || words.next();
    let weight: u32 = next()?.parse().ok()?;
    let capacity: u32 = next()?.parse().ok()?;
    let token: u64 = next()?.parse().ok()?;
    let _ttl = next()?;
    let evicted = next()? == "1";
    let _channel = next()?;
    let rest = next()?;
    // A record written by `vote.lua` has its permit here.
    let rest = match rest.strip_prefix('@') {
        Some(rest) => rest.split_once(' ')?.1,
        None => rest,
    };
    let (owner, value) = match rest.split_once('\n') {
        Some((owner, value)) => (owner, Some(value.to_owned())),
        None => (rest, None),
    };
    let left: i64 = number(left)?;
    Some({
        let mut claim = ClaimReport::new(
            text(id)?.to_owned(),
            match weight {
                0 => Ask::Whole,
                weight => Ask::Part { weight, capacity },
            },
        );
        claim.owner = Owner::from_json(owner.as_bytes());
        claim.value = value;
        claim.sequence = (token > 0).then_some(token);
        claim.expires_in = Some(Duration::from_micros(u64::try_from(left).unwrap_or(0)));
        claim.evicted = evicted;
        claim
    })
}

/// The id shown for another tool's value: the value itself, or hex if it is not plain text.
fn foreign_id(value: &[u8]) -> String {
    match std::str::from_utf8(value) {
        Ok(text) if !text.chars().any(char::is_control) && !text.starts_with("hex:") => {
            text.to_owned()
        }
        _ => {
            let digits = value.iter().map(|byte| format!("{byte:02x}"));
            format!("hex:{}", digits.collect::<String>())
        }
    }
}

/// The value that an id from [`foreign_id`] stands for. The id of one of our claims is its own
/// value.
pub(crate) fn foreign_value(id: &str) -> Vec<u8> {
    let hex = id.strip_prefix("hex:").filter(|hex| hex.is_ascii());
    let byte = |at: usize| u8::from_str_radix(hex?.get(at..at + 2)?, 16).ok();
    let bytes = (0..hex.map_or(0, str::len)).step_by(2).map(byte);
    match (hex, bytes.collect::<Option<Vec<u8>>>()) {
        (Some(_), Some(bytes)) => bytes,
        // The ids of our claims are stored in lower case.
        _ => match id.parse::<ClaimId>() {
            Ok(claim) if id.len() == 32 && id.eq_ignore_ascii_case(&claim.to_string()) => {
                claim.to_string().into_bytes()
            }
            _ => id.as_bytes().to_vec(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_other_tools_are_shown_and_found_again() {
        for value in [&b"0123abc"[..], b"\x00\xff\x10", b"hex:00", b"a b\n", b"=="] {
            let id = foreign_id(value);
            assert!(!id.chars().any(char::is_control));
            assert_eq!(foreign_value(&id), value, "{id}");
        }
    }
}
