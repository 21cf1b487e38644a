//! Parsing of the arguments, and those that all verbs share. Each verb's own arguments are in the
//! verb's file.

use std::ffi::{OsStr, OsString};
use std::sync::OnceLock;

use clap::builder::styling::{AnsiColor, Styles};
use clap::error::{ContextKind, ContextValue};
use clap::{Args as _, CommandFactory, FromArgMatches, Parser};
use palisade::command::nearest;

use crate::exit::Failure;
use crate::print::Printer;
use crate::verbs::Verb;
use crate::view::{shorten, shown};

const STYLES: Styles = Styles::styled()
    .header(AnsiColor::Green.on_default().bold())
    .usage(AnsiColor::Green.on_default().bold())
    .literal(AnsiColor::Cyan.on_default().bold())
    .placeholder(AnsiColor::Cyan.on_default());

/// Distributed locks with the same behaviour on every engine.
///
/// A lock has a name. An engine keeps it, and a URL selects the engine. By default the processes
/// of this user on this machine share the locks.
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
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

/// What every verb takes, before or after its name.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Global {
    /// The engine that keeps the locks, such as file:DIR [default: $PALISADE_URL, then the config
    /// file's, then file:]
    #[arg(long, alias = "engine-url", global = true, value_name = "URL")]
    pub(crate) url: Option<String>,
    /// Print JSON: documents on stdout, errors on stderr
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

impl Global {
    /// The printer that these arguments ask for.
    pub(crate) fn printer(&self) -> Printer {
        Printer { json: self.json }
    }
}

impl Args {
    /// Reads the arguments of this process.
    pub(crate) fn read() -> Result<Self, (Failure, Printer)> {
        let refuse = |failure| {
            let json = asks_for_json(own_arguments());
            (failure, Printer { json })
        };
        // clap accepts one before the verb and one after it, and silently drops the first.
        if own_arguments().filter(|arg| names_a_url(arg)).count() > 1 {
            let message = "--url is given twice; give it once";
            return Err(refuse(Failure::Usage(message.into())));
        }
        if let Some(args) = Self::read_one_verb(arguments().to_vec()) {
            return Ok(args);
        }
        Self::try_parse_from(arguments())
            .map_err(|error| refuse(Failure::Arguments(with_suggestion(error))))
    }
}

impl Args {
    /// Parses with the definition of the one verb alone, because building the definition of all
    /// verbs takes longer than taking a lock. `None` if all are needed, as for help and errors.
    fn read_one_verb(args: Vec<OsString>) -> Option<Self> {
        let mut words = args.iter().skip(1);
        let word = loop {
            match words.next()?.to_str()? {
                "--url" => drop(words.next()),
                word if word.starts_with('-') => {}
                word => break word,
            }
        };
        let verb = Verb::definition(word)?;
        // Otherwise clap adds a second `help` verb.
        let palisade = clap::Command::new("palisade").disable_help_subcommand(true);
        let one = Global::augment_args(palisade).subcommand(verb);
        Self::from_arg_matches(&one.try_get_matches_from(args).ok()?).ok()
    }
}

/// All arguments of this process, as they were before a password in them was overwritten.
pub(crate) fn arguments() -> &'static [OsString] {
    static ARGUMENTS: OnceLock<Vec<OsString>> = OnceLock::new();
    ARGUMENTS.get_or_init(|| std::env::args_os().collect())
}

/// The arguments before `--`, which are palisade's own and not the command's.
fn own_arguments() -> impl Iterator<Item = OsString> {
    let all = arguments().iter().skip(1).cloned();
    all.take_while(|arg| arg != OsStr::new("--"))
}

fn names_a_url(argument: &OsStr) -> bool {
    let text = argument.to_string_lossy();
    let flag = text.split_once('=').map_or(&*text, |(flag, _)| flag);
    matches!(flag, "--url" | "--engine-url")
}

/// Whether `--json` is among arguments that could not be read.
fn asks_for_json(mut args: impl Iterator<Item = OsString>) -> bool {
    args.any(|arg| arg == OsStr::new("--json"))
}

/// clap's message made safe to print: a URL among the arguments may hold a secret, and any
/// argument may be long or contain terminal control characters.
pub(crate) fn explain(text: &str) -> String {
    let mut text = text.replacen("error:", "palisade:", 1);
    for arg in own_arguments() {
        let arg = arg.to_string_lossy();
        // clap may quote a value without its flag.
        let value = arg.split_once('=').map(|(_, value)| value);
        for part in std::iter::once(&*arg).chain(value) {
            let safe = match part.split_once("://") {
                Some((scheme, _)) => format!("{}://…", shown(scheme)),
                None => shorten(&shown(part)),
            };
            if safe != part {
                text = text.replace(part, &safe);
            }
        }
    }
    text
}

/// Adds a suggestion that clap can't make.
fn with_suggestion(mut error: clap::Error) -> clap::Error {
    if let Some(ContextValue::String(argument)) = error.get(ContextKind::InvalidArg)
        && let Some(tip) = tip(argument, own_arguments())
    {
        let tip = ContextValue::StyledStrs(vec![tip.into()]);
        error.insert(ContextKind::Suggested, tip);
        return error;
    }
    let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidSubcommand) else {
        return error;
    };
    if error.get(ContextKind::SuggestedSubcommand).is_none()
        && let Some(meant) = meant_verb(word, own_arguments())
    {
        let meant = ContextValue::Strings(vec![meant]);
        error.insert(ContextKind::SuggestedSubcommand, meant);
    }
    error
}

/// A hint for an unknown argument of a verb that runs a command: it may belong to the command, or
/// be a flag of flock.
fn tip(argument: &str, mut args: impl Iterator<Item = OsString>) -> Option<String> {
    let runs = ["run", "elect", "acquire", "queue"];
    let mut verb = args.find_map(|arg| runs.into_iter().find(|verb| arg == OsStr::new(verb)))?;
    if verb == "queue" {
        args.find(|arg| arg == OsStr::new("work"))?;
        verb = "queue work";
    }
    let flag = match argument {
        word if word.starts_with('-') && verb == "queue work" => return None,
        "-n" | "--nb" | "--nonblock" => "use --no-wait to end at once when the lock is held",
        "-w" | "--timeout" => "use --wait with a unit, as in --wait 10s",
        "-s" => "use --shared to share the lock with other --shared holders",
        "-x" | "-e" | "--exclusive" => "omit it: a lock is exclusive unless --shared is given",
        "-c" | "--command" => "write the command after --, as in -- sh -c 'COMMAND'",
        word if word.starts_with('-') => return None,
        _ if verb == "acquire" => return None,
        _ => {
            return Some(format!(
                "write the command after --, as in palisade {verb} NAME -- CMD"
            ));
        }
    };
    Some(flag.to_owned())
}

/// The verb nearest to `word`, or the nearest part of the verb that precedes it in `args`.
fn meant_verb(word: &str, args: impl Iterator<Item = OsString>) -> Option<String> {
    let letters = |word: &str| {
        let mut letters: Vec<char> = word.chars().collect();
        letters.sort_unstable();
        letters
    };
    let verbs = Args::command();
    let mut before = args.take_while(|arg| arg != OsStr::new(word));
    let verb = before.find_map(|arg| verbs.find_subcommand(&arg));
    let names = || {
        let among = verb.unwrap_or(&verbs);
        among.get_subcommands().map(clap::Command::get_name)
    };
    let swapped = names().find(|name| letters(name) == letters(word));
    swapped
        .or_else(|| nearest(word, names()))
        .map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_is_sound() {
        Args::command().debug_assert();
    }

    #[test]
    fn one_verb_is_read_as_all_of_them_are() {
        for line in [
            "palisade run x -- true",
            "palisade --url file:d run --json x --ttl 5s -- a --url b",
            "palisade --url=file:d --json ls web --watch",
            "palisade fence check x 7 --accept",
            "palisade bench --engine-url memory: --count 1",
        ] {
            let args = || line.split(' ').map(OsString::from).collect::<Vec<_>>();
            let one = Args::read_one_verb(args()).unwrap();
            let all = Args::try_parse_from(args()).unwrap();
            assert_eq!(format!("{one:?}"), format!("{all:?}"), "{line}");
        }
        for line in [
            "palisade",
            "palisade rnu x",
            "palisade run",
            "palisade run --help",
        ] {
            let args = line.split(' ').map(OsString::from).collect();
            assert!(Args::read_one_verb(args).is_none(), "{line}");
        }
    }

    #[test]
    fn every_verb_has_its_definition() {
        for verb in Args::command().get_subcommands() {
            assert!(Verb::definition(verb.get_name()).is_some(), "{verb}");
        }
    }

    #[test]
    fn swapped_letters_are_seen_through() {
        let meant = |words: &[&str]| {
            let args = words.iter().map(OsString::from);
            meant_verb(words.last().unwrap(), args)
        };
        assert_eq!(meant(&["rnu"]).as_deref(), Some("run"));
        assert_eq!(meant(&["--json", "sl"]).as_deref(), Some("ls"));
        assert_eq!(meant(&["juggle"]), None);
        assert_eq!(meant(&["config", "apth"]).as_deref(), Some("path"));
        assert_eq!(meant(&["config", "sl"]), None);
    }
}
