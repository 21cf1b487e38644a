//! The documents of the API. Their field names are its contract.

use std::collections::HashSet;
use std::time::{Duration, UNIX_EPOCH};

use palisade::engine::{Ask, EndsWith, Permits, READERS, Tokens};
use palisade::report::{
    Ancestor, ClaimReport, Deadlock, LineReport, Owner, Severity, StuckAgent, StuckClaim,
};
use palisade::{Capability, Client, Error, Guarantee, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// The longest id that a client may give a claim.
const LONGEST_ID: usize = 128;
/// The longest id of an engine: another tool's claim may be named after a host.
pub(crate) const LONGEST_CLAIM: usize = 1024;
/// The longest owner, host, label or name of an agent: each is stored in the engine's record.
const LONGEST_TEXT: usize = 1024;
/// The longest record of an agent: its name, what it holds and the claims that it runs under.
const LONGEST_AGENT: usize = 16 * 1024;
/// The longest value of a claim.
pub(crate) const LONGEST_VALUE: usize = 64 * 1024;
/// The most claims that an agent may run under.
const DEEPEST: usize = 16;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct OpenSession {
    pub(crate) ttl: Option<String>,
    pub(crate) secret: Option<String>,
}

/// A long list is checked while it is parsed, where that delays nobody.
#[derive(Deserialize)]
#[serde(from = "Kept")]
pub(crate) struct KeepAlive {
    pub(crate) claims: Vec<String>,
    /// Why the list is refused.
    pub(crate) flaw: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    #[serde(default)]
    claims: Vec<String>,
}

impl From<Kept> for KeepAlive {
    fn from(Kept { claims }: Kept) -> Self {
        let mut named = HashSet::with_capacity(claims.len());
        let flaw = claims.iter().find_map(|id| {
            let twice = || "the field `claims`: an id is there twice".to_owned();
            let checked = check_id("claims", id).err();
            checked.or_else(|| (!named.insert(id)).then(twice))
        });
        Self { claims, flaw }
    }
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
    Record(Box<Owner>),
}

/// An agent, within its session: a name, possibly with the claims that it runs under.
#[derive(Deserialize)]
#[serde(untagged)]
pub(crate) enum AgentField {
    Name(String),
    Record(AgentRecord),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct AgentRecord {
    name: String,
    /// The claims that it runs under, the outermost first, by their engine's ids.
    #[serde(default)]
    within: Vec<Ancestor>,
    /// Whether it also gives way in a cycle through those, which is only a likely deadlock.
    #[serde(default)]
    nested: bool,
}

impl AgentField {
    pub(crate) fn name(&self) -> &str {
        match self {
            Self::Name(name) => name,
            Self::Record(record) => &record.name,
        }
    }

    /// The agent with this name.
    pub(crate) fn of(&self, client: &Client) -> Client {
        match self {
            Self::Name(name) => client.agent(name),
            Self::Record(AgentRecord {
                name,
                within,
                nested,
            }) => client.agent_within(name, within.clone(), *nested),
        }
    }

    fn fits(&self) -> bool {
        let short = |text: &str| text.len() <= LONGEST_TEXT;
        let within = match self {
            Self::Name(_) => &[][..],
            Self::Record(record) => &record.within,
        };
        let all = within
            .iter()
            .all(|one| short(&one.claim) && short(&one.name));
        (1..=LONGEST_TEXT).contains(&self.name().len()) && within.len() <= DEEPEST && all
    }
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
    pub(crate) agent: Option<AgentField>,
}

impl MakeClaim {
    /// Refuses values that are too long to be stored in an engine.
    pub(crate) fn check(&self) -> std::result::Result<(), &'static str> {
        let fits = |text: &String| text.len() <= LONGEST_TEXT;
        let owner = match &self.owner {
            None => true,
            Some(OwnerField::Handle(handle)) => fits(handle),
            Some(OwnerField::Record(owner)) => {
                let agent = |agent| serde_json::to_string(agent).map_or(0, |text| text.len());
                fits(&owner.owner)
                    && fits(&owner.host)
                    && owner.label.as_ref().is_none_or(fits)
                    && owner.agent.as_ref().map_or(0, agent) <= LONGEST_AGENT
            }
        };
        if !owner || !self.label.as_ref().is_none_or(fits) {
            return Err("owner, host and label have at most 1 KiB each, and an agent 16 KiB");
        }
        if !self.agent.as_ref().is_none_or(AgentField::fits) {
            return Err("an agent has a name of 1 byte to 1 KiB, and runs under 16 claims at most");
        }
        match &self.value {
            Some(value) if value.len() > LONGEST_VALUE => Err("a value has at most 64 KiB"),
            _ => Ok(()),
        }
    }
}

/// Refuses ids that no claim can have: some are remembered.
pub(crate) fn check_id(field: &str, id: &str) -> std::result::Result<(), String> {
    if id.is_empty() || id.len() > LONGEST_ID || id.chars().any(char::is_control) {
        return Err(format!(
            "the field `{field}`: an id has 1 to 128 bytes without control characters"
        ));
    }
    Ok(())
}

/// Whether it is a W3C `traceparent` of a known version.
pub(crate) fn is_traceparent(text: &str) -> bool {
    let parts: Vec<&str> = text.split('-').collect();
    let hex = |part: &str| {
        part.bytes()
            .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    };
    let some = |part: &str| part.bytes().any(|byte| byte != b'0');
    let [version, trace, span, flags] = parts[..] else {
        return false;
    };
    let lengths = (version.len(), trace.len(), span.len(), flags.len());
    parts.iter().all(|part| hex(part))
        && lengths == (2, 32, 16, 2)
        && version != "ff"
        && some(trace)
        && some(span)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct WaitFor {
    pub(crate) id: String,
    pub(crate) wait: Option<String>,
    /// Whether the request also extends the claim; the default is yes.
    pub(crate) keep: Option<bool>,
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
    /// Notifies the holder, and waits until it has let go.
    Ask,
    /// Notifies the holder.
    Mark,
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

/// A line as `palisade ls --json` shows it; with `records`, each claim with its owner's record.
/// What a record says about lines that the principal may not see is left out.
pub(crate) fn line(
    client: &Client,
    line: &LineReport,
    records: bool,
    sees: impl Fn(&str) -> bool,
) -> Result<Value> {
    let shown = |one: &ClaimReport, position| {
        let mut shown = claim(client, one, position, &sees)?;
        if records {
            let mut owner = one.owner.clone();
            if let Some(agent) = owner.as_mut().and_then(|owner| owner.agent.as_mut()) {
                agent.holds.retain(|name| sees(name));
                agent.within.retain(|above| sees(&above.name));
            }
            shown["record"] = json!(owner);
        }
        Ok(shown)
    };
    let holders: Result<Vec<_>> = line.holders.iter().map(|one| shown(one, None)).collect();
    let waiters = line.waiters.iter().enumerate();
    let waiters: Result<Vec<_>> = waiters.map(|(at, one)| shown(one, Some(at + 1))).collect();
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

fn claim(
    client: &Client,
    claim: &ClaimReport,
    position: Option<usize>,
    sees: impl Fn(&str) -> bool,
) -> Result<Value> {
    let owner = claim.owner.as_ref();
    let agent = owner.and_then(|owner| owner.agent.as_ref());
    let parent = agent.and_then(|agent| agent.within.last());
    let parent = parent.filter(|parent| sees(&parent.name));
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
        "principal": owner.and_then(|owner| owner.principal.as_ref()),
        "traceparent": owner.and_then(|owner| owner.traceparent.as_ref()),
        "agent": agent.map(|agent| &agent.name),
        "parent": parent.map(|parent| &parent.claim),
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

/// A deadlock as `palisade deadlocks --json` shows it, without what the principal may not see;
/// `None` if it may see nothing of it.
pub(crate) fn deadlock(found: &Deadlock, sees: impl Fn(&str) -> bool) -> Option<Value> {
    if !found.claims().any(|stuck| sees(&stuck.name)) {
        return None;
    }
    let shown_claim = |stuck: &StuckClaim| {
        if sees(&stuck.name) {
            json!({
                "name": stuck.name,
                "id": stuck.claim.id,
                "mode": stuck.claim.mode().to_string(),
                "since": stuck.claim.owner.as_ref().map(|owner| time(owner.since)),
                "hidden": false,
            })
        } else {
            json!({"name": null, "id": null, "mode": null, "since": null, "hidden": true})
        }
    };
    let agent = |agent: &StuckAgent| {
        // A principal that may see one of its claims may see the agent.
        let mut claims = agent.holds.iter().chain(&agent.waits);
        let owner = claims
            .any(|stuck| sees(&stuck.name))
            .then_some(&agent.owner);
        let list = |claims: &[StuckClaim]| claims.iter().map(shown_claim).collect::<Vec<_>>();
        json!({
            "agent": owner.map(|_| agent.name()),
            "owner": owner.map(|owner| &owner.owner),
            "host": owner.map(|owner| &owner.host),
            "pid": owner.map(|owner| owner.pid),
            "label": owner.and_then(|owner| owner.label.as_ref()),
            "holds": list(&agent.holds),
            "waits": list(&agent.waits),
            "behind": agent.behind,
            "children": agent.children,
        })
    };
    let visible = |id: &&String| {
        let mut claims = found.claims();
        claims.any(|stuck| stuck.claim.id == **id && sees(&stuck.name))
    };
    Some(json!({
        "likely": found.likely,
        "gives_way": found.gives_way.as_ref().filter(visible),
        "circle": found.circle,
        "agents": found.agents.iter().map(agent).collect::<Vec<_>>(),
    }))
}

pub(crate) fn time(millis: u64) -> String {
    // RFC 3339 has no form for years after 9999.
    let longest = Duration::from_secs(253_402_300_799);
    let since = Duration::from_millis(millis).min(longest);
    humantime::format_rfc3339_millis(UNIX_EPOCH + since).to_string()
}

/// The capability of the gateway in front of an engine with this capability.
/// What a client can do through this gateway, where a ttl is at most `longest`.
pub(crate) fn capability(engine: &Capability, longest: Duration) -> Value {
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
        // If a place ends with the gateway's process, a client can't learn of the loss before.
        "early_loss": engine.early_loss && engine.ends_with == EndsWith::Lease,
        "detached": false,
        "ends_with": "lease",
        "ttl_ms": {
            "min": engine.ttl.min.as_millis() as u64,
            "max": engine.ttl.max.min(longest).as_millis() as u64,
            "step": engine.ttl.step.as_millis() as u64,
        },
        "reentrant_session": false,
    })
}

/// Refuses an engine whose places end with the process of the gateway: a promise to a client would
/// not hold. Class C guarantees nothing that this would break.
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
