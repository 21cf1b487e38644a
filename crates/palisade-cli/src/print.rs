//! `Printer`: palisade's own output, as text or as JSON.
//!
//! Documents go to stdout, and a failed write is an error. Notes, events and errors go to stderr,
//! where a failed write is ignored. Nothing here panics on a closed pipe. Colours are only for a
//! terminal, and not with `NO_COLOR`.

use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use anstyle::{AnsiColor, Style};
use serde::Serialize;
use serde_json::json;

use crate::args::explain;
use crate::exit::{Failure, Outcome, Verdict};
use crate::json;
use crate::table::{self, Layout};
use crate::view::{ClaimView, LineView, brief, shorten, shown};

/// Prints text or JSON.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Printer {
    pub(crate) json: bool,
}

const HEADER: Style = Style::new().bold();
const WAITER: Style = Style::new().dimmed();
const ERROR: Style = AnsiColor::Red.on_default().bold();

impl Printer {
    /// Prints a document: as JSON, or as the text that `text` returns.
    pub(crate) fn answer<T: Serialize>(
        self,
        document: &T,
        text: impl FnOnce(&T) -> String,
    ) -> io::Result<()> {
        let mut out = anstream::stdout().lock();
        if self.json {
            writeln!(out, "{}", json::line(document)?)?;
        } else {
            out.write_all(text(document).as_bytes())?;
        }
        out.flush()
    }

    /// The same for a question whose answer may be "no", which is exit code 1.
    pub(crate) fn reply<T: Serialize>(
        self,
        document: &T,
        text: impl FnOnce(&T) -> String,
        yes: bool,
    ) -> Verdict {
        self.answer(document, text)?;
        Ok(if yes { Outcome::Done } else { Outcome::No })
    }

    /// Prints an event on stderr: as a JSON line, or as the text that `text` returns.
    pub(crate) fn event(self, event: serde_json::Value, text: impl FnOnce() -> Option<String>) {
        let line = if self.json {
            json::line(&event).ok()
        } else {
            text().map(|text| format!("palisade: {}", shorten(&shown(&text))))
        };
        if let Some(line) = line {
            let _ = writeln!(anstream::stderr(), "{line}");
        }
    }

    /// Why palisade failed.
    pub(crate) fn failure(self, failure: &Failure) {
        match failure {
            silent if silent.is_silent() => {}
            // Help and version, which are on stdout.
            Failure::Arguments(text) if !text.use_stderr() => {}
            Failure::Arguments(error) if !self.json => {
                let text = explain(&error.render().ansi().to_string());
                let _ = write!(anstream::stderr(), "{text}");
            }
            failure if self.json => {
                let (code, message) = (failure.word(), shorten(&failure.to_string()));
                let error = json!({"error": {"code": code, "message": message}});
                let _ = writeln!(
                    anstream::stderr(),
                    "{}",
                    json::line(&error).unwrap_or_default()
                );
            }
            failure => {
                let message = shorten(&shown(&failure.to_string()));
                let _ = writeln!(anstream::stderr(), "{ERROR}palisade:{ERROR:#} {message}");
            }
        }
    }
}

/// Help or the version, on stdout.
pub(crate) fn help(text: &clap::Error) -> io::Result<()> {
    text.print()?;
    io::stdout().flush()
}

/// The width of the terminal, if stdout is one.
pub(crate) fn width() -> Option<usize> {
    if !io::stdout().is_terminal() {
        return None;
    }
    let size = rustix::termios::tcgetwinsize(io::stdout()).ok()?;
    // A terminal that does not know its size reports 0.
    Some(usize::from(size.ws_col)).filter(|columns| *columns > 0)
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
    rows(lines, width()).into_iter().map(styled).collect()
}

const COLUMNS: [&str; 10] = [
    "NAME", "STATE", "MODE", "OWNER", "HOST", "PID", "AGE", "EXPIRES", "TOKEN", "ID",
];

/// `show --json` has all columns; name and owner are clipped last.
const LAYOUT: Layout = Layout {
    less: &[9, 8, 7, 2, 6, 4, 5],
    long: [0, 3],
    shortest: usize::MAX,
    right: &[],
};

/// The rows of the table, with its header, in at most `width` columns.
pub(crate) fn rows(lines: &[LineView], width: Option<usize>) -> Vec<(Style, String)> {
    let mut styles = vec![HEADER];
    let mut cells = vec![COLUMNS.map(str::to_owned)];
    for line in lines {
        for claim in line.claims() {
            cells.push(row(line, claim));
            styles.push(match claim.position {
                None => Style::new(),
                Some(_) => WAITER,
            });
        }
    }
    let rows = table::rows(cells, &LAYOUT, width);
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
    let seconds = |millis: u64| brief(Duration::from_secs(millis.div_ceil(1000)));
    [
        shown(&line.name),
        state,
        mode,
        owner,
        claim.host.as_deref().map_or_else(dash, shown),
        claim.pid.map_or_else(dash, |pid| pid.to_string()),
        claim.age().map_or_else(dash, brief),
        claim.expires_in_ms.map_or_else(dash, seconds),
        claim.token.clone().unwrap_or_else(dash),
        shown(&claim.id),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::LineView;

    fn line(name: &str) -> LineView {
        let mut line = LineView::empty(name);
        let mut claim = ClaimView::of_owner(None);
        claim.id = "715eed427a8bb7865b7fa2ffd58d71b2".into();
        claim.owner = Some("681f235aa74a2c64".into());
        claim.host = Some("db1.example.org".into());
        claim.pid = Some(4_194_304);
        claim.token = Some("1794780881520131".into());
        claim.expires_in_ms = Some(28_311);
        line.holders.push(claim);
        line
    }

    #[test]
    fn a_table_fits_into_any_terminal() {
        let lines = [line("nightly-report"), line(&"é".repeat(127))];
        let all = rows(&lines, None);
        assert!(all[0].1.ends_with("ID") && all[1].1.contains("1794780881520131"));
        for width in 30..250 {
            for (_, row) in rows(&lines, Some(width)) {
                assert!(table::columns(&row) <= width, "{width}: {row}");
            }
        }
        let narrow = rows(&[line("nightly-report")], Some(80));
        assert!(narrow[1].1.contains("4194304") && narrow[1].1.contains("681f235aa74a2c64"));
    }
}
