//! The arguments: what is common to all verbs, and how they are read. Each verb's own arguments
//! are beside the verb.

use std::ffi::{OsStr, OsString};

use clap::Parser;
use clap::builder::styling::{AnsiColor, Styles};

use crate::exit::Failure;
use crate::print::Printer;
use crate::verbs::Verb;

const STYLES: Styles = Styles::styled()
    .header(AnsiColor::Green.on_default().bold())
    .usage(AnsiColor::Green.on_default().bold())
    .literal(AnsiColor::Cyan.on_default().bold())
    .placeholder(AnsiColor::Cyan.on_default());

/// Distributed locks, the same everywhere.
///
/// A lock has a name. It is kept by an engine, which a URL picks: without one, every process of
/// this machine shares the locks.
#[derive(Debug, Parser)]
#[command(
    name = "palisade",
    version,
    styles = STYLES,
    disable_help_subcommand = true,
    subcommand_required = true,
    arg_required_else_help = true,
    after_help = "Example:\n  palisade run nightly-report -- ./report.sh"
)]
pub struct Args {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub verb: Verb,
}

/// What every verb takes, before or after its name.
#[derive(Debug, Clone, clap::Args)]
pub struct Global {
    /// The engine that keeps the locks, such as file:DIR [default: $PALISADE_URL, then file:]
    #[arg(long, global = true, value_name = "URL")]
    pub url: Option<String>,
    /// Speak JSON: documents on stdout, errors on stderr
    #[arg(long, global = true)]
    pub json: bool,
}

impl Global {
    /// What prints for these arguments.
    pub fn printer(&self) -> Printer {
        Printer { json: self.json }
    }
}

impl Args {
    /// Reads the arguments of this process.
    pub fn read() -> Result<Self, (Failure, Printer)> {
        Self::try_parse().map_err(|error| {
            let json = asks_for_json(std::env::args_os());
            (Failure::Arguments(error), Printer { json })
        })
    }
}

/// Whether `--json` is among arguments that could not be read.
fn asks_for_json(args: impl Iterator<Item = OsString>) -> bool {
    args.take_while(|arg| arg != OsStr::new("--"))
        .any(|arg| arg == OsStr::new("--json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_is_sound() {
        use clap::CommandFactory;
        Args::command().debug_assert();
    }

    #[test]
    fn json_after_the_dashes_belongs_to_the_command() {
        let asks = |args: &[&str]| asks_for_json(args.iter().map(OsString::from));
        assert!(asks(&["palisade", "ls", "--json"]));
        assert!(!asks(&["palisade", "run", "x", "--", "jq", "--json"]));
    }
}
