//! How a verb ends, and the exit code for each ending: the whole table is [`code`].
//!
//! A verb returns a [`Verdict`] and never a number; only `main` asks this file for the code.

use std::fmt;
use std::io;

use palisade::ErrorKind;

use crate::args::explain;

/// How a verb ends.
pub(crate) type Verdict = Result<Outcome, Failure>;

/// An ending that is not an error.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// Done, or "yes".
    Done,
    /// The answer "no": no such holder or message, nothing to do.
    No,
    /// The child's own code.
    Child(u8),
}

/// A failure; most are reported on stderr.
#[derive(Debug)]
pub(crate) enum Failure {
    /// A signal came while palisade waited, and nothing was left behind. Nothing is printed.
    Interrupted(i32),
    /// Refused by the library.
    Library(palisade::Error),
    /// An argument that can't be used.
    Usage(String),
    /// An error of clap about the arguments, help and version included.
    Arguments(clap::Error),
    /// The lock was not free in time.
    NotAcquired {
        /// What to say.
        message: String,
        /// The code that `-E` asks for.
        code: Option<u8>,
        /// Say nothing.
        quiet: bool,
    },
    /// The claim was in a deadlock and gave way.
    Deadlock {
        /// The cycle.
        message: String,
        /// The code that `-E` asks for.
        code: Option<u8>,
        /// Say nothing.
        quiet: bool,
    },
    /// The lock is held by the palisade that runs this one, so waiting would never end.
    Nested(String),
    /// The lock was lost while it was held.
    Lost(String),
    /// The command could not be started.
    Command {
        /// What to say.
        message: String,
        /// Whether the command was not found, as opposed to one that can't be executed.
        missing: bool,
    },
    /// Standard output could not be written.
    Output(io::Error),
    /// The system refused what palisade needs for itself.
    Start(String),
    /// A bug, or a broken environment.
    Defect(String),
}

/// The exit code of a verdict.
pub(crate) fn code(verdict: &Verdict) -> u8 {
    match verdict {
        Ok(Outcome::Done) => 0,
        Ok(Outcome::No) => 1,
        Ok(Outcome::Child(code)) => *code,
        Err(failure) => match failure {
            Failure::Interrupted(signal) => of_signal(*signal),
            Failure::Library(error) => of_kind(error.kind()),
            Failure::Usage(_) => 2,
            Failure::Arguments(error) => u8::from(error.use_stderr()) * 2,
            Failure::NotAcquired { code, .. } | Failure::Deadlock { code, .. } => {
                code.unwrap_or(75)
            }
            Failure::Lost(_) => 76,
            Failure::Nested(_) => 77,
            Failure::Command { missing: true, .. } => 127,
            Failure::Command { missing: false, .. } => 126,
            // A reader that closes the pipe early, as in `palisade ls | head`, is not a failure.
            Failure::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => 0,
            Failure::Output(_) => 74,
            Failure::Start(_) => 71,
            Failure::Defect(_) => 70,
        },
    }
}

/// The exit code that shells report for a process that a signal ended.
/// Ends the process now and drops nothing, where a drop would release what others rely on.
pub(crate) fn at_once(verdict: &Verdict) -> ! {
    std::process::exit(code(verdict).into())
}

pub(crate) fn of_signal(signal: i32) -> u8 {
    u8::try_from(128 + signal).unwrap_or(u8::MAX)
}

fn of_kind(kind: ErrorKind) -> u8 {
    match kind {
        ErrorKind::InvalidName | ErrorKind::InvalidArgument => 2,
        ErrorKind::Unreachable => 69,
        ErrorKind::Deadlock => 75,
        ErrorKind::Lost => 76,
        ErrorKind::Denied
        | ErrorKind::Unsupported
        | ErrorKind::CapacityMismatch
        | ErrorKind::NotForCorrectness => 77,
        ErrorKind::Config => 78,
        // `Unusable`, and kinds that only a bug can cause here.
        _ => 70,
    }
}

impl Failure {
    /// The stable word for it, as in the JSON on stderr.
    pub(crate) fn word(&self) -> &'static str {
        match self {
            Self::Library(error) => error.kind().code(),
            Self::Usage(_) | Self::Arguments(_) => ErrorKind::InvalidArgument.code(),
            Self::Interrupted(_) => "interrupted",
            Self::NotAcquired { .. } => "not_acquired",
            Self::Deadlock { .. } => ErrorKind::Deadlock.code(),
            Self::Nested(_) => "held_by_ancestor",
            Self::Lost(_) => ErrorKind::Lost.code(),
            Self::Command { missing: true, .. } => "command_not_found",
            Self::Command { missing: false, .. } => "command_not_executable",
            Self::Output(_) => "output",
            Self::Start(_) | Self::Defect(_) => ErrorKind::Internal.code(),
        }
    }

    /// Whether nothing is printed about it.
    pub(crate) fn is_silent(&self) -> bool {
        match self {
            Self::Interrupted(_) => true,
            Self::NotAcquired { quiet, .. } | Self::Deadlock { quiet, .. } => *quiet,
            Self::Output(error) => error.kind() == io::ErrorKind::BrokenPipe,
            _ => false,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Library(error) => f.write_str(&told(error)),
            Self::Arguments(error) => {
                if error.kind() == clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
                {
                    return f.write_str("no verb is given; --help lists them");
                }
                // The paragraphs that describe the error, as one line.
                let text = explain(&error.to_string());
                let text = text.trim_start_matches("palisade: ");
                let said = text
                    .split("\n\n")
                    .take_while(|part| !part.starts_with("Usage:") && !part.starts_with("For more"))
                    .flat_map(str::split_whitespace)
                    .collect::<Vec<_>>();
                f.write_str(&said.join(" "))
            }
            Self::Usage(message)
            | Self::NotAcquired { message, .. }
            | Self::Deadlock { message, .. }
            | Self::Nested(message)
            | Self::Lost(message)
            | Self::Command { message, .. }
            | Self::Start(message)
            | Self::Defect(message) => f.write_str(message),
            Self::Output(error) => write!(f, "can't write the output: {error}"),
            Self::Interrupted(signal) => write!(f, "ended by signal {signal}"),
        }
    }
}

/// The whole message of an error, with its context and cause.
pub(crate) fn told(error: &palisade::Error) -> String {
    // The operation in front is for logs; the message says what to do.
    let text = error.to_string();
    let operation = format!("{}: ", error.operation());
    let mut told = text.strip_prefix(&operation).unwrap_or(&text).to_owned();
    let mut cause = std::error::Error::source(error);
    while let Some(source) = cause {
        told.push_str(&format!(": {source}"));
        cause = source.source();
    }
    told
}

/// Makes a failure of something that the system refused.
pub(crate) fn refused(what: &str) -> impl Fn(io::Error) -> Failure {
    move |error| Failure::Start(format!("{what}: {error}"))
}

impl From<palisade::Error> for Failure {
    fn from(error: palisade::Error) -> Self {
        Self::Library(error)
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Output(error)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    /// Every failure that has a word of its own in JSON.
    fn failures() -> Vec<Failure> {
        let kinds = ErrorKind::ALL.iter().copied();
        // The command does not use the blocking API.
        let kinds = kinds.filter(|kind| *kind != ErrorKind::WouldBlock);
        let library = kinds.map(|kind| palisade::Error::new(kind, "test", "").into());
        let text = String::new;
        let (message, code, quiet) = (text(), None, false);
        library
            .chain([
                Failure::NotAcquired {
                    message,
                    code,
                    quiet,
                },
                Failure::Nested(text()),
                Failure::Command {
                    message: text(),
                    missing: true,
                },
                Failure::Command {
                    message: text(),
                    missing: false,
                },
                Failure::Output(io::ErrorKind::StorageFull.into()),
                Failure::Start(text()),
                Failure::Defect(text()),
            ])
            .collect()
    }

    /// The table of `docs/command.md`: each code, and the words beside it.
    fn documented() -> BTreeMap<u8, BTreeSet<String>> {
        let page = include_str!("../../../docs/command.md");
        let (_, table) = page.split_once("## Exit codes").unwrap();
        let rows = table.lines().filter_map(|row| {
            let mut cells = row.strip_prefix("| ")?.split(" | ");
            let code = cells.next()?.parse().ok()?;
            let words = cells.nth(1)?.split('`').skip(1).step_by(2);
            Some((code, words.map(str::to_owned).collect()))
        });
        rows.collect()
    }

    #[test]
    fn the_page_has_every_code_and_its_words() {
        let mut codes = BTreeMap::from([(0, BTreeSet::new()), (1, BTreeSet::new())]);
        for failure in failures() {
            let word = failure.word().to_owned();
            let words: &mut BTreeSet<String> = codes.entry(code(&Err(failure))).or_default();
            words.insert(word);
        }
        assert_eq!(documented(), codes);
    }
}
