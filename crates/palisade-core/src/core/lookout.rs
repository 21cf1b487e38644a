//! How a waiter checks for a deadlock that it is in, and what a client knows about its agents.
//!
//! Only an agent that holds something, or runs inside another's hold, can be in a circle. No other
//! waiter ever looks. A look goes backwards: from the waiters behind the agent's own holds to the
//! waiters behind what those hold, and so on, since every claim records what its agent held when it
//! entered. So it reads only the lines of a circle and those that lead to it.
//!
//! Invariant: a claim gives way only if two looks, the second begun after the first had ended, show
//! it as the claim that gives way in the same deadlock, and if every claim of another client in it
//! was renewed since the first look. The claims of a crashed client look alive until their leases
//! end.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use super::claim::ClaimId;
use super::clock::BootTime;
use super::deadlock::{Deadlock, find};
use super::dyn_engine::SharedEngine;
use super::error::{Error, ErrorKind, Result};
use super::events::Event;
use super::keeper::Keeper;
use super::name::Name;
use super::owner::{Agent, Ancestor};
use super::report::{LineReport, Scope};
use super::sync::{self, timeout};
use super::validity::Validity;

/// How long a waiter waits before its first look. Most waits are over by then, and a person has
/// only just begun to wonder why nothing happens.
pub const DEADLOCK_AFTER: Duration = Duration::from_secs(2);

/// The longest pause between two looks: a circle that closes late is found this late.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// The pause between two looks at a deadlock that is still to be confirmed, or that this waiter is
/// to break. Renewals come every third of a ttl, so a shorter pause would rarely find anything new.
const SUSPECT_PAUSE: Duration = Duration::from_millis(300);

/// How long one look may take. Other waiters of this client wait for it meanwhile.
const LOOK_LIMIT: Duration = Duration::from_secs(10);

/// How many lines one look reads. A circle of more lines is too large to report.
const LINES: usize = 256;

/// How many lines a look that serves several waiters may start from. The rest of `LINES` is left
/// for the lines that these lead to.
const SHARED: usize = LINES / 4;

/// How many of its agent's holds a claim records: enough for a walk, small in every record.
const HOLDS: usize = 16;
const HOLDS_BYTES: usize = 2048;

/// An allowance for clock drift between two looks and for the duration of their calls.
const DRIFT: Duration = Duration::from_millis(50);

/// The agents of one client and its clones.
pub(crate) struct Agents {
    /// Random, so that agents of two clients are never mistaken for one.
    client: String,
    known: Mutex<HashMap<String, Weak<AgentState>>>,
    looks: Arc<Looks>,
}

/// The looks of a client and of those that share its connection.
#[derive(Default)]
struct Looks {
    /// Where each waiter that is due for a look would start.
    due: Mutex<HashMap<ClaimId, BTreeSet<String>>>,
    /// The last look. Locked while a look is in progress, which serves all waiters that are due.
    last: tokio::sync::Mutex<Option<Look>>,
}

/// One agent of this process.
pub(crate) struct AgentState {
    agents: Arc<Agents>,
    name: String,
    within: Vec<Ancestor>,
    yields_nested: bool,
    holds: Mutex<HashMap<ClaimId, Arc<Validity>>>,
}

#[derive(Clone)]
struct Look {
    began: BootTime,
    ended: BootTime,
    starts: Arc<BTreeSet<String>>,
    lines: Arc<Vec<LineReport>>,
}

impl Agents {
    pub(crate) fn new() -> Arc<Self> {
        Self::with(Arc::default())
    }

    /// Creates a separate set of agents (names may repeat) that shares its looks with this one.
    pub(crate) fn others(&self) -> Arc<Self> {
        Self::with(Arc::clone(&self.looks))
    }

    fn with(looks: Arc<Looks>) -> Arc<Self> {
        Arc::new(Self {
            client: format!("{:016x}", rand::random::<u64>()),
            known: Mutex::default(),
            looks,
        })
    }

    /// The agent of this name: the same one as long as it is in use.
    pub(crate) fn named(
        self: &Arc<Self>,
        name: String,
        within: Vec<Ancestor>,
        yields_nested: bool,
    ) -> Arc<AgentState> {
        let mut known = self.known.lock();
        if let Some(state) = known.get(&name).and_then(Weak::upgrade) {
            return state;
        }
        known.retain(|_, state| state.strong_count() > 0);
        let state = Arc::new(AgentState {
            agents: Arc::clone(self),
            name: name.clone(),
            within,
            yields_nested,
            holds: Mutex::default(),
        });
        known.insert(name, Arc::downgrade(&state));
        state
    }
}

impl Looks {
    /// Performs a look that begins after this call, or waits for one. It starts from `own` and from
    /// the lines of other waiters that are due. If these are many, only some are included, because
    /// a look reads a limited number of lines and each waiter must get its turn.
    async fn look(&self, engine: &SharedEngine, own: &BTreeSet<String>) -> Result<Look> {
        let wanted = BootTime::now();
        let mut last = self.last.lock().await;
        let serves = |look: &&Look| look.began >= wanted && own.is_subset(&look.starts);
        if let Some(look) = last.as_ref().filter(serves) {
            return Ok(look.clone());
        }
        let mut starts = own.clone();
        for others in self.due.lock().values() {
            if starts.len() + others.len() <= SHARED {
                starts.extend(others.iter().cloned());
            }
        }
        let began = BootTime::now();
        let lines = timeout(LOOK_LIMIT, walk(engine, starts.clone())).await;
        let lines = lines.unwrap_or_else(|_| {
            let message = "the deadlock check took too long";
            Err(Error::new(ErrorKind::Unreachable, "survey", message))
        })?;
        let look = Look {
            began,
            ended: BootTime::now(),
            starts: Arc::new(starts),
            lines: Arc::new(lines),
        };
        *last = Some(look.clone());
        Ok(look)
    }
}

/// Reads the lines in `starts`, the lines that their waiters hold, and so on.
async fn walk(engine: &SharedEngine, starts: BTreeSet<String>) -> Result<Vec<LineReport>> {
    let mut queue = VecDeque::from_iter(starts.iter().cloned());
    let mut seen = starts;
    let mut lines = Vec::new();
    while let Some(name) = queue.pop_front().filter(|_| lines.len() < LINES) {
        // A record of another client may contain anything.
        let Ok(name) = Name::new(&name) else { continue };
        for line in engine.survey(Scope::Line(name)).await? {
            for waiter in &line.waiters {
                let owner = waiter.owner.as_ref();
                let Some(agent) = owner.and_then(|owner| owner.agent.as_ref()) else {
                    continue;
                };
                let within = agent.within.iter().map(|ancestor| &ancestor.name);
                for next in agent.holds.iter().chain(within) {
                    if seen.insert(next.clone()) {
                        queue.push_back(next.clone());
                    }
                }
            }
            lines.push(line);
        }
    }
    Ok(lines)
}

impl AgentState {
    /// The agent record for a claim.
    pub(crate) fn record(&self, ttl: Duration, yields: bool) -> Agent {
        let mut room = HOLDS_BYTES;
        let mut holds = self.held();
        holds.retain(|name| {
            let fits = name.len() <= room;
            room -= if fits { name.len() } else { 0 };
            fits
        });
        Agent {
            client: self.agents.client.clone(),
            name: self.name.clone(),
            ttl: ttl.as_millis() as u64,
            yields,
            yields_nested: yields && self.yields_nested,
            holds: holds.into_iter().take(HOLDS).collect(),
            within: self.within.clone(),
            ..Agent::default()
        }
    }

    /// Records that a claim of this agent is held.
    pub(super) fn granted(&self, claim: ClaimId, validity: &Arc<Validity>) {
        self.holds.lock().insert(claim, Arc::clone(validity));
    }

    /// Records that a claim of this agent has ended.
    pub(super) fn left(&self, claim: ClaimId) {
        self.holds.lock().remove(&claim);
    }

    /// The names that it holds. A lost hold does not count: its place may still exist, but will end
    /// by itself.
    fn held(&self) -> BTreeSet<String> {
        let holds = self.holds.lock();
        let held = holds.values().filter(|validity| validity.is_valid());
        let names = held.map(|validity| validity.name().as_str().to_owned());
        names.collect()
    }

    /// Whether it holds anything now.
    pub(super) fn holds_any(&self) -> bool {
        let holds = self.holds.lock();
        holds.values().any(|validity| validity.is_valid())
    }

    /// Where a look starts; `None` if nobody can wait for this agent.
    fn starts(&self) -> Option<BTreeSet<String>> {
        let mut starts = self.held();
        starts.extend(self.within.iter().map(|ancestor| ancestor.name.clone()));
        Some(starts).filter(|starts| !starts.is_empty())
    }

    /// Looks while `claim`, which is for `name`, waits: after `first`, then less and less often.
    /// Returns when the claim must give way.
    pub(super) async fn look_out(
        &self,
        keeper: &Keeper,
        claim: ClaimId,
        name: &Name,
        first: Duration,
    ) -> Error {
        let step = keeper.engine().capability().ttl.step;
        let (mut every, mut pause) = (first.max(SUSPECT_PAUSE), first);
        let mut suspect: Option<Suspect> = None;
        loop {
            // Jitter, so that waiters that began together don't look together.
            let jittered = pause.mul_f64(rand::random_range(0.9..1.1));
            sync::sleep_until(BootTime::now() + jittered).await;
            pause = every;
            every = every.mul_f64(1.5).min(LONGEST_PAUSE);
            let Some(starts) = self.starts() else {
                continue;
            };
            let looks = &self.agents.looks;
            let due = Due::new(looks, claim, starts.clone());
            let Ok(look) = looks.look(keeper.engine(), &starts).await else {
                continue;
            };
            drop(due);
            let id = claim.to_string();
            let mut found = find(&look.lines).into_iter();
            let found = found.find(|found| found.claims().any(|stuck| stuck.claim.id == id));
            let Some(found) = found else {
                suspect = None;
                continue;
            };
            let again = suspect
                .take()
                .filter(|suspect| suspect.found.is_same(&found));
            let Some(mut again) = again else {
                suspect = Some(Suspect::new(found, look.ended));
                pause = SUSPECT_PAUSE;
                continue;
            };
            let mine = found.gives_way.as_deref() == Some(&id);
            let tell = |gives_way| {
                let deadlock = &found;
                keeper.observers().tell(|engine| Event::Deadlocked {
                    engine,
                    name,
                    deadlock,
                    gives_way,
                });
            };
            if !std::mem::replace(&mut again.told, true) {
                tell(false);
            }
            if mine && again.all_live(&found, &look, &self.agents.client, step) {
                tell(true);
                return gave_way(&found).with("name", name);
            }
            if mine {
                pause = SUSPECT_PAUSE;
            }
            suspect = Some(again);
        }
    }
}

fn gave_way(found: &Deadlock) -> Error {
    let message = format!(
        "this claim gave way, because agents wait for each other: {found}. Release what you hold \
         before you ask again, or take these locks in the same order everywhere"
    );
    Error::new(ErrorKind::Deadlock, "wait", message)
}

/// A deadlock that one look has shown.
struct Suspect {
    found: Deadlock,
    seen: BootTime,
    told: bool,
}

impl Suspect {
    fn new(found: Deadlock, seen: BootTime) -> Self {
        let told = false;
        Self { found, seen, told }
    }

    /// Whether all claims of other clients were renewed since the first look. A lease that was not
    /// renewed ends at the time that the first look saw, within the engine's `step` and `DRIFT`.
    fn all_live(&self, now: &Deadlock, look: &Look, client: &str, step: Duration) -> bool {
        let first: HashMap<&str, Option<Duration>> = self
            .found
            .claims()
            .map(|stuck| (stuck.claim.id.as_str(), stuck.claim.expires_in))
            .collect();
        now.claims().all(|stuck| {
            let owner = stuck.claim.owner.as_ref();
            let Some(agent) = owner.and_then(|owner| owner.agent.as_ref()) else {
                return false;
            };
            if agent.client == client {
                return true;
            }
            let then = first.get(stuck.claim.id.as_str()).copied().flatten();
            match (then, stuck.claim.expires_in) {
                // A claim may outlive its lease until the engine notices.
                (Some(then), Some(now)) => {
                    !now.is_zero() && look.began + now > self.seen + then + step + DRIFT
                }
                // The claim would have ended if nobody had renewed it.
                _ => {
                    let ttl = Duration::from_millis(agent.ttl);
                    look.began.saturating_since(self.seen) > 2 * ttl + step + DRIFT
                }
            }
        })
    }
}

/// Marks a waiter as due for a look until it is dropped.
struct Due<'a> {
    looks: &'a Looks,
    claim: ClaimId,
}

impl<'a> Due<'a> {
    fn new(looks: &'a Looks, claim: ClaimId, starts: BTreeSet<String>) -> Self {
        looks.due.lock().insert(claim, starts);
        Self { looks, claim }
    }
}

impl Drop for Due<'_> {
    fn drop(&mut self) {
        self.looks.due.lock().remove(&self.claim);
    }
}

#[cfg(test)]
#[path = "lookout_tests.rs"]
mod tests;
