//! `palisade ls`: who holds and who waits, on every line or on those with a common prefix.

mod watch;

use std::io::{self, IsTerminal};

use palisade::report::Scope;

use crate::args::Global;
use crate::connect::Target;
use crate::exit::Verdict;
use crate::live::look;
use crate::print;
use crate::view::LineView;

/// List locks: who holds them and who waits
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  palisade ls\n  palisade ls nightly- --json\n  \
    palisade ls --watch\n  palisade ls --watch --json | jq .name"
)]
pub(crate) struct Ls {
    /// Only names that begin with this
    #[arg(default_value = "", hide_default_value = true)]
    prefix: String,
    /// Keep running and show every change, until a signal comes or the reader closes the pipe
    #[arg(long)]
    watch: bool,
}

impl Ls {
    pub(crate) async fn run(self, global: &Global) -> Verdict {
        let target = Target::find(global)?;
        let scope = Scope::Prefix(self.prefix);
        if self.watch {
            return watch::watch(target, scope, global.printer()).await;
        }
        let lines = match target.connect_existing().await? {
            Some(client) => look(&client, &scope).await?,
            None => Vec::new(),
        };
        let text = |lines: &Vec<LineView>| match lines.is_empty() {
            // Only for a terminal: a program that reads rows expects none.
            true if io::stdout().is_terminal() => "no locks are held\n".to_owned(),
            true => String::new(),
            false => print::table(lines),
        };
        global.printer().reply(&lines, text, true)
    }
}
