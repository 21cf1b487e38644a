//! The needs that `guide` knows, each with its test of an engine's card and what the card says
//! about it. A need that the data can't decide has no place here.

use palisade::{Card, Class, Permits, Tokens};

/// Something that a lock is needed for.
#[derive(Debug)]
pub(super) struct Need {
    pub(super) word: &'static str,
    /// What it means, for the list.
    pub(super) means: &'static str,
    pub(super) fits: fn(&Card) -> bool,
    /// What the card says about it, whether or not it fits.
    pub(super) why: fn(&Card) -> String,
}

impl Need {
    /// What a card says about it, with its name.
    pub(super) fn says(&self, card: &Card) -> String {
        format!("{}: {}", self.word, (self.why)(card))
    }
}

pub(super) const NEEDS: &[Need] = &[
    Need {
        word: "correctness",
        means: "data breaks if two are at it: fencing tokens that can't go back",
        fits: |card| card.capability.class < Class::C && card.capability.tokens != Tokens::None,
        why: |card| match (card.capability.class, card.capability.tokens) {
            (_, Tokens::None) => "it has no tokens".to_owned(),
            (Class::C, _) => {
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
        fits: |card| card.capability.early_loss,
        why: |card| match card.capability.early_loss {
            true => "a leader is told before another is elected".to_owned(),
            false => "a leader is not told before another is elected".to_owned(),
        },
    },
    Need {
        word: "permits",
        means: "at most N at once",
        fits: |card| card.capability.permits != Permits::None,
        why: permits,
    },
    Need {
        word: "weighted-permits",
        means: "at most N at once, some of whom take several",
        fits: |card| card.capability.permits == Permits::Weighted,
        why: permits,
    },
    Need {
        word: "read-write",
        means: "many readers or one writer",
        fits: |card| card.capability.shared,
        why: |card| yes(card.capability.shared, "readers beside each other"),
    },
    Need {
        word: "fair",
        means: "first come, first served",
        fits: |card| card.capability.fair,
        why: |card| yes(card.capability.fair, "waiters served in their order"),
    },
    Need {
        word: "waiters",
        means: "see who waits",
        fits: |card| card.capability.waiters_visible,
        why: |card| yes(card.capability.waiters_visible, "waiters that can be seen"),
    },
    Need {
        word: "detached",
        means: "a lock that another process renews",
        fits: |card| card.capability.detached,
        why: |card| {
            yes(
                card.capability.detached,
                "holds that another process can renew",
            )
        },
    },
    Need {
        word: "one-machine",
        means: "nothing but this machine, no server",
        fits: |card| !has_hosts(card),
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
pub(super) fn has_hosts(card: &Card) -> bool {
    card.example.contains("://")
}

fn yes(it_has: bool, what: &str) -> String {
    match it_has {
        true => format!("it has {what}"),
        false => format!("it has no {what}"),
    }
}

fn permits(card: &Card) -> String {
    match card.capability.permits {
        Permits::Weighted => "it counts permits of any weight".to_owned(),
        Permits::Slots => "it gives permits one by one".to_owned(),
        Permits::None => "it has no permits".to_owned(),
    }
}

fn reach(card: &Card) -> String {
    format!("it needs {}", card.needs)
}

/// All needs, one per line.
pub(super) fn list() -> String {
    let line = |need: &Need| format!("  {:<17} {}\n", need.word, need.means);
    NEEDS.iter().map(line).collect()
}
