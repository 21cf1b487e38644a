//! `ls --watch`: the table after each change. In a terminal it is redrawn in place; in a pipe it is
//! printed as blocks, or with `--json` as one line per object.
//!
//! It handles no signal, so that each ends it even in a blocked write, and it leaves nothing in the
//! terminal that would have to be undone.

use std::collections::BTreeMap;
use std::io::{self, IsTerminal, Write};

use anstream::ColorChoice;
use palisade::report::Scope;

use crate::connect::Target;
use crate::exit::{Outcome, Verdict};
use crate::json;
use crate::live::{Outages, feed, reader_gone};
use crate::print::{self, Printer};
use crate::view::LineView;

const NOBODY: &str = "nobody holds or waits";

/// Shows every change.
pub(super) async fn watch(target: Target, scope: Scope, printer: Printer) -> Verdict {
    let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
    let mut shown: Box<dyn Show> = match printer.json {
        true => Box::new(Objects::default()),
        false if io::stdout().is_terminal() && !dumb => Box::new(InPlace::default()),
        false => Box::new(Blocks::default()),
    };
    let mut seen = feed(target, scope).await?;
    let mut gone = std::pin::pin!(reader_gone());
    let mut outages = Outages::new(printer, None);
    loop {
        let lines = tokio::select! {
            () = &mut gone => return Ok(Outcome::Done),
            lines = seen.recv() => lines,
        };
        match outages.see(lines)? {
            Some(seen) => shown.show(seen.lines)?,
            None => shown.forget(),
        }
    }
}

/// A way to show lines repeatedly.
trait Show {
    fn show(&mut self, lines: Vec<LineView>) -> io::Result<()>;

    /// Other output was written below the table.
    fn forget(&mut self) {}
}

/// The table, redrawn where it was.
#[derive(Default)]
struct InPlace {
    /// How many rows it had.
    height: usize,
}

impl Show for InPlace {
    fn show(&mut self, lines: Vec<LineView>) -> io::Result<()> {
        let size = rustix::termios::tcgetwinsize(io::stdout());
        let room = size.map_or(24, |size| usize::from(size.ws_row));
        let columns = print::width().unwrap_or(80);
        let mut rows = if lines.is_empty() {
            vec![(anstyle::Style::new(), NOBODY.to_owned())]
        } else {
            print::rows(&lines, Some(columns))
        };
        // One row is for the cursor; rows that have scrolled away can't be redrawn.
        let room = room.saturating_sub(1).max(2);
        if rows.len() > room {
            let more = format!("… and {} more", rows.len() - (room - 1));
            rows.truncate(room - 1);
            rows.push((anstyle::Style::new(), more));
        }
        let mut frame = String::new();
        if self.height > 0 {
            frame.push_str(&format!("\x1b[{}A\r\x1b[J", self.height));
        }
        let plain = anstream::AutoStream::choice(&io::stdout()) == ColorChoice::Never;
        for (style, row) in &rows {
            // A row that wraps would take two.
            let row = crate::table::clip(row, columns);
            if plain {
                frame.push_str(&format!("{row}\n"))
            } else {
                frame.push_str(&format!("{style}{row}{style:#}\n"))
            }
        }
        self.height = rows.len();
        let mut out = io::stdout().lock();
        out.write_all(frame.as_bytes())?;
        out.flush()
    }

    fn forget(&mut self) {
        self.height = 0;
    }
}

/// Prints the table again after each change.
#[derive(Default)]
struct Blocks {
    last: Option<Vec<LineView>>,
}

impl Show for Blocks {
    fn show(&mut self, lines: Vec<LineView>) -> io::Result<()> {
        let lasting: Vec<_> = lines.iter().map(LineView::lasting).collect();
        if self.last.as_ref() == Some(&lasting) {
            return Ok(());
        }
        let mut block = String::new();
        if self.last.replace(lasting).is_some() {
            block.push('\n');
        }
        if lines.is_empty() {
            block.push_str(&format!("{NOBODY}\n"))
        } else {
            block.push_str(&print::table(&lines))
        }
        print::text(&block)
    }
}

/// Prints each line that has changed, as an object; a line without claims has empty lists.
#[derive(Default)]
struct Objects {
    last: BTreeMap<String, LineView>,
}

impl Show for Objects {
    fn show(&mut self, lines: Vec<LineView>) -> io::Result<()> {
        let mut now = BTreeMap::new();
        let mut out = String::new();
        let mut tell = |line: &LineView| -> io::Result<()> {
            out.push_str(&json::line(line)?);
            out.push('\n');
            Ok(())
        };
        for line in lines {
            let lasting = line.lasting();
            if self.last.remove(&line.name).as_ref() != Some(&lasting) {
                tell(&line)?;
            }
            now.insert(line.name, lasting);
        }
        for name in self.last.keys() {
            tell(&LineView::empty(name))?;
        }
        self.last = now;
        if out.is_empty() {
            Ok(())
        } else {
            print::text(&out)
        }
    }
}
