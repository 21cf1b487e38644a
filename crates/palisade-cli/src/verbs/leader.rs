//! `palisade leader`: who leads, now or after every change.

use futures_util::StreamExt;
use palisade::Name;
use serde::Serialize;

use crate::args::Global;
use crate::connect::Target;
use crate::exit::{Failure, Outcome, Verdict};
use crate::live::{Outages, connect, reader_gone};
use crate::view::{ClaimView, shown};

/// Show who leads an election; exit code 1 when nobody does
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  palisade leader scheduler\n  \
    palisade leader scheduler --json\n  palisade leader scheduler --watch")]
pub(crate) struct Leader {
    /// The name of the election
    name: String,
    /// Keep running and show every change, until a signal comes or the reader closes the pipe
    #[arg(long)]
    watch: bool,
}

/// The answer; its field names are the command's contract.
#[derive(Serialize)]
struct Answer<'a> {
    name: &'a str,
    leader: Option<Leading>,
}

#[derive(Serialize)]
struct Leading {
    value: Option<String>,
    owner: Option<String>,
    host: Option<String>,
    pid: Option<u32>,
    token: String,
    since: Option<String>,
    /// The leader as text.
    #[serde(skip)]
    who: String,
}

impl Leader {
    pub(crate) async fn run(self, global: &Global) -> Verdict {
        let name = Name::new(&self.name)?;
        let target = Target::find(global)?;
        let client = target.connect_existing().await?;
        if self.watch {
            return self.watch(&target, client, global).await;
        }
        let leader = match client {
            Some(client) => client.election(name.as_str()).leader().await?,
            None => None,
        };
        self.show(leader, global)
    }

    /// Shows every change. It handles no signal, so that each ends it even in a blocked write.
    async fn watch(
        &self,
        target: &Target,
        client: Option<palisade::Client>,
        global: &Global,
    ) -> Verdict {
        let mut gone = std::pin::pin!(reader_gone());
        let client = match client {
            Some(client) => client,
            None => {
                self.show(None, global)?;
                tokio::select! {
                    () = &mut gone => return Ok(Outcome::Done),
                    client = connect(target) => client?,
                }
            }
        };
        let election = client.election(self.name.as_str());
        let mut leaders = Box::pin(election.observe());
        let mut outages = Outages::new(global.printer(), Some(&self.name));
        loop {
            let seen = tokio::select! {
                () = &mut gone => return Ok(Outcome::Done),
                seen = leaders.next() => seen,
            };
            if let Some(leader) = outages.see(seen.map(|seen| seen.map_err(Failure::from)))? {
                self.show(leader, global)?;
            }
        }
    }

    fn show(&self, leader: Option<palisade::Leader>, global: &Global) -> Verdict {
        let leads = leader.is_some();
        let leader = leader.map(Leading::new);
        let name = &self.name;
        global
            .printer()
            .reply(&Answer { name, leader }, Answer::text, leads)
    }
}

impl Answer<'_> {
    fn text(&self) -> String {
        let name = shown(self.name);
        let Some(Leading {
            who, token, value, ..
        }) = &self.leader
        else {
            return format!("nobody leads {name}\n");
        };
        match value {
            Some(value) => format!("{} leads {name}: {who}, token {token}\n", shown(value)),
            None => format!("{who} leads {name}, token {token}\n"),
        }
    }
}

impl Leading {
    fn new(leader: palisade::Leader) -> Self {
        let claim = ClaimView::of_owner(leader.owner.as_ref());
        Self {
            value: leader.value,
            who: claim.to_string(),
            owner: claim.owner,
            host: claim.host,
            pid: claim.pid,
            token: leader.token.to_string(),
            since: claim.since,
        }
    }
}
