//! The capability data of an engine, as text and as JSON: `doctor` shows it, `guide` chooses by
//! it. The field names are the command's contract.

use std::time::Duration;

use palisade::engine::{EndsWith, Permits, Tokens};
use palisade::{Capability, Guarantee};
use serde::Serialize;

/// A capability as programs see it.
#[derive(Debug, Serialize)]
pub(crate) struct Abilities {
    shared: bool,
    permits: &'static str,
    resize: bool,
    fair: bool,
    waiters_visible: bool,
    tokens: &'static str,
    early_loss: bool,
    detached: bool,
    ends_with: &'static str,
    ttl_ms: TtlRange,
    reentrant_session: bool,
}

#[derive(Debug, Serialize)]
struct TtlRange {
    min: u64,
    max: u64,
    step: u64,
}

impl Abilities {
    pub(crate) fn new(capability: &Capability) -> Self {
        let millis = |time: Duration| time.as_millis() as u64;
        Self {
            shared: capability.shared,
            permits: match capability.permits {
                Permits::Weighted => "weighted",
                Permits::Slots => "slots",
                Permits::None => "none",
            },
            resize: capability.resize,
            fair: capability.fair,
            waiters_visible: capability.waiters_visible,
            tokens: match capability.tokens {
                Tokens::Durable => "durable",
                Tokens::Floored => "floored",
                Tokens::None => "none",
            },
            early_loss: capability.early_loss,
            detached: capability.detached,
            ends_with: match capability.ends_with {
                EndsWith::Lease => "lease",
                EndsWith::Process => "process",
            },
            ttl_ms: TtlRange {
                min: millis(capability.ttl.min),
                max: millis(capability.ttl.max),
                step: millis(capability.ttl.step),
            },
            reentrant_session: capability.reentrant_session,
        }
    }

    /// What people want to know, and the answer.
    pub(crate) fn rows(&self) -> Vec<(&'static str, String)> {
        let yes = |yes| if yes { "yes" } else { "no" }.to_owned();
        let ttl = |millis| humantime::format_duration(Duration::from_millis(millis)).to_string();
        vec![
            ("concurrent readers", yes(self.shared)),
            (
                "permits",
                match self.permits {
                    "weighted" => "any weight".to_owned(),
                    "slots" => "one by one".to_owned(),
                    none => none.to_owned(),
                },
            ),
            ("permits resized while in use", yes(self.resize)),
            ("first come, first served", yes(self.fair)),
            ("shows who waits", yes(self.waiters_visible)),
            (
                "tokens",
                match self.tokens {
                    "durable" => "never go back".to_owned(),
                    "floored" => "go back only if counter and clock are lost".to_owned(),
                    none => none.to_owned(),
                },
            ),
            ("loss known before the next grant", yes(self.early_loss)),
            ("renewable from another process", yes(self.detached)),
            (
                "ttl",
                format!("{} to {}", ttl(self.ttl_ms.min), ttl(self.ttl_ms.max)),
            ),
        ]
    }
}

/// What a class means.
pub(crate) fn meaning(class: Guarantee) -> &'static str {
    match class {
        Guarantee::Consensus => {
            "consensus: exclusion and tokens survive lost nodes and stepped clocks"
        }
        Guarantee::Durable => {
            "one durable node: tokens survive; exclusion assumes that its clock is not stepped"
        }
        Guarantee::Timed => "timed: exclusion and tokens assume correct clocks and no data loss",
    }
}
