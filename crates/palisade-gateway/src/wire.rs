//! The documents of the API. Their field names are its contract.

use std::time::{Duration, UNIX_EPOCH};

use palisade::engine::{Ask, EndsWith, Permits, READERS, Tokens};
use palisade::report::{ClaimReport, LineReport, Owner, Severity};
use palisade::{Capability, Client, Error, Guarantee, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct OpenSession {
    pub(crate) ttl: Option<String>,
    pub(crate) secret: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct KeepAlive {
    #[serde(default)]
    pub(crate) claims: Vec<String>,
}

#[derive(Deserialize, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Mode {
    Exclusive,
    Shared,
    Permits,
}

/// An owner handle, or a whole record from a client that has one.
#[derive(Deserialize)]
#[serde(untagged)]
pub(crate) enum OwnerField {
    Handle(String),
    Record(Owner),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MakeClaim {
    pub(crate) name: String,
    pub(crate) id: Option<String>,
    pub(crate) mode: Option<Mode>,
    pub(crate) weight: Option<u32>,
    pub(crate) capacity: Option<u32>,
    pub(crate) wait: Option<String>,
    pub(crate) queue: Option<bool>,
    pub(crate) value: Option<String>,
    pub(crate) owner: Option<OwnerField>,
    pub(crate) label: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct WaitFor {
    pub(crate) id: String,
    pub(crate) wait: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Amend {
    pub(crate) id: String,
    pub(crate) mode: Option<Mode>,
    pub(crate) value: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Release {
    pub(crate) id: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Evict {
    pub(crate) name: String,
    pub(crate) claim: Option<String>,
    pub(crate) how: How,
    pub(crate) reason: String,
}

#[derive(Deserialize, Serialize, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub(crate) enum How {
    Ask,
    Force,
}

/// How much of a line `mode` takes.
pub(crate) fn ask(
    mode: Option<Mode>,
    weight: Option<u32>,
    capacity: Option<u32>,
) -> std::result::Result<Ask, &'static str> {
    match (mode.unwrap_or(Mode::Exclusive), weight, capacity) {
        (Mode::Exclusive, None, None) => Ok(Ask::Whole),
        (Mode::Shared, None, None) => Ok(Ask::READ),
        (Mode::Exclusive | Mode::Shared, ..) => Err("weight and capacity belong to mode permits"),
        (Mode::Permits, _, None | Some(0 | READERS)) => {
            Err("mode permits needs a capacity of 1 to 4294967294")
        }
        (Mode::Permits, weight, Some(capacity)) => match weight.unwrap_or(1) {
            weight if (1..=capacity).contains(&weight) => Ok(Ask::Part { weight, capacity }),
            _ => Err("weight must be 1 to the capacity"),
        },
    }
}

/// A line as `palisade ls --json` shows it.
pub(crate) fn line(client: &Client, line: &LineReport) -> Result<Value> {
    let holders: Result<Vec<_>> = line
        .holders
        .iter()
        .map(|one| claim(client, one, None))
        .collect();
    let waiters = line.waiters.iter().enumerate();
    let waiters: Result<Vec<_>> = waiters
        .map(|(at, one)| claim(client, one, Some(at + 1)))
        .collect();
    let kind = match line.capacity {
        None | Some(READERS) => "lock",
        Some(_) => "permits",
    };
    let capacity = line.capacity.filter(|capacity| *capacity != READERS);
    Ok(json!({
        "name": line.name,
        "kind": kind,
        "capacity": capacity,
        "holders": holders?,
        "waiters": waiters?,
    }))
}

fn claim(client: &Client, claim: &ClaimReport, position: Option<usize>) -> Result<Value> {
    let owner = claim.owner.as_ref();
    let weight = match claim.ask {
        Ask::Whole => None,
        Ask::Part { weight, .. } => Some(weight),
    };
    let token = match claim.sequence {
        Some(sequence) => Some(client.token(sequence)?.to_string()),
        None => None,
    };
    let mut shown = json!({
        "id": claim.id,
        "owner": owner.map(|owner| &owner.owner),
        "host": owner.map(|owner| &owner.host),
        "pid": owner.map(|owner| owner.pid),
        "label": owner.and_then(|owner| owner.label.as_ref()),
        "traceparent": owner.and_then(|owner| owner.traceparent.as_ref()),
        "weight": weight,
        "mode": claim.mode().to_string(),
        "value": claim.value,
        "token": token,
        "sequence": claim.sequence.map(|sequence| sequence.to_string()),
        "since": owner.map(|owner| time(owner.since)),
        "expires_in_ms": claim.expires_in.map(|left| left.as_millis() as u64),
        "evicted": claim.evicted,
    });
    if let (Some(position), Some(shown)) = (position, shown.as_object_mut()) {
        shown.insert("position".into(), position.into());
    }
    Ok(shown)
}

pub(crate) fn time(millis: u64) -> String {
    // Beyond the year 9999 nothing can be written.
    let longest = Duration::from_secs(253_402_300_799);
    let since = Duration::from_millis(millis).min(longest);
    humantime::format_rfc3339_millis(UNIX_EPOCH + since).to_string()
}

/// What can be done through the gateway, in front of an engine of this capability.
pub(crate) fn capability(engine: &Capability) -> Value {
    json!({
        "class": engine.class.to_string(),
        "shared": engine.shared,
        "permits": match engine.permits {
            Permits::Weighted => "weighted",
            Permits::Slots => "slots",
            Permits::None => "none",
        },
        "resize": false,
        "fair": engine.fair,
        "waiters_visible": engine.waiters_visible,
        "tokens": match engine.tokens {
            Tokens::Durable => "durable",
            Tokens::Floored => "floored",
            Tokens::None => "none",
        },
        // Where a place ends with the gateway's process, a client can't be told before.
        "early_loss": engine.early_loss && engine.ends_with == EndsWith::Lease,
        "detached": false,
        "ends_with": "lease",
        "ttl_ms": {
            "min": engine.ttl.min.as_millis() as u64,
            "max": engine.ttl.max.as_millis() as u64,
            "step": engine.ttl.step.as_millis() as u64,
        },
        "reentrant_session": false,
    })
}

/// Refuses an engine whose places end with the process of the gateway: what a client was promised
/// would not last. Class C promises nothing that this would break.
pub(crate) fn passable(engine: &Capability) -> Result<()> {
    if engine.ends_with == EndsWith::Process && engine.class != Guarantee::Timed {
        let message = "this engine ends a hold with the gateway's process, so that no promise to a \
                       client could be kept; connect to it directly, or put the gateway in front \
                       of another engine";
        return Err(Error::new(
            palisade::ErrorKind::Unsupported,
            "enter",
            message,
        ));
    }
    Ok(())
}

pub(crate) fn severity(severity: Severity) -> &'static str {
    match severity {
        Severity::Info => "info",
        Severity::Warning => "warning",
        Severity::Danger => "danger",
    }
}
