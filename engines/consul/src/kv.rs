//! Consul's key-value pairs and transactions, and the format of our own values.
//!
//! The flags and the layout of the semaphore are those of Consul's own `api.Lock` and
//! `api.Semaphore`, so that `consul lock` and palisade exclude each other on the same key.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use palisade_core::engine::{Claim, ClaimId};
use palisade_core::report::Owner;
pub(super) use palisade_kit::uuid::{read_uuid as session_id, uuid as session_text};

/// The flags of a key that is an exclusive lock (`api.LockFlagValue`).
pub(super) const LOCK: u64 = 0x2ddc_cbc0_58a5_0c18;
/// The flags of the keys of a semaphore (`api.SemaphoreFlagValue`).
pub(super) const SEMAPHORE: u64 = 0xe0f6_9a2b_aa41_4de0;
/// The flags of the readers' gate. They are ours alone, so that Consul's own tools refuse the key
/// instead of overwriting it.
pub(super) const READERS: u64 = 0x7061_6c69_7361_6465;

/// The most operations that Consul takes in one transaction.
pub(super) const MOST_OPS: usize = 64;

/// A key-value pair.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct Pair {
    pub(super) key: String,
    #[serde(default)]
    pub(super) flags: u64,
    /// Base64.
    #[serde(default)]
    value: Option<String>,
    #[serde(default)]
    session: Option<String>,
    pub(super) modify_index: u64,
}

impl Pair {
    /// The session that has locked it.
    pub(super) fn holder(&self) -> Option<&str> {
        self.session.as_deref().filter(|id| !id.is_empty())
    }

    /// Whether a session has locked it.
    pub(super) fn is_held(&self) -> bool {
        self.holder().is_some()
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        let text = self.value.as_deref().unwrap_or_default();
        STANDARD.decode(text).unwrap_or_default()
    }

    /// The record in its value, if it is ours.
    pub(super) fn record(&self) -> Option<Record> {
        serde_json::from_slice(&self.bytes()).ok()
    }
}

/// The record that a claim writes into its key.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) claim: String,
    pub(super) owner: Owner,
    /// The ttl of its session in milliseconds.
    pub(super) ttl: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) value: Option<String>,
    /// The ModifyIndex of the grant, if the key was written again since.
    #[serde(default, rename = "counted", skip_serializing_if = "Option::is_none")]
    pub(super) sequence: Option<u64>,
}

impl Record {
    pub(super) fn of(claim: &Claim) -> Self {
        Self {
            claim: claim.id.to_string(),
            owner: claim.owner.clone(),
            ttl: u64::try_from(claim.ttl.as_millis()).unwrap_or(u64::MAX),
            value: claim.value.clone(),
            sequence: None,
        }
    }

    /// The ModifyIndex of the grant of the claim whose record `pair` holds.
    pub(super) fn granted_at(&self, pair: &Pair) -> u64 {
        self.sequence.unwrap_or(pair.modify_index)
    }
}

/// `NAME/.lock` of a semaphore.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct Holders {
    pub(super) limit: u32,
    #[serde(default)]
    pub(super) holders: BTreeMap<String, bool>,
    /// Ours; other tools ignore it. It changes with every write: Consul skips a write of an
    /// unchanged value, ModifyIndex included, and a holder that left is still listed.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(super) nonce: String,
    /// Ours too: an operator has changed the limit, and waiting claims with another limit adopt it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) resized: bool,
}

/// One operation of a transaction, in Consul's format.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Op(Value);

impl Op {
    /// Checks that the key is as it was read: absent, or with this ModifyIndex.
    pub(super) fn unchanged(key: &str, seen: Option<&Pair>) -> Self {
        match seen {
            None => Self(json!({ "KV": { "Verb": "check-not-exists", "Key": key } })),
            Some(pair) => Self::check_index(key, pair.modify_index),
        }
    }

    pub(super) fn check_index(key: &str, index: u64) -> Self {
        Self(json!({ "KV": { "Verb": "check-index", "Key": key, "Index": index } }))
    }

    pub(super) fn check_session(key: &str, session: &str) -> Self {
        Self(json!({ "KV": { "Verb": "check-session", "Key": key, "Session": session } }))
    }

    /// Checks that the key exists and that no session has locked it.
    pub(super) fn unlocked(key: &str) -> Self {
        Self::check_session(key, "")
    }

    pub(super) fn set(key: &str, flags: u64, value: &str) -> Self {
        Self(json!({ "KV": {
            "Verb": "set", "Key": key, "Flags": flags, "Value": STANDARD.encode(value),
        } }))
    }

    pub(super) fn lock(key: &str, session: &str, flags: u64, value: &str) -> Self {
        Self(json!({ "KV": {
            "Verb": "lock", "Key": key, "Flags": flags, "Value": STANDARD.encode(value),
            "Session": session,
        } }))
    }

    /// Locks a key for a claim, and writes the claim's record into it.
    pub(super) fn claim(key: &str, session: &str, flags: u64, record: &Record) -> Self {
        Self::lock(key, session, flags, &text(record))
    }

    pub(super) fn unlock(key: &str, session: &str) -> Self {
        Self(json!({ "KV": { "Verb": "unlock", "Key": key, "Session": session } }))
    }

    /// Writes a semaphore's list of holders.
    pub(super) fn list(key: &str, mut list: Holders) -> Self {
        list.nonce = ClaimId::random().to_string();
        Self::set(key, SEMAPHORE, &text(&list))
    }

    /// Writes the readers' gate, with a new value each time: Consul skips a write of an unchanged
    /// value, ModifyIndex included, and a writer would not notice that a reader came.
    pub(super) fn gate(key: &str) -> Self {
        Self::set(key, READERS, &ClaimId::random().to_string())
    }

    pub(super) fn delete(key: &str) -> Self {
        Self(json!({ "KV": { "Verb": "delete", "Key": key } }))
    }

    /// Returns the key; fails if it does not exist.
    pub(super) fn get(key: &str) -> Self {
        Self(json!({ "KV": { "Verb": "get", "Key": key } }))
    }

    /// Returns everything below the key.
    pub(super) fn get_tree(key: &str) -> Self {
        Self(json!({ "KV": { "Verb": "get-tree", "Key": key } }))
    }
}

/// The reply to a transaction.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(super) struct TxnAnswer {
    pub(super) results: Option<Vec<TxnResult>>,
    pub(super) errors: Option<Vec<TxnError>>,
}

#[derive(Debug, Deserialize)]
pub(super) struct TxnResult {
    #[serde(rename = "KV")]
    pub(super) kv: Option<Pair>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct TxnError {
    pub(super) op_index: usize,
    #[serde(default)]
    pub(super) what: String,
}

/// Structs of strings and numbers always serialize.
fn text(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Clients of other versions read these records.
    #[test]
    fn a_record_keeps_the_names_of_its_fields() {
        let owner = serde_json::to_value(Owner::here("me", None)).unwrap();
        let stored = json!({ "claim": "7", "owner": owner, "ttl": 9, "value": "v", "counted": 5 });
        let record: Record = serde_json::from_value(stored.clone()).unwrap();
        assert_eq!(record.sequence, Some(5));
        assert_eq!(serde_json::to_value(&record).unwrap(), stored);
    }

    #[test]
    fn the_flags_are_those_of_the_go_client() {
        assert_eq!(LOCK, 3_304_740_253_564_472_344);
        assert_eq!(SEMAPHORE, 16_210_313_421_097_356_768);
    }
}
