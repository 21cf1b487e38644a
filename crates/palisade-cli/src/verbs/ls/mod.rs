//! `palisade ls`: who holds and who waits, on every line or on those whose names begin alike.

mod watch;

use palisade::Scope;

use crate::args::Global;
use crate::connect::Place;
use crate::exit::{Outcome, Verdict};
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
    /// Show every change too, until a signal comes or nobody reads any more
    #[arg(long)]
    watch: bool,
}

impl Ls {
    pub(crate) async fn run(self, global: &Global) -> Verdict {
        let client = Place::find(global)?.connect().await?;
        let scope = Scope::Prefix(self.prefix);
        if self.watch {
            return watch::watch(client, scope, global.printer()).await;
        }
        let reports = client.survey(scope).await?;
        let lines = reports
            .into_iter()
            .map(|report| LineView::new(report, &client))
            .collect::<Result<Vec<_>, _>>()?;
        global
            .printer()
            .answer(&lines, |lines| match lines.is_empty() {
                true => String::new(),
                false => print::table(lines),
            })?;
        Ok(Outcome::Done)
    }
}
