//! `Owner`: who asks, as one record that every engine keeps as it is.

use serde::{Deserialize, Deserializer, Serialize};

use super::clock::unix_time;

/// The owner record of a claim. It is for people and for deadlock detection; nothing decides
/// ownership by it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Owner {
    /// The owner handle: by default one per client.
    pub owner: String,
    /// The machine.
    pub host: String,
    /// The process, in the pid namespace it runs in.
    pub pid: u32,
    /// Free text of the user's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// When it asked, in milliseconds of Unix time. For people: no decision rests on it.
    pub since: u64,
    /// The W3C trace that it asked in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traceparent: Option<String>,
    /// Whom a gateway knows the owner as: it asked through one, with that principal's token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub principal: Option<String>,
    /// Who does one thing at a time, where somebody said so. One that can't be read, as of a later
    /// version, is none.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "readable"
    )]
    pub agent: Option<Agent>,
}

/// Somebody who does one thing at a time: while one of its claims waits, it releases nothing. The
/// part of the owner record that deadlocks are found by; see [`Client::agent`](crate::Client::agent).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Agent {
    /// The random handle of its client. Two clients whose agents have the same name are two agents.
    pub client: String,
    /// Its name.
    pub name: String,
    /// The ttl of this claim in milliseconds.
    pub ttl: u64,
    /// Whether this claim gives way when it is found in a deadlock.
    #[serde(default, skip_serializing_if = "is_default")]
    pub yields: bool,
    /// Whether it does so also in one that is only likely, since it goes through a parent.
    #[serde(default, skip_serializing_if = "is_default")]
    pub yields_nested: bool,
    /// Whether this claim ends by itself once it is held.
    #[serde(default, skip_serializing_if = "is_default")]
    pub unrenewed: bool,
    /// What the agent held when it asked, as far as there is room.
    #[serde(default, skip_serializing_if = "is_default")]
    pub holds: Vec<String>,
    /// The claims that this agent runs under, the outermost first and its parent's last.
    #[serde(default, skip_serializing_if = "is_default")]
    pub within: Vec<Ancestor>,
    /// The claims of which one is enough.
    #[serde(default, skip_serializing_if = "is_default")]
    pub group: Option<Group>,
}

/// A claim that an agent runs under: it is not released before the agent has ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ancestor {
    /// The claim's id.
    pub claim: String,
    /// The name of its line.
    pub name: String,
}

/// Claims in several lines of which one is enough.
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
    /// A record for this process, asking now. Host and pid are found by the library.
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

    /// The same owner, asking now.
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

    /// Reads a record that [`Owner::to_json`] wrote; `None` when it is something else.
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
