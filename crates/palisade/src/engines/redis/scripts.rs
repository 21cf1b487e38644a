//! The scripts, one per verb, each on one line. What they share is put before each; before that,
//! for what is asked for most, the simple case.

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
    Resize,
}

macro_rules! source {
    ($($file:literal),*) => {
        concat!(include_str!("lua/head.lua"), $(include_str!(concat!("lua/", $file, ".lua"))),*)
    };
}

/// In the order of [`Script`].
pub(super) const SOURCES: [&str; 8] = [
    source!("enter_free", "line", "enter"),
    source!("line", "look"),
    source!("renew_whole", "line", "renew"),
    source!("line", "amend"),
    source!("leave_free", "line", "leave"),
    source!("line", "survey"),
    source!("line", "evict"),
    source!("line", "resize"),
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
            Self::Resize => "resize",
        }
    }

    pub(super) const fn source(self) -> &'static str {
        SOURCES[self as usize]
    }
}
