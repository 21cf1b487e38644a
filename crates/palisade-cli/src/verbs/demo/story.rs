//! What happens in the demo, told as it happens, and kept for the JSON document.

use std::io::Write;
use std::time::Instant;

use serde::Serialize;

use crate::exit::Failure;
use crate::print::Printer;

/// One moment of the timeline.
#[derive(Debug, Serialize)]
pub(super) struct Moment {
    at_ms: u64,
    /// The first or the second worker.
    who: Option<&'static str>,
    what: String,
}

pub(super) struct Story {
    began: Instant,
    printer: Printer,
    pub(super) moments: Vec<Moment>,
}

impl Story {
    pub(super) fn new(printer: Printer) -> Self {
        Self {
            began: Instant::now(),
            printer,
            moments: Vec::new(),
        }
    }

    pub(super) fn tell(&mut self, who: Option<&'static str>, what: &str) -> Result<(), Failure> {
        let at = self.began.elapsed();
        self.moments.push(Moment {
            at_ms: at.as_millis() as u64,
            who,
            what: what.to_owned(),
        });
        if !self.printer.json {
            let seconds = at.as_secs_f64();
            let who = who.unwrap_or_default();
            let mut out = anstream::stdout().lock();
            writeln!(out, "{seconds:>5.1} s  {who:<7} {what}")?;
            out.flush()?;
        }
        Ok(())
    }
}
