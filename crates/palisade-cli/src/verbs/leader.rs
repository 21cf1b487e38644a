//! `palisade leader`: who leads, now or after every change.

use futures_util::StreamExt;
use palisade::{Election, Error, Name};
use serde::Serialize;
use serde_json::json;

use crate::args::Global;
use crate::connect::Place;
use crate::exit::{Failure, Outcome, Verdict, told};
use crate::live::{connect, reader_gone};
use crate::print::Printer;
use crate::view::{ClaimView, shown};

/// Show who leads an election; exit code 1 when nobody does
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  palisade leader scheduler\n  \
    palisade leader scheduler --json\n  palisade leader scheduler --watch")]
pub(crate) struct Leader {
    /// The name of the election
    name: String,
    /// Show every change of leader too, until a signal comes or nobody reads any more
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
    /// Who it is, for people.
    #[serde(skip)]
    who: String,
}

impl Leader {
    pub(crate) async fn run(self, global: &Global) -> Verdict {
        let name = Name::new(&self.name)?;
        let place = Place::find(global)?;
        let printer = global.printer();
        if self.watch {
            let client = match place.connect_existing().await? {
                Some(client) => client,
                None => {
                    show(name.as_str(), None, printer)?;
                    tokio::select! {
                        () = reader_gone() => return Ok(Outcome::Done),
                        client = connect(&place) => client?,
                    }
                }
            };
            let election = client.election(name.as_str());
            return watch(name.as_str(), &election, printer).await;
        }
        let leader = match place.connect_existing().await? {
            Some(client) => client.election(name.as_str()).leader().await?,
            None => None,
        };
        let nobody = leader.is_none();
        show(name.as_str(), leader, printer)?;
        Ok(if nobody { Outcome::No } else { Outcome::Done })
    }
}

/// Shows every change. It listens to no signal, so that each ends it, also in a blocked write.
async fn watch(name: &str, election: &Election, printer: Printer) -> Verdict {
    let mut leaders = Box::pin(election.observe());
    let mut gone = std::pin::pin!(reader_gone());
    let mut outage = false;
    loop {
        let seen = tokio::select! {
            () = &mut gone => return Ok(Outcome::Done),
            seen = leaders.next() => seen,
        };
        match seen {
            Some(Ok(leader)) => {
                outage = false;
                show(name, leader, printer)?;
            }
            Some(Err(error)) if error.is_transient() => {
                if !std::mem::replace(&mut outage, true) {
                    complain(name, &error, printer);
                }
            }
            Some(Err(error)) => return Err(error.into()),
            None => return Err(Failure::Defect("the watch has ended".into())),
        }
    }
}

fn complain(name: &str, error: &Error, printer: Printer) {
    let message = told(error);
    printer.event(
        json!({"event": "unreachable", "name": name, "message": message}),
        || Some(format!("waiting for the engine: {message}")),
    );
}

fn show(name: &str, leader: Option<palisade::Leader>, printer: Printer) -> Result<(), Failure> {
    let leader = leader.map(Leading::new);
    printer.answer(&Answer { name, leader }, |answer| {
        let name = shown(name);
        match &answer.leader {
            None => format!("nobody leads {name}\n"),
            Some(leader) => {
                let (who, token) = (&leader.who, &leader.token);
                match &leader.value {
                    Some(value) => {
                        format!("{} leads {name}: {who}, token {token}\n", shown(value))
                    }
                    None => format!("{who} leads {name}, token {token}\n"),
                }
            }
        }
    })?;
    Ok(())
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
