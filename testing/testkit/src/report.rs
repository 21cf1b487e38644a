//! Results as JSON lines, and the table of behaviours × engines made from them.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::conformance::{Case, Verdict};

/// The result of one case on one engine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The engine.
    pub engine: String,
    /// The case.
    pub case: String,
    /// The promise that it tests.
    pub behavior: String,
    /// `ok`, `FAIL` or `n/a`.
    pub result: String,
    /// Why it failed or does not apply.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// How long it took.
    pub millis: u64,
    /// Measured values.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<(String, f64)>,
}

impl Row {
    /// The row of a verdict.
    pub fn new(
        engine: &str,
        case: &Case,
        verdict: &Verdict,
        took: Duration,
        notes: Vec<(String, f64)>,
    ) -> Self {
        let (result, why) = match verdict {
            Verdict::Ok => ("ok", None),
            Verdict::Failed(why) => ("FAIL", Some(why.clone())),
            Verdict::NotApplicable(why) => ("n/a", Some(why.clone())),
        };
        Self {
            engine: engine.to_owned(),
            case: case.name.to_owned(),
            behavior: case.behavior.to_owned(),
            result: result.to_owned(),
            why,
            millis: u64::try_from(took.as_millis()).unwrap_or(u64::MAX),
            notes,
        }
    }
}

/// Collects the rows of a run, and appends them to a file if there is one.
#[derive(Debug, Default)]
pub struct Report {
    path: Option<PathBuf>,
    rows: Mutex<Vec<Row>>,
}

impl Report {
    /// Appends to the file that `PALISADE_TEST_REPORT` names, if it is set.
    pub fn from_env() -> Self {
        Self {
            path: std::env::var_os("PALISADE_TEST_REPORT").map(PathBuf::from),
            rows: Mutex::default(),
        }
    }

    /// Adds a row with one write, so that processes can append concurrently.
    pub fn add(&self, row: Row) {
        if let (Some(path), Ok(line)) = (&self.path, serde_json::to_string(&row)) {
            let file = OpenOptions::new().create(true).append(true).open(path);
            let written = file.and_then(|mut file| file.write_all(format!("{line}\n").as_bytes()));
            if let Err(error) = written {
                eprintln!("PALISADE_TEST_REPORT: {error}");
            }
        }
        self.rows.lock().push(row);
    }

    /// The rows so far.
    pub fn rows(&self) -> Vec<Row> {
        self.rows.lock().clone()
    }
}

/// Parses a report. If there are several rows for a cell, the last one counts.
///
/// # Errors
/// A message that names the invalid line.
pub fn read(text: &str) -> Result<Vec<Row>, String> {
    let lines = text.lines().enumerate();
    let rows = lines.filter(|(_, line)| !line.trim().is_empty());
    rows.map(|(at, line)| {
        serde_json::from_str(line).map_err(|error| format!("line {} is no row: {error}", at + 1))
    })
    .collect()
}

/// The table of behaviours × engines, and what is wrong with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// The table as text.
    pub text: String,
    /// How many cells failed.
    pub failed: usize,
    /// How many cells have no row.
    pub missing: usize,
}

/// Builds the table. `required` lists engines that must be in it even without rows; `cases` lists
/// its lines in order.
pub fn table(rows: &[Row], required: &[String], cases: &[Case]) -> Table {
    let mut cells: BTreeMap<(&str, &str), &Row> = BTreeMap::new();
    let mut engines: Vec<&str> = required.iter().map(String::as_str).collect();
    for row in rows {
        cells.insert((&row.case, &row.engine), row);
        if !engines.contains(&row.engine.as_str()) {
            engines.push(&row.engine);
        }
    }
    let width = cases.iter().map(|case| case.name.len()).max().unwrap_or(0);
    let mut table = Table {
        text: String::new(),
        failed: 0,
        missing: 0,
    };
    let mut totals: BTreeMap<&str, BTreeMap<&str, usize>> = BTreeMap::new();
    let mut reasons: BTreeMap<String, usize> = BTreeMap::new();
    let out = &mut table.text;
    // Writing to a string can't fail.
    let _ = write!(out, "{:width$}", "behaviour");
    for engine in &engines {
        let _ = write!(out, "  {engine:>8}");
    }
    let _ = writeln!(out);
    for case in cases {
        let _ = write!(out, "{:width$}", case.name);
        for engine in &engines {
            let row = cells.get(&(case.name, *engine));
            let shown = row.map_or("MISSING", |row| row.result.as_str());
            let cell = match row.and_then(|row| row.why.as_ref().filter(|_| row.result == "n/a")) {
                Some(why) => {
                    let next = reasons.len() + 1;
                    format!("n/a {}", reasons.entry(why.clone()).or_insert(next))
                }
                None => shown.to_owned(),
            };
            let _ = write!(out, "  {cell:>8}");
            *totals
                .entry(engine)
                .or_default()
                .entry(shown_key(shown))
                .or_default() += 1;
            table.failed += usize::from(shown == "FAIL");
            table.missing += usize::from(shown == "MISSING");
        }
        let _ = writeln!(out);
    }
    for engine in &engines {
        let of = totals.get(engine).cloned().unwrap_or_default();
        let counts = ["ok", "FAIL", "n/a", "MISSING"]
            .map(|key| format!("{} {key}", of.get(key).copied().unwrap_or(0)));
        let _ = writeln!(out, "{engine}: {}", counts.join(", "));
    }
    let mut reasons: Vec<_> = reasons.into_iter().collect();
    reasons.sort_by_key(|(_, number)| *number);
    for (why, number) in reasons {
        let _ = writeln!(out, "n/a {number}: {why}");
    }
    for row in cells.values().filter(|row| row.result == "FAIL") {
        let why = row.why.as_deref().unwrap_or_default();
        let _ = writeln!(out, "FAIL {}::{}: {why}", row.engine, row.case);
    }
    table
}

fn shown_key(shown: &str) -> &'static str {
    match shown {
        "ok" => "ok",
        "n/a" => "n/a",
        "FAIL" => "FAIL",
        _ => "MISSING",
    }
}
