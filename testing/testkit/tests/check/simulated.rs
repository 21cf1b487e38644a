//! A simulation of a correct lock: clients that acquire, hold, are stopped and killed, and a server
//! with a fair line and leases. Its histories are valid, so every checker must accept them.

use palisade_testkit::lab::history::{Event, History, Released, Shown, What};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::support::{MS, ask, claim, held, lost, release, released, start, valid};

/// In ticks of a millisecond, as in `support::params`.
const TTL: u64 = 100;
const MARGIN: u64 = 10;
const DEATH: u64 = 5;
/// How long a holder continues after it was told of its loss.
const LINGER: u64 = 40;

#[derive(Clone, Copy, PartialEq)]
enum State {
    Idle,
    Waiting,
    Holding { token: u64 },
    Zombie { token: u64, until: u64 },
    Dead,
}

struct Client {
    name: String,
    state: State,
    stopped_until: Option<u64>,
    deadline: u64,
    op: u64,
}

struct Seat {
    client: usize,
    claim: u64,
    granted: bool,
    expires: u64,
}

struct Sim {
    rng: StdRng,
    now: u64,
    events: Vec<Event>,
    clients: Vec<Client>,
    line: Vec<Seat>,
    claims: u64,
}

/// A valid history of `ticks` milliseconds with `clients` clients.
pub(crate) fn history(seed: u64, clients: usize, ticks: u64) -> History {
    let mut sim = Sim {
        rng: StdRng::seed_from_u64(seed),
        now: 1,
        events: Vec::new(),
        clients: Vec::new(),
        line: Vec::new(),
        claims: 0,
    };
    for at in 0..clients {
        sim.clients.push(Client {
            name: format!("w{at}"),
            state: State::Idle,
            stopped_until: None,
            deadline: 0,
            op: 0,
        });
        sim.tell(at, start(&format!("o{at}")));
    }
    while sim.now < ticks {
        sim.tick(true);
    }
    // Lets everyone finish.
    while sim
        .clients
        .iter()
        .any(|c| !matches!(c.state, State::Idle | State::Dead))
    {
        sim.tick(false);
    }
    sim.now += TTL + DEATH;
    sim.serve();
    sim.survey();
    History::of(sim.events)
}

impl Sim {
    fn tell(&mut self, client: usize, what: What) {
        let name = self.clients[client].name.clone();
        self.tell_of(name, what);
    }

    fn tell_of(&mut self, client: String, what: What) {
        // Events of one tick keep their order.
        let at = self.now * MS + self.events.len() as u64 % MS;
        self.events.push(Event {
            at,
            client,
            name: "x".to_owned(),
            what,
        });
    }

    fn tick(&mut self, go_on: bool) {
        self.now += 1;
        self.serve();
        for at in 0..self.clients.len() {
            self.step(at, go_on);
            self.serve();
        }
        if self.now.is_multiple_of(7) {
            self.survey();
        }
    }

    /// The server: removes expired claims, and grants the first one.
    fn serve(&mut self) {
        let now = self.now;
        self.line.retain(|seat| seat.expires > now);
        if let Some(first) = self.line.first_mut() {
            first.granted = true;
        }
    }

    fn survey(&mut self) {
        let line = self.line.iter().map(|seat| Shown {
            claim: claim(seat.claim),
            owner: format!("o{}", seat.client),
            token: seat.granted.then_some(seat.claim),
        });
        let line = line.collect();
        let asked = self.now * MS;
        self.tell_of("harness".to_owned(), What::Survey { asked, line });
    }

    fn seat(&mut self, client: usize) -> Option<&mut Seat> {
        self.line.iter_mut().find(|seat| seat.client == client)
    }

    fn enter(&mut self, client: usize) {
        self.claims += 1;
        let (claim, expires) = (self.claims, self.now + TTL);
        self.clients[client].deadline = expires - MARGIN;
        self.line.push(Seat {
            client,
            claim,
            granted: false,
            expires,
        });
    }

    fn step(&mut self, at: usize, go_on: bool) {
        let now = self.now;
        if let Some(until) = self.clients[at].stopped_until {
            if now < until {
                return;
            }
            self.clients[at].stopped_until = None;
            self.tell(at, What::PauseEnd);
        }
        let state = self.clients[at].state;
        if state == State::Dead {
            return;
        }
        // While it runs, its keeper renews unless the deadline has passed.
        if matches!(state, State::Waiting | State::Holding { .. }) {
            if now < self.clients[at].deadline {
                self.clients[at].deadline = now + TTL - MARGIN;
                if let Some(seat) = self.seat(at) {
                    seat.expires = now + TTL;
                }
            } else if let State::Holding { token } = state {
                let valid_until = self.clients[at].deadline;
                self.tell(at, lost(token, valid_until));
                let until = now + LINGER;
                self.clients[at].state = State::Zombie { token, until };
                return;
            } else {
                // Its place is gone or about to go, so it makes a new claim.
                self.line.retain(|seat| seat.client != at);
                self.enter(at);
            }
        }
        if go_on && self.rng.random_bool(0.004) {
            self.tell(at, What::PauseBegin);
            self.clients[at].stopped_until = Some(now + self.rng.random_range(5..3 * TTL));
            return;
        }
        if go_on && self.rng.random_bool(0.0005) {
            self.tell(at, What::Kill);
            self.clients[at].state = State::Dead;
            if let Some(seat) = self.seat(at) {
                seat.expires = seat.expires.min(now + DEATH);
            }
            return;
        }
        self.act(at, go_on);
    }

    fn act(&mut self, at: usize, go_on: bool) {
        match self.clients[at].state {
            State::Idle if go_on && self.rng.random_bool(0.1) => {
                self.clients[at].op += 1;
                self.tell(at, ask(self.clients[at].op));
                self.enter(at);
                self.clients[at].state = State::Waiting;
            }
            State::Waiting => {
                let seat = self.line.iter().find(|seat| seat.client == at);
                if let Some(token) = seat.filter(|seat| seat.granted).map(|seat| seat.claim) {
                    self.tell(at, held(self.clients[at].op, token));
                    self.clients[at].state = State::Holding { token };
                }
            }
            State::Holding { token } => {
                if self.rng.random_bool(0.3) {
                    self.tell(at, valid(token));
                }
                if !go_on || self.rng.random_bool(0.1) {
                    self.tell(at, release(token));
                    self.line.retain(|seat| seat.claim != token);
                    self.tell(at, released(token, Released::Done));
                    self.clients[at].state = State::Idle;
                }
            }
            State::Zombie { token, until } if self.now >= until => {
                self.tell(at, release(token));
                self.tell(at, released(token, Released::Lost));
                self.clients[at].state = State::Idle;
            }
            _ => {}
        }
    }
}
