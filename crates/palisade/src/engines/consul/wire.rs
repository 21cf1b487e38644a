//! What goes over the wire to Consul: pairs, transactions, and what our own values look like.
//!
//! The flags and the layout of the semaphore are those of Consul's own `api.Lock` and
//! `api.Semaphore`, so that `consul lock` and palisade exclude each other on the same key.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde::{Deserialize, Serialize};

use crate::core::claim::{Claim, ClaimId};
use crate::core::owner::Owner;

/// The flags of a key that is an exclusive lock (`api.LockFlagValue`).
pub(super) const LOCK: u64 = 0x2ddc_cbc0_58a5_0c18;
/// The flags of the keys of a semaphore (`api.SemaphoreFlagValue`).
pub(super) const SEMAPHORE: u64 = 0xe0f6_9a2b_aa41_4de0;
/// The flags of a key that is the gate of readers: ours alone, so that Consul's own tools refuse
/// the key instead of overwriting it.
pub(super) const READERS: u64 = 0x7061_6c69_7361_6465;

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
    pub(super) session: Option<String>,
    pub(super) modify_index: u64,
}

impl Pair {
    /// The session that has it locked.
    pub(super) fn holder(&self) -> Option<&str> {
        self.session
            .as_deref()
            .filter(|session| !session.is_empty())
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        self.value
            .as_deref()
            .and_then(base64_decode)
            .unwrap_or_default()
    }

    /// Our record in it, if it is ours.
    pub(super) fn record(&self) -> Option<Record> {
        serde_json::from_slice(&self.bytes()).ok()
    }

    /// Our record, if it is that of `claim` and `session` has the key locked.
    pub(super) fn of(&self, claim: ClaimId, session: &str) -> Option<Record> {
        let record = self
            .record()
            .filter(|record| record.claim == claim.to_string())?;
        (self.holder() == Some(session)).then_some(record)
    }

    /// What was counted for the claim whose record this is.
    pub(super) fn sequence(&self, record: &Record) -> u64 {
        record.sequence.unwrap_or(self.modify_index)
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
    #[serde(rename = "counted", default, skip_serializing_if = "Option::is_none")]
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

    pub(super) fn to_json(&self) -> String {
        // A struct of strings and numbers always serialises.
        serde_json::to_string(self).unwrap_or_default()
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

/// One operation of a transaction.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Op {
    #[serde(rename = "KV")]
    kv: Kv,
}

#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "PascalCase")]
struct Kv {
    verb: &'static str,
    key: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    flags: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    session: Option<String>,
}

impl Op {
    fn new(verb: &'static str, key: impl Into<String>) -> Self {
        let kv = Kv {
            verb,
            key: key.into(),
            value: None,
            flags: None,
            index: None,
            session: None,
        };
        Self { kv }
    }

    /// Checks that the key is as it was seen: absent, or written last at this index.
    pub(super) fn unchanged(key: &str, seen: Option<&Pair>) -> Self {
        match seen {
            None => Self::new("check-not-exists", key),
            Some(pair) => Self::check_index(key, pair.modify_index),
        }
    }

    pub(super) fn check_index(key: &str, index: u64) -> Self {
        let mut op = Self::new("check-index", key);
        op.kv.index = Some(index);
        op
    }

    pub(super) fn check_session(key: &str, session: &str) -> Self {
        let mut op = Self::new("check-session", key);
        op.kv.session = Some(session.to_owned());
        op
    }

    /// Checks that the key is there and that no session has it locked.
    pub(super) fn unlocked(key: &str) -> Self {
        Self::check_session(key, "")
    }

    pub(super) fn lock(key: &str, session: &str, flags: u64, value: &str) -> Self {
        let mut op = Self::set(key, flags, value);
        op.kv.verb = "lock";
        op.kv.session = Some(session.to_owned());
        op
    }

    pub(super) fn unlock(key: &str, session: &str) -> Self {
        let mut op = Self::new("unlock", key);
        op.kv.session = Some(session.to_owned());
        op
    }

    pub(super) fn set(key: &str, flags: u64, value: &str) -> Self {
        let mut op = Self::new("set", key);
        op.kv.flags = Some(flags);
        op.kv.value = Some(base64_encode(value.as_bytes()));
        op
    }

    pub(super) fn delete(key: &str) -> Self {
        Self::new("delete", key)
    }

    /// Answers with all that is below the key then.
    pub(super) fn get_tree(key: &str) -> Self {
        Self::new("get-tree", key)
    }
}

/// What a transaction answers.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct TxnAnswer {
    #[serde(default)]
    pub(super) results: Option<Vec<TxnResult>>,
    #[serde(default)]
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

/// How a session's id is written.
pub(super) fn session_text(id: u128) -> String {
    let hex = format!("{id:032x}");
    format!(
        "{}-{}-{}-{}-{}",
        &hex[..8],
        &hex[8..12],
        &hex[12..16],
        &hex[16..20],
        &hex[20..]
    )
}

/// Reads a session's id; `None` when it is none.
pub(super) fn session_id(text: &str) -> Option<u128> {
    let shaped = text.len() == 36 && text.bytes().filter(|byte| *byte == b'-').count() == 4;
    let hex = text.replace('-', "");
    (shaped && hex.len() == 32)
        .then(|| u128::from_str_radix(&hex, 16).ok())
        .flatten()
}

/// Writes a key as the path of a URL.
pub(super) fn path(key: &str) -> String {
    let mut path = String::with_capacity(key.len());
    for byte in key.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'/' => {
                path.push(char::from(byte));
            }
            other => {
                // Writing to a string can't fail.
                let _ = write!(path, "%{other:02X}");
            }
        }
    }
    path
}

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// For tests of what reads it.
#[cfg(test)]
pub(super) fn base64(text: &str) -> String {
    base64_encode(text.as_bytes())
}

fn base64_encode(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let byte = |at: usize| u32::from(chunk.get(at).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for at in 0..4 {
            let digit = (bits >> (18 - 6 * at)) & 63;
            text.push(match at <= chunk.len() {
                true => char::from(ALPHABET[digit as usize]),
                false => '=',
            });
        }
    }
    text
}

fn base64_decode(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let (mut bits, mut count) = (0u32, 0);
    for byte in text.bytes().filter(|byte| *byte != b'=') {
        let digit = ALPHABET.iter().position(|letter| *letter == byte)?;
        bits = bits << 6 | u32::try_from(digit).ok()?;
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
            bits &= (1 << count) - 1;
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_goes_there_and_back() {
        assert_eq!(base64_encode(b"hello"), "aGVsbG8=");
        for length in 0..40_u8 {
            let bytes: Vec<u8> = (0..length).map(|byte| byte.wrapping_mul(37)).collect();
            assert_eq!(base64_decode(&base64_encode(&bytes)), Some(bytes));
        }
        assert_eq!(base64_decode("a!"), None);
    }

    #[test]
    fn session_ids_go_there_and_back() {
        let text = "908f61f1-c6d0-694b-bd48-93ec3cf46853";
        assert_eq!(session_id(text).map(session_text).as_deref(), Some(text));
        for bad in [
            "",
            ".lock",
            "908f61f1",
            "908f61f1-c6d0-694b-bd48-93ec3cf4685x",
        ] {
            assert_eq!(session_id(bad), None, "{bad}");
        }
    }

    #[test]
    fn the_flags_are_those_of_the_go_client() {
        assert_eq!(LOCK, 3_304_740_253_564_472_344);
        assert_eq!(SEMAPHORE, 16_210_313_421_097_356_768);
    }
}
