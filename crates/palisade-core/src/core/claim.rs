//! `Claim`: a request for a weighted place in a line.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use super::name::Name;
use super::owner::Owner;

/// The random 128-bit id of one claim. An enter that repeats an id concerns the same claim.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClaimId(pub u128);

impl ClaimId {
    /// A new random id.
    pub fn random() -> Self {
        Self(rand::random())
    }
}

impl fmt::Display for ClaimId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for ClaimId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for ClaimId {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        u128::from_str_radix(text, 16).map(Self)
    }
}

/// The capacity of a line of readers.
pub const READERS: u32 = u32::MAX;

/// How much of a line a claim takes. Only this weight tells a mutex, a reader and a permit apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Ask {
    /// The whole line, whatever its capacity: mutex, write lock, leadership.
    Whole,
    /// `weight` out of `capacity`: a reader (1 of [`READERS`]) or permits.
    Part {
        /// The weight: at least 1 and at most `capacity`.
        weight: u32,
        /// The capacity that the line must have.
        capacity: u32,
    },
}

impl Ask {
    /// A single reader.
    pub const READ: Self = Self::Part {
        weight: 1,
        capacity: READERS,
    };

    /// The mode that people see for this kind of claim.
    pub const fn mode(self) -> Mode {
        match self {
            Self::Whole => Mode::Exclusive,
            Self::Part {
                capacity: READERS, ..
            } => Mode::Shared,
            Self::Part { .. } => Mode::Permits,
        }
    }

    /// Weight and capacity as stores keep them: the whole line is 0 of 0.
    #[allow(dead_code, reason = "some engines need it")]
    pub const fn numbers(self) -> (u32, u32) {
        match self {
            Self::Whole => (0, 0),
            Self::Part { weight, capacity } => (weight, capacity),
        }
    }

    /// The weight in a line of `capacity`.
    pub const fn weight_in(self, capacity: u32) -> u32 {
        match self {
            Self::Whole => capacity,
            Self::Part { weight, .. } => weight,
        }
    }
}

/// How a claim takes part: alone, beside other readers, or with some of the permits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Nobody else holds.
    Exclusive,
    /// Other readers may hold too.
    Shared,
    /// Others may hold within the capacity.
    Permits,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Exclusive => "exclusive",
            Self::Shared => "shared",
            Self::Permits => "permits",
        })
    }
}

/// A request for a place in the line `name`.
#[derive(Debug, Clone)]
pub struct Claim {
    /// Its random id. Repeating an enter with the same id concerns the same claim.
    pub id: ClaimId,
    /// The line.
    pub name: Name,
    /// How much of the line it takes.
    pub ask: Ask,
    /// How long the place lasts without renewal.
    pub ttl: Duration,
    /// Whether it queues when it can't be held at once. A claim that does not queue leaves no trace
    /// when the line is busy.
    pub queue: bool,
    /// Who asks.
    pub owner: Owner,
    /// The value that an election candidate announces.
    pub value: Option<String>,
    /// Whether it is renewed while it holds. A claim that is not renewed ends with its ttl, so an
    /// engine with shared leases gives it a lease of its own (see
    /// [`Ticket::has_own_lease`](super::ticket::Ticket::has_own_lease)).
    pub renewed: bool,
    /// The least time that it is to be held. The hold ensures this while its process lives. Some
    /// engines keep the place for that time even if the process dies (ShedLock's table).
    pub at_least: Duration,
}
