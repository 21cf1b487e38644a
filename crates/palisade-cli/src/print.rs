//! `Printer`: everything that palisade itself says, as text or as JSON.
//!
//! Documents go to stdout and may fail with it; notes, events and errors go to stderr, and a
//! stderr that can't be written is no reason to fail. Nothing here panics on a closed pipe.
//! Colours are for a terminal that wants them: not when piped, not with `NO_COLOR`.

use std::io::{self, Write};

use anstyle::{AnsiColor, Style};
use comfy_table::{ContentArrangement, Table, presets};
use serde::Serialize;
use serde_json::json;

use crate::args::explain;
use crate::exit::Failure;
use crate::view::{ClaimView, LineView, shown};

/// Says things as text or as JSON.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Printer {
    pub(crate) json: bool,
}

const HEADER: Style = Style::new().bold();
const WAITER: Style = Style::new().dimmed();
const ERROR: Style = AnsiColor::Red.on_default().bold();

impl Printer {
    /// The answer to a question: `document` as JSON, or what `text` makes of it.
    pub(crate) fn answer<T: Serialize>(
        self,
        document: &T,
        text: impl FnOnce(&T) -> String,
    ) -> io::Result<()> {
        let mut out = anstream::stdout().lock();
        if self.json {
            serde_json::to_writer(&mut out, document)?;
            writeln!(out)?;
        } else {
            out.write_all(text(document).as_bytes())?;
        }
        out.flush()
    }

    /// Something that happened, on stderr: as a JSON line, or as what `text` makes of it.
    pub(crate) fn event(self, event: serde_json::Value, text: impl FnOnce() -> Option<String>) {
        let line = match self.json {
            true => Some(event.to_string()),
            false => text().map(|text| format!("palisade: {text}")),
        };
        if let Some(line) = line {
            let _ = writeln!(anstream::stderr(), "{line}");
        }
    }

    /// Why palisade failed.
    pub(crate) fn failure(self, failure: &Failure) {
        match failure {
            silent if silent.is_silent() => {}
            // Help and version.
            Failure::Arguments(text) if !text.use_stderr() => {
                let _ = text.print();
            }
            Failure::Arguments(error) if !self.json => {
                let text = explain(&error.render().ansi().to_string());
                let _ = write!(anstream::stderr(), "{text}");
            }
            failure if self.json => {
                let (code, message) = (failure.word(), failure.to_string());
                let error = json!({"error": {"code": code, "message": message}});
                let _ = writeln!(anstream::stderr(), "{error}");
            }
            failure => {
                let _ = writeln!(anstream::stderr(), "{ERROR}palisade:{ERROR:#} {failure}");
            }
        }
    }
}

/// Text on stdout.
pub(crate) fn text(text: &str) -> io::Result<()> {
    let mut out = anstream::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Lines as a table, one row per claim.
pub(crate) fn table(lines: &[LineView]) -> String {
    let styled = |(style, row)| format!("{style}{row}{style:#}\n");
    rows(lines).into_iter().map(styled).collect()
}

/// The rows of the table, with its header.
pub(crate) fn rows(lines: &[LineView]) -> Vec<(Style, String)> {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_content_arrangement(ContentArrangement::Disabled);
    table.set_header([
        "NAME", "STATE", "MODE", "OWNER", "HOST", "PID", "AGE", "EXPIRES", "TOKEN", "ID",
    ]);
    let mut styles = vec![HEADER];
    for line in lines {
        for claim in line.claims() {
            table.add_row(row(line, claim));
            styles.push(match claim.position {
                None => Style::new(),
                Some(_) => WAITER,
            });
        }
    }
    let rows = table.lines().map(|row| row.trim().to_owned());
    styles.into_iter().zip(rows).collect()
}

/// The cells of one claim.
pub(crate) fn row(line: &LineView, claim: &ClaimView) -> [String; 10] {
    let state = match (claim.position, claim.evicted) {
        (Some(position), _) => format!("waits #{position}"),
        (None, true) => "evicted".to_owned(),
        (None, false) => "held".to_owned(),
    };
    let mode = match claim.mode {
        "permits" => format!("{}/{}", claim.weight, line.capacity),
        mode => mode.to_owned(),
    };
    let owner = match (&claim.owner, &claim.label) {
        (None, _) => "another tool".to_owned(),
        (Some(owner), None) => shown(owner),
        (Some(owner), Some(label)) => format!("{} ({})", shown(owner), shown(label)),
    };
    let dash = || "-".to_owned();
    let seconds = |millis: u64| format!("{}s", millis.div_ceil(1000));
    let age = claim.age().map(humantime::format_duration);
    [
        shown(&line.name),
        state,
        mode,
        owner,
        claim.host.as_deref().map_or_else(dash, shown),
        claim.pid.map_or_else(dash, |pid| pid.to_string()),
        age.map_or_else(dash, |age| age.to_string()),
        claim.expires_in_ms.map_or_else(dash, seconds),
        claim.token.clone().unwrap_or_else(dash),
        shown(&claim.id),
    ]
}
