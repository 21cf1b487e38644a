//! The conformance suite: what every engine promises, as cases that can fail.
//!
//! A case is named `group/what_is_true`. The groups named after a verb of the engine trait carry,
//! word for word, the `# Behavior` line that they test; the others say their own. What an engine
//! can't do is `n/a` with the reason, and then its refusal is tested instead: `unsupported`,
//! before any request is made.

mod bed;
mod failure;
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
mod processes_faults;
mod renew;
mod resize;
mod rwlock;
mod semaphore;
mod survey;
mod wait;

use std::fmt;

use futures_util::future::LocalBoxFuture;
use palisade::core::capability::Capability;
use palisade::core::claim::Ask;

pub use bed::{Bed, SOON, within};
pub use failure::{Check, Failure};
pub use needs::Need;

/// One behaviour, as a test.
#[derive(Clone, Copy)]
pub struct Case {
    /// `group/what_is_true`.
    pub name: &'static str,
    /// The promise that it tests, in a sentence.
    pub behavior: &'static str,
    /// Whether the engine can be asked for it.
    pub needs: fn(&Bed) -> Need,
    /// Tries it.
    pub run: fn(Bed) -> LocalBoxFuture<'static, Check>,
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
    /// The engine behaves so.
    Ok,
    /// It does not.
    Failed(String),
    /// It can't be asked for it, for this reason, and says so itself.
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
        processes_faults::CASES,
    ]
    .concat()
}

/// The verbs whose `# Behavior` lines the cases of the group of that name repeat.
pub const VERBS: &[&str] = &[
    "enter", "wait", "renew", "amend", "leave", "survey", "evict", "resize",
];

/// Runs one case on its bed.
pub async fn run(case: &Case, bed: Bed) -> Verdict {
    let check = match (case.needs)(&bed) {
        Need::Met => (case.run)(bed).await,
        Need::Missing { reason, refused } => {
            let refusal = match refused {
                None => Ok(()),
                Some(ask) => client::is_refused(&bed, ask).await,
            };
            refusal.and_then(|()| Err(Failure::not_applicable(reason)))
        }
    };
    match check {
        Ok(()) => Verdict::Ok,
        Err(failure) => failure.verdict(),
    }
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
    (@run $case:ident []) => { |bed| Box::pin($case(bed)) };
    (@run $case:ident [$with:expr]) => { |bed| Box::pin($case(bed, $with)) };
}
pub(crate) use cases;

/// The engine's capability as the suite sees it, for reports.
pub fn summary(capability: &Capability) -> String {
    format!(
        "class {}, permits {:?}, tokens {:?}{}{}{}{}",
        capability.class,
        capability.permits,
        capability.tokens,
        if capability.shared { ", shared" } else { "" },
        if capability.resize { ", resize" } else { "" },
        if capability.fair { ", fair" } else { "" },
        if capability.detached {
            ", detached"
        } else {
            ""
        },
    )
}

/// Permits: `weight` of `capacity`.
pub(crate) const fn permits(weight: u32, capacity: u32) -> Ask {
    Ask::Part { weight, capacity }
}
