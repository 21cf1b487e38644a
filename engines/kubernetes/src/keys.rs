//! `Keys`: maps a line to the name of its Lease, and back.
//!
//! A Lease's name is a DNS subdomain: at most 253 of `a-z`, `0-9`, `-` and `.`, the latter two only
//! between letters or digits. With a namespace it is `NS.NAME`, both encoded: `z` is the escape
//! character, so `z` becomes `zz` and any other byte `zXX`. The encoded `NS` has no dot. A name
//! that becomes too long is `NS.zh` and a hash, which no encoding yields; the annotation
//! [`NAME`](super::lease::NAME) says whose Lease it is. With `namespace=` names are Lease names
//! unchanged.

use std::fmt::Write;

use ring::digest::{SHA256, digest};

use palisade_core::engine::config_error;
use palisade_core::{Error, ErrorKind, Name, Result};

/// The longest name of a Lease.
const LONGEST: usize = 253;

/// The longest encoded namespace, which leaves room for a hash.
const LONGEST_NAMESPACE: usize = 128;

/// The Lease names of one namespace.
#[derive(Debug, Clone)]
pub(super) struct Keys {
    /// Empty, or ends with a dot.
    prefix: String,
}

impl Keys {
    /// # Errors
    /// [`ErrorKind::Config`] for a namespace that is too long.
    pub(super) fn new(namespace: &str) -> Result<Self> {
        if namespace.is_empty() {
            let prefix = String::new();
            return Ok(Self { prefix });
        }
        let prefix = format!("{}.", encode(namespace, false));
        if prefix.len() > LONGEST_NAMESPACE {
            let message = "namespace= is too long to begin the name of a Lease; use a shorter one";
            return Err(config_error(message));
        }
        Ok(Self { prefix })
    }

    /// Whether names are used unchanged.
    pub(super) fn is_bare(&self) -> bool {
        self.prefix.is_empty()
    }

    /// The name of a line's Lease.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidName`] for a name that can't be a Lease name unchanged.
    pub(super) fn lease(&self, name: &Name) -> Result<String> {
        let name = name.as_str();
        if self.is_bare() {
            if is_subdomain(name) {
                return Ok(name.to_owned());
            }
            let message = "with namespace= a name is the name of a Lease: at most 253 of a-z, 0-9, - and ., which begins and ends with a letter or digit; omit namespace= for other names";
            return Err(Error::new(ErrorKind::InvalidName, "name", message));
        }
        let key = format!("{}{}", self.prefix, encode(name, true));
        if key.len() <= LONGEST {
            return Ok(key);
        }
        let mut key = format!("{}zh", self.prefix);
        for byte in digest(&SHA256, name.as_bytes()).as_ref() {
            // Writing to a string never fails.
            let _ = write!(key, "{byte:02x}");
        }
        Ok(key)
    }

    /// The line of a Lease in this namespace, by its annotation, or else by its name.
    pub(super) fn name(&self, lease: &str, annotation: Option<&str>) -> Option<String> {
        if self.is_bare() {
            return Some(lease.to_owned());
        }
        let name = match annotation {
            Some(name) => name.to_owned(),
            None => decode(lease.strip_prefix(&self.prefix)?)?,
        };
        let same = self.lease(&Name::new(&name).ok()?).ok()? == lease;
        same.then_some(name)
    }

    /// Whether a Lease is in this namespace.
    pub(super) fn includes(&self, lease: &str) -> bool {
        lease.starts_with(&self.prefix)
    }
}

fn is_plain(byte: u8) -> bool {
    byte.is_ascii_lowercase() || byte.is_ascii_digit()
}

fn is_subdomain(name: &str) -> bool {
    let label = |label: &str| {
        let bytes = label.as_bytes();
        let ends = [bytes.first(), bytes.last()];
        let inside = |byte: &u8| is_plain(*byte) || *byte == b'-';
        ends.iter().all(|end| end.is_some_and(|end| is_plain(*end))) && bytes.iter().all(inside)
    };
    name.len() <= LONGEST && name.split('.').all(label)
}

fn encode(name: &str, dots: bool) -> String {
    let bytes = name.as_bytes();
    let joint = |byte: u8| byte == b'-' || (dots && byte == b'.');
    let mut encoded = String::with_capacity(name.len());
    for (at, &byte) in bytes.iter().enumerate() {
        let next_is_joint = bytes.get(at + 1).is_none_or(|next| b"-.".contains(next));
        match byte {
            b'z' => encoded.push_str("zz"),
            byte if is_plain(byte) => encoded.push(char::from(byte)),
            // Unescaped only between letters or digits, which is what every escape consists of.
            byte if joint(byte)
                && !next_is_joint
                && encoded.bytes().last().is_some_and(is_plain) =>
            {
                encoded.push(char::from(byte));
            }
            byte => {
                let _ = write!(encoded, "z{byte:02x}");
            }
        }
    }
    encoded
}

fn decode(encoded: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(encoded.len());
    let mut rest = encoded.as_bytes();
    while let [first, tail @ ..] = rest {
        rest = tail;
        if *first != b'z' {
            bytes.push(*first);
        } else if let [b'z', tail @ ..] = rest {
            bytes.push(b'z');
            rest = tail;
        } else {
            let digits = std::str::from_utf8(rest.get(..2)?).ok()?;
            bytes.push(u8::from_str_radix(digits, 16).ok()?);
            rest = &rest[2..];
        }
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key(keys: &Keys, name: &str) -> String {
        keys.lease(&Name::new(name).unwrap()).unwrap()
    }

    #[test]
    fn usual_names_stay_readable() {
        let keys = Keys::new("palisade").unwrap();
        for (name, lease) in [
            ("nightly-report", "palisade.nightly-report"),
            ("orders/42", "palisade.ordersz2f42"),
            ("a.b", "palisade.a.b"),
            ("-", "palisade.z2d"),
            ("a-.b", "palisade.az2d.b"),
            ("Zoo", "palisade.z5aoo"),
            ("zoo", "palisade.zzoo"),
        ] {
            assert_eq!(key(&keys, name), lease);
            assert_eq!(keys.name(lease, None).as_deref(), Some(name));
        }
        let dotted = Keys::new("a.b").unwrap();
        assert_eq!(key(&dotted, "c"), "az2eb.c");
    }

    #[test]
    fn long_names_are_hashed_and_known_by_their_annotation() {
        let keys = Keys::new("palisade").unwrap();
        let (one, two) = ("x".repeat(255), format!("{}y", "x".repeat(254)));
        let lease = key(&keys, &one);
        assert!(is_subdomain(&lease) && lease != key(&keys, &two));
        assert_eq!(keys.name(&lease, Some(&one)), Some(one.clone()));
        // An annotation with another name does not match the hash.
        assert_eq!(keys.name(&lease, Some(&two)), None);
        assert_eq!(keys.name(&lease, None), None);
    }

    #[test]
    fn bare_names_are_leases_or_refused() {
        let keys = Keys::new("").unwrap();
        assert_eq!(key(&keys, "my-controller.example"), "my-controller.example");
        for bad in ["a/b", "A", "-a", "a-", "a..b", ".", "a_b", &"a".repeat(254)] {
            let refused = keys.lease(&Name::new(bad).unwrap()).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::InvalidName, "{bad}");
        }
        let long = Keys::new(&"/".repeat(60)).unwrap_err();
        assert_eq!(long.kind(), ErrorKind::Config);
    }

    proptest! {
        #[test]
        fn every_name_is_a_subdomain_and_comes_back(name in "\\PC{1,60}", namespace in "\\PC{1,8}") {
            prop_assume!(name.len() <= 255);
            let keys = Keys::new(&namespace).unwrap();
            let lease = key(&keys, &name);
            prop_assert!(is_subdomain(&lease), "{lease}");
            prop_assert_eq!(keys.name(&lease, Some(&name)), Some(name.clone()));
            if !lease.contains("zh") {
                prop_assert_eq!(keys.name(&lease, None), Some(name));
            }
        }
    }
}
