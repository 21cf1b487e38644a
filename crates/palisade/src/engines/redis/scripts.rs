//! The scripts, one per verb. What they share (`line.lua`) is put before each; before that, for
//! enter and leave, what is done on a line with nobody else in it.

/// A script: which of [`SOURCES`] it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Script {
    Enter,
    Look,
    Renew,
    Amend,
    Leave,
    Survey,
    Evict,
}

macro_rules! source {
    ($file:literal) => {
        concat!(include_str!("lua/line.lua"), include_str!($file))
    };
    ($first:literal, $file:literal) => {
        concat!(include_str!($first), source!($file))
    };
}

/// In the order of [`Script`].
pub(super) const SOURCES: [&str; 7] = [
    source!("lua/enter_idle.lua", "lua/enter.lua"),
    source!("lua/look.lua"),
    source!("lua/renew.lua"),
    source!("lua/amend.lua"),
    source!("lua/leave_alone.lua", "lua/leave.lua"),
    source!("lua/survey.lua"),
    source!("lua/evict.lua"),
];

impl Script {
    /// What errors call it.
    pub(super) const fn operation(self) -> &'static str {
        match self {
            Self::Enter => "enter",
            Self::Look => "wait",
            Self::Renew => "renew",
            Self::Amend => "amend",
            Self::Leave => "leave",
            Self::Survey => "survey",
            Self::Evict => "evict",
        }
    }

    pub(super) const fn source(self) -> &'static str {
        SOURCES[self as usize]
    }
}
