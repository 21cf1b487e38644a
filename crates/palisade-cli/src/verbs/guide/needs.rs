//! The needs that `guide` knows, each with its test of an engine's entry in the registry and what
//! that says about it. A need that the data can't decide has no place here.

use palisade::Guarantee;
use palisade::engine::{EngineInfo, Permits, Tokens};

/// Something that a lock is needed for.
#[derive(Debug)]
pub(super) struct Need {
    pub(super) word: &'static str,
    /// What it means, for the list.
    pub(super) means: &'static str,
    pub(super) fits: fn(&EngineInfo) -> bool,
    /// What the entry says about it, whether or not it fits.
    pub(super) why: fn(&EngineInfo) -> String,
}

impl Need {
    /// What an engine's entry says about it, with its name.
    pub(super) fn says(&self, info: &EngineInfo) -> String {
        format!("{}: {}", self.word, (self.why)(info))
    }
}

pub(super) const NEEDS: &[Need] = &[
    Need {
        word: "correctness",
        means: "data breaks if two are at it: fencing tokens that can't go back",
        fits: |info| {
            info.capability.class < Guarantee::Timed && info.capability.tokens != Tokens::None
        },
        why: |info| match (info.capability.class, info.capability.tokens) {
            (_, Tokens::None) => "it has no tokens".to_owned(),
            (Guarantee::Timed, _) => {
                "it is of class C, whose tokens and exclusion assume sane clocks and kept data"
                    .to_owned()
            }
            (class, _) => {
                format!("its tokens can't go back (class {class}); let the storage compare them")
            }
        },
    },
    Need {
        word: "efficiency",
        means: "doing the work twice costs time, not data",
        fits: |_| true,
        why: |_| "any engine will do".to_owned(),
    },
    Need {
        word: "election",
        means: "one leader, replaced when it fails",
        fits: |info| info.capability.early_loss,
        why: |info| {
            if info.capability.early_loss {
                "a leader is told before another is elected".to_owned()
            } else {
                "a leader is not told before another is elected".to_owned()
            }
        },
    },
    Need {
        word: "permits",
        means: "at most N at once",
        fits: |info| info.capability.permits != Permits::None,
        why: permits,
    },
    Need {
        word: "weighted-permits",
        means: "at most N at once, some of whom take several",
        fits: |info| info.capability.permits == Permits::Weighted,
        why: permits,
    },
    Need {
        word: "read-write",
        means: "many readers or one writer",
        fits: |info| info.capability.shared,
        why: |info| yes(info.capability.shared, "readers beside each other"),
    },
    Need {
        word: "fair",
        means: "first come, first served",
        fits: |info| info.capability.fair,
        why: |info| yes(info.capability.fair, "waiters served in their order"),
    },
    Need {
        word: "waiters",
        means: "see who waits",
        fits: |info| info.capability.waiters_visible,
        why: |info| yes(info.capability.waiters_visible, "waiters that can be seen"),
    },
    Need {
        word: "detached",
        means: "a lock that another process renews",
        fits: |info| info.capability.detached,
        why: |info| {
            yes(
                info.capability.detached,
                "holds that another process can renew",
            )
        },
    },
    Need {
        word: "one-machine",
        means: "nothing but this machine, no server",
        fits: |info| !has_hosts(info),
        why: reach,
    },
    Need {
        word: "many-machines",
        means: "the same lock on several machines",
        fits: has_hosts,
        why: reach,
    },
];

/// Whether it is reached over a network: its URL names hosts.
pub(super) fn has_hosts(info: &EngineInfo) -> bool {
    info.example.contains("://")
}

fn yes(it_has: bool, what: &str) -> String {
    if it_has {
        format!("it has {what}")
    } else {
        format!("it has no {what}")
    }
}

fn permits(info: &EngineInfo) -> String {
    match info.capability.permits {
        Permits::Weighted => "it counts permits of any weight".to_owned(),
        Permits::Slots => "it gives permits one by one".to_owned(),
        Permits::None => "it has no permits".to_owned(),
    }
}

fn reach(info: &EngineInfo) -> String {
    format!("it needs {}", info.needs)
}

/// All needs, one per line.
pub(super) fn list() -> String {
    let line = |need: &Need| format!("  {:<17} {}\n", need.word, need.means);
    NEEDS.iter().map(line).collect()
}
