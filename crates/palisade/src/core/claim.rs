//! `Claim`: an ask for a weighted place in a line.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use super::name::Name;
use super::owner::Owner;

/// The random 128-bit id of one claim. Asking again with the same id is the same claim.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClaimId(pub u128);

impl ClaimId {
    /// A fresh id.
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

/// How much of a line a claim takes. Weights, not kinds: this is all that tells a mutex, a reader
/// and a permit apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Ask {
    /// The whole line, whatever its capacity: mutex, write lock, leadership.
    Whole,
    /// `weight` out of `capacity`: a reader (1 of [`READERS`]) or permits.
    Part {
        /// How much it takes, at least 1 and at most `capacity`.
        weight: u32,
        /// The capacity that the line must have.
        capacity: u32,
    },
}

impl Ask {
    /// One reader.
    pub const READ: Self = Self::Part {
        weight: 1,
        capacity: READERS,
    };

    /// The name of this kind of ask, as people see it.
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
    pub(crate) const fn numbers(self) -> (u32, u32) {
        match self {
            Self::Whole => (0, 0),
            Self::Part { weight, capacity } => (weight, capacity),
        }
    }

    /// What it weighs in a line of `capacity`.
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
    /// Others may hold as far as the capacity goes.
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

/// An ask for a place in the line `name`.
#[derive(Debug, Clone)]
pub struct Claim {
    /// Its random id; the same id is the same claim.
    pub id: ClaimId,
    /// The line.
    pub name: Name,
    /// How much of the line.
    pub ask: Ask,
    /// How long the place lasts without renewal.
    pub ttl: Duration,
    /// Whether to take a place in the line when it can't be held at once. A claim that does not
    /// queue leaves no trace when the answer is busy.
    pub queue: bool,
    /// Who asks.
    pub owner: Owner,
    /// What an election candidate stands for.
    pub value: Option<String>,
    /// Whether it is renewed while it holds. One that is not ends with its ttl, so that an engine
    /// whose claims share leases gives it a lease of its own (see
    /// [`Ticket::has_own_lease`](super::ticket::Ticket::has_own_lease)).
    pub renewed: bool,
    /// How long it is to be held at the least. The hold's owner sees to that while it lives; an
    /// engine that can keeps the place as long though its owner dies (ShedLock's table).
    pub at_least: Duration,
}
