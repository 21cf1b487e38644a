//! `Owner`: who asks, as one record that every engine keeps as it is.

use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

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
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_millis() as u64)
}
