//! `find` on small systems: on hand-made ones, and against brute force on random ones.

use super::*;
use crate::core::claim::READERS;
use crate::core::owner::Ancestor;

/// Builds lines, claim by claim, in order of entry.
#[derive(Default, Clone)]
struct World {
    lines: Vec<LineReport>,
    claims: u32,
}

impl World {
    /// A claim of `who` in the line `name`, held if it fits. Returns its id.
    fn claim(&mut self, who: &str, name: &str, ask: Ask) -> String {
        self.shaped(who, name, ask, |_| {})
    }

    fn whole(&mut self, who: &str, name: &str) -> String {
        self.claim(who, name, Ask::Whole)
    }

    fn shaped(
        &mut self,
        who: &str,
        name: &str,
        ask: Ask,
        shape: impl FnOnce(&mut ClaimReport),
    ) -> String {
        self.claims += 1;
        let id = format!("{:032x}", self.claims);
        let mut owner = Owner::here(who, None);
        // `client/agent`; without a name it belongs to no agent.
        let (client, agent) = who.split_once('/').unwrap_or(("pod", who));
        owner.agent = (!agent.is_empty()).then(|| Agent {
            client: client.into(),
            name: agent.into(),
            ttl: 30_000,
            yields: true,
            ..Agent::default()
        });
        let mut claim = ClaimReport {
            id: id.clone(),
            owner: Some(owner),
            ask,
            value: None,
            sequence: None,
            expires_in: None,
            evicted: false,
        };
        shape(&mut claim);
        let at = self.lines.iter().position(|line| line.name == name);
        let at = at.unwrap_or_else(|| {
            self.lines.push(LineReport {
                name: name.into(),
                capacity: None,
                holders: Vec::new(),
                waiters: Vec::new(),
            });
            self.lines.len() - 1
        });
        let line = &mut self.lines[at];
        if let Ask::Part { capacity, .. } = ask {
            line.capacity = Some(capacity);
        }
        let capacity = line.capacity.unwrap_or(1);
        let ahead = line.holders.iter().chain(&line.waiters);
        let taken: u64 = ahead
            .map(|claim| u64::from(claim.ask.weight_in(capacity)))
            .sum();
        if fits(taken, ask, capacity) {
            claim.sequence = Some(u64::from(self.claims));
            line.holders.push(claim);
        } else {
            line.waiters.push(claim)
        }
        id
    }

    /// The names of the agents of each deadlock, sorted.
    fn found(&self) -> Vec<Vec<String>> {
        let names = |found: &Deadlock| {
            let mut names: Vec<_> = found.agents.iter().map(|a| a.name().to_owned()).collect();
            names.sort();
            names
        };
        let mut found: Vec<_> = find(&self.lines).iter().map(names).collect();
        found.sort();
        found
    }
}

fn agent_of(claim: &mut ClaimReport) -> &mut Agent {
    claim.owner.as_mut().unwrap().agent.as_mut().unwrap()
}

fn under(name: &str, claim: &str) -> impl Fn(&mut ClaimReport) {
    let ancestor = Ancestor {
        claim: claim.into(),
        name: name.into(),
    };
    move |claim| agent_of(claim).within = vec![ancestor.clone()]
}

const fn permits(weight: u32, capacity: u32) -> Ask {
    Ask::Part { weight, capacity }
}

/// `n` agents, each of which holds a lock and waits for the next one's.
fn ring(n: usize) -> World {
    let mut world = World::default();
    for at in 0..n {
        world.whole(&format!("w{at}"), &format!("l{at}"));
    }
    for at in 0..n {
        world.whole(&format!("w{at}"), &format!("l{}", (at + 1) % n));
    }
    world
}

#[test]
fn a_circle_is_found_and_told_in_its_order() {
    for n in 2..9 {
        let found = find(&ring(n).lines);
        assert_eq!(found.len(), 1);
        let found = &found[0];
        assert_eq!(
            (found.circle, found.agents.len(), found.likely),
            (n, n, false)
        );
        for (at, agent) in found.agents.iter().enumerate() {
            let next = &found.agents[(at + 1) % n];
            assert_eq!(agent.behind, [(at + 1) % n]);
            assert_eq!(agent.waits[0].name, next.holds[0].name);
        }
        assert_eq!(
            found.gives_way,
            Some(format!("{:032x}", 2 * n)),
            "the greatest id"
        );
    }
    let told = find(&ring(2).lines)[0].to_string();
    assert!(told.contains("holds l0 and waits for l1; w1 ("), "{told}");
}

#[test]
fn an_agent_that_waits_behind_itself_is_a_circle() {
    let mut world = World::default();
    world.whole("a", "x");
    world.whole("a", "x");
    assert_eq!(world.found(), [["a"]]);
    assert!(find(&world.lines)[0].gives_way.is_some());
}

#[test]
fn bystanders_are_no_part_of_it() {
    let mut world = ring(3);
    // Behind the circle: one that holds a lock others wait for, and one with the greatest id.
    world.whole("tail", "t");
    world.whole("tail", "l1");
    world.whole("end", "t");
    assert_eq!(world.found(), [["w0", "w1", "w2"]]);
    let gives_way = find(&world.lines)[0].gives_way.clone();
    assert_eq!(gives_way, Some(format!("{:032x}", 6)));
}

#[test]
fn a_circle_that_another_holds_up_is_no_part_of_it() {
    // c proceeds as soon as b releases its permit, though a waits for c.
    let mut world = World::default();
    world.claim("a", "p", permits(1, 2));
    world.claim("b", "p", permits(1, 2));
    world.whole("c", "x");
    world.whole("d", "y");
    world.claim("c", "p", permits(1, 2));
    world.whole("a", "x");
    assert_eq!(world.found().len(), 0, "b can finish");
    world.whole("b", "y");
    world.whole("b", "z");
    world.whole("d", "z");
    assert_eq!(world.found(), [["b", "d"]]);
}

#[test]
fn near_misses_are_none() {
    // One edge is missing.
    let mut world = ring(4);
    world.lines[0].waiters.clear();
    assert_eq!(world.found().len(), 0);
    // A holder that is no agent may release at any time.
    let mut world = World::default();
    world.whole("a", "x");
    world.whole("pod/", "y");
    world.whole("a", "y");
    world.whole("pod/", "x");
    assert_eq!(world.found().len(), 0);
    // Two clients whose agents have the same name.
    let mut world = World::default();
    world.whole("one/w", "x");
    world.whole("two/w", "x");
    assert_eq!(world.found().len(), 0);
    // A claim that is marked for eviction or not renewed ends by itself.
    for shape in [
        |claim: &mut ClaimReport| claim.evicted = true,
        |claim: &mut ClaimReport| agent_of(claim).unrenewed = true,
    ] {
        let mut world = World::default();
        world.shaped("a", "x", Ask::Whole, shape);
        world.whole("b", "y");
        world.whole("a", "y");
        world.whole("b", "x");
        assert_eq!(world.found().len(), 0);
    }
    // Permits that suffice once an agent that can finish is gone.
    let mut world = World::default();
    world.claim("a", "p", permits(1, 2));
    world.claim("c", "p", permits(1, 2));
    world.whole("b", "x");
    world.whole("a", "x");
    world.claim("b", "p", permits(1, 2));
    assert_eq!(world.found().len(), 0);
    world.whole("c", "x");
    assert_eq!(world.found(), [["a", "b", "c"]]);
}

#[test]
fn the_fair_order_counts() {
    // Readers: b would hold beside a if the writer c were not ahead of it.
    let mut world = World::default();
    world.claim("a", "r", Ask::READ);
    world.whole("b", "x");
    world.whole("c", "r");
    world.claim("b", "r", Ask::READ);
    assert_eq!(world.found().len(), 0);
    world.whole("a", "x");
    assert_eq!(world.found(), [["a", "b", "c"]]);
    let found = find(&world.lines);
    assert_eq!(world.lines[0].capacity, Some(READERS));
    // Nobody waits for anything that c holds, so it does not give way.
    let gives_way = found[0].gives_way.clone().unwrap();
    let victim = found[0].claims().find(|stuck| stuck.claim.id == gives_way);
    assert_ne!(victim.unwrap().claim.owner.as_ref().unwrap().owner, "c");
}

#[test]
fn of_a_group_one_is_enough() {
    let grouped = |claim: &mut ClaimReport| {
        agent_of(claim).group = Some(Group {
            id: "g".into(),
            size: 2,
        });
    };
    let mut world = World::default();
    world.whole("a", "x");
    world.whole("b", "y");
    world.whole("c", "z");
    world.shaped("a", "y", Ask::Whole, grouped);
    world.whole("b", "x");
    assert_eq!(world.found().len(), 0, "one of the group is not there yet");
    let mut other = world.clone();
    world.shaped("a", "z", Ask::Whole, grouped);
    assert_eq!(world.found().len(), 0, "c can finish");
    world.whole("c", "x");
    assert_eq!(world.found(), [["a", "b", "c"]]);
    // Both claims of the group are blocked by the same agent.
    other.whole("b", "w");
    other.shaped("a", "w", Ask::Whole, grouped);
    assert_eq!(other.found(), [["a", "b"]]);
}

/// A claim that its agent no longer needs does not draw the holder of that line into the circle.
#[test]
fn of_a_group_that_one_meets_the_others_count_no_more() {
    let grouped = |claim: &mut ClaimReport| {
        agent_of(claim).group = Some(Group {
            id: "g".into(),
            size: 2,
        });
    };
    let mut world = World::default();
    world.whole("a", "x");
    world.whole("b", "y");
    world.whole("c", "z");
    world.whole("d", "w");
    world.shaped("a", "z", Ask::Whole, grouped);
    world.shaped("a", "w", Ask::Whole, grouped);
    world.whole("a", "y");
    world.whole("b", "x");
    // Last, so that it would be chosen to give way.
    world.whole("c", "x");
    assert_eq!(
        world.found(),
        [["a", "b"]],
        "d can finish, so c is a bystander"
    );
}

#[test]
fn only_who_says_so_gives_way() {
    let mut world = World::default();
    world.whole("a", "x");
    world.whole("b", "y");
    let a = world.whole("a", "y");
    world.shaped("b", "x", Ask::Whole, |claim| agent_of(claim).yields = false);
    assert_eq!(find(&world.lines)[0].gives_way, Some(a));
    let waiter = &mut world.lines[1].waiters[0];
    agent_of(waiter).yields = false;
    assert_eq!(find(&world.lines)[0].gives_way, None);
}

/// Two scripts that nest two locks in opposite orders.
fn nested(yields: bool) -> World {
    let mut world = World::default();
    let a = world.whole("p1/run a", "a");
    let b = world.whole("p2/run b", "b");
    for (who, name, outer, claim) in [("c1/run b", "b", "a", a), ("c2/run a", "a", "b", b)] {
        world.shaped(who, name, Ask::Whole, |report| {
            under(outer, &claim)(report);
            agent_of(report).yields_nested = yields;
        });
    }
    world
}

#[test]
fn circles_through_parents_are_likely() {
    let found = find(&nested(false).lines);
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].likely, found[0].circle), (true, 4));
    assert_eq!(found[0].gives_way, None);
    let told = found[0].to_string();
    assert!(told.contains("runs the next; run b"), "{told}");
    let found = find(&nested(true).lines);
    assert_eq!(found[0].gives_way, Some(format!("{:032x}", 4)));
}

/// A run between the two is on another engine, or has lost its lock.
#[test]
fn the_nearest_ancestor_that_is_seen_counts() {
    let mut world = World::default();
    let a = world.whole("p1/run a", "a");
    let b = world.whole("p2/run b", "b");
    for (who, name, outer, claim) in [("c1/run b", "b", "a", a), ("c2/run a", "a", "b", b)] {
        world.shaped(who, name, Ask::Whole, |report| {
            under(outer, &claim)(report);
            let elsewhere = Ancestor {
                claim: "e".repeat(32),
                name: "elsewhere".into(),
            };
            agent_of(report).within.push(elsewhere);
        });
    }
    let found = find(&world.lines);
    assert_eq!(
        (found.len(), found[0].likely, found[0].circle),
        (1, true, 4)
    );
    assert!(found[0].to_string().contains("holds a and runs the next"));
}

/// Not all claims ahead are reported, but a circle always is, even if the first agent is in none of
/// the reported ones.
#[test]
fn a_circle_is_told_however_long_its_lines_are() {
    let mut world = World::default();
    world.whole("z", "z");
    world.whole("head", "long");
    for at in 0..2 * TOLD_AHEAD {
        world.whole(&format!("w{at}"), "long");
    }
    world.whole("z", "long");
    world.whole("v", "v");
    world.whole("v", "long");
    world.whole("head", "v");
    let found = find(&world.lines);
    assert_eq!(
        (found.len(), found[0].agents.len()),
        (1, 2 * TOLD_AHEAD + 3)
    );
    assert!(found[0].circle > 0, "{}", found[0]);
}

#[test]
fn a_circle_inside_a_nested_one_is_certain() {
    let mut world = nested(false);
    world.whole("p1/run a", "b");
    world.whole("p2/run b", "a");
    let found = find(&world.lines);
    assert_eq!(found.len(), 1);
    assert!(!found[0].likely);
}

#[test]
fn what_is_seen_once_is_not_confirmed() {
    let mut sightings = Sightings::default();
    let mut world = ring(2);
    assert!(sightings.confirm(find(&world.lines)).is_empty());
    assert_eq!(sightings.confirm(find(&world.lines)).len(), 1);
    // The same name and agent, but another claim: the lock was free in between.
    world.lines[0].holders[0].id = "f".repeat(32);
    assert!(sightings.confirm(find(&world.lines)).is_empty());
    assert_eq!(sightings.confirm(find(&world.lines)).len(), 1);
    world.lines[0].holders[0].sequence = Some(99);
    assert!(sightings.confirm(find(&world.lines)).is_empty());
}

/// A record says anything about its agent, but a gateway says whose it is.
#[test]
fn an_agent_of_another_principal_is_another_agent() {
    let of = |principal: &str| {
        let principal = Some(principal.to_owned());
        move |claim: &mut ClaimReport| claim.owner.as_mut().unwrap().principal = principal.clone()
    };
    for (other, found) in [("p", 1), ("q", 0)] {
        let mut world = World::default();
        world.shaped("c/w", "a", Ask::Whole, of("p"));
        world.shaped("c/v", "b", Ask::Whole, of("p"));
        world.shaped("c/w", "b", Ask::Whole, of("p"));
        world.shaped("c/v", "a", Ask::Whole, of(other));
        assert_eq!(world.found().len(), found, "{other}");
        // The same by a claim that is said to run inside that of another.
        let mut world = World::default();
        world.shaped("c/w", "a", Ask::Whole, of("p"));
        let parent = world.shaped("c/v", "b", Ask::Whole, of("p"));
        world.shaped("c/w", "b", Ask::Whole, of("p"));
        world.shaped("d/x", "a", Ask::Whole, |claim| {
            under("b", &parent)(claim);
            of(other)(claim);
        });
        assert_eq!(world.found().len(), found, "{other}");
    }
}

#[test]
fn a_long_line_costs_no_more_than_its_claims() {
    let mut world = ring(2);
    for at in 0..20_000 {
        let claim = world.lines[0].waiters[0].clone();
        let mut claim = ClaimReport {
            id: format!("f{at:031x}"),
            ..claim
        };
        agent_of(&mut claim).name = format!("late {at}");
        world.lines[0].waiters.push(claim);
    }
    let began = std::time::Instant::now();
    assert_eq!(world.found(), [["w0", "w1"]]);
    // With an edge for each pair there would be 200 million.
    assert!(began.elapsed() < std::time::Duration::from_secs(5));
}

/// A random number generator without a crate, so that a failure can name its seed.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u32) -> u32 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as u32) % bound
    }
}

fn random_world(seed: u64) -> World {
    let mut random = Random(seed);
    let mut world = World::default();
    let kinds = [Ask::Whole, Ask::READ, permits(1, 3)].map(|kind| (kind, random.below(2)));
    let claims = 3 + random.below(8);
    let mut ids: Vec<(String, String)> = Vec::new();
    for _ in 0..claims {
        let agents = ["a", "b", "c", "d", "pod/"];
        let who = agents[random.below(agents.len() as u32) as usize];
        let line = random.below(4) as usize;
        let ask = match kinds[line % 3].0 {
            Ask::Part { capacity: 3, .. } => permits(1 + random.below(3), 3),
            Ask::Part { .. } if random.below(2) == 0 => Ask::READ,
            _ => Ask::Whole,
        };
        let dice = random.below(12);
        let parent = ids.get(random.below(12) as usize).cloned();
        let id = world.shaped(who, &format!("l{line}"), ask, |claim| {
            claim.evicted = dice == 0;
            if who != "pod/" {
                agent_of(claim).unrenewed = dice == 1;
                if dice < 6 && dice > 2 {
                    let id = format!("g{who}");
                    agent_of(claim).group = Some(Group { id, size: 2 });
                }
                if let Some((name, claim_id)) = parent.filter(|_| dice == 11) {
                    under(&name, &claim_id)(claim);
                }
            }
        });
        ids.push((format!("l{line}"), id));
    }
    world
}

/// The agents that are stuck however the others proceed: every order of finishing is tried.
fn stuck(world: &World, nested: bool) -> BTreeSet<String> {
    let name = |claim: &ClaimReport| agent(claim).map(|agent| agent.name.clone());
    let claims = || {
        world.lines.iter().flat_map(|line| {
            let held = line.holders.iter().map(move |claim| (line, claim, false));
            held.chain(line.waiters.iter().map(move |claim| (line, claim, true)))
        })
    };
    let all: Vec<String> = claims()
        .filter(|(_, claim, waits)| !ends_by_itself(claim, *waits))
        .filter_map(|(_, claim, _)| name(claim))
        .collect::<BTreeSet<_>>()
        .into_iter()
        .collect();
    let is_seen = |id: &str| {
        let mut kept = claims().filter(|(_, claim, waits)| !ends_by_itself(claim, *waits));
        kept.any(|(_, claim, _)| claim.id == id && agent(claim).is_some())
    };
    let bit = |who: &str| 1_u32 << all.iter().position(|other| other == who).unwrap();
    let admitted = |line: &LineReport, me: &ClaimReport, gone: u32| {
        let capacity = line.capacity.unwrap_or(1);
        let ahead = line.holders.iter().map(|claim| (claim, false));
        let ahead = ahead.chain(line.waiters.iter().map(|claim| (claim, true)));
        let taken: u64 = ahead
            .take_while(|(claim, _)| claim.id != me.id)
            .filter(|(claim, waits)| !ends_by_itself(claim, *waits))
            .filter(|(claim, _)| name(claim).is_some_and(|who| gone & bit(&who) == 0))
            .map(|(claim, _)| u64::from(claim.ask.weight_in(capacity)))
            .sum();
        taken + u64::from(me.ask.weight_in(capacity)) <= u64::from(capacity)
    };
    let can_finish = |who: &String, gone: u32| {
        let mine: Vec<_> = claims()
            .filter(|(_, claim, waits)| !ends_by_itself(claim, *waits))
            .filter(|(_, claim, _)| name(claim).as_ref() == Some(who))
            .collect();
        let waiting: Vec<_> = mine.iter().filter(|(_, _, waits)| *waits).collect();
        let alone = waiting
            .iter()
            .filter(|(_, claim, _)| group(claim).is_none());
        let grouped: Vec<_> = waiting
            .iter()
            .filter(|(_, claim, _)| group(claim).is_some())
            .collect();
        let children = claims().filter(|(_, claim, waits)| {
            let above = agent(claim).into_iter().flat_map(|agent| &agent.within);
            let seen = above.rev().find(|above| is_seen(&above.claim));
            !ends_by_itself(claim, *waits)
                && seen.is_some_and(|seen| mine.iter().any(|(_, own, _)| own.id == seen.claim))
        });
        alone
            .clone()
            .all(|(line, claim, _)| admitted(line, claim, gone))
            && (grouped.len() < 2
                || grouped
                    .iter()
                    .any(|(line, claim, _)| admitted(line, claim, gone)))
            && (!nested
                || children
                    .filter_map(|(_, claim, _)| name(claim))
                    .all(|child| gone & bit(&child) != 0))
    };
    let mut ends = HashSet::new();
    let (mut todo, mut seen) = (vec![0_u32], HashSet::new());
    while let Some(gone) = todo.pop() {
        if !seen.insert(gone) {
            continue;
        }
        let next: Vec<_> = all
            .iter()
            .filter(|who| gone & bit(who) == 0 && can_finish(who, gone))
            .map(|who| gone | bit(who))
            .collect();
        if next.is_empty() {
            ends.insert(gone);
        }
        todo.extend(next);
    }
    assert_eq!(
        ends.len(),
        1,
        "the order in which they finish makes no difference"
    );
    let gone = ends.into_iter().next().unwrap();
    all.iter()
        .filter(|who| gone & bit(who) == 0)
        .cloned()
        .collect()
}

#[test]
fn it_agrees_with_brute_force_on_small_systems() {
    let (mut with, mut without, mut likely) = (0, 0, 0);
    let full = std::env::var_os("PALISADE_TEST_FULL").is_some();
    for seed in 0..if full { 200_000 } else { 3_000 } {
        let world = random_world(seed);
        for nested in [false, true] {
            let system = System::read(&world.lines);
            let rest = system.reduce(nested);
            let left = system
                .agents
                .iter()
                .zip(&rest.finished)
                .filter(|(_, finished)| !**finished);
            let name = |party: &Party<'_>| party.owner.agent.as_ref().unwrap().name.clone();
            let left: BTreeSet<String> = left.map(|(party, _)| name(party)).collect();
            assert_eq!(
                left,
                stuck(&world, nested),
                "seed {seed}, nested {nested}: {:#?}",
                world.lines
            );
            let components = system.components(&rest);
            // Some agent is stuck exactly if there is a deadlock, which consists of stuck agents.
            assert_eq!(components.is_empty(), left.is_empty(), "seed {seed}");
            for members in &components {
                for member in members {
                    assert!(left.contains(&name(&system.agents[*member])), "seed {seed}");
                }
            }
        }
        let found = find(&world.lines);
        for found in &found {
            likely += u32::from(found.likely);
            assert!(found.circle > 0, "seed {seed}: {found:?}");
            for at in 0..found.circle {
                let next = (at + 1) % found.circle;
                let agent = &found.agents[at];
                assert!(
                    agent.behind.contains(&next) || agent.children.contains(&next),
                    "seed {seed}"
                );
            }
            // The claim that gives way is a waiting claim of this deadlock.
            if let Some(id) = &found.gives_way {
                let stuck = found
                    .agents
                    .iter()
                    .find(|a| a.waits.iter().any(|c| c.claim.id == *id));
                assert!(stuck.is_some(), "seed {seed}");
            }
        }
        if found.is_empty() {
            without += 1
        } else {
            with += 1
        }
    }
    assert!(
        with > 150 && without > 150 && likely > 5,
        "{with} {without} {likely}"
    );
}
