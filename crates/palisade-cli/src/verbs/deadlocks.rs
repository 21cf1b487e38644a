//! `palisade deadlocks`: draws the agents that wait for each other in a cycle.
//!
//! A deadlock is shown only if two surveys agree on it, so all of it was true at one moment
//! between them. A claim of a process that has crashed is shown until its lease ends.

use std::io::{self, IsTerminal};

use palisade::report::{Deadlock, Scope, StuckAgent, StuckClaim};
use palisade::{Error, ErrorKind};
use serde::Serialize;

use crate::args::Global;
use crate::connect::Target;
use crate::exit::{Outcome, Verdict};
use crate::json;
use crate::live::{Outages, feed, reader_gone};
use crate::print;
use crate::view::{ClaimView, shown};

/// Show deadlocks: agents that wait for each other
///
/// Each `palisade run` is an agent, and so is each client that names one with the library's
/// `agent`. Agents that wait for each other in a cycle never continue unless one gives way.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  palisade deadlocks\n  palisade deadlocks --json\n  \
    palisade deadlocks --watch\n\n\
    Exit codes: 0 none, 1 some, 69 engine unreachable, 77 the engine does not show who waits."
)]
pub(crate) struct Deadlocks {
    /// Keep running and show every change, until a signal comes or the reader closes the pipe
    #[arg(long)]
    watch: bool,
}

impl Deadlocks {
    pub(crate) async fn run(self, global: &Global) -> Verdict {
        let target = Target::find(global)?;
        // An invalid URL is reported by the connection attempt.
        if let Ok(info) = target.info()
            && !info.capability.waiters_visible
        {
            let why = "this engine does not show who waits, so deadlocks can't be found";
            let error = Error::new(ErrorKind::Unsupported, "deadlocks", why);
            return Err(error.with("engine", target.shown()?).into());
        }
        if self.watch {
            return watch(target, global).await;
        }
        let found = match target.connect_existing().await? {
            Some(client) => client.deadlocks().await?,
            None => Vec::new(),
        };
        let views: Vec<_> = found.iter().map(DeadlockView::new).collect();
        let text = |_: &Vec<DeadlockView>| match found.is_empty() {
            // Only for a terminal: a program that reads lines expects none.
            true if io::stdout().is_terminal() => NONE.to_owned(),
            true => String::new(),
            false => pictures(&found),
        };
        global.printer().reply(&views, text, found.is_empty())
    }
}

const NONE: &str = "no deadlocks\n";

/// Shows all of them again after each change.
async fn watch(target: Target, global: &Global) -> Verdict {
    let mut seen = feed(target, Scope::Prefix(String::new())).await?;
    let mut gone = std::pin::pin!(reader_gone());
    let mut outages = Outages::new(global.printer(), None);
    let mut last: Option<Vec<Deadlock>> = None;
    loop {
        let seen = tokio::select! {
            () = &mut gone => return Ok(Outcome::Done),
            seen = seen.recv() => seen,
        };
        let Some(now) = outages.see(seen)? else {
            continue;
        };
        let now = now.deadlocks;
        let same = |last: &Vec<Deadlock>| {
            last.len() == now.len() && last.iter().zip(&now).all(|(last, now)| last.is_same(now))
        };
        if last.as_ref().is_some_and(same) {
            continue;
        }
        let text = match (global.json, now.is_empty()) {
            (true, _) => {
                let views: Vec<_> = now.iter().map(DeadlockView::new).collect();
                format!("{}\n", json::line(&views)?)
            }
            (false, true) => NONE.to_owned(),
            (false, false) => pictures(&now),
        };
        let blank = if last.is_some() && !global.json {
            "\n"
        } else {
            ""
        };
        print::text(&format!("{blank}{text}"))?;
        last = Some(now);
    }
}

/// A deadlock, for programs.
#[derive(Debug, Serialize)]
struct DeadlockView {
    /// Whether it goes through a parent that may not wait for its child.
    likely: bool,
    /// The claim that gives way.
    gives_way: Option<String>,
    /// How many of the agents, from the first on, form the cycle.
    circle: usize,
    agents: Vec<AgentView>,
}

#[derive(Debug, Serialize)]
struct AgentView {
    agent: String,
    owner: String,
    host: String,
    pid: u32,
    label: Option<String>,
    holds: Vec<StuckView>,
    waits: Vec<StuckView>,
    behind: Vec<usize>,
    children: Vec<usize>,
}

#[derive(Debug, Serialize)]
struct StuckView {
    name: String,
    id: String,
    mode: String,
    since: Option<String>,
}

impl DeadlockView {
    fn new(found: &Deadlock) -> Self {
        Self {
            likely: found.likely,
            gives_way: found.gives_way.clone(),
            circle: found.circle,
            agents: found.agents.iter().map(AgentView::new).collect(),
        }
    }
}

impl AgentView {
    fn new(agent: &StuckAgent) -> Self {
        let owner = &agent.owner;
        let views = |claims: &[StuckClaim]| claims.iter().map(StuckView::new).collect();
        Self {
            agent: agent.name().to_owned(),
            owner: owner.owner.clone(),
            host: owner.host.clone(),
            pid: owner.pid,
            label: owner.label.clone(),
            holds: views(&agent.holds),
            waits: views(&agent.waits),
            behind: agent.behind.clone(),
            children: agent.children.clone(),
        }
    }
}

impl StuckView {
    fn new(stuck: &StuckClaim) -> Self {
        Self {
            name: stuck.name.clone(),
            id: stuck.claim.id.clone(),
            mode: stuck.claim.mode().to_string(),
            since: ClaimView::of_owner(stuck.claim.owner.as_ref()).since,
        }
    }
}

fn pictures(found: &[Deadlock]) -> String {
    let pictures: Vec<_> = found.iter().map(picture).collect();
    pictures.join("\n")
}

/// The cycle with an arrow back to its first agent, then the other agents of the deadlock.
fn picture(found: &Deadlock) -> String {
    let mut rows = vec![heading(found)];
    for (at, agent) in found.agents[..found.circle].iter().enumerate() {
        let lead = if at == 0 { "╭─▶ " } else { "│   " };
        rows.push(format!("{lead}{}", who(agent)));
        rows.extend(claims(found, agent).map(|claim| format!("│     {claim}")));
        if at + 1 < found.circle {
            rows.push("│   ▼".to_owned());
        }
    }
    rows.push("╰───╯".to_owned());
    for agent in &found.agents[found.circle..] {
        rows.push(format!("also {}", who(agent)));
        rows.extend(claims(found, agent).map(|claim| format!("      {claim}")));
    }
    rows.push(String::new());
    rows.join("\n")
}

fn heading(found: &Deadlock) -> String {
    let many = match found.agents.len() {
        1 => "one agent waits for itself".to_owned(),
        many => format!("{many} agents wait for each other"),
    };
    let then = match (&found.gives_way, found.likely) {
        (Some(_), _) => "one of them gives way",
        (None, true) => "with --nested one of them would give way",
        (None, false) => "none of them gives way: evict one",
    };
    if found.likely {
        format!("likely deadlock, through nested runs: {many}; {then}")
    } else {
        format!("deadlock: {many}; {then}")
    }
}

fn who(agent: &StuckAgent) -> String {
    let owner = &agent.owner;
    let label = owner.label.as_ref();
    let label = label.map_or_else(String::new, |label| format!(" ({})", shown(label)));
    let (name, host) = (shown(agent.name()), shown(&owner.host));
    format!("{name}{label} on {host} pid {}", owner.pid)
}

fn claims<'a>(found: &'a Deadlock, agent: &'a StuckAgent) -> impl Iterator<Item = String> + 'a {
    let since = |stuck: &StuckClaim| {
        let view = ClaimView::of_owner(stuck.claim.owner.as_ref());
        let age = view.age().map(crate::view::brief);
        let times = view.since.zip(age);
        times.map_or_else(String::new, |(at, age)| format!(" since {at} ({age})"))
    };
    let row = move |verb: &str, stuck: &StuckClaim| {
        let gives_way = if found.gives_way.as_ref() == Some(&stuck.claim.id) {
            ", gives way"
        } else {
            ""
        };
        let mode = match stuck.claim.mode() {
            palisade::engine::Mode::Exclusive => String::new(),
            mode => format!(" ({mode})"),
        };
        format!(
            "{verb} {}{mode}{}{gives_way}",
            shown(&stuck.name),
            since(stuck)
        )
    };
    let holds = agent.holds.iter().map(move |stuck| row("holds", stuck));
    let waits = agent.waits.iter().map(move |stuck| row("waits for", stuck));
    let runs = agent.waits.is_empty() && !agent.children.is_empty();
    holds
        .chain(waits)
        .chain(runs.then(|| "runs the next".to_owned()))
}
