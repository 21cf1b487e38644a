//! The conformance suite: what every engine promises, as cases that can fail.
//!
//! A case is named `group/what_is_true`. The groups named after a method of the engine trait
//! repeat, word for word, the `# Behavior` line that they test; the others have their own text. If
//! an engine can't do something, the case is `n/a` with the reason, and its refusal is tested
//! instead: `unsupported`, before any request is made.

#![allow(clippy::unwrap_used)] // A panic is how a case fails.

mod fixture;
mod needs;

mod amend;
mod client;
mod composed;
mod election;
mod enter;
mod evict;
mod hold;
mod keeper;
mod leave;
mod mutex;
mod outage;
mod processes;
mod renew;
mod resize;
mod rwlock;
mod semaphore;
mod survey;
mod wait;

use std::cell::{Cell, RefCell};
use std::fmt;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;
use std::task::Poll;

use futures_util::future::LocalBoxFuture;
use palisade::engine::Ask;

pub(crate) use fixture::Notes;
pub use fixture::{Fixture, SOON, soon, within};
pub use needs::Need;

/// One behaviour, as a test.
#[derive(Clone, Copy)]
pub struct Case {
    /// `group/what_is_true`.
    pub name: &'static str,
    /// The promise that it tests, in a sentence.
    pub behavior: &'static str,
    /// Whether the case applies to the engine.
    pub needs: fn(&Fixture) -> Need,
    /// Runs the case.
    pub run: fn(Fixture) -> LocalBoxFuture<'static, ()>,
}

impl Case {
    /// The part of the name before the slash.
    pub fn group(&self) -> &'static str {
        self.name.split('/').next().unwrap_or(self.name)
    }
}

impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// How a case ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The engine behaves as promised.
    Ok,
    /// The engine does not behave as promised.
    Failed(String),
    /// The case does not apply, for this reason, and the engine refuses properly.
    NotApplicable(String),
}

/// All cases, in the order of the table.
pub fn all() -> Vec<Case> {
    [
        enter::CASES,
        wait::CASES,
        renew::CASES,
        amend::CASES,
        leave::CASES,
        survey::CASES,
        survey::MORE,
        evict::CASES,
        resize::CASES,
        mutex::MUTEX,
        mutex::ORDER,
        mutex::DRAINED_SEMAPHORE,
        mutex::WRITE_LOCK,
        rwlock::CASES,
        semaphore::CASES,
        election::CASES,
        composed::CASES,
        hold::CASES,
        keeper::CASES,
        client::CASES,
        outage::CASES,
        processes::CASES,
        processes::FAULTS,
    ]
    .concat()
}

/// The methods whose `# Behavior` lines are repeated by the cases of the group of the same name.
pub const VERBS: &[&str] = &[
    "enter", "wait", "renew", "amend", "leave", "survey", "evict", "resize",
];

/// The case of that name.
pub fn named(name: &str) -> Option<Case> {
    all().into_iter().find(|case| case.name == name)
}

/// Runs one case.
pub(crate) async fn run(case: &Case, fixture: Fixture) -> Verdict {
    caught(async move {
        match (case.needs)(&fixture) {
            Need::Met => (case.run)(fixture).await,
            Need::Missing { reason, refused } => {
                if let Some(ask) = refused {
                    client::is_refused(&fixture, ask).await;
                }
                NotApplicable::because(reason);
            }
        }
    })
    .await
}

/// The panic payload of a case that turns out not to apply.
struct NotApplicable(String);

impl NotApplicable {
    fn because(reason: impl Into<String>) -> ! {
        panic::panic_any(Self(reason.into()))
    }
}

thread_local! {
    /// Whether this thread is polling a case, so that a panic is a verdict.
    static IN_CASE: Cell<bool> = const { Cell::new(false) };
    /// The message and location of the panic.
    static WHY: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Runs a case to its end or its panic; the panic message is stored instead of printed.
async fn caught(case: impl Future<Output = ()>) -> Verdict {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let usual = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if IN_CASE.get() {
                WHY.set(info.to_string().replacen("panicked at ", "", 1))
            } else {
                usual(info)
            }
        }));
    });
    let mut case = std::pin::pin!(case);
    std::future::poll_fn(|context| {
        IN_CASE.set(true);
        let polled = panic::catch_unwind(AssertUnwindSafe(|| case.as_mut().poll(context)));
        IN_CASE.set(false);
        match polled {
            Ok(Poll::Pending) => Poll::Pending,
            Ok(Poll::Ready(())) => Poll::Ready(Verdict::Ok),
            Err(payload) => Poll::Ready(match payload.downcast::<NotApplicable>() {
                Ok(not) => Verdict::NotApplicable(not.0),
                Err(_) => Verdict::Failed(WHY.take()),
            }),
        }
    })
    .await
}

/// The cases of one group: `"behaviour" => [case if need, …]`.
macro_rules! cases {
    ($visibility:vis $list:ident, $group:literal; $($rest:tt)+) => {
        cases! { @list [] $visibility $list, $group; $($rest)+ }
    };
    ($visibility:vis $list:ident, $group:literal with $with:expr; $($rest:tt)+) => {
        cases! { @list [$with] $visibility $list, $group; $($rest)+ }
    };
    (@list $with:tt $visibility:vis $list:ident, $group:literal;
     $($behavior:literal => [$($case:ident $(if $need:path)?),+ $(,)?]),+ $(,)?) => {
        $visibility const $list: &[$crate::conformance::Case] = &[$($(
            $crate::conformance::Case {
                name: concat!($group, "/", stringify!($case)),
                behavior: $behavior,
                needs: cases!(@need $($need)?),
                run: cases!(@run $case $with),
            },
        )+)+];
    };
    (@need) => { |_| $crate::conformance::Need::Met };
    (@need $need:path) => { $need };
    (@run $case:ident []) => { |fixture| Box::pin($case(fixture)) };
    (@run $case:ident [$with:expr]) => { |fixture| Box::pin($case(fixture, $with)) };
}
pub(crate) use cases;

/// Permits: `weight` of `capacity`.
pub(crate) const fn permits(weight: u32, capacity: u32) -> Ask {
    Ask::Part { weight, capacity }
}
