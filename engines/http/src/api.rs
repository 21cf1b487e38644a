//! The documents of a gateway that this engine sends and reads. Missing fields are optional, so
//! that older and newer gateways are understood as far as possible.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::keys::Names;
use palisade_core::engine::{Ask, EndsWith, Mode, Permits, READERS, Tokens, TtlRange};
use palisade_core::report::{ClaimReport, LineReport, Owner};
use palisade_core::{Capability, Guarantee};

/// A claim, the body of `POST /v1/claims`.
#[derive(Serialize)]
pub(super) struct Enter<'a> {
    pub(super) name: String,
    pub(super) id: &'a str,
    pub(super) mode: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) weight: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) capacity: Option<u32>,
    pub(super) queue: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) value: Option<&'a str>,
    pub(super) owner: Owner,
}

/// `mode`, `weight` and `capacity` of an ask.
pub(super) fn words(ask: Ask) -> (&'static str, Option<u32>, Option<u32>) {
    match (ask.mode(), ask) {
        (Mode::Permits, Ask::Part { weight, capacity }) => {
            ("permits", Some(weight), Some(capacity))
        }
        (Mode::Shared, _) => ("shared", None, None),
        _ => ("exclusive", None, None),
    }
}

/// A session.
#[derive(Deserialize)]
pub(super) struct Opened {
    pub(super) ttl_ms: u64,
    pub(super) url: Option<String>,
}

/// The state of a claim.
#[derive(Deserialize)]
pub(super) struct Standing {
    pub(super) id: String,
    /// The gateway's id of the claim, as in surveys.
    pub(super) claim: Option<String>,
    pub(super) state: String,
    /// Includes the gateway's era.
    pub(super) token: Option<String>,
    pub(super) valid_ms: Option<u64>,
}

impl Standing {
    /// The token of the grant; `None` unless it holds.
    pub(super) fn sequence(&self) -> Option<u64> {
        self.token
            .as_ref()
            .filter(|_| self.state == "held")
            .and_then(|token| token.parse().ok())
    }

    /// How long the holder may rely on it.
    pub(super) fn valid(&self) -> Option<Duration> {
        self.valid_ms.map(Duration::from_millis)
    }
}

/// The reply to a keep-alive.
#[derive(Deserialize)]
pub(super) struct Kept {
    pub(super) claims: Vec<Standing>,
    #[serde(default)]
    pub(super) draining: bool,
}

/// A page of lines.
#[derive(Deserialize)]
pub(super) struct Lines {
    pub(super) lines: Vec<Line>,
    pub(super) next: Option<String>,
}

#[derive(Deserialize)]
pub(super) struct Line {
    name: String,
    capacity: Option<u32>,
    holders: Vec<Shown>,
    waiters: Vec<Shown>,
}

/// A claim in a line.
#[derive(Deserialize)]
struct Shown {
    id: String,
    /// `null` for a claim of another tool.
    record: Option<Owner>,
    mode: String,
    weight: Option<u32>,
    value: Option<String>,
    token: Option<String>,
    expires_in_ms: Option<u64>,
    #[serde(default)]
    evicted: bool,
}

impl Line {
    /// The line as a survey shows it; `None` when it is in another namespace.
    pub(super) fn report(self, names: &Names) -> Option<LineReport> {
        let name = names.here(&self.name)?.to_owned();
        let all = || self.holders.iter().chain(&self.waiters);
        let readers = all().any(|claim| claim.mode == "shared");
        let capacity = if readers {
            Some(READERS)
        } else {
            self.capacity
        };
        let report = |claim: &Shown| claim.report(names, capacity);
        Some({
            let mut line = LineReport::empty(name);
            line.capacity = capacity;
            line.holders = self.holders.iter().map(report).collect();
            line.waiters = self.waiters.iter().map(report).collect();
            line
        })
    }
}

impl Shown {
    fn report(&self, names: &Names, capacity: Option<u32>) -> ClaimReport {
        let ask = match (self.mode.as_str(), self.weight, capacity) {
            ("shared", ..) => Ask::READ,
            ("permits", Some(weight), Some(capacity)) => Ask::Part { weight, capacity },
            _ => Ask::Whole,
        };
        let mut claim = ClaimReport::new(&self.id, ask);
        claim.owner = self.record.as_ref().map(|owner| names.owner_here(owner));
        claim.value = self.value.clone();
        claim.sequence = self.token.as_ref().and_then(|token| token.parse().ok());
        claim.expires_in = self.expires_in_ms.map(Duration::from_millis);
        claim.evicted = self.evicted;
        claim
    }
}

/// What a gateway reports about its engine.
#[derive(Deserialize)]
pub(super) struct Described {
    capability: Able,
    #[serde(default = "yes")]
    pub(super) passable: bool,
    pub(super) version: Option<String>,
    pub(super) clock_ahead_us: Option<i64>,
    #[serde(default)]
    pub(super) findings: Vec<Found>,
    #[serde(default)]
    pub(super) draining: bool,
}

fn yes() -> bool {
    true
}

#[derive(Deserialize)]
pub(super) struct Found {
    pub(super) severity: String,
    pub(super) code: String,
    pub(super) message: String,
    pub(super) remedy: String,
}

#[derive(Deserialize)]
struct Able {
    class: String,
    shared: bool,
    permits: String,
    fair: bool,
    waiters_visible: bool,
    tokens: String,
    early_loss: bool,
    ttl_ms: Range,
}

#[derive(Deserialize)]
struct Range {
    min: u64,
    max: u64,
    step: u64,
}

impl Described {
    /// The capability of the engine behind the gateway. An unknown word counts as the least that it
    /// could mean.
    pub(super) fn capability(&self) -> Capability {
        let able = &self.capability;
        let ms = Duration::from_millis;
        let mut can = Capability::FULL;
        can.class = match able.class.as_str() {
            "A" => Guarantee::Consensus,
            "B" => Guarantee::Durable,
            _ => Guarantee::Timed,
        };
        can.shared = able.shared;
        can.permits = match able.permits.as_str() {
            "weighted" => Permits::Weighted,
            "slots" => Permits::Slots,
            _ => Permits::None,
        };
        can.resize = false;
        can.fair = able.fair;
        can.waiters_visible = able.waiters_visible;
        can.tokens = match able.tokens.as_str() {
            "durable" => Tokens::Durable,
            "floored" => Tokens::Floored,
            _ => Tokens::None,
        };
        can.early_loss = able.early_loss;
        can.detached = false;
        can.ends_with = EndsWith::Lease;
        can.ttl = TtlRange {
            min: ms(able.ttl_ms.min),
            max: ms(able.ttl_ms.max),
            step: ms(able.ttl_ms.step.max(1)),
        };
        can.reentrant_session = false;
        can.queue = false;
        can
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_read_as_it_was_surveyed() {
        let text = r#"{"name":"ns/a","kind":"permits","capacity":3,"holders":[
            {"id":"1f","record":{"owner":"o","host":"h","pid":7,"since":1500,"principal":"local"},
             "weight":2,"mode":"permits","value":null,"token":"216172782113783809",
             "sequence":"1","expires_in_ms":900,"evicted":false}],
            "waiters":[{"id":"x","record":null,"mode":"exclusive","position":1}]}"#;
        let line: Line = serde_json::from_str(text).unwrap();
        let line = line.report(&Names::new("ns")).unwrap();
        assert_eq!((line.name.as_str(), line.capacity), ("a", Some(3)));
        let holder = &line.holders[0];
        let ask = Ask::Part {
            weight: 2,
            capacity: 3,
        };
        assert_eq!(holder.ask, ask);
        assert_eq!(holder.sequence, Some(3 << 56 | 1), "with the era");
        let owner = holder.owner.as_ref().unwrap();
        assert_eq!(owner.since, 1500);
        assert_eq!(owner.principal.as_deref(), Some("local"));
        assert_eq!(holder.expires_in, Some(Duration::from_millis(900)));
        assert_eq!(line.waiters[0].owner, None);
        assert_eq!(line.waiters[0].ask, Ask::Whole);
    }
}
