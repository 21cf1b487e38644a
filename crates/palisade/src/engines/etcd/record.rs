//! What is kept with a place: who, how much, what it stands for.
//!
//! In a namespace of ours the record is the value of the place's key. With `namespace=` that
//! value is what other tools expect of a lock or a candidate (nothing, or the proposal), and the
//! record is kept under `.palisade/owner/`; only parts of a line, which no other tool knows, have
//! a marked record as their value too. A place whose record can't be read takes the whole line.

use serde::{Deserialize, Serialize};

use super::keys::Keys;
use crate::core::claim::{Ask, Claim};
use crate::core::error::{Error, Kind, Result};
use crate::core::owner::Owner;

/// What the value of a part begins with where values belong to other tools.
const PART: &str = "\u{1}palisade ";

/// The record of a claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    /// The claim. Its key may be called after an earlier one (see `Pool`).
    pub(super) id: String,
    pub(super) owner: Owner,
    /// Weight and capacity; absent for the whole line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) part: Option<(u32, u32)>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) value: Option<String>,
    /// Whether it held when its line was given another capacity, in which it may not fit.
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
        match self.part {
            Some((weight, capacity)) => Ask::Part { weight, capacity },
            None => Ask::Whole,
        }
    }

    pub(super) fn set_ask(&mut self, ask: Ask) {
        self.part = part(ask);
    }

    pub(super) fn json(&self) -> Vec<u8> {
        // Strings and numbers always serialise.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// The value of the place's key.
    ///
    /// # Errors
    /// [`Kind::InvalidArgument`] for a proposal that would be read as something else.
    pub(super) fn value(&self, keys: &Keys) -> Result<Vec<u8>> {
        if !keys.shared_with_others() {
            return Ok(self.json());
        }
        if self.part.is_some() {
            return Ok([PART.as_bytes(), &self.json()].concat());
        }
        let value = self.value.clone().unwrap_or_default();
        match value.starts_with(PART) {
            true => Err(Error::new(
                Kind::InvalidArgument,
                "value",
                "a value can't begin as the engine's own records do",
            )),
            false => Ok(value.into_bytes()),
        }
    }

    /// Reads the value of a place's key, which is ours.
    pub(super) fn read(keys: &Keys, value: &[u8]) -> Option<Self> {
        match keys.shared_with_others() {
            true => serde_json::from_slice(value.strip_prefix(PART.as_bytes())?).ok(),
            false => serde_json::from_slice(value).ok(),
        }
        .filter(|record: &Self| record.is_sound())
    }

    /// Reads a record that is kept apart.
    pub(super) fn read_apart(json: &[u8]) -> Option<Self> {
        serde_json::from_slice(json).ok()
    }

    fn is_sound(&self) -> bool {
        self.part
            .is_none_or(|(weight, capacity)| weight >= 1 && weight <= capacity)
    }
}

fn part(ask: Ask) -> Option<(u32, u32)> {
    match ask {
        Ask::Whole => None,
        Ask::Part { weight, capacity } => Some((weight, capacity)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            let value = record.value(&keys).unwrap();
            assert_eq!(Record::read(&keys, &value).as_ref(), Some(&record));
        }
        let keys = Keys::new("").unwrap();
        let as_a_part = String::from_utf8(record.value(&keys).unwrap()).unwrap();
        record.part = None;
        assert_eq!(record.value(&keys).unwrap(), b"");
        record.value = Some(as_a_part);
        let refused = record.value(&keys).err().unwrap();
        assert_eq!(refused.kind(), Kind::InvalidArgument);
    }

    #[test]
    fn what_can_not_be_read_weighs_the_whole_line() {
        let keys = Keys::new("palisade").unwrap();
        for value in ["", "x", "{}", r#"{"owner":1}"#] {
            assert_eq!(Record::read(&keys, value.as_bytes()), None);
        }
        let unsound = Record {
            id: "7".into(),
            owner: Owner::here("me", None),
            part: Some((4, 3)),
            value: None,
            held: false,
        };
        assert_eq!(Record::read(&keys, &unsound.json()), None);
    }
}
