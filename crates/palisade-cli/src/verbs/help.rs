//! `palisade help [VERB]`: the same as `palisade [VERB] --help`.

use clap::CommandFactory;

use crate::args::{Args, Global};
use crate::exit::{Failure, Outcome, Verdict};

/// Print the help of palisade or of a verb
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  palisade help\n  palisade help run\n  palisade help fence check"
)]
pub(crate) struct Help {
    /// The verb, and the part of it [default: palisade itself]
    verb: Vec<String>,
}

impl Help {
    pub(crate) async fn run(self, _global: &Global) -> Verdict {
        let words = ["palisade".to_owned()].into_iter().chain(self.verb);
        let asked = Args::command().try_get_matches_from(words.chain(["--help".to_owned()]));
        // clap returns help as an error, too: one that is printed to stdout.
        match asked {
            Err(answer) => Err(Failure::Arguments(answer)),
            Ok(_) => Ok(Outcome::Done),
        }
    }
}
