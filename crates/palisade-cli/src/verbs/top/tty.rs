//! `Tty`: the terminal while it belongs to a full-screen view, and the keys that are pressed there.
//!
//! Invariant: its modes, screen and cursor are restored when this is dropped, and before a panic
//! is reported.

use std::io::{self, Read, Write, stdin, stdout};
use std::sync::{Mutex, PoisonError};

use anstyle::Style;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use tokio::sync::mpsc;

/// The original modes, while the terminal is ours.
static BEFORE: Mutex<Option<Termios>> = Mutex::new(None);

/// A terminal that is ours until this is dropped.
pub(super) struct Tty;

impl Tty {
    pub(super) fn enter() -> io::Result<Self> {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            give_back();
            before(panic);
        }));
        // From here on a failure restores the terminal.
        let tty = Self;
        tty.again()?;
        Ok(tty)
    }

    /// Takes it over, also after another process had it.
    pub(super) fn again(&self) -> io::Result<()> {
        let modes = tcgetattr(stdin())?;
        let mut raw = modes.clone();
        raw.make_raw();
        before().get_or_insert(modes);
        tcsetattr(stdin(), OptionalActions::Now, &raw)?;
        // The alternate screen, cleared, without a cursor.
        send("\x1b[?1049h\x1b[?25l\x1b[2J")
    }

    /// Restores it for a while.
    pub(super) fn leave(&self) {
        give_back();
    }

    /// Columns and rows. A terminal that does not know its size, as on a serial line, has 80 × 24.
    pub(super) fn size(&self) -> (usize, usize) {
        match tcgetwinsize(stdout()) {
            Ok(size) if size.ws_col > 0 && size.ws_row > 0 => {
                (size.ws_col.into(), size.ws_row.into())
            }
            _ => (80, 24),
        }
    }

    /// Overwrites the screen: clearing it first would flicker.
    pub(super) fn draw(&self, rows: &[(Style, String)]) -> io::Result<()> {
        let rows = rows
            .iter()
            .map(|(style, row)| format!("{style}{row}{style:#}\x1b[K"));
        let rows: Vec<_> = rows.take(self.size().1).collect();
        send(&format!("\x1b[H{}\x1b[J", rows.join("\r\n")))
    }
}

impl Drop for Tty {
    fn drop(&mut self) {
        give_back();
    }
}

fn before() -> std::sync::MutexGuard<'static, Option<Termios>> {
    BEFORE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn send(text: &str) -> io::Result<()> {
    let mut out = stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Restores the terminal; errors are ignored, since it may be gone. It does so only once: a second
/// time would clear what was written since, such as the report of a panic.
fn give_back() {
    if let Some(modes) = before().take() {
        let _ = send("\x1b[?1049l\x1b[?25h");
        let _ = tcsetattr(stdin(), OptionalActions::Now, &modes);
    }
}

/// A key that has a meaning here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Key {
    Up,
    Down,
    PageUp,
    PageDown,
    Home,
    End,
    Enter,
    Esc,
    Backspace,
    CtrlC,
    CtrlZ,
    Char(char),
}

/// The keys pressed, read by a thread of its own because reading a terminal blocks. The thread ends
/// with the process.
pub(super) fn keys() -> mpsc::UnboundedReceiver<io::Result<Key>> {
    let (sender, receiver) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        let mut bytes = [0; 1024];
        loop {
            let sent = match stdin().lock().read(&mut bytes) {
                Ok(0) => sender.send(Err(io::ErrorKind::UnexpectedEof.into())),
                Ok(length) => {
                    let text = String::from_utf8_lossy(&bytes[..length]);
                    let mut keys = parse(&text).into_iter();
                    keys.try_for_each(|key| sender.send(Ok(key)))
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
                Err(error) => sender.send(Err(error)),
            };
            if sent.is_err() {
                return;
            }
        }
    });
    receiver
}

/// The keys in one read from the terminal; unknown sequences are skipped.
fn parse(mut text: &str) -> Vec<Key> {
    let mut keys = Vec::new();
    while let Some(c) = text.chars().next() {
        text = &text[c.len_utf8()..];
        let sequence = text.strip_prefix('[').or_else(|| text.strip_prefix('O'));
        keys.extend(match (c, sequence) {
            ('\x1b', Some(rest)) => {
                let end = rest.find(|c: char| matches!(c, '@'..='~'));
                let end = end.map_or(rest.len(), |end| end + 1);
                text = &rest[end..];
                match &rest[..end] {
                    "A" => Some(Key::Up),
                    "B" => Some(Key::Down),
                    "5~" => Some(Key::PageUp),
                    "6~" => Some(Key::PageDown),
                    "H" | "1~" | "7~" => Some(Key::Home),
                    "F" | "4~" | "8~" => Some(Key::End),
                    _ => None,
                }
            }
            ('\x1b', None) => Some(Key::Esc),
            ('\r' | '\n', _) => Some(Key::Enter),
            ('\x7f' | '\x08', _) => Some(Key::Backspace),
            ('\x03', _) => Some(Key::CtrlC),
            ('\x1a', _) => Some(Key::CtrlZ),
            (c, _) => Some(Key::Char(c)).filter(|_| !c.is_control()),
        });
    }
    keys
}

#[cfg(test)]
mod tests {
    use super::Key::*;
    use super::*;

    #[test]
    fn keys_are_read_from_what_terminals_send() {
        for (text, keys) in [
            ("q", &[Char('q')][..]),
            ("/é[", &[Char('/'), Char('é'), Char('[')]),
            ("\x1b[A\x1bOB\x1b[5~\x1b[6~", &[Up, Down, PageUp, PageDown]),
            ("\x1b[H\x1b[4~\x1b[1;5Cx", &[Home, End, Char('x')]),
            ("\x1b", &[Esc]),
            ("\r\x7f\x03\x1a\x01", &[Enter, Backspace, CtrlC, CtrlZ]),
        ] {
            assert_eq!(parse(text), keys, "{text:?}");
        }
    }
}
