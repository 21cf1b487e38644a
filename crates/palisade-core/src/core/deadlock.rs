//! `find`: which agents wait for each other for ever, as a pure function of surveys.
//!
//! First comes a reduction: agents that can finish are removed until no more can. Among the rest,
//! only strongly connected components without outgoing edges are deadlocks; an agent that waits
//! behind one is a bystander. A missing line only lets more agents finish, so an incomplete set of
//! lines never shows a false deadlock.
//!
//! Surveys of several lines are not one snapshot. [`Sightings`] confirms what two consecutive looks
//! show alike. Claim ids are never reused, so all of it was true at one time between the two.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::fmt;

use super::admission::{capacity, fits};
use super::claim::Ask;
use super::owner::{Agent, Group, Owner};
use super::report::{ClaimReport, LineReport};

/// Limits how many claims ahead of a waiting one are reported, from the front of the line.
const TOLD_AHEAD: usize = 32;

/// Agents that wait for each other.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Deadlock {
    /// Its agents. The first [`Deadlock::circle`] of them form a circle: each waits for the next,
    /// and the last for the first.
    pub agents: Vec<StuckAgent>,
    /// How many agents at the start of the list form the circle.
    pub circle: usize,
    /// Whether it includes an edge from a parent to its child. A parent does not always wait for
    /// its child, so such a deadlock is likely but not certain.
    pub likely: bool,
    /// The id of the claim that gives way, if one does.
    pub gives_way: Option<String>,
}

/// An agent in a deadlock.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct StuckAgent {
    /// The owner record of one of its claims.
    pub owner: Owner,
    /// Its holds that others in the deadlock wait for.
    pub holds: Vec<StuckClaim>,
    /// The claims that it waits with.
    pub waits: Vec<StuckClaim>,
    /// The agents whose claims are ahead of its own, as indexes into the deadlock's agents.
    pub behind: Vec<usize>,
    /// The agents of the deadlock that run inside it, as indexes.
    pub children: Vec<usize>,
}

/// A claim in a deadlock.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct StuckClaim {
    /// The line.
    pub name: String,
    /// The claim.
    pub claim: ClaimReport,
}

impl Deadlock {
    /// All claims in it.
    pub fn claims(&self) -> impl Iterator<Item = &StuckClaim> {
        self.agents
            .iter()
            .flat_map(|agent| agent.holds.iter().chain(&agent.waits))
    }

    /// Whether both consist of the same claims with the same grants.
    pub fn is_same(&self, other: &Self) -> bool {
        self.likely == other.likely && self.signature() == other.signature()
    }

    fn signature(&self) -> HashSet<(&str, &str, Option<u64>, Ask)> {
        let claims = self.claims().map(|StuckClaim { name, claim }| {
            (name.as_str(), claim.id.as_str(), claim.sequence, claim.ask)
        });
        claims.collect()
    }
}

impl StuckAgent {
    /// Its name.
    pub fn name(&self) -> &str {
        let agent = self.owner.agent.as_ref();
        agent.map_or(&self.owner.owner, |agent| &agent.name)
    }
}

/// `worker-1 (db1, pid 7) holds a and waits for b`.
impl fmt::Display for StuckAgent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Owner { host, pid, .. } = &self.owner;
        write!(f, "{} ({host}, pid {pid})", self.name())?;
        let names = |claims: &[StuckClaim]| {
            let names: BTreeSet<&str> = claims.iter().map(|claim| claim.name.as_str()).collect();
            Vec::from_iter(names).join(", ")
        };
        let any = if self.waits.iter().any(|stuck| group(&stuck.claim).is_some()) {
            "any of "
        } else {
            ""
        };
        match (self.holds.is_empty(), self.waits.is_empty()) {
            (false, false) => write!(
                f,
                " holds {} and waits for {any}{}",
                names(&self.holds),
                names(&self.waits)
            ),
            (true, _) => write!(f, " waits for {any}{}", names(&self.waits)),
            (_, true) => write!(f, " holds {} and runs the next", names(&self.holds)),
        }
    }
}

/// The circle in one line.
impl fmt::Display for Deadlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, agent) in self.agents[..self.circle].iter().enumerate() {
            write!(f, "{}{agent}", if at == 0 { "" } else { "; " })?;
        }
        match self.agents.len() - self.circle {
            0 => Ok(()),
            others => write!(f, "; and {others} more"),
        }
    }
}

/// The deadlocks that the last look found, to be confirmed by the next one.
#[derive(Debug, Default)]
pub struct Sightings(Vec<Deadlock>);

impl Sightings {
    /// Returns those in `now` that the previous look found as well.
    pub fn confirm(&mut self, now: Vec<Deadlock>) -> Vec<Deadlock> {
        let before = std::mem::replace(&mut self.0, now);
        let again = |found: &&Deadlock| before.iter().any(|earlier| earlier.is_same(found));
        self.0.iter().filter(again).cloned().collect()
    }
}

/// The deadlocks in `lines`, with disjoint sets of agents.
pub fn find(lines: &[LineReport]) -> Vec<Deadlock> {
    let system = System::read(lines);
    let rest = system.reduce(false);
    let certain = system.components(&rest);
    let mut all: Vec<Deadlock> = Vec::new();
    all.extend(certain.iter().map(|members| system.tell(members, &rest)));
    if system.agents.iter().any(|agent| !agent.children.is_empty()) {
        let certain: HashSet<usize> = certain.into_iter().flatten().collect();
        let rest = system.reduce(true);
        let likely = system.components(&rest).into_iter();
        let likely = likely.filter(|members| !members.iter().any(|agent| certain.contains(agent)));
        all.extend(likely.map(|members| system.tell(&members, &rest)));
    }
    all
}

fn agent(claim: &ClaimReport) -> Option<&Agent> {
    claim.owner.as_ref()?.agent.as_ref()
}

fn group(claim: &ClaimReport) -> Option<&Group> {
    agent(claim)?.group.as_ref()
}

/// Whether the claim will end soon whatever its agent does.
fn ends_by_itself(claim: &ClaimReport, waits: bool) -> bool {
    claim.evicted || !waits && agent(claim).is_some_and(|agent| agent.unrenewed)
}

/// The claims of agents that don't end by themselves, as a graph.
struct System<'a> {
    lines: Vec<Line<'a>>,
    agents: Vec<Party<'a>>,
}

struct Line<'a> {
    name: &'a str,
    capacity: u32,
    /// In order of the line.
    seats: Vec<Seat<'a>>,
}

struct Seat<'a> {
    claim: &'a ClaimReport,
    agent: usize,
    /// The index of the agent's need that this claim meets, if it waits.
    need: Option<usize>,
    waits: bool,
}

struct Party<'a> {
    owner: &'a Owner,
    /// How many things it waits for: single claims, or groups of which one claim is enough.
    needs: usize,
    children: Vec<usize>,
    parents: Vec<usize>,
}

/// The state after the reduction.
struct Rest {
    /// Whether a parent is taken to wait for its child.
    nested: bool,
    finished: Vec<bool>,
    /// For each line, the positions of claims that would not be admitted even if all agents that
    /// can finish had left, and whose need no other claim meets.
    blocked: Vec<HashSet<usize>>,
}

impl<'a> System<'a> {
    fn read(lines: &'a [LineReport]) -> Self {
        let mut system = Self {
            lines: Vec::new(),
            agents: Vec::new(),
        };
        let mut by_identity = HashMap::new();
        let mut by_claim = HashMap::new();
        let mut groups: HashMap<(usize, &str), Vec<(usize, usize)>> = HashMap::new();
        for line in lines {
            let held = line.holders.iter().map(|claim| (claim, false));
            let waiting = line.waiters.iter().map(|claim| (claim, true));
            let asks = line
                .holders
                .iter()
                .chain(&line.waiters)
                .map(|claim| claim.ask);
            let mut seats = Vec::new();
            for (claim, waits) in held.chain(waiting) {
                let (Some(owner), Some(who)) = (&claim.owner, agent(claim)) else {
                    continue;
                };
                if ends_by_itself(claim, waits) {
                    continue;
                }
                // A gateway vouches for the principal only: the rest may be copied from another's
                // record.
                let principal = owner.principal.as_deref();
                let identity = (principal, who.client.as_str(), who.name.as_str());
                let agent = *by_identity.entry(identity).or_insert_with(|| {
                    system.agents.push(Party::new(owner));
                    system.agents.len() - 1
                });
                by_claim.insert((principal, claim.id.as_str()), agent);
                let mut need = None;
                match group(claim).filter(|_| waits) {
                    Some(group) => {
                        let place = (system.lines.len(), seats.len());
                        groups.entry((agent, &group.id)).or_default().push(place);
                    }
                    None if waits => need = Some(system.agents[agent].need()),
                    None => {}
                }
                seats.push(Seat {
                    claim,
                    agent,
                    need,
                    waits,
                });
            }
            system.lines.push(Line {
                name: &line.name,
                capacity: line.capacity.unwrap_or_else(|| capacity(asks)),
                seats,
            });
        }
        // If a group is incomplete, one of its claims was granted or is still to come.
        for ((agent, _), places) in groups {
            let (line, at) = places[0];
            let size = group(system.lines[line].seats[at].claim).map_or(0, |group| group.size);
            if places.len() >= size {
                let need = system.agents[agent].need();
                for (line, at) in places {
                    system.lines[line].seats[at].need = Some(need);
                }
            }
        }
        let mut families = BTreeSet::new();
        for seat in system.lines.iter().flat_map(|line| &line.seats) {
            // The nearest visible ancestor: those in between may be on another engine, or gone.
            let mut above = agent(seat.claim)
                .into_iter()
                .flat_map(|agent| agent.within.iter().rev());
            let principal = seat.claim.owner.as_ref();
            let principal = principal.and_then(|owner| owner.principal.as_deref());
            let parent = above.find_map(|above| by_claim.get(&(principal, above.claim.as_str())));
            if let Some(&parent) = parent {
                families.insert((parent, seat.agent));
            }
        }
        for (parent, child) in families {
            system.agents[parent].children.push(child);
            system.agents[child].parents.push(parent);
        }
        system
    }

    /// Removes agents that can finish until no more can.
    fn reduce(&self, nested: bool) -> Rest {
        let mut finished = vec![false; self.agents.len()];
        let mut unmet: Vec<HashSet<usize>> = self
            .agents
            .iter()
            .map(|agent| (0..agent.needs).collect())
            .collect();
        let mut blocked: Vec<HashSet<usize>> = self
            .lines
            .iter()
            .map(|line| {
                let seats = line.seats.iter().enumerate();
                seats
                    .filter(|(_, seat)| seat.need.is_some())
                    .map(|(at, _)| at)
                    .collect()
            })
            .collect();
        let mut changed = true;
        while std::mem::take(&mut changed) {
            for (line, blocked) in self.lines.iter().zip(&mut blocked) {
                let mut taken = 0;
                for (at, seat) in line.seats.iter().enumerate() {
                    if finished[seat.agent] {
                        continue;
                    }
                    if let Some(need) = seat.need
                        && blocked.contains(&at)
                        && fits(taken, seat.claim.ask, line.capacity)
                    {
                        blocked.remove(&at);
                        unmet[seat.agent].remove(&need);
                        changed = true;
                    }
                    let children = &self.agents[seat.agent].children;
                    let alone = !nested || children.iter().all(|child| finished[*child]);
                    if unmet[seat.agent].is_empty() && alone {
                        finished[seat.agent] = true;
                        changed = true;
                        continue;
                    }
                    taken += u64::from(seat.claim.ask.weight_in(line.capacity));
                }
            }
        }
        // One claim of a group is enough: once it is met, the others don't block their agent.
        for (line, blocked) in self.lines.iter().zip(&mut blocked) {
            let is_unmet =
                |seat: &Seat<'_>| seat.need.is_some_and(|n| unmet[seat.agent].contains(&n));
            blocked.retain(|at| is_unmet(&line.seats[*at]));
        }
        Rest {
            nested,
            finished,
            blocked,
        }
    }

    /// The agents of each deadlock, sorted.
    fn components(&self, rest: &Rest) -> Vec<Vec<usize>> {
        let Rest { finished, .. } = rest;
        if finished.iter().all(|finished| *finished) {
            return Vec::new();
        }
        // After the agents comes one node per place, which stands for its claim and all claims
        // ahead of it. So a line has as many edges as claims, instead of one for each pair.
        let mut edges = vec![Vec::new(); self.agents.len()];
        for (line, blocked) in self.lines.iter().zip(&rest.blocked) {
            let mut ahead = None;
            for (at, seat) in line.seats.iter().enumerate() {
                if finished[seat.agent] {
                    continue;
                }
                if blocked.contains(&at) {
                    edges[seat.agent].extend(ahead);
                }
                edges.push(Vec::from_iter(ahead.into_iter().chain([seat.agent])));
                ahead = Some(edges.len() - 1);
            }
        }
        if rest.nested {
            for (parent, party) in self.agents.iter().enumerate() {
                let children = party.children.iter().filter(|child| !finished[**child]);
                edges[parent].extend(children);
            }
        }
        let mut found = Vec::new();
        for component in strongly_connected(&edges) {
            let inside: HashSet<usize> = component.iter().copied().collect();
            let mut out = component.iter().flat_map(|node| &edges[*node]).peekable();
            let is_closed = out.peek().is_some() && out.all(|to| inside.contains(to));
            if is_closed {
                let mut agents = component;
                agents.retain(|node| *node < self.agents.len());
                agents.sort_unstable();
                found.push(agents);
            }
        }
        found.retain(|agents| !agents.is_empty());
        found
    }

    /// Builds the report of a deadlock of these agents.
    fn tell(&self, members: &[usize], rest: &Rest) -> Deadlock {
        let likely = rest.nested;
        let index: HashMap<usize, usize> = members.iter().copied().zip(0..).collect();
        let mut agents: Vec<StuckAgent> = Vec::new();
        for member in members {
            let party = &self.agents[*member];
            let children = party.children.iter().filter(|_| likely);
            agents.push(StuckAgent {
                owner: party.owner.clone(),
                holds: Vec::new(),
                waits: Vec::new(),
                behind: Vec::new(),
                children: children
                    .filter_map(|child| index.get(child).copied())
                    .collect(),
            });
        }
        let linked: HashSet<&str> = self
            .seats_of(&index)
            .filter_map(|seat| agent(seat.claim))
            .flat_map(|agent| agent.within.iter().map(|above| above.claim.as_str()))
            .filter(|_| likely)
            .collect();
        let mut blocking = HashSet::new();
        for (line, blocked) in self.lines.iter().zip(&rest.blocked) {
            let seats = line.seats.iter().enumerate();
            let seats: Vec<_> = seats
                .filter_map(|(at, seat)| Some((at, seat, *index.get(&seat.agent)?)))
                .collect();
            let waits = |at: &usize, seat: &Seat<'_>| seat.waits && blocked.contains(at);
            for (place, (at, seat, me)) in seats.iter().enumerate() {
                let stuck = || StuckClaim {
                    name: line.name.to_owned(),
                    claim: seat.claim.clone(),
                };
                if waits(at, seat) {
                    agents[*me].waits.push(stuck());
                    let ahead = seats[..place].iter().take(TOLD_AHEAD);
                    agents[*me].behind.extend(ahead.map(|(_, _, them)| *them));
                } else if !seat.waits {
                    let mut after = seats[place..]
                        .iter()
                        .filter(|(at, seat, _)| waits(at, seat));
                    let others = after
                        .clone()
                        .any(|(_, _, them)| them != me || members.len() == 1);
                    if others {
                        blocking.insert(*me);
                    }
                    if after.next().is_some() || linked.contains(seat.claim.id.as_str()) {
                        agents[*me].holds.push(stuck());
                    }
                }
            }
        }
        for agent in &mut agents {
            agent.behind.sort_unstable();
            agent.behind.dedup();
        }
        let yielding = agents.iter().enumerate().filter(|(me, _)| {
            let above = self.above(members, *me, likely);
            above.iter().any(|agent| blocking.contains(agent))
        });
        let claims = yielding.flat_map(|(_, stuck)| &stuck.waits);
        let claims = claims.filter(|stuck| {
            agent(&stuck.claim).is_some_and(|agent| {
                if likely {
                    agent.yields_nested
                } else {
                    agent.yields
                }
            })
        });
        let gives_way = claims.map(|stuck| &stuck.claim.id).max().cloned();
        let order = circle_first(&agents);
        Deadlock {
            circle: order.circle,
            agents: order.of(agents),
            likely,
            gives_way,
        }
    }

    fn seats_of(&self, index: &HashMap<usize, usize>) -> impl Iterator<Item = &Seat<'a>> {
        let seats = self.lines.iter().flat_map(|line| &line.seats);
        seats.filter(|seat| index.contains_key(&seat.agent))
    }

    /// A member and, if `likely`, the members that it runs inside.
    fn above(&self, members: &[usize], me: usize, likely: bool) -> Vec<usize> {
        let mut above = vec![me];
        let mut next = 0;
        while let Some(&member) = above.get(next).filter(|_| likely) {
            next += 1;
            for parent in &self.agents[members[member]].parents {
                if let Ok(parent) = members.binary_search(parent)
                    && !above.contains(&parent)
                {
                    above.push(parent);
                }
            }
        }
        above
    }
}

impl<'a> Party<'a> {
    fn new(owner: &'a Owner) -> Self {
        Self {
            owner,
            needs: 0,
            children: Vec::new(),
            parents: Vec::new(),
        }
    }

    /// Adds one thing that it waits for.
    fn need(&mut self) -> usize {
        self.needs += 1;
        self.needs - 1
    }
}

/// The order in which agents are reported.
struct Order {
    order: Vec<usize>,
    circle: usize,
}

impl Order {
    fn of(&self, agents: Vec<StuckAgent>) -> Vec<StuckAgent> {
        let mut place = vec![0; agents.len()];
        for (new, old) in self.order.iter().enumerate() {
            place[*old] = new;
        }
        let mut told: Vec<_> = agents.into_iter().enumerate().collect();
        told.sort_by_key(|(old, _)| place[*old]);
        let renumber = |edges: &mut Vec<usize>| {
            edges.iter_mut().for_each(|edge| *edge = place[*edge]);
            edges.sort_unstable();
        };
        let told = told.into_iter().map(|(_, mut agent)| {
            renumber(&mut agent.behind);
            renumber(&mut agent.children);
            agent
        });
        told.collect()
    }
}

/// Orders the agents: a shortest circle through the first agent that is in one, then the others.
/// Claims beyond `TOLD_AHEAD` are not reported, so some agents may be in no circle.
fn circle_first(agents: &[StuckAgent]) -> Order {
    let circle = (0..agents.len()).find_map(|from| circle_through(agents, from));
    let mut order = circle.unwrap_or_default();
    let circle = order.len();
    let others: Vec<_> = (0..agents.len()).filter(|at| !order.contains(at)).collect();
    order.extend(others);
    Order { order, circle }
}

/// A shortest circle through an agent, beginning with it.
fn circle_through(agents: &[StuckAgent], from: usize) -> Option<Vec<usize>> {
    let mut came_from: HashMap<usize, usize> = HashMap::new();
    let mut queue = VecDeque::from([from]);
    while let Some(at) = queue.pop_front() {
        for &to in agents[at].behind.iter().chain(&agents[at].children) {
            if to == from {
                let mut circle = vec![at];
                while let Some(before) = circle.last().and_then(|at| came_from.get(at)) {
                    circle.push(*before);
                }
                circle.reverse();
                return Some(circle);
            }
            came_from.entry(to).or_insert_with(|| {
                queue.push_back(to);
                at
            });
        }
    }
    None
}

/// The strongly connected components of a graph, by Tarjan's algorithm without recursion.
fn strongly_connected(edges: &[Vec<usize>]) -> Vec<Vec<usize>> {
    const NEW: usize = usize::MAX;
    let mut number = vec![NEW; edges.len()];
    let mut low = vec![NEW; edges.len()];
    let mut on_stack = vec![false; edges.len()];
    let (mut stack, mut found, mut count) = (Vec::new(), Vec::new(), 0);
    for root in 0..edges.len() {
        let mut path = match number[root] {
            NEW => vec![(root, 0)],
            _ => continue,
        };
        while let Some((node, edge)) = path.last_mut() {
            let node = *node;
            if *edge == 0 {
                (number[node], low[node]) = (count, count);
                count += 1;
                stack.push(node);
                on_stack[node] = true;
            }
            if let Some(&to) = edges[node].get(*edge) {
                *edge += 1;
                if number[to] == NEW {
                    path.push((to, 0));
                } else if on_stack[to] {
                    low[node] = low[node].min(number[to]);
                }
                continue;
            }
            path.pop();
            if let Some((parent, _)) = path.last() {
                low[*parent] = low[*parent].min(low[node]);
            }
            if low[node] == number[node] {
                let from = stack.iter().rposition(|other| *other == node).unwrap_or(0);
                let component = stack.split_off(from);
                component.iter().for_each(|node| on_stack[*node] = false);
                found.push(component);
            }
        }
    }
    found
}

#[cfg(test)]
#[path = "deadlock_tests.rs"]
mod tests;
