//! The token of `redlock:`, explored exhaustively: three servers, two clients with their own
//! clocks, servers that crash and come back with their data, requests in any order.
//!
//! The model covers this rule: a server counts `max(last + 1, proposal)`. A count that a majority
//! agrees on is the token; otherwise it is the greatest count, after it was written back to a
//! majority that still has the claim. Leases do not end while their claim lives: that concerns the
//! engine's class, not the token. Without the write-back, or with one to fewer servers, tokens
//! decrease, and the search must find that.

use stateright::{Checker, HasDiscoveries, Model, Property};

const NODES: usize = 3;
const QUORUM: usize = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Variant {
    Right,
    /// The greatest count becomes the token at once.
    NoWriteBack,
    /// It is written back to only one server.
    WriteBackToOne,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Node {
    last: u8,
    holder: Option<usize>,
    up: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Phase {
    Idle,
    /// Requested, with the answer of each server.
    Voting {
        proposal: u8,
        answers: [Option<Answer>; NODES],
    },
    /// Writes a token back; `seen` are the servers that have it and still had the claim.
    Raising {
        token: u8,
        seen: [bool; NODES],
    },
    Holding {
        token: u8,
    },
    /// Withdraws its votes.
    Leaving,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Answer {
    Held(u8),
    Busy,
    /// It was applied, but its answer was lost.
    Lost,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Client {
    phase: Phase,
    seen: u8,
    rounds: u8,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct World {
    nodes: [Node; NODES],
    clients: [Client; 2],
    crashes: u8,
    losses: u8,
    /// The greatest token granted, and whether a later one was not greater.
    granted: u8,
    went_back: bool,
    written_back: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    Propose(usize, u8),
    Vote(usize, usize),
    VoteUnheard(usize, usize),
    Decide(usize),
    GiveUp(usize),
    Raise(usize, usize),
    Release(usize),
    /// One vote is withdrawn, or expires.
    Free(usize, usize),
    Left(usize),
    Crash(usize),
    Return(usize),
}

struct Tokens {
    variant: Variant,
    /// How often each client tries.
    rounds: [u8; 2],
    crashes: u8,
    /// How many answers are lost.
    losses: u8,
    /// The maximum value of a clock.
    clock: u8,
}

impl World {
    /// A server votes; returns its count.
    fn vote(&mut self, client: usize, node: usize, proposal: u8) -> Answer {
        let node = &mut self.nodes[node];
        if node.holder.is_some_and(|holder| holder != client) {
            return Answer::Busy;
        }
        node.holder = Some(client);
        node.last = proposal.max(node.last + 1);
        Answer::Held(node.last)
    }

    fn grant(&mut self, client: usize, token: u8) {
        self.went_back |= token <= self.granted;
        self.granted = self.granted.max(token);
        let client = &mut self.clients[client];
        client.seen = client.seen.max(token);
        client.phase = Phase::Holding { token };
    }

    fn counts(answers: &[Option<Answer>; NODES]) -> Vec<u8> {
        let held = answers.iter().flatten().filter_map(|answer| match answer {
            Answer::Held(count) => Some(*count),
            Answer::Busy | Answer::Lost => None,
        });
        held.collect()
    }

    fn decide(&mut self, client: usize, answers: [Option<Answer>; NODES], variant: Variant) {
        let counts = Self::counts(&answers);
        let most = counts.iter().copied().max().unwrap_or(0);
        let agreed = counts
            .iter()
            .copied()
            .find(|count| counts.iter().filter(|other| *other == count).count() >= QUORUM);
        match (agreed, variant) {
            (Some(token), _) => self.grant(client, token),
            (None, Variant::NoWriteBack) => self.grant(client, most),
            (None, _) => {
                self.clients[client].phase = Phase::Raising {
                    token: most,
                    seen: [false; NODES],
                };
            }
        }
    }
}

impl Model for Tokens {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        let node = Node {
            last: 0,
            holder: None,
            up: true,
        };
        let client = |rounds| Client {
            phase: Phase::Idle,
            seen: 0,
            rounds,
        };
        vec![World {
            nodes: [node.clone(), node.clone(), node],
            clients: self.rounds.map(client),
            crashes: self.crashes,
            losses: self.losses,
            granted: 0,
            went_back: false,
            written_back: false,
        }]
    }

    fn actions(&self, world: &World, actions: &mut Vec<Action>) {
        for (c, client) in world.clients.iter().enumerate() {
            match &client.phase {
                Phase::Idle if client.rounds > 0 => {
                    let next = client.seen + 1;
                    actions.extend((next..=next.max(self.clock)).map(|p| Action::Propose(c, p)));
                }
                Phase::Idle => {}
                Phase::Voting { answers, .. } => {
                    for n in (0..NODES).filter(|n| answers[*n].is_none() && world.nodes[*n].up) {
                        actions.push(Action::Vote(c, n));
                        if world.losses > 0 {
                            actions.push(Action::VoteUnheard(c, n));
                        }
                    }
                    if World::counts(answers).len() >= QUORUM {
                        actions.push(Action::Decide(c));
                    }
                    actions.push(Action::GiveUp(c));
                }
                Phase::Raising { seen, .. } => {
                    let asked = (0..NODES).filter(|n| !seen[*n] && world.nodes[*n].up);
                    actions.extend(asked.map(|n| Action::Raise(c, n)));
                    actions.push(Action::GiveUp(c));
                }
                Phase::Holding { .. } => actions.push(Action::Release(c)),
                Phase::Leaving => {
                    let held = |n: &usize| world.nodes[*n].holder == Some(c);
                    let votes: Vec<usize> = (0..NODES).filter(held).collect();
                    if votes.is_empty() {
                        actions.push(Action::Left(c));
                    }
                    actions.extend(votes.into_iter().map(|n| Action::Free(c, n)));
                }
            }
        }
        for (n, node) in world.nodes.iter().enumerate() {
            match node.up {
                true if world.crashes > 0 => actions.push(Action::Crash(n)),
                true => {}
                false => actions.push(Action::Return(n)),
            }
        }
    }

    fn next_state(&self, world: &World, action: Action) -> Option<World> {
        let mut world = world.clone();
        match action {
            Action::Propose(c, proposal) => {
                world.clients[c].seen = proposal;
                world.clients[c].rounds -= 1;
                world.clients[c].phase = Phase::Voting {
                    proposal,
                    answers: [None; NODES],
                };
            }
            Action::Vote(c, n) | Action::VoteUnheard(c, n) => {
                let Phase::Voting { proposal, .. } = world.clients[c].phase else {
                    return None;
                };
                let answer = world.vote(c, n, proposal);
                world.losses -= u8::from(matches!(action, Action::VoteUnheard(..)));
                let Phase::Voting { answers, .. } = &mut world.clients[c].phase else {
                    return None;
                };
                answers[n] = Some(match action {
                    Action::VoteUnheard(..) => Answer::Lost,
                    _ => answer,
                });
            }
            Action::Decide(c) => {
                let Phase::Voting { answers, .. } = world.clients[c].phase else {
                    return None;
                };
                world.decide(c, answers, self.variant);
            }
            Action::Raise(c, n) => {
                let Phase::Raising { token, seen } = &mut world.clients[c].phase else {
                    return None;
                };
                let node = &mut world.nodes[n];
                node.last = node.last.max(*token);
                seen[n] = node.holder == Some(c);
                let (token, seen) = (*token, seen.iter().filter(|seen| **seen).count());
                let needed = match self.variant {
                    Variant::WriteBackToOne => 1,
                    Variant::Right | Variant::NoWriteBack => QUORUM,
                };
                if seen >= needed {
                    world.written_back = true;
                    world.grant(c, token);
                }
            }
            Action::GiveUp(c) | Action::Release(c) => world.clients[c].phase = Phase::Leaving,
            Action::Free(_, n) => world.nodes[n].holder = None,
            Action::Left(c) => world.clients[c].phase = Phase::Idle,
            Action::Crash(n) => {
                world.nodes[n].up = false;
                world.crashes -= 1;
            }
            Action::Return(n) => world.nodes[n].up = true,
        }
        Some(world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(RISE, |_, world: &World| !world.went_back),
            Property::always(ALONE, |_, world: &World| {
                let holds = |client: &&Client| matches!(client.phase, Phase::Holding { .. });
                world.clients.iter().filter(holds).count() <= 1
            }),
            // These states must be reached.
            Property::sometimes(BACK, |_, world: &World| world.written_back),
            Property::sometimes(DOWN, |_, world: &World| {
                let holds = |client: &Client| matches!(client.phase, Phase::Holding { .. });
                world.clients.iter().any(holds) && world.nodes.iter().any(|node| !node.up)
            }),
        ]
    }
}

const RISE: &str = "every grant's token is above all before";
const ALONE: &str = "no two clients hold";
const BACK: &str = "a token is written back";
const DOWN: &str = "a grant while a server is down";

fn search(variant: Variant) -> impl Checker<Tokens> {
    let full = std::env::var_os("PALISADE_TEST_FULL").is_some();
    let model = Tokens {
        variant,
        rounds: if full { [2, 2] } else { [2, 1] },
        crashes: 1,
        losses: u8::from(full),
        clock: if full { 3 } else { 2 },
    };
    let checker = model.checker().threads(2);
    let checker = checker.finish_when(HasDiscoveries::AnyFailures);
    checker.spawn_bfs().join()
}

#[test]
fn tokens_rise_when_the_greatest_is_written_back_to_a_majority() {
    let found = search(Variant::Right);
    let states = found.unique_state_count();
    assert!(states > 10_000, "a search of only {states} states");
    found.assert_properties();
}

#[test]
fn tokens_go_back_without_the_write_back() {
    let found = search(Variant::NoWriteBack);
    assert!(found.discovery(RISE).is_some(), "no counter-example");
    assert!(
        found.discovery(ALONE).is_none(),
        "it is the token that fails"
    );
}

#[test]
fn tokens_go_back_when_fewer_than_a_majority_know_them() {
    let found = search(Variant::WriteBackToOne);
    assert!(found.discovery(RISE).is_some(), "no counter-example");
}
