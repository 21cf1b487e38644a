//! `Tty`: the terminal while it belongs to a full-screen view.
//!
//! Invariant: it is as it was, with its own modes, screen and cursor, when this is dropped, and
//! before a panic is reported.

use std::io::{self, Stdout, stdout};

use crossterm::cursor::{Hide, Show};
use crossterm::execute;
use crossterm::terminal::{
    EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};
use ratatui::backend::CrosstermBackend;
use ratatui::{Frame, Terminal};

/// A terminal that is ours until this is dropped.
pub(super) struct Tty {
    terminal: Terminal<CrosstermBackend<Stdout>>,
}

impl Tty {
    /// Takes the terminal over.
    pub(super) fn enter() -> io::Result<Self> {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            give_back();
            before(panic);
        }));
        let mut tty = Self {
            terminal: Terminal::new(CrosstermBackend::new(stdout()))?,
        };
        // From here on a failure gives it back.
        tty.again()?;
        Ok(tty)
    }

    /// Takes it over again, after others may have had it.
    pub(super) fn again(&mut self) -> io::Result<()> {
        enable_raw_mode()?;
        execute!(stdout(), EnterAlternateScreen, Hide)?;
        self.terminal.clear()
    }

    /// Gives it back for a while.
    pub(super) fn leave(&mut self) {
        give_back();
    }

    pub(super) fn draw(&mut self, picture: impl FnOnce(&mut Frame<'_>)) -> io::Result<()> {
        self.terminal.draw(picture).map(drop)
    }
}

impl Drop for Tty {
    fn drop(&mut self) {
        give_back();
    }
}

/// A terminal that is gone needs nothing back.
fn give_back() {
    let _ = execute!(stdout(), LeaveAlternateScreen, Show);
    let _ = disable_raw_mode();
}
