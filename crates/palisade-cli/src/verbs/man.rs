//! `palisade man`: the manual pages, made from the definition of the arguments.

use std::io;
use std::path::{Path, PathBuf};

use clap::{Command, CommandFactory};
use serde_json::json;

use crate::args::{Args, Global};
use crate::exit::{Failure, Verdict};
use crate::view::shown;

/// Print a manual page, or write all of them into a directory
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  palisade man | man -l -\n  palisade man run | man -l -\n  palisade man queue work | man -l -\n  \
    palisade man --out ~/.local/share/man/man1"
)]
pub(crate) struct Man {
    /// The verb to print the page of, and the part of it [default: palisade itself]
    #[arg(conflicts_with = "out")]
    verb: Vec<String>,
    /// Write one page for each verb into this directory
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

impl Man {
    pub(crate) async fn run(self, global: &Global) -> Verdict {
        let mut pages = Vec::new();
        collect(Args::command(), None, &mut pages)?;
        match self.out {
            Some(out) => write_all(&out, &pages, global),
            None => print(&self.verb.join("-"), &pages, global),
        }
    }
}

/// A page and what it is called: `palisade-run`.
type Page = (String, Vec<u8>);

/// The pages of a command and those below it.
fn collect(command: Command, above: Option<&str>, pages: &mut Vec<Page>) -> io::Result<()> {
    let name = match above {
        Some(above) => format!("{above}-{}", command.get_name()),
        None => command.get_name().to_owned(),
    };
    // So that usage and options are those that a user types.
    let mut command = command.disable_help_subcommand(true);
    if above.is_none() {
        command.build();
    }
    let below: Vec<_> = command.get_subcommands().cloned().collect();
    let mut page = Vec::new();
    clap_mangen::Man::new(command.name(name.clone())).render(&mut page)?;
    pages.push((name.clone(), page));
    for command in below {
        collect(command, Some(&name), pages)?;
    }
    Ok(())
}

fn print(verb: &str, pages: &[Page], global: &Global) -> Verdict {
    let wanted = match verb {
        "" => "palisade".to_owned(),
        verb => format!("palisade-{}", verb.replace(' ', "-")),
    };
    let Some((name, page)) = pages.iter().find(|(name, _)| *name == wanted) else {
        let names = pages.iter().filter_map(|(name, _)| name.split_once('-'));
        let names: Vec<_> = names.map(|(_, verb)| verb).collect();
        let hint = match palisade::command::nearest(verb, names) {
            Some(near) => format!("did you mean {}?", near.replace('-', " ")),
            None => "`palisade --help` lists the verbs".to_owned(),
        };
        let verb = shown(&verb.replace('-', " "));
        return Err(Failure::Usage(format!("there is no verb {verb}; {hint}")));
    };
    let page = String::from_utf8_lossy(page).into_owned();
    let answer = json!({"page": name, "text": page});
    global.printer().reply(&answer, |_| page, true)
}

fn write_all(out: &Path, pages: &[Page], global: &Global) -> Verdict {
    let failed = |path: &Path, error: io::Error| {
        let message = format!("{}: {error}", path.display());
        Failure::Output(io::Error::new(error.kind(), message))
    };
    std::fs::create_dir_all(out).map_err(|error| failed(out, error))?;
    let mut written = Vec::new();
    for (name, page) in pages {
        let path = out.join(format!("{name}.1"));
        std::fs::write(&path, page).map_err(|error| failed(&path, error))?;
        written.push(path.to_string_lossy().into_owned());
    }
    let lines = |_: &_| {
        written
            .iter()
            .map(|path| format!("{}\n", shown(path)))
            .collect()
    };
    global
        .printer()
        .reply(&json!({"written": written}), lines, true)
}
