//! `Tty`: the terminal while it belongs to a full-screen view.
//!
//! Invariant: it is as it was, with its own modes, screen and cursor, when this is dropped, and
//! before a panic is reported.

use std::io::{self, Stdout, stdout};
use std::sync::atomic::{AtomicBool, Ordering};

use crossterm::cursor::{Hide, Show};
use crossterm::execute;
use crossterm::terminal::{
    Clear, ClearType, EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};
use ratatui::backend::CrosstermBackend;
use ratatui::layout::Rect;
use ratatui::{Frame, Terminal, TerminalOptions, Viewport};

/// Whether the terminal is ours now.
static TAKEN: AtomicBool = AtomicBool::new(false);

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
        let mut tty = Self { terminal: fresh()? };
        // From here on a failure gives it back.
        tty.again()?;
        Ok(tty)
    }

    /// Takes it over again, after others may have had it.
    pub(super) fn again(&mut self) -> io::Result<()> {
        TAKEN.store(true, Ordering::Relaxed);
        enable_raw_mode()?;
        execute!(stdout(), EnterAlternateScreen, Hide, Clear(ClearType::All))?;
        // A new one knows that nothing is drawn. Its own `clear` asks the terminal where the cursor
        // is, and would wait for an answer that the reader of keys takes away.
        self.terminal = fresh()?;
        Ok(())
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

fn fresh() -> io::Result<Terminal<CrosstermBackend<Stdout>>> {
    let backend = CrosstermBackend::new(stdout());
    match crossterm::terminal::size() {
        Ok((1.., 1..)) => Terminal::new(backend),
        // It does not know its own size, as on a serial line.
        _ => {
            let viewport = Viewport::Fixed(Rect::new(0, 0, 80, 24));
            Terminal::with_options(backend, TerminalOptions { viewport })
        }
    }
}

/// A terminal that is gone needs nothing back. Once only: a second time would clear what was
/// written since, as the report of a panic.
fn give_back() {
    if !TAKEN.swap(false, Ordering::Relaxed) {
        return;
    }
    let _ = execute!(stdout(), LeaveAlternateScreen, Show);
    let _ = disable_raw_mode();
}
