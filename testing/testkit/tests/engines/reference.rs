//! The reference: a few lines of the model, and the operations on them.

use palisade::engine::{Amended, Ask};
use palisade_testkit::model::{Bench, Entry};
use proptest::prelude::*;
use proptest::sample::Index;
use proptest_state_machine::ReferenceStateMachine;

/// Names that are easy to confuse.
pub(crate) const NAMES: [&str; 3] = ["a", "a/b", "A"];

/// An operation. `usize` is the index of the name, `u32` the claim.
#[derive(Debug, Clone)]
pub(crate) enum Verb {
    Enter { name: usize, ask: Ask, queue: bool },
    EnterAgain(u32),
    Leave(u32),
    LeaveAnother(u32),
    LeaveUnknown { name: usize },
    Renew(u32),
    RenewAnother(u32),
    Say(u32, String),
    Reweigh(u32, Ask),
    Mark(u32),
    Remove(u32),
    Resize { name: usize, capacity: u32 },
}

/// The expected answer to the last operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    Entered(Entry),
    /// Whether the claim was found.
    Found(bool),
    Amended(Amended),
    Renewed,
    Evicted,
    Lost,
    /// Whether there were permits; `None` if it is refused.
    Resized(Option<bool>),
}

/// A claim that has entered, with its line.
#[derive(Debug, Clone)]
pub(crate) struct Known {
    pub(crate) name: usize,
    pub(crate) ask: Ask,
    pub(crate) queue: bool,
}

#[derive(Debug, Clone)]
pub(crate) struct State {
    pub(crate) lines: [Bench; 3],
    /// All claims so far, by their id.
    pub(crate) claims: Vec<Known>,
    pub(crate) answer: Option<Answer>,
}

impl State {
    fn bench(&mut self, id: u32) -> &mut Bench {
        &mut self.lines[self.claims[id as usize].name]
    }

    fn is_in(&self, id: u32) -> bool {
        let claim = &self.claims[id as usize];
        self.lines[claim.name].get(id).is_some()
    }

    fn is_held(&self, id: u32) -> bool {
        let claim = &self.claims[id as usize];
        self.lines[claim.name]
            .get(id)
            .is_some_and(|sitter| sitter.held)
    }
}

/// `RESIZE`: whether the engine supports it.
pub(crate) struct Lines<const RESIZE: bool>;

fn ask() -> impl Strategy<Value = Ask> {
    let part = |weight, capacity| Ask::Part { weight, capacity };
    prop_oneof![
        3 => Just(Ask::Whole),
        3 => Just(Ask::READ),
        4 => (1..=3u32).prop_map(move |weight| part(weight, 3)),
        1 => Just(part(1, 2)),
    ]
}

impl<const RESIZE: bool> ReferenceStateMachine for Lines<RESIZE> {
    type State = State;
    type Transition = Verb;

    fn init_state() -> BoxedStrategy<State> {
        Just(State {
            lines: Default::default(),
            claims: Vec::new(),
            answer: None,
        })
        .boxed()
    }

    fn transitions(state: &State) -> BoxedStrategy<Verb> {
        let name = 0..NAMES.len();
        let enter = (name.clone(), ask(), any::<bool>())
            .prop_map(|(name, ask, queue)| Verb::Enter { name, ask, queue });
        let Some(last) = state.claims.len().checked_sub(1) else {
            return enter.boxed();
        };
        // Any claim, but more often a recent one, which is more likely to be still in its line.
        let claim = any::<Index>().prop_map(move |index| {
            let recent = last.saturating_sub(8);
            (recent + index.index(last - recent + 1)) as u32
        });
        prop_oneof![
            8 => enter,
            2 => claim.clone().prop_map(Verb::EnterAgain),
            5 => claim.clone().prop_map(Verb::Leave),
            1 => claim.clone().prop_map(Verb::LeaveAnother),
            1 => name.clone().prop_map(|name| Verb::LeaveUnknown { name }),
            1 => (name, 1..=4u32)
                .prop_map(|(name, capacity)| Verb::Resize { name, capacity }),
            2 => claim.clone().prop_map(Verb::Renew),
            1 => claim.clone().prop_map(Verb::RenewAnother),
            2 => (claim.clone(), "[a-z ü]{0,8}").prop_map(|(id, value)| Verb::Say(id, value)),
            3 => (claim.clone(), ask()).prop_map(|(id, ask)| Verb::Reweigh(id, ask)),
            1 => claim.clone().prop_map(Verb::Mark),
            1 => claim.prop_map(Verb::Remove),
        ]
        .boxed()
    }

    fn preconditions(state: &State, verb: &Verb) -> bool {
        let known = |id: &u32| (*id as usize) < state.claims.len();
        match verb {
            Verb::Enter { .. } | Verb::LeaveUnknown { .. } => true,
            Verb::Resize { .. } => RESIZE,
            // Entering a claim again after it left would reuse its id, which nobody does.
            Verb::EnterAgain(id) => known(id) && state.is_in(*id),
            // Only a known sequence can differ from another.
            Verb::LeaveAnother(id) | Verb::RenewAnother(id) => known(id) && state.is_held(*id),
            // The weight of a waiting claim is never changed.
            Verb::Reweigh(id, _) => known(id) && (state.is_held(*id) || !state.is_in(*id)),
            Verb::Leave(id)
            | Verb::Renew(id)
            | Verb::Say(id, _)
            | Verb::Mark(id)
            | Verb::Remove(id) => known(id),
        }
    }

    fn apply(mut state: State, verb: &Verb) -> State {
        let answer = match verb {
            Verb::Enter { name, ask, queue } => {
                let id = state.claims.len() as u32;
                state.claims.push(Known {
                    name: *name,
                    ask: *ask,
                    queue: *queue,
                });
                Answer::Entered(state.lines[*name].enter(id, *ask, *queue, (0, u64::MAX)))
            }
            Verb::EnterAgain(id) => Answer::Entered(if state.is_held(*id) {
                Entry::Held
            } else {
                Entry::Waiting
            }),
            Verb::Leave(id) => Answer::Found(state.bench(*id).leave(*id)),
            Verb::LeaveAnother(_) | Verb::LeaveUnknown { .. } => Answer::Found(false),
            Verb::Renew(id) => match state.bench(*id).get(*id) {
                None => Answer::Lost,
                Some(sitter) if sitter.evicted => Answer::Evicted,
                Some(_) => Answer::Renewed,
            },
            Verb::RenewAnother(_) => Answer::Lost,
            Verb::Say(id, value) => match state.bench(*id).get_mut(*id) {
                None => Answer::Amended(Amended::Gone),
                Some(sitter) => {
                    sitter.value = Some(value.clone());
                    Answer::Amended(Amended::Done)
                }
            },
            Verb::Reweigh(id, ask) => Answer::Amended(state.bench(*id).reweigh(*id, *ask)),
            Verb::Mark(id) => match state.bench(*id).get_mut(*id) {
                None => Answer::Found(false),
                Some(sitter) => {
                    sitter.evicted = true;
                    Answer::Found(true)
                }
            },
            Verb::Remove(id) => Answer::Found(state.bench(*id).leave(*id)),
            Verb::Resize { name, capacity } => {
                Answer::Resized(state.lines[*name].resize(*capacity))
            }
        };
        state.answer = Some(answer);
        state
    }
}
