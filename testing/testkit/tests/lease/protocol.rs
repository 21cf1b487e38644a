//! The lease protocol as a model: clients that enter, hold, renew, write and leave; an engine that
//! grants and expires; a network that delays, reorders and duplicates; a store that checks tokens.
//!
//! The engine's line and the deadline are the library's own `Line` and [`LeaseStart`]. Time is a
//! clock of ticks that only the action [`Action::Tick`] advances. **A pause needs no action of its
//! own**: a client that takes no step while time advances is paused, and the search lets every
//! client take no step at every point, also between the check and the write. A message that is
//! never delivered is lost.

use std::collections::BTreeSet;
use std::time::Duration;

use palisade::BootTime;
use palisade::engine::{ClaimId, LeaseStart};

use crate::engine::{Engine, Store};

/// Long enough that the library's margin of 50 ms is within a tick.
pub(crate) const TICK: Duration = Duration::from_millis(100);
/// The shortest ttl within which a renewal can be answered.
pub(crate) const TTL: Duration = Duration::from_millis(200);

/// The start of time, which is not `BootTime::PAST`.
pub(crate) const START: BootTime = BootTime::from_nanos(1_000_000_000);

/// The protocol as it is, or with one mistake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Variant {
    AsItIs,
    /// The store accepts every write.
    Unfenced,
    /// The deadline counts from the answer.
    DeadlineFromReply,
    /// The answer to an abandoned request is taken for the answer to the next one.
    StaleAnswer,
    /// A grant is accepted without checking the claim's own lease.
    GrantUnchecked,
    /// A leave removes any holder of the name.
    LeaveByName,
    /// A renewal extends any holder of the name.
    RenewByName,
    /// The counter is kept with the line and lost with it.
    CounterDiesWithLine,
}

/// The limits of the search.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    pub(crate) clients: u8,
    /// When time ends.
    pub(crate) ticks: u32,
    /// How many claims one client makes.
    pub(crate) claims: u8,
    /// How often one claim enters, is renewed, and is used for a write.
    pub(crate) asks: u8,
    pub(crate) renewals: u8,
    pub(crate) writes: u8,
    /// How many requests in total the network may deliver twice.
    pub(crate) doubles: u8,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct World {
    pub(crate) now: BootTime,
    pub(crate) clients: Vec<Client>,
    pub(crate) engine: Engine,
    pub(crate) store: Store,
    /// The messages in flight, in no order.
    pub(crate) network: BTreeSet<Message>,
    pub(crate) doubles: u8,
}

/// One client, which has one claim at a time.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Client {
    /// The number of its current claim.
    pub(crate) claim: u8,
    pub(crate) phase: Phase,
    /// The end of its lease's validity.
    pub(crate) deadline: BootTime,
    /// It was valid at its last check, and is about to write.
    pub(crate) checked: bool,
    asks: u8,
    renewals: u8,
    writes: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Phase {
    Idle,
    /// Entered, without an answer yet.
    Asking,
    Waiting,
    Holding {
        sequence: u64,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Message {
    pub(crate) client: u8,
    pub(crate) claim: u8,
    pub(crate) what: What,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum What {
    /// Enters, or asks for its place: the same claim has the same place.
    Enter {
        sent: BootTime,
        /// The number of this enter of the claim.
        ask: u8,
    },
    Renew {
        sent: BootTime,
        sequence: u64,
    },
    Leave {
        sequence: u64,
    },
    Write {
        sequence: u64,
    },
    /// The answers, which identify their request.
    Entered {
        sent: BootTime,
        ask: u8,
        left: Duration,
        sequence: Option<u64>,
    },
    Renewed {
        sent: BootTime,
        held: bool,
    },
}

impl What {
    fn is_request(self) -> bool {
        !matches!(self, Self::Entered { .. } | Self::Renewed { .. })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Action {
    Tick,
    Ask(u8),
    Renew(u8),
    /// `is_valid()` returned `true`.
    Check(u8),
    Write(u8),
    /// Releases, gives up waiting, is cancelled, or was told of a loss.
    Leave(u8),
    Deliver(Message),
    /// Delivers it, and keeps it for a second delivery.
    DeliverTwice(Message),
}

/// The id of a client's claim.
fn id(client: u8, claim: u8) -> ClaimId {
    ClaimId(u128::from(client) << 8 | u128::from(claim))
}

impl World {
    pub(crate) fn start(bounds: &Bounds) -> Self {
        let client = Client {
            claim: 0,
            phase: Phase::Idle,
            deadline: BootTime::PAST,
            checked: false,
            asks: 0,
            renewals: 0,
            writes: 0,
        };
        Self {
            now: START,
            clients: vec![client; usize::from(bounds.clients)],
            engine: Engine::default(),
            store: Store::default(),
            network: BTreeSet::new(),
            doubles: 0,
        }
    }

    /// Whether a client believes that it holds, as its `is_valid()` would return.
    pub(crate) fn believes(&self, client: usize) -> bool {
        let client = &self.clients[client];
        matches!(client.phase, Phase::Holding { .. }) && self.now < client.deadline
    }

    /// Whether the engine agrees that this client's current claim holds.
    pub(crate) fn holds(&self, client: usize) -> bool {
        let Client { claim, phase, .. } = self.clients[client];
        let seat = self.engine.line.seat(id(client as u8, claim));
        match phase {
            Phase::Holding { sequence } => seat.is_some_and(|seat| seat.sequence == sequence),
            _ => false,
        }
    }

    pub(crate) fn actions(&self, bounds: &Bounds, actions: &mut Vec<Action>) {
        if self.now < START + TICK * bounds.ticks {
            actions.push(Action::Tick);
        }
        for (at, client) in self.clients.iter().enumerate() {
            let c = at as u8;
            let placed = matches!(client.phase, Phase::Waiting | Phase::Holding { .. });
            let may = |yes: bool, action: Action| yes.then_some(action);
            actions.extend(
                [
                    may(
                        client.claim < bounds.claims
                            && client.asks < bounds.asks
                            && !matches!(client.phase, Phase::Holding { .. }),
                        Action::Ask(c),
                    ),
                    // The keeper also renews waiting claims, but none that has ended.
                    may(
                        placed && self.now < client.deadline && client.renewals < bounds.renewals,
                        Action::Renew(c),
                    ),
                    may(
                        self.believes(at) && !client.checked && client.writes < bounds.writes,
                        Action::Check(c),
                    ),
                    may(client.checked, Action::Write(c)),
                    may(
                        client.phase != Phase::Idle && !client.checked,
                        Action::Leave(c),
                    ),
                ]
                .into_iter()
                .flatten(),
            );
        }
        for message in &self.network {
            actions.push(Action::Deliver(*message));
            if message.what.is_request() && self.doubles < bounds.doubles {
                actions.push(Action::DeliverTwice(*message));
            }
        }
    }

    pub(crate) fn step(&mut self, action: Action, variant: Variant) {
        match action {
            Action::Tick => {
                self.now = self.now + TICK;
                // At once, which is the worst case for a holder that still believes.
                self.engine.settle(self.now, variant);
            }
            Action::Ask(c) => {
                let sent = self.now;
                let client = self.client(c);
                client.asks += 1;
                let ask = client.asks;
                if client.phase == Phase::Idle {
                    client.phase = Phase::Asking;
                }
                self.send(c, What::Enter { sent, ask });
            }
            Action::Renew(c) => {
                let sent = self.now;
                self.client(c).renewals += 1;
                let sequence = self.client(c).sequence();
                self.send(c, What::Renew { sent, sequence });
            }
            Action::Check(c) => self.client(c).checked = true,
            Action::Write(c) => {
                let client = self.client(c);
                client.checked = false;
                client.writes += 1;
                let sequence = client.sequence();
                self.send(c, What::Write { sequence });
            }
            Action::Leave(c) => self.leave(c),
            Action::Deliver(message) => {
                self.network.remove(&message);
                self.deliver(message, variant);
            }
            Action::DeliverTwice(message) => {
                self.doubles += 1;
                self.deliver(message, variant);
            }
        }
        // A client that abandoned a request ignores its answer.
        let Self {
            network, clients, ..
        } = self;
        network.retain(|message| clients[usize::from(message.client)].hears(message, variant));
    }

    fn client(&mut self, c: u8) -> &mut Client {
        &mut self.clients[usize::from(c)]
    }

    fn send(&mut self, client: u8, what: What) {
        let claim = self.client(client).claim;
        self.network.insert(Message {
            client,
            claim,
            what,
        });
    }

    /// Stops renewing, then leaves; the next one is a new claim.
    fn leave(&mut self, c: u8) {
        let sequence = self.client(c).sequence();
        self.send(c, What::Leave { sequence });
        let client = self.client(c);
        *client = Client {
            claim: client.claim + 1,
            phase: Phase::Idle,
            deadline: BootTime::PAST,
            checked: false,
            asks: 0,
            renewals: 0,
            writes: 0,
        };
    }

    fn deliver(&mut self, message: Message, variant: Variant) {
        let Message {
            client: c,
            claim,
            what,
        } = message;
        let (now, me) = (self.now, id(c, claim));
        match what {
            What::Enter { sent, ask } => {
                if let Some((left, sequence)) = self.engine.enter(me, now, variant) {
                    let answer = What::Entered {
                        sent,
                        ask,
                        left,
                        sequence,
                    };
                    self.network.insert(Message {
                        what: answer,
                        ..message
                    });
                }
            }
            What::Renew { sent, sequence } => {
                let held = self.engine.renew(me, sequence, now, variant);
                let answer = What::Renewed { sent, held };
                self.network.insert(Message {
                    what: answer,
                    ..message
                });
            }
            What::Leave { sequence } => self.engine.leave(me, sequence, now, variant),
            What::Write { sequence } => self.store.write(sequence, variant),
            What::Entered {
                sent,
                left,
                sequence,
                ..
            } => {
                let armed = LeaseStart {
                    sent: counts_from(sent, now, variant),
                    ttl: left,
                };
                let client = self.client(c);
                if client.phase == Phase::Asking {
                    client.phase = Phase::Waiting;
                    client.deadline = armed.deadline();
                }
                let unchecked = variant == Variant::GrantUnchecked;
                match sequence {
                    None => {}
                    Some(sequence) if now < client.deadline || unchecked => {
                        client.phase = Phase::Holding { sequence };
                        // A client that does not check believes at least for a moment.
                        client.deadline = client.deadline.max(now + TICK / 4);
                    }
                    // Its own lease has ended meanwhile: leave, and start over.
                    Some(_) => self.leave(c),
                }
            }
            What::Renewed { sent, held } => {
                let armed = LeaseStart {
                    sent: counts_from(sent, now, variant),
                    ttl: TTL,
                };
                let client = self.client(c);
                // A lease that has ended stays ended.
                if !held {
                    client.deadline = BootTime::PAST;
                } else if now < client.deadline {
                    client.deadline = client.deadline.max(armed.deadline());
                }
            }
        }
    }
}

/// The time that a lease counts from.
fn counts_from(sent: BootTime, now: BootTime, variant: Variant) -> BootTime {
    match variant {
        Variant::DeadlineFromReply => now,
        _ => sent,
    }
}

impl Client {
    /// Whether a message can still be processed, or is not for this client.
    fn hears(&self, message: &Message, variant: Variant) -> bool {
        let holding = matches!(self.phase, Phase::Holding { .. });
        match message.what {
            What::Entered { .. } if self.claim != message.claim || holding => false,
            What::Entered { ask, .. } => ask == self.asks || variant == Variant::StaleAnswer,
            What::Renewed { .. } => self.claim == message.claim,
            _ => true,
        }
    }

    fn sequence(&self) -> u64 {
        match self.phase {
            Phase::Holding { sequence } => sequence,
            _ => 0,
        }
    }
}
