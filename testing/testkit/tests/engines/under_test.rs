//! The engine under test: applies each operation, compares the answer, then the survey.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use palisade::engine::{
    Amendment, Claim, ClaimId, Engine, Entered, Lease, Left, Place, Renewal, SharedEngine, Ticket,
};
use palisade::report::{LineReport, Owner, Scope};
use palisade::{Client, ErrorKind, Eviction, Name};
use palisade_testkit::engine::{Site, named};
use palisade_testkit::lab::engines::ENGINES;
use palisade_testkit::model::Entry;
use proptest_state_machine::StateMachineTest;
use tokio::runtime::Runtime;

use super::reference::{Answer, Lines, NAMES, State, Verb};

pub(crate) struct Memory;
pub(crate) struct File;

/// One engine, with what is known of its claims and sequences.
pub(crate) struct UnderTest {
    runtime: Runtime,
    client: Client,
    /// The ids of this run are above this.
    base: u128,
    tickets: HashMap<u32, Ticket>,
    greatest: [u64; 3],
    _site: Site,
}

impl UnderTest {
    fn new(site: Site) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let url = site.fresh_url();
        let client = runtime.block_on(palisade::connect(&url)).unwrap();
        Self {
            runtime,
            client,
            base: u128::from(rand::random::<u64>()) << 64,
            tickets: HashMap::new(),
            greatest: [0; 3],
            _site: site,
        }
    }

    fn id(&self, id: u32) -> ClaimId {
        ClaimId(self.base + u128::from(id) + 1)
    }

    fn claim(&self, state: &State, id: u32) -> Arc<Claim> {
        let known = &state.claims[id as usize];
        Arc::new(Claim {
            id: self.id(id),
            name: Name::new(NAMES[known.name]).unwrap(),
            ask: known.ask,
            ttl: Duration::from_secs(3600),
            queue: known.queue,
            owner: Owner::here("model", None),
            value: None,
            renewed: true,
            at_least: Duration::ZERO,
        })
    }

    /// The ticket as its client would know it; without a sequence for a claim that never got one.
    fn ticket(&self, state: &State, id: u32) -> Ticket {
        let name = Name::new(NAMES[state.claims[id as usize].name]).unwrap();
        let own = Ticket::own(name, self.id(id));
        self.tickets.get(&id).cloned().unwrap_or(own)
    }

    fn other_incarnation(&self, state: &State, id: u32) -> Ticket {
        let mut ticket = self.ticket(state, id);
        ticket.sequence += 1;
        ticket
    }

    async fn enter(&mut self, engine: &SharedEngine, state: &State, id: u32) -> Answer {
        Answer::Entered(match engine.enter(self.claim(state, id)).await {
            Ok(Entered::Busy) => Entry::Busy,
            Ok(Entered::In { ticket, place, .. }) => {
                self.tickets.insert(id, ticket);
                match place {
                    Place::Held { .. } => Entry::Held,
                    Place::Waiting => Entry::Waiting,
                    Place::Gone => panic!("entered and gone"),
                }
            }
            Err(error) if error.kind() == ErrorKind::CapacityMismatch => Entry::Mismatch,
            Err(error) => panic!("{error:?}"),
        })
    }

    async fn answer(&mut self, engine: &SharedEngine, state: &State, verb: &Verb) -> Answer {
        let renew = async |ticket: Ticket| {
            let lease = Lease::in_a_test(&ticket);
            match engine
                .renew(vec![lease], Duration::from_secs(2))
                .await
                .remove(0)
            {
                Renewal::Held(_) => Answer::Renewed,
                Renewal::Lost | Renewal::Revoked(_) => Answer::Lost,
                Renewal::Evicted => Answer::Evicted,
                Renewal::Unknown(error) => panic!("{error:?}"),
            }
        };
        let leave =
            async |ticket: Ticket| Answer::Found(engine.leave(ticket).await.unwrap() == Left::Done);
        let evict = async |ticket: Ticket, eviction: Eviction| {
            let id = ticket.claim.to_string();
            Answer::Found(engine.evict(ticket.name, id, eviction).await.unwrap())
        };
        match verb {
            Verb::Enter { .. } => {
                self.enter(engine, state, state.claims.len() as u32 - 1)
                    .await
            }
            Verb::EnterAgain(id) => self.enter(engine, state, *id).await,
            Verb::Leave(id) => leave(self.ticket(state, *id)).await,
            Verb::LeaveAnother(id) => leave(self.other_incarnation(state, *id)).await,
            Verb::LeaveUnknown { name } => {
                let name = Name::new(NAMES[*name]).unwrap();
                leave(Ticket::own(name, ClaimId::random())).await
            }
            Verb::Renew(id) => renew(self.ticket(state, *id)).await,
            Verb::RenewAnother(id) => renew(self.other_incarnation(state, *id)).await,
            Verb::Say(id, value) => {
                let amendment = Amendment::Value(value.clone());
                let ticket = self.ticket(state, *id);
                Answer::Amended(engine.amend(ticket, amendment).await.unwrap())
            }
            Verb::Reweigh(id, ask) => {
                let ticket = self.ticket(state, *id);
                Answer::Amended(engine.amend(ticket, Amendment::Ask(*ask)).await.unwrap())
            }
            Verb::Mark(id) => evict(self.ticket(state, *id), Eviction::Mark).await,
            Verb::Remove(id) => evict(self.ticket(state, *id), Eviction::Remove).await,
            Verb::Resize { name, capacity } => {
                let name = Name::new(NAMES[*name]).unwrap();
                Answer::Resized(engine.resize(name, *capacity).await.ok())
            }
        }
    }

    /// The survey equals the model; held claims keep their sequences, and new ones are greater than
    /// all earlier ones of that name.
    fn compare(&mut self, state: &State, lines: &[LineReport]) {
        let shown = lines.iter().map(|line| line.name.as_str());
        let mut expected: Vec<&str> = Vec::new();
        for (index, bench) in state.lines.iter().enumerate() {
            if !bench.0.is_empty() {
                expected.push(NAMES[index]);
            }
        }
        let mut shown: Vec<&str> = shown.collect();
        shown.sort_unstable();
        expected.sort_unstable();
        assert_eq!(shown, expected, "the lines that are not empty");
        for (index, bench) in state.lines.iter().enumerate() {
            let Some(line) = lines.iter().find(|line| line.name == NAMES[index]) else {
                continue;
            };
            let all = line.holders.iter().chain(&line.waiters);
            let seen: Vec<_> = all
                .map(|c| {
                    (
                        c.id.clone(),
                        c.ask,
                        c.sequence.is_some(),
                        c.value.clone(),
                        c.evicted,
                    )
                })
                .collect();
            let model: Vec<_> = bench
                .0
                .iter()
                .map(|s| {
                    (
                        self.id(s.id).to_string(),
                        s.ask,
                        s.held,
                        s.value.clone(),
                        s.evicted,
                    )
                })
                .collect();
            assert_eq!(seen, model, "the line {:?}", NAMES[index]);
            assert!(
                line.holders.iter().all(|holder| holder.sequence.is_some()),
                "{line:?}"
            );
            assert_eq!(
                line.capacity,
                palisade_testkit::model::capacity(
                    &bench.0.iter().map(|s| s.ask).collect::<Vec<_>>()
                ),
                "the capacity of {line:?}"
            );
            let mut greatest = self.greatest[index];
            for (sitter, holder) in bench.0.iter().zip(&line.holders) {
                let sequence = holder.sequence.unwrap();
                let Some(ticket) = self.tickets.get_mut(&sitter.id) else {
                    panic!("no ticket")
                };
                if ticket.sequence != 0 && ticket.sequence <= self.greatest[index] {
                    assert_eq!(ticket.sequence, sequence, "a count changed");
                } else {
                    assert!(sequence > greatest, "count {sequence} after {greatest}");
                    greatest = sequence;
                }
                ticket.sequence = sequence;
            }
            self.greatest[index] = greatest;
        }
    }

    fn step(mut self, state: &State, verb: &Verb) -> Self {
        let engine = Arc::clone(self.client.engine());
        let runtime = std::mem::replace(&mut self.runtime, idle());
        let lines = runtime.block_on(async {
            let answer = self.answer(&engine, state, verb).await;
            assert_eq!(Some(answer), state.answer, "the answer to {verb:?}");
            engine.survey(Scope::Prefix(String::new())).await.unwrap()
        });
        self.runtime = runtime;
        self.compare(state, &lines);
        self
    }
}

fn idle() -> Runtime {
    tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap()
}

fn site(name: &str) -> Site {
    (named(ENGINES, name).unwrap().start)().unwrap()
}

impl StateMachineTest for Memory {
    type SystemUnderTest = UnderTest;
    type Reference = Lines<true>;

    fn init_test(_: &State) -> UnderTest {
        UnderTest::new(site("memory"))
    }

    fn apply(under_test: UnderTest, state: &State, verb: Verb) -> UnderTest {
        under_test.step(state, &verb)
    }
}

impl StateMachineTest for File {
    type SystemUnderTest = UnderTest;
    type Reference = Lines<false>;

    fn init_test(_: &State) -> UnderTest {
        UnderTest::new(site("file"))
    }

    fn apply(under_test: UnderTest, state: &State, verb: Verb) -> UnderTest {
        under_test.step(state, &verb)
    }
}
