//! The look of a waiter for deadlocks that it is in, and what a client knows of its agents.
//!
//! Only an agent that holds something, or runs under what another holds, can be in a circle: no
//! other waiter ever looks. It walks backwards, from who waits behind what it holds to who waits
//! behind what those hold, since every claim says what its agent held when it asked. So it asks
//! for the lines of a circle and their tails, not for all.
//!
//! Invariant: a waiter gives way only if two looks, one begun after the other had ended, show it
//! in the same deadlock as the claim that gives way, and every claim of another client in it was
//! renewed since the first: a crashed one looks alive until its lease ends.

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

/// How long a waiter waits before its first look: most waits are over by then, and a person who
/// wonders why nothing happens has just begun to.
pub const DEADLOCK_AFTER: Duration = Duration::from_secs(2);

/// Between two looks at the most: a circle that closes late is found this late.
const SELDOM: Duration = Duration::from_secs(30);

/// Between two looks at a deadlock that is still to be confirmed, or to be broken by the one who
/// looks. Renewals come every third of a ttl, so sooner would mostly find nothing new.
const AGAIN: Duration = Duration::from_millis(300);

/// How long one look may take. Others of this client wait for it meanwhile.
const LOOK_LIMIT: Duration = Duration::from_secs(10);

/// How many lines one look asks for. A circle with more has too many to be told.
const LINES: usize = 256;

/// From how many lines a look begins that serves several: the rest is for what those lead to.
const SHARED: usize = LINES / 4;

/// How much of what an agent holds its claims say: enough for a walk, small in every record.
const HOLDS: usize = 16;
const HOLDS_BYTES: usize = 2048;

/// How much two clocks can differ while a waiter looks, and the calls between.
const DRIFT: Duration = Duration::from_millis(50);

/// The agents of one client and its clones.
pub(crate) struct Agents {
    /// Random, so that agents of two clients are never one.
    client: String,
    known: Mutex<HashMap<String, Weak<AgentState>>>,
    looks: Arc<Looks>,
}

/// The looks for a client and those that share its connection.
#[derive(Default)]
struct Looks {
    /// Where the waiters begin that are due for a look.
    due: Mutex<HashMap<ClaimId, BTreeSet<String>>>,
    /// The last look. Held while one is under way: it serves all who are due.
    last: tokio::sync::Mutex<Option<Look>>,
}

/// One agent in this process.
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

    /// Other agents, also where they have the same names, that look together with these.
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

    /// The agent of this name: the same one while it is in use.
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
    /// A look that begins from now on, and from `own` and where others begin who are due. Not
    /// from all of them if they are many: a look asks for so many lines and no more, and each is
    /// to have its turn.
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
            let message = "the look for deadlocks took too long";
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

/// The lines of `starts`, of what those hold who wait there, and so on.
async fn walk(engine: &SharedEngine, starts: BTreeSet<String>) -> Result<Vec<LineReport>> {
    let mut queue = VecDeque::from_iter(starts.iter().cloned());
    let mut seen = starts;
    let mut lines = Vec::new();
    while let Some(name) = queue.pop_front().filter(|_| lines.len() < LINES) {
        // A record of another may say anything.
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
    /// What a claim of this agent says of it.
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

    /// Says that a claim of this agent is held from now on.
    pub(super) fn granted(&self, claim: ClaimId, validity: &Arc<Validity>) {
        self.holds.lock().insert(claim, Arc::clone(validity));
    }

    /// Says that a claim of this agent is over.
    pub(super) fn left(&self, claim: ClaimId) {
        self.holds.lock().remove(&claim);
    }

    /// What it holds. A hold that is lost is not, though its place may be there for a while: it
    /// ends by itself.
    fn held(&self) -> BTreeSet<String> {
        let holds = self.holds.lock();
        let held = holds.values().filter(|validity| validity.is_valid());
        let names = held.map(|validity| validity.name().as_str().to_owned());
        names.collect()
    }

    /// Where a look begins; `None` when nobody can wait for this agent.
    fn starts(&self) -> Option<BTreeSet<String>> {
        let mut starts = self.held();
        starts.extend(self.within.iter().map(|ancestor| ancestor.name.clone()));
        Some(starts).filter(|starts| !starts.is_empty())
    }

    /// Looks while `claim`, which is for `name`, waits: after `first`, then less and less often.
    /// Returns when the claim is to give way.
    pub(super) async fn look_out(
        &self,
        keeper: &Keeper,
        claim: ClaimId,
        name: &Name,
        first: Duration,
    ) -> Error {
        let step = keeper.engine().capability().ttl.step;
        let (mut every, mut pause) = (first.max(AGAIN), first);
        let mut suspect: Option<Suspect> = None;
        loop {
            // Spread out, so that those who began together don't look together.
            let jittered = pause.mul_f64(rand::random_range(0.9..1.1));
            sync::sleep_until(BootTime::now() + jittered).await;
            pause = every;
            every = every.mul_f64(1.5).min(SELDOM);
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
                pause = AGAIN;
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
                pause = AGAIN;
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

    /// Whether all claims of other clients were renewed since it was seen first. A lease that was
    /// not ends when it was to end then, by the engine's `step` and the calls between.
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
                // Past its lease a claim may be there until the engine has noticed.
                (Some(then), Some(now)) => {
                    !now.is_zero() && look.began + now > self.seen + then + step + DRIFT
                }
                // It would have ended if nobody had renewed it.
                _ => {
                    let ttl = Duration::from_millis(agent.ttl);
                    look.began.saturating_since(self.seen) > 2 * ttl + step + DRIFT
                }
            }
        })
    }
}

/// A waiter that is due for a look, until this is dropped.
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
