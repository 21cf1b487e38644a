//! `palisade top`: a live view of all lines, over the whole screen.
//!
//! `model` is the state and how keys change it, `draw` renders it, `tty` is the terminal itself,
//! which is restored however `top` ends. While the engine can't be reached, `top` retries and the
//! last state stays on the screen.

mod draw;
mod model;
mod tty;

use std::io::{self, IsTerminal};
use std::time::Duration;

use palisade::report::Scope;

use self::model::{Model, Next};
use self::tty::{Tty, keys};
use crate::args::Global;
use crate::connect::Target;
use crate::exit::{Failure, Outcome, Verdict, told};
use crate::live::feed;
use crate::signals::{Event, Signals};
use crate::terminal::{self, Stop};

/// How old a time on the screen may become.
const TICK: Duration = Duration::from_secs(1);

/// Watch all locks, live, over the whole screen
///
/// One row per lock: who holds it, how many wait, and for how long. Below the table are the claims
/// of the selected lock.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  palisade top\n  palisade top nightly-\n\n\
        Keys: q ends; up, down, page up, page down, home, end select; n, h, w, l, a sort by name,\n\
        holders, waiters, longest wait, age; r reverses; / filters by what is typed, Esc clears it.")]
pub(crate) struct Top {
    /// Only names that begin with this
    #[arg(default_value = "", hide_default_value = true)]
    prefix: String,
}

impl Top {
    pub(crate) async fn run(self, global: &Global) -> Verdict {
        if !io::stdin().is_terminal() || !io::stdout().is_terminal() || global.json {
            let why = "top needs a terminal; use `palisade ls --watch`, with --json for programs";
            return Err(Failure::Usage(why.into()));
        }
        let target = Target::find(global)?;
        let mut model = Model::new(target.shown()?);
        let mut seen = feed(target, Scope::Prefix(self.prefix)).await?;
        // Registered before the terminal is changed, so that no signal leaves it changed.
        let mut signals = Signals::listen()?;
        let tty = Tty::enter()?;
        let mut keys = keys();
        let mut tick = tokio::time::interval(TICK);
        loop {
            let (width, height) = tty.size();
            tty.draw(&draw::draw(&model, width, height))?;
            // For the test that a panic restores the terminal, too; not in release builds.
            #[cfg(debug_assertions)]
            if model.is_ready() && std::env::var_os("PALISADE_TEST_PANIC").is_some() {
                panic!("asked to panic");
            }
            tokio::select! {
                biased;
                event = signals.next() => match event {
                    Event::Ending(signal) => return Err(Failure::Interrupted(signal.as_raw())),
                    Event::Stop => pause(&tty, Stop::Us)?,
                    Event::Resumed => tty.again()?,
                    Event::Resized => {}
                },
                key = keys.recv() => match key {
                    Some(Ok(key)) => match model.press(key) {
                        Next::Go => {}
                        Next::End => return Ok(Outcome::Done),
                        Next::Interrupt => return Err(Failure::Interrupted(libc::SIGINT)),
                        Next::Stop => pause(&tty, Stop::OurGroup)?,
                    },
                    Some(Err(error)) => return Err(Failure::Output(error)),
                    None => return Err(Failure::Output(io::ErrorKind::UnexpectedEof.into())),
                },
                lines = seen.recv() => match lines {
                    Some(Ok(seen)) => model.saw(seen),
                    Some(Err(Failure::Library(error))) if error.is_transient() => {
                        model.outage(&told(&error));
                    }
                    Some(Err(failure)) => return Err(failure),
                    None => return Err(Failure::Defect("the watch has ended".into())),
                },
                _ = tick.tick() => {}
            }
        }
    }
}

/// Stops as a shell expects it, with its terminal as it was.
fn pause(tty: &Tty, whom: Stop) -> io::Result<()> {
    tty.leave();
    terminal::stop(whom);
    tty.again()
}
