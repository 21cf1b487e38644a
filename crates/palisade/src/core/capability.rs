//! `Capability`: what an engine can do, as data.
//!
//! Checked once before any I/O, printed by the command and the docs, and used by the conformance
//! suite to choose its trials.

use std::fmt;
use std::time::Duration;

use super::claim::Ask;
use super::error::{Error, ErrorKind, Result};

/// How far an engine's exclusion and tokens can be relied on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Guarantee {
    /// Class A: exclusion and tokens survive lost nodes and stepped clocks.
    Consensus,
    /// Class B, one durable node: tokens survive; exclusion assumes that the server's clock is
    /// not stepped.
    Durable,
    /// Class C: both assume sane clocks and kept data.
    Timed,
}

impl fmt::Display for Guarantee {
    /// The letter of the class.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Consensus => "A",
            Self::Durable => "B",
            Self::Timed => "C",
        })
    }
}

/// How an engine counts permits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Permits {
    /// Any weight up to the capacity.
    Weighted,
    /// One slot per claim.
    Slots,
    /// Not at all.
    None,
}

/// Where an engine's tokens come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Tokens {
    /// From the engine's own history: they never go back.
    Durable,
    /// A counter floored by the clock: they go back only if both are lost.
    Floored,
    /// There are none.
    None,
}

/// What ends a place whose process was killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EndsWith {
    /// The end of its lease: a promise that its process passed on holds until then.
    Lease,
    /// The death of its process, or of that process's connection: another may be granted at once.
    Process,
}

/// The times to live that an engine takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TtlRange {
    /// The shortest.
    pub min: Duration,
    /// The longest.
    pub max: Duration,
    /// Rounded up to a multiple of this.
    pub step: Duration,
}

/// What an engine can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Capability {
    /// How far it can be relied on.
    pub class: Guarantee,
    /// Readers beside each other.
    pub shared: bool,
    /// How it counts permits.
    pub permits: Permits,
    /// A line of permits can be given another capacity while it is in use.
    pub resize: bool,
    /// Waiters are served in the order in which they came.
    pub fair: bool,
    /// `survey` shows who waits.
    pub waiters_visible: bool,
    /// Where tokens come from.
    pub tokens: Tokens,
    /// A holder is told of the end of its lease before anyone else is granted.
    pub early_loss: bool,
    /// A hold can be renewed from another process.
    pub detached: bool,
    /// What ends a place whose process was killed.
    pub ends_with: EndsWith,
    /// The times to live it takes.
    pub ttl: TtlRange,
    /// A second claim on the same name by the same session is granted by nature.
    pub reentrant_session: bool,
    /// It has work queues beside its lines.
    pub queue: bool,
}

impl Capability {
    /// Everything that a line can be, on one durable node, and no work queues. An engine's own is
    /// this but for what it lacks: `let mut can = Capability::FULL; can.fair = false;`.
    pub const FULL: Self = Self {
        class: Guarantee::Durable,
        shared: true,
        permits: Permits::Weighted,
        resize: true,
        fair: true,
        waiters_visible: true,
        tokens: Tokens::Durable,
        early_loss: true,
        detached: true,
        ends_with: EndsWith::Lease,
        ttl: TtlRange {
            min: Duration::from_millis(100),
            max: Duration::from_secs(24 * 3600),
            step: Duration::from_millis(1),
        },
        reentrant_session: false,
        queue: false,
    };

    /// Refuses what the engine can't do, before any I/O.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] with the reason.
    pub fn allows(&self, ask: Ask) -> Result<()> {
        let refuse = |what| Err(Error::new(ErrorKind::Unsupported, "enter", what));
        match (ask, self.permits) {
            (Ask::READ, _) if !self.shared => refuse("this engine has no read lock"),
            (Ask::READ, _) | (Ask::Whole, _) => Ok(()),
            (_, Permits::None) => refuse("this engine has no permits"),
            (Ask::Part { weight: 2.., .. }, Permits::Slots) => {
                refuse("this engine gives permits one by one; ask for a weight of 1")
            }
            _ => Ok(()),
        }
    }

    /// Takes `ttl` as the engine will keep it: in range, rounded up to its step.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] with the range.
    pub fn explicit_ttl(&self, ttl: Duration) -> Result<Duration> {
        let TtlRange { min, max, step } = self.ttl;
        if ttl < min || ttl > max {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                "ttl",
                format!("the ttl must be between {min:?} and {max:?} on this engine, not {ttl:?}"),
            ));
        }
        let steps = ttl.as_nanos().div_ceil(step.as_nanos().max(1));
        Ok(step * u32::try_from(steps).unwrap_or(u32::MAX))
    }

    /// The default ttl, moved into the engine's range.
    pub fn default_ttl(&self) -> Duration {
        DEFAULT_TTL.clamp(self.ttl.min, self.ttl.max)
    }
}

/// Long enough that a slow renewal is no loss, short enough that a lost machine is replaced soon.
pub(crate) const DEFAULT_TTL: Duration = Duration::from_secs(30);
