//! Checkers: pure functions from a [`History`] to a [`Verdict`], one per invariant.
//!
//! Exclusion is judged by *inner* intervals (grant returned → release called, invalid or stopped),
//! so that delays in the callers are not blamed on the lock; progress is judged by *outer* ones. A
//! checker that can't decide says so, and that counts as a failure.

mod counter;
mod exclusion;
mod index;
mod leaks;
mod linear;
mod loss;
mod order;
mod outages;
mod progress;
mod register;
mod tokens;

pub use index::{Attempt, Held, Index, Window};
pub use linear::{Model, Outcome, Timed, linearize};
pub use outages::Resumption;
pub use progress::handovers;
pub use register::{Op as RegisterOp, Register};

use std::fmt;
use std::time::Duration;

use crate::lab::history::History;

macro_rules! invariants {
    ($($(#[$doc:meta])* $name:ident: $label:literal by $checker:path,)+) => {
        /// A property that every history must have.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Invariant {
            $($(#[$doc])* $name,)+
        }

        impl Invariant {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$name),+];

            /// Its number and name.
            pub const fn label(self) -> &'static str {
                match self {
                    $(Self::$name => $label,)+
                }
            }

            /// Judges a history.
            pub fn check(self, history: &History, params: &Params) -> Verdict {
                let checker: fn(&Index<'_>, &Params) -> Verdict = match self {
                    $(Self::$name => $checker,)+
                };
                match Index::new(history) {
                    Ok(index) => checker(&index, params),
                    Err(why) => Verdict::Undecided(why),
                }
            }
        }
    };
}

invariants! {
    /// I1: the storage never accepts a lower token after a higher one.
    FencedExclusion: "I1 fenced exclusion" by tokens::fenced,
    /// I2: two exclusive holders never both believe to hold.
    BelievedExclusion: "I2 believed exclusion" by exclusion::believed,
    /// I3: held weights fit into the capacity; a writer excludes readers.
    Capacity: "I3 capacity" by exclusion::capacity,
    /// I4: a later grant has a greater token.
    TokenOrder: "I4 token order" by tokens::order,
    /// I5: no acknowledged write is lost, none is invented.
    NoLostUpdate: "I5 no lost update" by counter::no_lost_update,
    /// I5: the fenced register is linearizable.
    Linearizable: "I5 linearizable" by register::linearizable,
    /// I6: a dead holder's claim is gone in time.
    BoundedLeak: "I6 bounded leak" by progress::bounded_leak,
    /// I7: every acquire ends by its deadline, every release wakes the next.
    Progress: "I7 progress" by progress::progress,
    /// I8: a fair engine grants in the order of its line.
    Fifo: "I8 first come, first served" by order::fifo,
    /// I9: a hold becomes invalid before another is granted.
    EarlyLoss: "I9 early loss" by loss::early,
    /// I10: a late release changes nothing for the next holder.
    NoForeignRelease: "I10 no foreign release" by loss::foreign_release,
    /// I11: an error hides no hold; one claim is granted once.
    HonestUnknown: "I11 honest unknown" by leaks::honest_unknown,
    /// I12: a dropped acquire leaves nothing behind.
    CancelSafety: "I12 cancel safety" by leaks::cancel_safety,
    /// I13: one leader per term, terms rise, and the old leader's work ends first.
    Election: "I13 election" by tokens::election,
    /// F4: no hold is lost without a reason.
    NoSpuriousLoss: "F4 no spurious loss" by loss::spurious,
}

impl Invariant {
    /// Whether it is a timing property, which a machine that stalls for a moment can violate. All
    /// others hold however slow the machine is.
    pub const fn is_about_time(self) -> bool {
        matches!(
            self,
            Self::BoundedLeak | Self::Progress | Self::NoSpuriousLoss
        )
    }
}

impl fmt::Display for Invariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.label())
    }
}

/// The times that the bounds are derived from.
#[derive(Debug, Clone)]
pub struct Params {
    /// How long a place lasts without renewal.
    pub ttl: Duration,
    /// How long the engine keeps a place without renewal; some engines exceed the ttl.
    pub lasts: Duration,
    /// How soon the engine notices a death; the end of the lease if it does not.
    pub death: Duration,
    /// What a busy machine may add to any bound.
    pub slack: Duration,
    /// How late the re-check of a waiter makes up for a lost notification.
    pub recheck: Duration,
    /// How long one request to the engine may take (the URL's `timeout`).
    pub request: Duration,
    /// How long a claim that does not queue may take to be answered busy.
    pub no_wait: Duration,
    /// Whether a server that was stopped may take away leases that are alive when it continues, so
    /// that no earlier signal is possible.
    pub takes_away: bool,
    /// How long the linearizability check may take; beyond that it is undecided.
    pub limit: Duration,
}

impl Params {
    /// Whether it is the engine's doing that `hold` was still believed in at `when`: a server
    /// continued just before, after a stop in which leases ended by its own count, and took the
    /// hold away. The fence must hold nevertheless.
    fn excuses(&self, index: &Index<'_>, hold: &Held<'_>, when: u64) -> bool {
        // A lease is renewed after a third of its ttl, so the rest is left when the stop begins.
        let rest = nanos(self.ttl) / 3 * 2;
        self.takes_away && index.had_resumed(when, rest) && index.was_taken(hold)
    }

    /// For leases that last up to `times` their ttl, and whose end is noticed `late` after that.
    #[must_use]
    pub fn lasting(self, times: u32, late: Duration) -> Self {
        let lasts = self.ttl * times + late;
        Self {
            lasts,
            death: if self.death == self.ttl {
                lasts
            } else {
                self.death
            },
            ..self
        }
    }

    /// The usual bounds for a ttl, on an engine that notices a death within `death`.
    pub fn new(ttl: Duration, death: Option<Duration>) -> Self {
        Self {
            ttl,
            lasts: ttl,
            death: death.unwrap_or(ttl),
            slack: Duration::from_millis(100),
            recheck: Duration::from_secs(1),
            request: Duration::from_secs(2),
            no_wait: Duration::ZERO,
            takes_away: false,
            limit: Duration::from_secs(60),
        }
    }
}

/// The result of a checker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The property holds.
    Ok,
    /// The property is violated, with the places.
    Violated(Vec<Violation>),
    /// This history does not allow a decision. Counts as a failure.
    Undecided(String),
}

impl Verdict {
    /// The verdict for a list of violations.
    pub(crate) fn of(violations: Vec<Violation>) -> Self {
        if violations.is_empty() {
            Self::Ok
        } else {
            Self::Violated(violations)
        }
    }

    /// Whether the property holds.
    pub fn is_ok(&self) -> bool {
        *self == Self::Ok
    }

    /// The violations.
    pub fn violations(&self) -> &[Violation] {
        match self {
            Self::Violated(violations) => violations,
            _ => &[],
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ok => f.pad("ok"),
            Self::Undecided(why) => write!(f, "UNDECIDED: {why}"),
            Self::Violated(violations) => {
                write!(f, "VIOLATED {} times", violations.len())?;
                let first = violations.first();
                first.map_or(Ok(()), |first| write!(f, ": {}", first.text))
            }
        }
    }
}

/// One violation, with the events that show it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// A description for people.
    pub text: String,
    /// Indexes into [`History::events`].
    pub events: Vec<usize>,
}

impl Violation {
    pub(crate) fn new(text: impl Into<String>, events: impl Into<Vec<usize>>) -> Self {
        Self {
            text: text.into(),
            events: events.into(),
        }
    }
}

/// Nanoseconds as milliseconds, for texts.
pub(crate) fn ms(nanos: u64) -> String {
    format!("{:.1} ms", nanos as f64 / 1e6)
}

pub(crate) fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
