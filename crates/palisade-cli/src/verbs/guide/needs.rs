//! The needs that `guide` knows. Each has a test of an engine's entry in the registry, and a text
//! about the result. A need that this data can't decide does not belong here.

use palisade::Guarantee;
use palisade::engine::{EngineInfo, Permits, Tokens};

/// Something that a lock is needed for.
#[derive(Debug)]
pub(super) struct Need {
    pub(super) word: &'static str,
    /// A description, for the list.
    pub(super) means: &'static str,
    pub(super) fits: fn(&EngineInfo) -> bool,
    /// How the entry meets or misses the need.
    pub(super) why: fn(&EngineInfo) -> String,
}

impl Need {
    /// `why` with the word of the need in front.
    pub(super) fn says(&self, info: &EngineInfo) -> String {
        let decided_behind = is_gateway(info) && ["correctness", "election"].contains(&self.word);
        let why = if decided_behind {
            "the engine behind it decides (palisade doctor --url URL shows it)".to_owned()
        } else {
            (self.why)(info)
        };
        format!("{}: {why}", self.word)
    }
}

pub(super) const NEEDS: &[Need] = &[
    Need {
        word: "correctness",
        means: "two holders at once would damage data: fencing tokens that can't go back",
        fits: |info| {
            info.capability.class < Guarantee::Timed && info.capability.tokens != Tokens::None
        },
        why: |info| match (info.capability.class, info.capability.tokens) {
            (_, Tokens::None) => "it has no tokens".to_owned(),
            (Guarantee::Timed, _) => {
                "it is of class C: exclusion and tokens assume correct clocks and no data loss; \
                 only a fence refuses a late writer, in storage that compares the tokens \
                 (docs/fences.md)"
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
                "a leader learns of its loss before another is elected".to_owned()
            } else {
                "a leader may learn of its loss after another is elected".to_owned()
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
        why: |info| yes(info.capability.shared, "concurrent readers"),
    },
    Need {
        word: "fair",
        means: "first come, first served",
        fits: |info| info.capability.fair,
        why: |info| yes(info.capability.fair, "fair ordering of waiters"),
    },
    Need {
        word: "waiters",
        means: "see who waits",
        fits: |info| info.capability.waiters_visible,
        why: |info| yes(info.capability.waiters_visible, "visible waiters"),
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
        means: "this machine only, without a server",
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

/// Whether it only passes on what another engine does: the registry has the least that it can do.
pub(super) fn is_gateway(info: &EngineInfo) -> bool {
    info.schemes.contains(&"http")
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
