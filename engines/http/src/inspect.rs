//! `survey` and `check`: the lines as the gateway shows them, and what it reports about its engine.

use std::collections::BTreeSet;

use parking_lot::Mutex;

use super::Gateway;
use super::api::{Described, Found, Lines};
use super::error::{WHO, parse};
use super::notify::query;
use palisade_core::Result;
use palisade_core::report::{Checkup, Finding, LineReport, Scope, Severity};
use palisade_kit::plain_text;
use palisade_kit::replies::{PAGES, too_large};

/// What a page counts for at least.
const PAGE: usize = 4 << 10;

pub(super) async fn survey(engine: &Gateway, scope: &Scope) -> Result<Vec<LineReport>> {
    let asked = match scope {
        Scope::Line(name) => format!("name={}", query(&engine.names.there(name)?)),
        Scope::Prefix(prefix) => format!("prefix={}", query(&engine.names.prefix(prefix))),
    };
    let (mut found, mut after, mut read) = (Vec::new(), String::new(), 0);
    loop {
        let path = format!("/v1/lines?records=true&{asked}{after}");
        let body = engine.client.get("survey", &path).await?;
        // Empty pages without end are refused, too.
        read += body.len().max(PAGE);
        if read > PAGES {
            return Err(too_large("survey", WHO, PAGES));
        }
        let page: Lines = parse("survey", &body)?;
        let lines = page.lines.into_iter();
        found.extend(lines.filter_map(|line| line.report(&engine.names)));
        match page.next {
            Some(next) => after = format!("&after={}", query(&next)),
            None => return Ok(found),
        }
    }
}

pub(super) async fn check(engine: &Gateway) -> Result<Checkup> {
    let body = engine.client.get("check", "/v1/engine").await?;
    let described: Described = parse("check", &body)?;
    let mut findings: Vec<Finding> = described.findings.iter().map(finding).collect();
    findings.extend(plain_text(&engine.hosts, engine.encrypted));
    if !described.passable {
        findings.push(Finding::new(
            Severity::Danger,
            "not_passable",
            "the gateway's engine ends a hold with the gateway's process, so that it grants none",
            "connect to that engine directly, or put the gateway in front of another",
        ));
    }
    if described.draining {
        findings.push(Finding::new(
            Severity::Warning,
            "draining",
            "the gateway is about to stop and opens no new sessions",
            "name several gateways in the URL, by comma",
        ));
    }
    Ok({
        let mut checkup = Checkup::default();
        checkup.version = described.version;
        checkup.clock_ahead_us = described.clock_ahead_us;
        checkup.findings = findings;
        checkup
    })
}

fn finding(found: &Found) -> Finding {
    let severity = match found.severity.as_str() {
        "info" => Severity::Info,
        "warning" => Severity::Warning,
        _ => Severity::Danger,
    };
    let (code, message) = (code(&found.code), found.message.clone());
    Finding::new(severity, code, message, found.remedy.clone())
}

/// The most codes that are kept; all engines of palisade have fewer.
const CODES: usize = 256;

/// Interns the code of a finding as a `'static` string. A gateway has few codes; the codes of one
/// that invents them are replaced by a single word.
fn code(said: &str) -> &'static str {
    static KNOWN: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    let mut known = KNOWN.lock();
    if let Some(code) = known.get(said) {
        return code;
    }
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    if known.len() >= CODES || said.is_empty() || said.len() > 64 || !said.chars().all(plain) {
        return "gateway";
    }
    let code: &'static str = String::leak(said.to_owned());
    known.insert(code);
    code
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_kept_once_and_nothing_else_is_a_code() {
        let known = code("no_persistence");
        assert_eq!(known, "no_persistence");
        assert!(std::ptr::eq(known, code("no_persistence")));
        for odd in ["", "two words", "UPPER", &"x".repeat(65)] {
            assert_eq!(code(odd), "gateway");
        }
    }
}
