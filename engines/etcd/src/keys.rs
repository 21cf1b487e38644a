//! The keys of a line, and their values.
//!
//! A place in the line NAME is `NS/NAME/<lease hex>-<claim id>`, next to the keys of Go's
//! `concurrency` package (`NS/NAME/<lease hex>`). With a namespace, `/` and `%` in a name are
//! escaped as `%2F` and `%25`, and the value of a place is its [`Record`]. With `namespace=` a name
//! is used unchanged, and the value is what other tools expect of a lock or a candidate (empty, or
//! the proposal); the record is kept under `.palisade/owner/` + key. Only readers and permits,
//! which no other tool knows, have a marked record as their value even then.
//!
//! A place whose record can't be read takes the whole line. `.palisade/evict/` + key is an
//! operator's eviction mark. All of these keys are attached to the lease of the place.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use palisade_core::engine::{Ask, Claim, ClaimId, config_error};
use palisade_core::report::Owner;
use palisade_core::{Error, ErrorKind, Name, Result};

/// The prefix of the engine's own records.
const RESERVED: &str = ".palisade/";
pub(super) const OWNERS: &str = ".palisade/owner/";
pub(super) const MARKS: &str = ".palisade/evict/";
/// A key that never exists, for writes that change nothing.
pub(super) const NOTHING: &str = ".palisade/nothing";

/// The prefix of a reader's or permit's value where values belong to other tools.
const PART: &str = "\u{1}palisade ";

/// Maps names to keys.
#[derive(Debug, Clone)]
pub(super) struct Keys {
    /// `ns/`, or empty.
    base: String,
}

impl Keys {
    /// # Errors
    /// [`ErrorKind::Config`] for a namespace that collides with the engine's own records.
    pub(super) fn new(namespace: &str) -> Result<Self> {
        if format!("{namespace}/").starts_with(RESERVED) {
            let message = "namespace: .palisade is where the engine keeps its own records";
            return Err(config_error(message));
        }
        let base = match namespace {
            "" => String::new(),
            namespace => format!("{namespace}/"),
        };
        Ok(Self { base })
    }

    /// Whether names are used unchanged, next to other tools.
    pub(super) fn shared_with_others(&self) -> bool {
        self.base.is_empty()
    }

    /// The prefix of the keys of all lines whose names begin with `prefix`.
    pub(super) fn scope(&self, prefix: &str) -> String {
        if self.shared_with_others() {
            prefix.to_owned()
        } else {
            self.base.clone() + &prefix.replace('%', "%25").replace('/', "%2F")
        }
    }

    /// The prefix of the line's keys.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidName`] for a name that can't be used unchanged.
    pub(super) fn line(&self, name: &Name) -> Result<String> {
        if self.shared_with_others() && format!("{name}/").starts_with(RESERVED) {
            let message = "with an empty namespace a name can't begin with .palisade/, where the \
                           engine keeps its own records";
            return Err(Error::new(ErrorKind::InvalidName, "name", message));
        }
        Ok(self.scope(name.as_str()) + "/")
    }

    /// The name in a key of this namespace, and the rest of the key.
    pub(super) fn parse<'a>(&self, key: &'a [u8]) -> Option<(String, &'a str)> {
        let key = std::str::from_utf8(key).ok()?.strip_prefix(&self.base)?;
        let (name, rest) = key.rsplit_once('/')?;
        if key.starts_with(RESERVED) || name.is_empty() {
            return None;
        }
        if self.shared_with_others() {
            return Some((name.to_owned(), rest));
        }
        let escapes = name.matches("%25").count() + name.matches("%2F").count();
        let is_ours = escapes == name.matches('%').count() && !name.contains('/');
        is_ours.then(|| (name.replace("%2F", "/").replace("%25", "%"), rest))
    }
}

/// The key of a new place in the line whose keys begin with `prefix`.
pub(super) fn place(prefix: &str, lease: i64, claim: ClaimId) -> Arc<str> {
    format!("{prefix}{lease:x}-{claim}").into()
}

/// The lease and the claim in the rest of a key after the name; `None` for a key of another tool.
pub(super) fn ours(rest: &str) -> Option<(i64, ClaimId)> {
    let (lease, claim) = rest.split_once('-')?;
    (claim.len() == 32).then_some(())?;
    Some((i64::from_str_radix(lease, 16).ok()?, claim.parse().ok()?))
}

/// The lease in the key of one of our places.
pub(super) fn lease_of(key: &str) -> Option<i64> {
    ours(key.rsplit('/').next()?).map(|(lease, _)| lease)
}

/// The key of a place's owner record where values belong to other tools.
pub(super) fn owner_key(key: &[u8]) -> Vec<u8> {
    [OWNERS.as_bytes(), key].concat()
}

/// The key of a place's eviction mark.
pub(super) fn mark_key(key: &[u8]) -> Vec<u8> {
    [MARKS.as_bytes(), key].concat()
}

/// The value of a place's key, and its owner record where that is kept apart.
pub(super) type Values = (Vec<u8>, Option<Vec<u8>>);

/// The record of a place: its owner, its part of the line, and its value.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    /// The claim. A reused key contains the id of an earlier one (see `leases`).
    pub(super) id: String,
    pub(super) owner: Owner,
    /// Weight and capacity; absent for the whole line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) part: Option<(u32, u32)>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) value: Option<String>,
    /// Whether it held when its line was resized, even if it no longer fits.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) held: bool,
}

impl Record {
    pub(super) fn new(claim: &Claim) -> Self {
        Self {
            id: claim.id.to_string(),
            owner: claim.owner.clone(),
            part: part(claim.ask),
            value: claim.value.clone(),
            held: false,
        }
    }

    pub(super) fn ask(&self) -> Ask {
        self.part
            .map_or(Ask::Whole, |(weight, capacity)| Ask::Part {
                weight,
                capacity,
            })
    }

    fn json(&self) -> Vec<u8> {
        // Strings and numbers always serialize.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// What is written for it.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for a proposal that would be taken for a record.
    pub(super) fn values(&self, keys: &Keys) -> Result<Values> {
        let (json, value) = (self.json(), self.value.as_deref().unwrap_or_default());
        if !keys.shared_with_others() {
            return Ok((json, None));
        }
        if self.part.is_some() {
            return Ok(([PART.as_bytes(), &json].concat(), Some(json)));
        }
        if value.starts_with(PART) {
            let message = "a value can't begin like the engine's own records";
            return Err(Error::new(ErrorKind::InvalidArgument, "value", message));
        }
        Ok((value.into(), Some(json)))
    }

    /// Parses the value of one of our keys.
    pub(super) fn read(keys: &Keys, value: &[u8]) -> Option<Self> {
        if keys.shared_with_others() {
            return Self::parse(value.strip_prefix(PART.as_bytes())?);
        }
        Self::parse(value)
    }

    pub(super) fn parse(json: &[u8]) -> Option<Self> {
        let record: Self = serde_json::from_slice(json).ok()?;
        let is_sound = |(weight, capacity)| weight >= 1 && weight <= capacity;
        record.part.is_none_or(is_sound).then_some(record)
    }
}

/// Weight and capacity of a claim; `None` for the whole line.
pub(super) fn part(ask: Ask) -> Option<(u32, u32)> {
    match ask {
        Ask::Whole => None,
        Ask::Part { weight, capacity } => Some((weight, capacity)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_made_and_read() {
        for namespace in ["palisade", "a/b", "ü", ""] {
            let keys = Keys::new(namespace).unwrap();
            for name in ["x", "a/b", "100%", "%2F", "a%25/b", "α β", "/x", "x/"] {
                let line = keys.line(&Name::new(name).unwrap()).unwrap();
                let key = place(&line, 0x1a2b, ClaimId(7));
                let (parsed, rest) = keys.parse(key.as_bytes()).unwrap();
                assert_eq!(parsed, name, "{namespace:?}");
                assert_eq!(ours(rest), Some((0x1a2b, ClaimId(7))));
            }
        }
    }

    #[test]
    fn in_a_namespace_of_ours_no_line_is_inside_another() {
        let keys = Keys::new("palisade").unwrap();
        let line = |name: &str| keys.line(&Name::new(name).unwrap()).unwrap();
        assert!(!line("a/b").starts_with(&line("a")));
        assert!(line("a/b").starts_with(&keys.scope("a/")));
    }

    #[test]
    fn the_keys_of_other_tools_are_told_apart() {
        let keys = Keys::new("").unwrap();
        let (name, rest) = keys.parse(b"nightly/694d81417acd4754").unwrap();
        assert_eq!((name.as_str(), ours(rest)), ("nightly", None));
        assert!(keys.parse(b"no-slash").is_none());
        assert!(keys.parse(b".palisade/owner/x/1-2").is_none());
        for odd in ["1-2", "x-0000000000000000000000000000000a", "-"] {
            assert_eq!(ours(odd), None, "{odd}");
        }
        let kind = Keys::new(".palisade").err().map(|error| error.kind());
        assert_eq!(kind, Some(ErrorKind::Config));
        let reserved = keys.line(&Name::new(".palisade/evict").unwrap());
        assert_eq!(reserved.err().unwrap().kind(), ErrorKind::InvalidName);
    }

    #[test]
    fn a_record_comes_back_and_a_proposal_is_never_taken_for_one() {
        let mut record = Record {
            id: "7".into(),
            owner: Owner::here("me", None),
            part: Some((2, 3)),
            value: None,
            held: false,
        };
        for namespace in ["palisade", ""] {
            let keys = Keys::new(namespace).unwrap();
            let (value, _) = record.values(&keys).unwrap();
            assert_eq!(Record::read(&keys, &value).as_ref(), Some(&record));
        }
        let keys = Keys::new("").unwrap();
        let as_a_part = String::from_utf8(record.values(&keys).unwrap().0).unwrap();
        record.part = None;
        assert_eq!(record.values(&keys).unwrap().0, b"");
        record.value = Some(as_a_part);
        let refused = record.values(&keys).err().unwrap();
        assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
        record.part = Some((4, 3));
        for unsound in [&record.json()[..], b"", b"x", b"{}", br#"{"owner":1}"#] {
            assert_eq!(Record::parse(unsound), None);
        }
    }
}
