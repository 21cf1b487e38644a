//! Consul's key-value pairs and transactions, and what our own values look like.
//!
//! The flags and the layout of the semaphore are those of Consul's own `api.Lock` and
//! `api.Semaphore`, so that `consul lock` and palisade exclude each other on the same key.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::core::claim::{Claim, ClaimId};
use crate::core::owner::Owner;
pub(super) use crate::engines::kit::uuid::{read_uuid as session_id, uuid as session_text};

/// The flags of a key that is an exclusive lock (`api.LockFlagValue`).
pub(super) const LOCK: u64 = 0x2ddc_cbc0_58a5_0c18;
/// The flags of the keys of a semaphore (`api.SemaphoreFlagValue`).
pub(super) const SEMAPHORE: u64 = 0xe0f6_9a2b_aa41_4de0;
/// The flags of the gate of readers: ours alone, so that Consul's own tools refuse the key
/// instead of overwriting it.
pub(super) const READERS: u64 = 0x7061_6c69_7361_6465;

/// The most operations that Consul takes in one transaction.
pub(super) const MOST_OPS: usize = 64;

/// A key and what is under it.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct Pair {
    pub(super) key: String,
    #[serde(default)]
    pub(super) flags: u64,
    /// In base64.
    #[serde(default)]
    value: Option<String>,
    #[serde(default)]
    session: Option<String>,
    pub(super) modify_index: u64,
}

impl Pair {
    /// The session that has it locked.
    pub(super) fn holder(&self) -> Option<&str> {
        self.session.as_deref().filter(|id| !id.is_empty())
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        let text = self.value.as_deref().unwrap_or_default();
        STANDARD.decode(text).unwrap_or_default()
    }

    /// The record in it, if it is ours.
    pub(super) fn record(&self) -> Option<Record> {
        serde_json::from_slice(&self.bytes()).ok()
    }
}

/// What a claim writes into its key.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) claim: String,
    pub(super) owner: Owner,
    /// Of its session, in milliseconds.
    pub(super) ttl: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) value: Option<String>,
    /// The index of the grant, where the key was written again since.
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

    /// The index of the grant of the claim whose record `pair` holds.
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
    /// Of ours, and ignored by others: another one each time. Consul leaves a key alone, index
    /// included, that is written with the value it has, and a holder that left is still listed.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(super) nonce: String,
    /// Of ours too: an operator has changed the limit, and claims that wait with another follow.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) resized: bool,
}

/// One operation of a transaction, as Consul reads it.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Op {
    #[serde(rename = "KV")]
    kv: Value,
}

impl Op {
    fn new(verb: &str, key: &str) -> Self {
        let kv = json!({ "Verb": verb, "Key": key });
        Self { kv }
    }

    fn with(mut self, field: &str, value: impl Into<Value>) -> Self {
        self.kv[field] = value.into();
        self
    }

    /// Checks that the key is as it was seen: absent, or written last at this index.
    pub(super) fn unchanged(key: &str, seen: Option<&Pair>) -> Self {
        match seen {
            None => Self::new("check-not-exists", key),
            Some(pair) => Self::check_index(key, pair.modify_index),
        }
    }

    pub(super) fn check_index(key: &str, index: u64) -> Self {
        Self::new("check-index", key).with("Index", index)
    }

    pub(super) fn check_session(key: &str, session: &str) -> Self {
        Self::new("check-session", key).with("Session", session)
    }

    /// Checks that the key is there and that no session has it locked.
    pub(super) fn unlocked(key: &str) -> Self {
        Self::check_session(key, "")
    }

    pub(super) fn set(key: &str, flags: u64, value: &str) -> Self {
        let value = STANDARD.encode(value);
        Self::new("set", key)
            .with("Flags", flags)
            .with("Value", value)
    }

    pub(super) fn lock(key: &str, session: &str, flags: u64, value: &str) -> Self {
        let op = Self::set(key, flags, value).with("Verb", "lock");
        op.with("Session", session)
    }

    /// Locks a key for a claim, whose record it holds then.
    pub(super) fn claim(key: &str, session: &str, flags: u64, record: &Record) -> Self {
        Self::lock(key, session, flags, &text(record))
    }

    pub(super) fn unlock(key: &str, session: &str) -> Self {
        Self::new("unlock", key).with("Session", session)
    }

    /// Writes the list of holders of a semaphore.
    pub(super) fn list(key: &str, mut list: Holders) -> Self {
        list.nonce = ClaimId::random().to_string();
        Self::set(key, SEMAPHORE, &text(&list))
    }

    /// Writes the gate of readers. Consul leaves a key alone, index included, that is written
    /// with the value it has, and then a writer would not see that a reader came.
    pub(super) fn gate(key: &str) -> Self {
        Self::set(key, READERS, &ClaimId::random().to_string())
    }

    pub(super) fn delete(key: &str) -> Self {
        Self::new("delete", key)
    }

    /// Answers with the key, and is refused when there is none.
    pub(super) fn get(key: &str) -> Self {
        Self::new("get", key)
    }

    /// Answers with all that is below the key.
    pub(super) fn get_tree(key: &str) -> Self {
        Self::new("get-tree", key)
    }
}

/// What a transaction answers.
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

/// Structs of strings and numbers always serialise.
fn text(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Clients of other versions read it.
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
