//! `palisade doctor`: what an engine is, what it can do, how far away it is, and which of its
//! settings are unsafe. It reads only: nothing is locked and nothing is changed.

use std::time::Instant;

use anstyle::{AnsiColor, Style};
use palisade::{Checkup, Client, Finding, Name, Scope, Severity};
use serde::Serialize;

use crate::abilities::{Abilities, meaning};
use crate::args::Global;
use crate::connect::Place;
use crate::exit::{Failure, Outcome, Verdict};
use crate::view::shown;

/// Odd, so that the median is one of them; few, so that a slow engine is no long wait.
const ROUND_TRIPS: usize = 9;

/// Look at an engine: what it can do, how far away it is, and unsafe settings
///
/// Reads only. The exit code is 1 when a finding is dangerous: when exclusion or tokens can break.
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
        let place = Place::find(global)?;
        let client = place.connect_existing().await?;
        let mut checkup = match &client {
            Some(client) => client.check().await?,
            None => Checkup::default(),
        };
        checkup
            .findings
            .extend(of_the_command(&place, client.is_none())?);
        checkup
            .findings
            .sort_by_key(|finding| std::cmp::Reverse(finding.severity));
        let worst = checkup.findings.first().map(|finding| finding.severity);
        let (engine, capability, round_trip_us) = match &client {
            Some(client) => {
                let round_trip = round_trip(client).await?;
                (client.describe(), client.capability(), Some(round_trip))
            }
            None => (place.shown()?, place.info()?.capability, None),
        };
        let health = Health {
            engine,
            version: checkup.version,
            class: capability.class.to_string(),
            capability: Abilities::new(&capability),
            round_trip_us,
            clock_ahead_us: checkup.clock_ahead_us,
            findings: checkup
                .findings
                .into_iter()
                .map(|finding| FindingView {
                    severity: match finding.severity {
                        Severity::Info => "info",
                        Severity::Warning => "warning",
                        Severity::Danger => "danger",
                    },
                    code: finding.code,
                    message: finding.message,
                    remedy: finding.remedy,
                })
                .collect(),
            meaning: meaning(capability.class),
        };
        global.printer().answer(&health, Health::text)?;
        Ok(match worst {
            Some(Severity::Danger) => Outcome::No,
            _ => Outcome::Done,
        })
    }
}

/// What the engine itself can't know: how the command uses it.
fn of_the_command(place: &Place, absent: bool) -> Result<Vec<Finding>, Failure> {
    let mut findings = Vec::new();
    if absent {
        findings.push(Finding {
            severity: Severity::Info,
            code: "no_store_yet",
            message: "there is no store yet: the first lock makes it".into(),
            remedy: "nothing; look again when a lock was taken".into(),
        });
    }
    if place.is_private()? {
        findings.push(Finding {
            severity: Severity::Danger,
            code: "excludes_nobody",
            message: "memory: keeps its locks inside one process: two commands never meet there, \
                      and `run` and `elect` refuse it"
                .into(),
            remedy: "use file: for the processes of this machine, or a server".into(),
        });
    }
    if let Some(message) = place.exposed() {
        findings.push(Finding {
            severity: Severity::Warning,
            code: "exposed_password",
            message: message.to_owned(),
            remedy: "chmod 600 it, or put the password into a file of its own and name that with \
                     password_file="
                .into(),
        });
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
        let bold = Style::new().bold();
        let mut text = String::new();
        let mut row = |what: &str, answer: &str| {
            text.push_str(&format!("{what:<32} {answer}\n"));
        };
        row("engine", &shown(&self.engine));
        if let Some(version) = &self.version {
            row("version", &shown(version));
        }
        row("class", &format!("{} ({})", self.class, self.meaning));
        if let Some(round_trip) = self.round_trip_us {
            row("round trip", &format!("{round_trip:.0} µs"));
        }
        if let Some(ahead) = self.clock_ahead_us {
            let side = if ahead < 0 { "behind" } else { "ahead of" };
            let off = ahead.unsigned_abs() as f64 / 1e3;
            row("clock", &format!("{off:.1} ms {side} ours"));
        }
        text.push('\n');
        for (what, answer) in self.capability.rows() {
            text.push_str(&format!("{what:<32} {answer}\n"));
        }
        text.push('\n');
        if self.findings.is_empty() {
            text.push_str("nothing unsafe was found\n");
        }
        for finding in &self.findings {
            let style = match finding.severity {
                "danger" => AnsiColor::Red.on_default().bold(),
                "warning" => AnsiColor::Yellow.on_default().bold(),
                _ => bold,
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
