//! `palisade completions`: what a shell needs to complete palisade's verbs and options.

use clap::CommandFactory;
use clap_complete::Shell;
use serde_json::json;

use crate::args::{Args, Global};
use crate::exit::Verdict;

/// Print completions for a shell
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    palisade completions bash > ~/.local/share/bash-completion/completions/palisade\n  \
    palisade completions zsh > \"${fpath[1]}/_palisade\"\n  \
    palisade completions fish > ~/.config/fish/completions/palisade.fish")]
pub(crate) struct Completions {
    /// The shell
    shell: Shell,
}

impl Completions {
    pub(crate) async fn run(self, global: &Global) -> Verdict {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut Args::command(), "palisade", &mut script);
        let script = String::from_utf8_lossy(&script).into_owned();
        let answer = json!({"shell": self.shell.to_string(), "script": script});
        global.printer().reply(&answer, |_| script, true)
    }
}
