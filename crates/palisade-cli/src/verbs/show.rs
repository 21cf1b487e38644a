//! `palisade show`: who holds and who waits on one line.

use palisade::{Client, Name, Scope};

use crate::args::Global;
use crate::connect::Target;
use crate::exit::{Failure, Outcome, Verdict};
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
        let absent = line.is_none();
        let line = line.unwrap_or_else(|| LineView::empty(name.as_str()));
        global.printer().answer(&line, |line| match absent {
            true => format!("nobody holds {}\n", shown(&line.name)),
            false => print::table(std::slice::from_ref(line)),
        })?;
        Ok(if absent { Outcome::No } else { Outcome::Done })
    }
}

/// The line called `name`, if anyone is in it.
pub(crate) async fn look(client: &Client, name: &Name) -> Result<Option<LineView>, Failure> {
    let reports = client.survey(Scope::Line(name.clone())).await?;
    let report = reports.into_iter().next();
    report
        .map(|report| LineView::new(report, client))
        .transpose()
}
