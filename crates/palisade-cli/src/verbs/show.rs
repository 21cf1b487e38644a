//! `palisade show`: who holds and who waits on one line.

use palisade::report::Scope;
use palisade::{Client, Name};

use crate::args::Global;
use crate::connect::Target;
use crate::exit::{Failure, Verdict};
use crate::live;
use crate::print;
use crate::view::{LineView, shown};

/// Show one lock: who holds it and who waits; exit code 1 when nobody does
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  palisade show nightly-report")]
pub(crate) struct Show {
    /// The name of the lock
    name: String,
}

impl Show {
    pub(crate) async fn run(self, global: &Global) -> Verdict {
        let name = Name::new(&self.name)?;
        let line = match Target::find(global)?.connect_existing().await? {
            Some(client) => look(&client, &name).await?,
            None => None,
        };
        let there = line.is_some();
        let line = line.unwrap_or_else(|| LineView::empty(name.as_str()));
        let text = |line: &LineView| {
            if there {
                print::table(std::slice::from_ref(line))
            } else {
                format!("nobody holds {}\n", shown(&line.name))
            }
        };
        global.printer().reply(&line, text, there)
    }
}

/// The line called `name`, if anyone is in it.
pub(crate) async fn look(client: &Client, name: &Name) -> Result<Option<LineView>, Failure> {
    Ok(live::look(client, &Scope::Line(name.clone())).await?.pop())
}
