//! Parsing of the arguments, and those that all verbs share. Each verb's own arguments are in the
//! verb's file.

use std::ffi::{OsStr, OsString};
use std::sync::OnceLock;

use clap::builder::styling::{AnsiColor, Styles};
use clap::{Args as _, FromArgMatches, Parser};

use crate::exit::Failure;
use crate::print::Printer;
use crate::tips::{in_words, with_suggestion};
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

/// The heading of the options of every verb, after the verb's own.
const GLOBAL: &str = "Global options";

/// What every verb takes, before or after its name.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Global {
    /// The engine that keeps the locks, such as file:DIR [default: $PALISADE_URL, then the config
    /// file's, then file:]
    #[arg(
        long,
        alias = "engine-url",
        global = true,
        value_name = "URL",
        help_heading = GLOBAL
    )]
    pub(crate) url: Option<String>,
    /// Print JSON: documents on stdout, errors on stderr
    #[arg(long, global = true, help_heading = GLOBAL)]
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
        Self::try_parse_from(arguments()).or_else(|error| {
            let again = dashed_name(arguments()).map(Self::try_parse_from);
            again
                .unwrap_or(Err(error))
                .map_err(|error| refuse(Failure::Arguments(with_suggestion(error))))
        })
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
pub(crate) fn own_arguments() -> impl Iterator<Item = OsString> {
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
    let mut text = in_words(&text.replacen("error:", "palisade:", 1));
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

/// A value parser for the name of a verb that runs a command; see [`dashed_name`].
pub(crate) fn parse_name(text: &str) -> Result<String, std::convert::Infallible> {
    Ok(text.strip_prefix(DASHED).unwrap_or(text).to_owned())
}

/// In front of a name, it keeps clap from taking it for an option. No argument contains it.
const DASHED: char = '\0';

/// `run -- -x -- CMD`, in which `-x` is the name, as clap can read it: for clap everything after the
/// first `--` is the command. Only a name that starts with a dash is looked for there, because no
/// command does: a name that was forgotten must not be made up from a command.
fn dashed_name(args: &[OsString]) -> Option<Vec<OsString>> {
    let words = words(args.iter().skip(1).cloned());
    let words: Vec<_> = words.iter().map(String::as_str).collect();
    let end = args.iter().position(|arg| arg == "--")?;
    let name = args.get(end + 1).filter(|name| {
        let bytes = name.as_encoded_bytes();
        bytes.starts_with(b"-") && bytes != b"--"
    })?;
    let behind = &args[end + 2..];
    let commanded = behind.first().is_some_and(|next| next == "--");
    match words[..] {
        ["run", ..] | ["queue", "work", ..] if commanded => {}
        ["elect", ..] if commanded || behind.is_empty() => {}
        _ => return None,
    }
    let mut marked = OsString::from(DASHED.to_string());
    marked.push(name);
    Some([&args[..end], &[marked], behind].concat())
}

/// The words before `--` that are neither options nor the value of `--url`: the verb is the first.
pub(crate) fn words(args: impl Iterator<Item = OsString>) -> Vec<String> {
    let mut words = Vec::new();
    let mut args = args.take_while(|arg| arg != "--");
    while let Some(arg) = args.next() {
        match &*arg.to_string_lossy() {
            "--url" | "--engine-url" => drop(args.next()),
            option if option.starts_with('-') => {}
            word => words.push(word.to_owned()),
        }
    }
    words
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

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
    fn a_name_that_starts_with_a_dash_is_behind_the_dashes() {
        let parsed = |line: &str| {
            let args: Vec<_> = line.split(' ').map(OsString::from).collect();
            let again = dashed_name(&args)?;
            Some(format!("{:?}", Args::try_parse_from(again).unwrap().verb))
        };
        for line in [
            "palisade run --shared -- -x -- true",
            "palisade elect -- -x -- true",
            "palisade elect -- -x",
            "palisade queue work --drain -- --url -- true",
        ] {
            let parsed = parsed(line).expect(line);
            let name = if line.contains("-x") { "-x" } else { "--url" };
            assert!(parsed.contains(&format!("name: {name:?}")), "{parsed}");
            assert_eq!(parsed.contains("[\"true\"]"), line.ends_with("true"));
        }
        for line in [
            "palisade run -- ./a -- b",
            "palisade elect -- ./scheduler",
            "palisade run -- -x",
            "palisade run -- -x true",
            "palisade run --",
            "palisade run -- -- true",
            "palisade queue push -- -x -- true",
            "palisade show -- -x",
        ] {
            assert_eq!(parsed(line), None, "{line}");
        }
    }
}
