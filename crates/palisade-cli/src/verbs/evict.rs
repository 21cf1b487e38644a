//! `palisade evict`: an operator's release of a lock that somebody else holds.
//!
//! The holder is told, lets go or runs out of its lease, and only then is its place taken away.
//! `--force` takes it away at once: the holder hears of it only afterwards, and nothing but its
//! fencing token keeps it from doing harm.

use palisade::{Eviction, Name, Which};
use serde::Serialize;

use super::show::look;
use crate::args::Global;
use crate::connect::Place;
use crate::exit::{Outcome, Verdict};
use crate::view::{ClaimView, shown};

/// Take a lock away from its holder; exit code 1 when there is none
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  palisade evict nightly-report\n  \
    palisade evict nightly-report --id 3f9a04d6c1b25e7788a0b1c2d3e4f506 --force")]
pub(crate) struct Evict {
    /// The name of the lock
    name: String,
    /// Only the claim with this id (see `ls`), holding or waiting, not every holder
    #[arg(long)]
    id: Option<String>,
    /// Take it away at once, without the holder's letting go
    #[arg(long)]
    force: bool,
}

/// What was done.
#[derive(Serialize)]
struct Evicted {
    name: String,
    forced: bool,
    evicted: Vec<ClaimView>,
}

impl Evict {
    pub(crate) async fn run(self, global: &Global) -> Verdict {
        let name = Name::new(&self.name)?;
        let Some(client) = Place::find(global)?.connect_existing().await? else {
            let nothing = Evicted {
                name: self.name,
                forced: self.force,
                evicted: Vec::new(),
            };
            let printer = global.printer();
            printer.answer(&nothing, |nothing| nothing.text(false))?;
            return Ok(Outcome::No);
        };
        let line = look(&client, &name).await?;
        let mut victims = match (line, &self.id) {
            (None, _) => Vec::new(),
            (Some(line), None) => line.holders,
            (Some(line), Some(id)) => {
                let all = line.holders.into_iter().chain(line.waiters);
                all.filter(|claim| claim.id == *id).collect()
            }
        };
        let which = self.id.as_deref().map_or(Which::Holders, Which::Claim);
        let how = if self.force {
            Eviction::Remove
        } else {
            Eviction::Mark
        };
        let done = client.evict(&name, which, how).await?;
        if !done {
            victims.clear();
        }
        let evicted = Evicted {
            name: self.name,
            forced: self.force,
            evicted: victims,
        };
        global
            .printer()
            .answer(&evicted, |evicted| evicted.text(done))?;
        Ok(if done { Outcome::Done } else { Outcome::No })
    }
}

impl Evicted {
    fn text(&self, done: bool) -> String {
        let name = shown(&self.name);
        if !done {
            return format!("nothing to evict from {name}\n");
        }
        let how = match self.forced {
            true => "removed at once",
            false => "evicted",
        };
        if self.evicted.is_empty() {
            // It came between the look and the deed.
            return format!("{how} from {name}\n");
        }
        let line = |claim: &ClaimView| format!("{how} from {name}: {claim}\n");
        self.evicted.iter().map(line).collect()
    }
}
