//! `palisade doctor`: an engine's version, capabilities, latency and unsafe settings. It only
//! reads: nothing is locked and nothing is changed.

use std::time::Instant;

use anstyle::{AnsiColor, Style};
use palisade::report::{Checkup, Finding, Scope, Severity};
use palisade::{Client, Name};
use serde::Serialize;

use crate::abilities::{Abilities, meaning};
use crate::args::Global;
use crate::connect::Target;
use crate::exit::{Failure, Verdict};
use crate::view::shown;

/// Odd, so that the median is one of the reads; few, so that a slow engine takes no long time.
const ROUND_TRIPS: usize = 9;

/// Check an engine: capabilities, latency and unsafe settings
///
/// It only reads. The exit code is 1 if a finding is a danger: exclusion or tokens can break, or
/// nobody can lock.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  palisade doctor\n  \
    palisade doctor --url redis://localhost --json\n\n\
    Exit codes: 0 nothing dangerous, 1 danger, 69 engine unreachable.")]
pub(crate) struct Doctor {}

/// What was found.
#[derive(Debug, Serialize)]
struct Health {
    engine: String,
    version: Option<String>,
    class: String,
    capability: Abilities,
    round_trip_us: Option<f64>,
    clock_ahead_us: Option<i64>,
    findings: Vec<FindingView>,
    #[serde(skip)]
    meaning: &'static str,
}

#[derive(Debug, Serialize)]
struct FindingView {
    severity: &'static str,
    code: &'static str,
    message: String,
    remedy: String,
}

impl Doctor {
    pub(crate) async fn run(self, global: &Global) -> Verdict {
        let target = Target::find(global)?;
        let client = target.connect_existing().await?;
        let (checkup, engine, capability, round_trip_us) = match &client {
            Some(client) => (
                client.check().await?,
                client.describe(),
                client.capability(),
                Some(round_trip(client).await?),
            ),
            None => (
                Checkup::default(),
                target.shown()?,
                target.info()?.capability,
                None,
            ),
        };
        let mut findings = checkup.findings;
        findings.extend(of_the_command(&target, client.is_none())?);
        if !capability.waiters_visible {
            findings.push(Finding::new(
                Severity::Info,
                "deadlocks_unseen",
                "this engine does not show who waits, so deadlocks are not found",
                "take locks in the same order everywhere, or wait with a limit",
            ));
        }
        findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
        let safe = findings
            .first()
            .is_none_or(|worst| worst.severity != Severity::Danger);
        let health = Health {
            engine,
            version: checkup.version,
            class: capability.class.to_string(),
            capability: Abilities::new(&capability),
            round_trip_us,
            clock_ahead_us: checkup.clock_ahead_us,
            findings: findings.into_iter().map(FindingView::new).collect(),
            meaning: meaning(capability.class),
        };
        global.printer().reply(&health, Health::text, safe)
    }
}

impl FindingView {
    fn new(finding: Finding) -> Self {
        Self {
            severity: match finding.severity {
                Severity::Info => "info",
                Severity::Warning => "warning",
                Severity::Danger => "danger",
            },
            code: finding.code,
            message: finding.message,
            remedy: finding.remedy,
        }
    }
}

/// Findings that the engine itself can't make: how the command uses it.
fn of_the_command(target: &Target, absent: bool) -> Result<Vec<Finding>, Failure> {
    let mut findings = Vec::new();
    if absent {
        let message = "there is no store yet: the first lock creates it";
        let remedy = "none needed; run doctor again after a lock was taken";
        findings.push(Finding::new(
            Severity::Info,
            "no_store_yet",
            message,
            remedy,
        ));
    }
    if target.is_private()? {
        let message = "memory: keeps its locks inside one process: two commands never meet there, \
                       and `run` and `elect` refuse it";
        let remedy = "use file: for the processes of this machine, or a server";
        findings.push(Finding::new(
            Severity::Danger,
            "excludes_nobody",
            message,
            remedy,
        ));
    }
    if let Some(message) = target.exposed() {
        let remedy = "chmod 600 it, or put the password into a file of its own and name that with \
                      password_file=";
        findings.push(Finding::new(
            Severity::Warning,
            "exposed_password",
            message,
            remedy,
        ));
    }
    Ok(findings)
}

/// The median time of a cheap read, in microseconds.
async fn round_trip(client: &Client) -> Result<f64, Failure> {
    // Nobody else uses this name: the owner is random.
    let name = Name::new(format!("palisade-doctor-{}", client.owner()))?;
    let mut times = Vec::new();
    // The first one also warms up.
    for _ in 0..=ROUND_TRIPS {
        let began = Instant::now();
        client.survey(Scope::Line(name.clone())).await?;
        times.push(began.elapsed());
    }
    let mut times = times.split_off(1);
    times.sort_unstable();
    Ok(times[ROUND_TRIPS / 2].as_nanos() as f64 / 1e3)
}

impl Health {
    fn text(&self) -> String {
        let class = format!("{} ({})", self.class, self.meaning);
        let mut rows = vec![("engine", shown(&self.engine))];
        rows.extend(
            self.version
                .iter()
                .map(|version| ("version", shown(version))),
        );
        rows.push(("class", class));
        rows.extend(
            self.round_trip_us
                .map(|time| ("round trip", format!("{time:.0} µs"))),
        );
        rows.extend(self.clock_ahead_us.map(|ahead| {
            let side = if ahead < 0 { "behind" } else { "ahead of" };
            let off = ahead.unsigned_abs() as f64 / 1e3;
            ("clock", format!("{off:.1} ms {side} ours"))
        }));
        rows.push(("", String::new()));
        rows.extend(self.capability.rows());
        rows.push(("", String::new()));
        let row = |(what, answer): (&str, String)| format!("{:<32}", what) + " " + &answer;
        let rows = rows
            .into_iter()
            .map(|cells| row(cells).trim_end().to_owned() + "\n");
        let mut text: String = rows.collect();
        if self.findings.is_empty() {
            text.push_str("nothing unsafe was found\n");
        }
        for finding in &self.findings {
            let style = match finding.severity {
                "danger" => AnsiColor::Red.on_default().bold(),
                "warning" => AnsiColor::Yellow.on_default().bold(),
                _ => Style::new().bold(),
            };
            let FindingView { severity, code, .. } = finding;
            let (message, remedy) = (shown(&finding.message), shown(&finding.remedy));
            text.push_str(&format!(
                "{style}{severity}{style:#} {code}: {message}\n  remedy: {remedy}\n"
            ));
        }
        text
    }
}
