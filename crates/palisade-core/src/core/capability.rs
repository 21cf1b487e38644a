//! `Capability`: what an engine can do, as data.
//!
//! It is checked once before any I/O, printed by the command and the docs, and used by the
//! conformance suite to select its cases.

use std::fmt;
use std::time::Duration;

use super::claim::Ask;
use super::duration::rounded;
use super::error::{Error, ErrorKind, Result};

/// How far an engine's exclusion and tokens can be relied on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Guarantee {
    /// Class A: exclusion and tokens survive the loss of nodes and stepped clocks.
    Consensus,
    /// Class B, one durable node: tokens survive. Exclusion assumes that the server's clock is not
    /// stepped.
    Durable,
    /// Class C: exclusion and tokens assume correct clocks and no loss of data.
    Timed,
}

impl fmt::Display for Guarantee {
    /// Writes the letter of the class.
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
    /// No permits.
    None,
}

/// Where an engine's tokens come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Tokens {
    /// From the engine's own history: they never decrease.
    Durable,
    /// From a counter with the clock as its lower bound: they decrease only if both are lost.
    Floored,
    /// No tokens.
    None,
}

/// What ends the place of a killed process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EndsWith {
    /// The end of its lease. Holds that it passed on to others are valid until then.
    Lease,
    /// The death of the process or of its connection. The next claim may be granted at once.
    Process,
}

/// The range of ttls that an engine accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TtlRange {
    /// The shortest ttl.
    pub min: Duration,
    /// The longest ttl.
    pub max: Duration,
    /// A ttl is rounded up to a multiple of this.
    pub step: Duration,
}

/// What an engine can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Capability {
    /// How far its exclusion and tokens can be relied on.
    pub class: Guarantee,
    /// Whether readers can hold beside each other.
    pub shared: bool,
    /// How it counts permits.
    pub permits: Permits,
    /// Whether the capacity of a line of permits can be changed while it is in use.
    pub resize: bool,
    /// Whether waiters are served in order of arrival.
    pub fair: bool,
    /// Whether `survey` shows waiters.
    pub waiters_visible: bool,
    /// Where its tokens come from.
    pub tokens: Tokens,
    /// Whether a holder learns of the end of its lease before another claim is granted.
    pub early_loss: bool,
    /// Whether a hold can be renewed from another process.
    pub detached: bool,
    /// What ends the place of a killed process.
    pub ends_with: EndsWith,
    /// The range of ttls that it accepts.
    pub ttl: TtlRange,
    /// Whether the engine itself grants a second claim of the same session on the same name.
    pub reentrant_session: bool,
    /// Whether it has work queues besides lines.
    pub queue: bool,
}

impl Capability {
    /// Everything that a line can offer, on one durable node, and no work queues. An engine starts
    /// from this and clears what it lacks: `let mut can = Capability::FULL; can.fair = false;`.
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

    /// Returns `ttl` as the engine will keep it: checked against its range, rounded up to its step.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] with the range.
    pub fn explicit_ttl(&self, ttl: Duration) -> Result<Duration> {
        let TtlRange { min, max, step } = self.ttl;
        if ttl < min || ttl > max {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                "ttl",
                format!(
                    "the ttl must be between {} and {} on this engine, not {}",
                    rounded(min),
                    rounded(max),
                    rounded(ttl)
                ),
            ));
        }
        let steps = ttl.as_nanos().div_ceil(step.as_nanos().max(1));
        Ok(step * u32::try_from(steps).unwrap_or(u32::MAX))
    }

    /// The default ttl, clamped to the engine's range.
    pub fn default_ttl(&self) -> Duration {
        DEFAULT_TTL.clamp(self.ttl.min, self.ttl.max)
    }
}

/// Long enough that one slow renewal loses nothing, short enough that a dead machine is replaced
/// soon.
pub const DEFAULT_TTL: Duration = Duration::from_secs(30);
