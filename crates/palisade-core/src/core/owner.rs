//! `Owner`: who made a claim, as one record that every engine stores unchanged.

use serde::{Deserialize, Deserializer, Serialize};

use super::clock::unix_time;

/// The owner record of a claim. It is for people and for deadlock detection, and never decides who
/// owns a lock.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Owner {
    /// The owner handle: by default one per client.
    pub owner: String,
    /// The host name of the machine.
    pub host: String,
    /// The process id, in the process's own pid namespace.
    pub pid: u32,
    /// Free text from the user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// When it entered, in milliseconds of Unix time. For people only: no decision depends on it.
    pub since: u64,
    /// The W3C trace context of the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traceparent: Option<String>,
    /// The principal that a gateway authenticated, if the claim was made through one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub principal: Option<String>,
    /// The agent that the claim belongs to, if the caller named one. A record that can't be read,
    /// for example one of a later version, counts as none.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "readable"
    )]
    pub agent: Option<Agent>,
}

/// An agent does one thing at a time: while one of its claims waits, it releases nothing. Deadlock
/// detection relies on this part of the owner record; see [`Client::agent`](crate::Client::agent).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Agent {
    /// The random id of its client. Agents of two clients are different even if their names are
    /// equal.
    pub client: String,
    /// Its name.
    pub name: String,
    /// The ttl of this claim in milliseconds.
    pub ttl: u64,
    /// Whether this claim may be chosen to give way in a deadlock.
    #[serde(default, skip_serializing_if = "is_default")]
    pub yields: bool,
    /// Whether it may also be chosen in a deadlock that is only likely, because a parent is part of
    /// it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub yields_nested: bool,
    /// Whether this claim is not renewed once it is held, and so ends by itself.
    #[serde(default, skip_serializing_if = "is_default")]
    pub unrenewed: bool,
    /// The names that the agent held when it entered; the list may be cut short.
    #[serde(default, skip_serializing_if = "is_default")]
    pub holds: Vec<String>,
    /// The claims that this agent runs inside, from the outermost to its parent's.
    #[serde(default, skip_serializing_if = "is_default")]
    pub within: Vec<Ancestor>,
    /// The group that the claim belongs to: one granted claim of a group is enough.
    #[serde(default, skip_serializing_if = "is_default")]
    pub group: Option<Group>,
}

/// Whether others may wait for this agent while its claim waits: it held something when it entered,
/// or it runs inside a hold. Only such a claim can be part of a deadlock, so an engine must not
/// hold it back where no survey shows it.
pub fn may_block(agent: &Agent) -> bool {
    !agent.holds.is_empty() || !agent.within.is_empty()
}

/// A claim that an agent runs inside: it is not released before the agent has ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ancestor {
    /// The claim's id.
    pub claim: String,
    /// The name of its line.
    pub name: String,
}

/// Claims in several lines, of which one granted claim is enough.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Group {
    /// A random id.
    pub id: String,
    /// How many claims it has when all of them wait.
    pub size: usize,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

fn readable<'de, D: Deserializer<'de>>(agent: D) -> Result<Option<Agent>, D::Error> {
    let agent = serde_json::Value::deserialize(agent)?;
    Ok(serde_json::from_value(agent).ok())
}

impl Owner {
    /// A record for this process with the current time. Host and pid are determined here.
    pub fn here(owner: impl Into<String>, label: Option<String>) -> Self {
        Self {
            owner: owner.into(),
            host: host(),
            pid: std::process::id(),
            label,
            since: unix_millis(),
            traceparent: None,
            principal: None,
            agent: None,
        }
    }

    /// The same owner with the current time.
    #[must_use]
    pub fn asking_now(&self) -> Self {
        Self {
            since: unix_millis(),
            ..self.clone()
        }
    }

    /// The record as one line of JSON.
    pub fn to_json(&self) -> String {
        // A struct of strings and numbers always serialises.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Parses a record that [`Owner::to_json`] wrote; `None` for anything else.
    pub fn from_json(json: &[u8]) -> Option<Self> {
        serde_json::from_slice(json).ok()
    }
}

fn host() -> String {
    rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned()
}

fn unix_millis() -> u64 {
    unix_time().as_millis() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_of_other_versions_can_be_read() {
        let earlier = br#"{"owner":"o","host":"h","pid":7,"since":1}"#;
        let read = Owner::from_json(earlier).unwrap();
        assert_eq!((read.pid, &read.agent), (7, &None));
        assert_eq!(read.to_json().as_bytes(), earlier, "and nothing is added");
        let later = br#"{"owner":"o","host":"h","pid":7,"since":1,"agent":{"v":2},"more":[]}"#;
        assert_eq!(Owner::from_json(later).unwrap(), read);
        let agent = Agent {
            client: "c".into(),
            name: "n\t\n".into(),
            holds: vec!["a b".into()],
            ..Agent::default()
        };
        let owner = Owner {
            agent: Some(agent),
            ..read
        };
        let json = owner.to_json();
        assert!(!json.contains(['\t', '\n']), "one line: {json}");
        assert_eq!(Owner::from_json(json.as_bytes()), Some(owner));
    }
}
