//! `Running`: an engine that was started for a test. Dropping it stops and removes everything.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use super::folder::Folder;
use super::node::{Node, START};
use super::proc::State;
use super::table::Recipe;
use super::until;
use crate::engine::CutOff;

/// How long a majority may take to elect a leader: elections here take 0.2 to 3 s.
const ELECTION: Duration = Duration::from_secs(20);

/// How often a start is repeated if another process has taken one of its ports.
const STARTS: usize = 4;

type Ready = Box<dyn Fn(&[Node]) -> Result<(), String> + Send + Sync>;
type Leader = Box<dyn Fn(&[Node]) -> Option<usize> + Send + Sync>;

/// The result of a recipe: nodes that are started or about to be, and how to judge them.
pub(super) struct Parts {
    pub(super) url: String,
    pub(super) nodes: Vec<Node>,
    /// Whether the engine as a whole works; nodes that are not running don't count.
    pub(super) ready: Ready,
    /// Which node leads, for engines with a leader.
    pub(super) leader: Option<Leader>,
}

/// A running engine.
pub struct Running {
    name: &'static str,
    // Declared before the folder, so that servers end before their data is removed.
    parts: Parts,
    folder: Folder,
}

impl Running {
    /// Starts an engine by its recipe, and waits until it is ready.
    pub(super) fn start(recipe: &Recipe, settings: &[&str]) -> Result<Self, String> {
        let mut tries = 1;
        loop {
            let folder = Folder::new(recipe.name)?;
            let started = (recipe.start)(folder.path(), settings).and_then(|parts| {
                wait_ready(&parts)?;
                Ok(parts)
            });
            match started {
                Ok(parts) => {
                    return Ok(Self {
                        name: recipe.name,
                        parts,
                        folder,
                    });
                }
                Err(why) => {
                    let tails = folder.tails();
                    let clash = tails.to_lowercase().contains("already in use");
                    if !clash || tries == STARTS {
                        return Err(format!("{why}{tails}"));
                    }
                    tries += 1;
                }
            }
        }
    }

    /// Its name in the table.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Its URL for palisade.
    pub fn url(&self) -> &str {
        &self.parts.url
    }

    /// Its servers. For `redis-sentinel` these are the first master, the replica and three
    /// sentinels; for `pgbouncer` the pooler and its PostgreSQL.
    pub fn nodes(&self) -> &[Node] {
        &self.parts.nodes
    }

    /// The directory of its data and logs.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Waits until it works again, with the nodes that are running.
    ///
    /// # Errors
    /// What is still wrong after half a minute.
    pub fn ready(&self) -> Result<(), String> {
        wait_ready(&self.parts)
    }

    /// The index of the node that leads, or is the master for Sentinel, as the running nodes see it
    /// now. `None` if there is none, and for engines without a leader.
    pub fn leader(&self) -> Option<usize> {
        self.parts.leader.as_ref()?(&self.parts.nodes)
    }

    /// Waits until a node leads for which `test` returns `true`.
    ///
    /// # Errors
    /// If none does in time.
    pub fn leader_where(&self, test: impl Fn(usize) -> bool) -> Result<usize, String> {
        until(ELECTION, || match self.leader() {
            Some(leader) if test(leader) => Ok(leader),
            seen => Err(format!("{} has leader {seen:?}", self.name)),
        })
    }

    /// Kills the node that leads, and returns its index.
    ///
    /// # Errors
    /// If there is no leader, or it does not die.
    pub fn kill_leader(&self) -> Result<usize, String> {
        let leader = self.leader_where(|_| true)?;
        self.parts.nodes[leader].kill()?;
        Ok(leader)
    }

    /// Kills all nodes, removes their data, and starts them again empty.
    ///
    /// # Errors
    /// If one does not come back.
    pub fn wipe(&self) -> Result<(), String> {
        for node in &self.parts.nodes {
            node.kill()?;
        }
        for node in &self.parts.nodes {
            node.forget()?;
            node.spawn()?;
        }
        self.ready()
    }
}

/// Stops all nodes: connections stay open, and nothing is answered.
impl CutOff for Running {
    fn begin(&self) {
        for (_, node) in alive(&self.parts.nodes) {
            // A node that ends meanwhile does not answer either.
            let _ = node.stop();
        }
    }

    fn end(&self) {
        for node in &self.parts.nodes {
            let _ = node.cont();
        }
    }
}

impl fmt::Debug for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Running")
            .field("url", &self.parts.url)
            .field("nodes", &self.parts.nodes)
            .finish_non_exhaustive()
    }
}

fn wait_ready(parts: &Parts) -> Result<(), String> {
    let was_started: Vec<&Node> = parts.nodes.iter().filter(|n| n.pid().is_some()).collect();
    let mut ended = None;
    let ready = until(START, || {
        ended = was_started.iter().find(|node| node.state() == State::Dead);
        match ended {
            // There is nothing to wait for, and whatever answers on its port is not ours.
            Some(_) => Ok(()),
            None => (parts.ready)(&parts.nodes),
        }
    });
    match ended.or_else(|| was_started.iter().find(|node| node.state() == State::Dead)) {
        Some(node) => Err(format!("{} has ended", node.name())),
        None => ready,
    }
}

/// The nodes that are running.
pub(super) fn alive(nodes: &[Node]) -> impl Iterator<Item = (usize, &Node)> {
    let runs = |(_, node): &(usize, &Node)| node.state() == State::Running;
    nodes.iter().enumerate().filter(runs)
}

/// The addresses of nodes, in the form of URLs.
pub(super) fn addresses(nodes: &[Node]) -> String {
    let all: Vec<String> = nodes.iter().map(Node::address).collect();
    all.join(",")
}
