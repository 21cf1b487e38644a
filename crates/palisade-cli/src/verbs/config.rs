//! `palisade config`: the config file in force, and each setting with its source.

use serde::Serialize;
use serde_json::json;

use crate::args::Global;
use crate::config::{Config as Found, From, Setting, candidates};
use crate::connect::shown_url;
use crate::exit::{Outcome, Verdict};
use crate::view::shown;

/// Show the configuration in force
///
/// The first of these files that exists is read: $PALISADE_CONFIG (if set, it must exist),
/// $XDG_CONFIG_HOME/palisade/config.toml, ~/.config/palisade/config.toml,
/// /etc/palisade/config.toml. It may set url, ttl, wait, label and
/// for_correctness.
#[derive(Debug, clap::Args)]
#[command(
    arg_required_else_help = true,
    subcommand_required = true,
    after_help = "Examples:\n  palisade config path\n  palisade config show\n\n\
        A config file:\n  \
        url = \"file:/var/lib/locks\"\n  ttl = \"10s\"\n  wait = \"1m\"\n  label = \"web\"\n  for_correctness = true"
)]
pub(crate) struct Config {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// Print the path of the config file; exit code 1 when there is none
    #[command(after_help = "Example:\n  palisade config path")]
    Path,
    /// Print the settings in force, and where each comes from; secrets are hidden
    #[command(after_help = "Examples:\n  palisade config show\n  palisade config show --json")]
    Show,
}

#[derive(Serialize)]
struct PathAnswer {
    path: Option<String>,
    searched: Vec<String>,
}

#[derive(Serialize)]
struct ShowAnswer {
    path: Option<String>,
    url: Setting,
    ttl: Setting,
    wait: Setting,
    label: Setting,
    for_correctness: Setting,
}

impl Config {
    pub(crate) async fn run(self, global: &Global) -> Verdict {
        let found = Found::find(global.url.as_deref())?;
        let path = found.path.as_ref();
        let path = path.map(|path| path.to_string_lossy().into_owned());
        match self.what {
            What::Path => show_path(path, global),
            What::Show => show_all(path, &found, global),
        }
    }
}

fn show_path(path: Option<String>, global: &Global) -> Verdict {
    let searched = candidates().into_iter();
    let searched = searched
        .map(|path| path.to_string_lossy().into_owned())
        .collect();
    let found = path.is_some();
    let text = |answer: &PathAnswer| match &answer.path {
        Some(path) => format!("{}\n", shown(path)),
        None => {
            let searched = answer
                .searched
                .iter()
                .map(|path| format!("  {}\n", shown(path)));
            format!(
                "no config file; looked for\n{}",
                searched.collect::<String>()
            )
        }
    };
    global
        .printer()
        .reply(&PathAnswer { path, searched }, text, found)
}

fn show_all(path: Option<String>, found: &Found, global: &Global) -> Verdict {
    let (url, from) = &found.url;
    let (value, from) = (Some(shown_url(url)?), *from);
    let answer = ShowAnswer {
        path,
        url: Setting { value, from },
        ttl: found.setting("ttl")?,
        wait: found.setting("wait")?,
        label: found.setting("label")?,
        for_correctness: found.setting("for_correctness")?,
    };
    global.printer().answer(&answer, ShowAnswer::text)?;
    if let Some(message) = found.exposed() {
        let event = json!({"event": "exposed_password", "message": message});
        let text = format!("{message}; chmod 600 it, or use password_file=");
        global.printer().event(event, || Some(text));
    }
    Ok(Outcome::Done)
}

impl ShowAnswer {
    fn text(&self) -> String {
        let dash = |text: &Option<String>| text.as_deref().map_or("-".to_owned(), shown);
        let mut text = format!("{:<15} {}\n", "file", dash(&self.path));
        for (key, setting) in [
            ("url", &self.url),
            ("ttl", &self.ttl),
            ("wait", &self.wait),
            ("label", &self.label),
            ("for_correctness", &self.for_correctness),
        ] {
            let from = match setting.from {
                From::Flag => "--url",
                From::Environment => "PALISADE_URL",
                From::Url => "the url",
                From::File => "the file",
                From::Default => "default",
            };
            text.push_str(&format!("{key:<15} {} ({from})\n", dash(&setting.value)));
        }
        text
    }
}
