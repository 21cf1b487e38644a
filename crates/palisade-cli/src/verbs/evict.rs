//! `palisade evict`: an operator's release of a lock that somebody else holds.
//!
//! The holder is notified; its claim is removed only when it has let go or its lease has ended.
//! `--force` removes the claim at once: the holder learns of it only afterwards, and only its
//! fencing token keeps it from doing harm.

use palisade::{Eviction, Name, Which};
use serde::Serialize;

use super::look;
use crate::args::Global;
use crate::connect::Target;
use crate::exit::Verdict;
use crate::view::{ClaimView, shown};

/// Take a lock away from its holder; exit code 1 if there is none
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  palisade evict nightly-report\n  \
    palisade evict nightly-report --id 3f9a04d6c1b25e7788a0b1c2d3e4f506 --force")]
pub(crate) struct Evict {
    /// The name of the lock
    name: String,
    /// Evict only the claim with this id (see `ls`), holding or waiting, instead of every holder
    #[arg(long)]
    id: Option<String>,
    /// Remove the claim at once, without waiting for the holder to let go
    #[arg(long)]
    force: bool,
}

#[derive(Serialize)]
struct Evicted {
    name: String,
    forced: bool,
    evicted: Vec<ClaimView>,
}

impl Evict {
    pub(crate) async fn run(self, global: &Global) -> Verdict {
        let name = Name::new(&self.name)?;
        let (mut done, mut evicted) = (false, Vec::new());
        if let Some(client) = Target::find(global)?.connect_existing().await? {
            let line = look(&client, &name).await?;
            let (which, how) = (
                self.id.as_deref().map_or(Which::Holders, Which::Claim),
                if self.force {
                    Eviction::Remove
                } else {
                    Eviction::Mark
                },
            );
            done = client.evict(&name, which, how).await?;
            evicted = match (line.filter(|_| done), &self.id) {
                (None, _) => Vec::new(),
                (Some(line), None) => line.holders,
                (Some(line), Some(id)) => {
                    let all = line.holders.into_iter().chain(line.waiters);
                    all.filter(|claim| claim.id == *id).collect()
                }
            };
        }
        let answer = Evicted {
            name: self.name,
            forced: self.force,
            evicted,
        };
        global
            .printer()
            .reply(&answer, |answer| answer.text(done), done)
    }
}

impl Evicted {
    fn text(&self, done: bool) -> String {
        let name = shown(&self.name);
        let how = if self.forced {
            "removed at once"
        } else {
            "evicted"
        };
        match (done, self.evicted.is_empty()) {
            (false, _) => format!("nothing to evict from {name}\n"),
            // The claim arrived between the survey and the eviction.
            (true, true) => format!("{how} from {name}\n"),
            (true, false) => {
                let line = |claim: &ClaimView| format!("{how} from {name}: {claim}\n");
                self.evicted.iter().map(line).collect()
            }
        }
    }
}
