//! The lease protocol, explored exhaustively within small bounds: every order of every step, with
//! messages delayed, lost and duplicated and clients paused anywhere.
//!
//! The protocol as it is keeps its promises. Each variant with one mistake must be found unsafe,
//! which proves that the search detects mistakes. The model is in `protocol.rs` (clients and
//! network) and `engine.rs` (engine and store).
#![allow(clippy::unwrap_used)]

mod engine;
mod protocol;

use protocol::{Action, Bounds, Phase, Variant, World};
use stateright::{Checker, HasDiscoveries, Model, Property};

struct Lease {
    variant: Variant,
    bounds: Bounds,
}

impl Model for Lease {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        vec![World::start(&self.bounds)]
    }

    fn actions(&self, world: &World, actions: &mut Vec<Action>) {
        world.actions(&self.bounds, actions);
    }

    fn next_state(&self, world: &World, action: Action) -> Option<World> {
        let mut next = world.clone();
        next.step(action, self.variant);
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(FENCED, |_, world: &World| !world.store.went_back),
            Property::always(EXCLUSION, |_, world: &World| {
                let all = 0..world.clients.len();
                all.filter(|client| world.believes(*client)).count() <= 1
            }),
            Property::always(TOKENS_RISE, |_, world: &World| !world.engine.fell_back),
            Property::always(EARLY_LOSS, |_, world: &World| {
                let mut all = 0..world.clients.len();
                all.all(|client| !world.believes(client) || world.holds(client))
            }),
            Property::always(OWN_ONLY, |_, world: &World| !world.engine.touched_another),
            // These states must be reached, so that no promise holds only because nothing happened.
            Property::sometimes(RENEWED, |_, world: &World| world.engine.renewed),
            Property::sometimes(SPARED, |_, world: &World| world.engine.spared_another),
            Property::sometimes(FENCED_OFF, |_, world: &World| world.store.refused),
            Property::sometimes(TOLD, |_, world: &World| {
                let told = |client: usize| {
                    matches!(world.clients[client].phase, Phase::Holding { .. })
                        && !world.believes(client)
                };
                let mut all = 0..world.clients.len();
                all.clone().any(told) && all.any(|client| world.believes(client))
            }),
        ]
    }
}

const FENCED: &str = "the store takes no write of an earlier grant after one of a later";
const EXCLUSION: &str = "no two clients believe that they hold";
const TOKENS_RISE: &str = "every grant counts more than all before";
const EARLY_LOSS: &str = "who believes to hold does hold: a loss is known before the next grant";
const OWN_ONLY: &str = "a leave or a renewal changes no other incarnation";
const PROMISES: [&str; 5] = [FENCED, EXCLUSION, TOKENS_RISE, EARLY_LOSS, OWN_ONLY];

const RENEWED: &str = "a holder is renewed";
const SPARED: &str = "a late leave spares the next holder";
const FENCED_OFF: &str = "a write is fenced off";
const TOLD: &str = "one holder is told and another is granted";

/// Two clients with one claim each; raising one bound at a time keeps the search small.
const SMALL: Bounds = Bounds {
    clients: 2,
    ticks: 4,
    claims: 1,
    asks: 1,
    renewals: 0,
    writes: 0,
    doubles: 0,
};

/// Explores everything within `bounds`; every promise must hold, and `seen` must happen.
fn keeps_its_promises(bounds: Bounds, seen: &[&'static str]) {
    let start = std::time::Instant::now();
    let variant = Variant::AsItIs;
    let checker = Lease { variant, bounds }
        .checker()
        .threads(2)
        .spawn_bfs()
        .join();
    println!(
        "{} states in {:?}: {bounds:?}",
        checker.unique_state_count(),
        start.elapsed()
    );
    for promise in PROMISES {
        checker.assert_no_discovery(promise);
    }
    for event in seen {
        checker.assert_any_discovery(event);
    }
}

#[test]
fn with_renewals_and_writes() {
    let bounds = Bounds {
        renewals: 1,
        writes: 1,
        ..SMALL
    };
    keeps_its_promises(bounds, &[RENEWED, SPARED, FENCED_OFF, TOLD]);
}

#[test]
fn with_requests_that_arrive_twice() {
    let bounds = Bounds {
        doubles: 1,
        ..SMALL
    };
    keeps_its_promises(bounds, &[SPARED, TOLD]);
    let bounds = Bounds {
        ticks: 2,
        renewals: 1,
        ..bounds
    };
    keeps_its_promises(bounds, &[RENEWED]);
}

#[test]
fn with_answers_that_are_given_up_and_asked_for_again() {
    let bounds = Bounds {
        ticks: 3,
        asks: 2,
        ..SMALL
    };
    keeps_its_promises(bounds, &[SPARED, TOLD]);
}

#[test]
fn with_a_second_claim_of_the_same_client() {
    let bounds = Bounds {
        ticks: 1,
        claims: 2,
        ..SMALL
    };
    keeps_its_promises(bounds, &[]);
}

#[test]
fn with_three_clients() {
    let bounds = Bounds {
        clients: 3,
        ticks: 3,
        ..SMALL
    };
    keeps_its_promises(bounds, &[SPARED, TOLD]);
}

/// Takes minutes, so it runs only with `PALISADE_TEST_FULL=1`.
#[test]
fn with_everything_at_once() {
    if std::env::var_os("PALISADE_TEST_FULL").is_some() {
        let second = Bounds { claims: 2, ..SMALL };
        keeps_its_promises(second, &[SPARED, TOLD]);
        let bounds = Bounds {
            renewals: 1,
            writes: 1,
            doubles: 1,
            ..SMALL
        };
        keeps_its_promises(bounds, &[RENEWED, SPARED, FENCED_OFF, TOLD]);
    }
}

/// A mistake in the protocol must be found to break this promise. Prints an example.
fn is_found_unsafe(variant: Variant, bounds: Bounds, promise: &'static str) {
    let checker = Lease { variant, bounds }
        .checker()
        .finish_when(HasDiscoveries::AllOf([promise].into()))
        .spawn_bfs()
        .join();
    let steps = checker.assert_any_discovery(promise).into_actions();
    println!("{variant:?} breaks: {promise}");
    for step in steps {
        println!("    {step:?}");
    }
}

/// A pause between `is_valid()` and the write: only the fence helps.
#[test]
fn without_a_fence_a_paused_holder_overwrites_the_next() {
    let bounds = Bounds { writes: 1, ..SMALL };
    is_found_unsafe(Variant::Unfenced, bounds, FENCED);
}

#[test]
fn a_deadline_that_counts_from_the_reply_outlives_the_lease() {
    is_found_unsafe(Variant::DeadlineFromReply, SMALL, EARLY_LOSS);
    is_found_unsafe(Variant::DeadlineFromReply, SMALL, EXCLUSION);
}

#[test]
fn a_grant_that_is_taken_unchecked_may_be_over() {
    is_found_unsafe(Variant::GrantUnchecked, SMALL, EARLY_LOSS);
    is_found_unsafe(Variant::GrantUnchecked, SMALL, EXCLUSION);
}

#[test]
fn a_leave_by_name_removes_the_next_holder() {
    is_found_unsafe(Variant::LeaveByName, SMALL, OWN_ONLY);
    is_found_unsafe(Variant::LeaveByName, SMALL, EARLY_LOSS);
}

#[test]
fn a_renewal_by_name_renews_the_next_holder() {
    let bounds = Bounds {
        renewals: 1,
        ..SMALL
    };
    is_found_unsafe(Variant::RenewByName, bounds, OWN_ONLY);
}

#[test]
fn an_answer_to_an_earlier_ask_is_not_the_answer_to_a_later_one() {
    let bounds = Bounds { asks: 2, ..SMALL };
    is_found_unsafe(Variant::StaleAnswer, bounds, EARLY_LOSS);
}

#[test]
fn a_counter_that_dies_with_its_line_repeats_tokens() {
    is_found_unsafe(Variant::CounterDiesWithLine, SMALL, TOKENS_RISE);
}
