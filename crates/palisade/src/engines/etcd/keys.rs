//! Where everything is kept: the keys of a namespace, made and read.
//!
//! A place in the line NAME is `NS/NAME/<lease hex>-<claim id>`, beside the keys of Go's
//! `concurrency` package (`NS/NAME/<lease hex>`). In a namespace of ours `/` and `%` of a name
//! are written `%2F` and `%25`; with `namespace=` a name is used as it is. Two further prefixes,
//! apart from every line: `.palisade/owner/` + key, the owner record where the value of the key
//! belongs to other tools, and `.palisade/evict/` + key, an operator's mark; both hang on the
//! lease of the place.

use std::sync::Arc;

use crate::core::claim::ClaimId;
use crate::core::error::{Error, Kind, Result};
use crate::core::name::Name;

/// What nothing but the engine's own records begins with.
const RESERVED: &str = ".palisade/";
pub(super) const OWNERS: &str = ".palisade/owner/";
pub(super) const MARKS: &str = ".palisade/evict/";
/// A key that never is, to write without changing anything.
pub(super) const NOTHING: &str = ".palisade/nothing";

/// How names become keys.
#[derive(Debug, Clone)]
pub(super) struct Keys {
    /// `ns/`, or nothing.
    base: String,
}

/// A key of a line, taken apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Parsed {
    pub(super) name: String,
    /// The lease and the claim; `None` for a ticket of another tool.
    pub(super) ours: Option<(i64, ClaimId)>,
    /// What follows the name.
    pub(super) rest: String,
}

impl Keys {
    /// # Errors
    /// [`Kind::Config`] for a namespace that the engine keeps its own records in.
    pub(super) fn new(namespace: &str) -> Result<Self> {
        if format!("{namespace}/").starts_with(RESERVED) {
            let message = "namespace: .palisade is where the engine keeps its own records";
            return Err(Error::new(Kind::Config, "connect", message));
        }
        let base = match namespace {
            "" => String::new(),
            namespace => format!("{namespace}/"),
        };
        Ok(Self { base })
    }

    /// Whether names are used as they are, beside other tools.
    pub(super) fn shared_with_others(&self) -> bool {
        self.base.is_empty()
    }

    /// What all lines of the namespace whose name begins with `prefix` begin with.
    pub(super) fn scope(&self, prefix: &str) -> String {
        match self.shared_with_others() {
            true => prefix.to_owned(),
            false => format!("{}{}", self.base, encode(prefix)),
        }
    }

    /// What all keys of the line begin with.
    ///
    /// # Errors
    /// [`Kind::InvalidName`] for a name that can't be used as it is.
    pub(super) fn line(&self, name: &Name) -> Result<String> {
        if self.shared_with_others() && format!("{name}/").starts_with(RESERVED) {
            let message = "with an empty namespace a name can't begin with .palisade/, where the \
                           engine keeps its own records";
            return Err(Error::new(Kind::InvalidName, "name", message));
        }
        Ok(format!("{}/", self.scope(name.as_str())))
    }

    /// The key of a place.
    ///
    /// # Errors
    /// As [`Keys::line`].
    pub(super) fn place(&self, name: &Name, lease: i64, claim: ClaimId) -> Result<Arc<str>> {
        Ok(format!("{}{}", self.line(name)?, suffix(lease, claim)).into())
    }

    /// Takes a key of this namespace apart.
    pub(super) fn parse(&self, key: &[u8]) -> Option<Parsed> {
        let key = std::str::from_utf8(key).ok()?.strip_prefix(&self.base)?;
        let (name, rest) = key.rsplit_once('/')?;
        if key.starts_with(RESERVED) || name.is_empty() {
            return None;
        }
        let name = match self.shared_with_others() {
            true => name.to_owned(),
            false => decode(name)?,
        };
        Some(Parsed {
            name,
            ours: ours(rest),
            rest: rest.to_owned(),
        })
    }
}

/// What follows the name in the key of a place.
pub(super) fn suffix(lease: i64, claim: ClaimId) -> String {
    format!("{lease:x}-{claim}")
}

/// The lease and the claim, if what follows the name is ours.
pub(super) fn ours(rest: &str) -> Option<(i64, ClaimId)> {
    let (lease, claim) = rest.split_once('-')?;
    (claim.len() == 32).then_some(())?;
    Some((i64::from_str_radix(lease, 16).ok()?, claim.parse().ok()?))
}

/// The end of the range of keys that begin with `prefix`: the prefix with its last byte raised.
pub(super) fn prefix_end(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    // UTF-8 has no byte 0xff, so that the last one can always be raised.
    match end.last_mut() {
        Some(last) => *last += 1,
        None => end.push(0),
    }
    end
}

/// The first key of the range of keys that begin with `prefix`.
pub(super) fn prefix_start(prefix: &str) -> Vec<u8> {
    match prefix.is_empty() {
        // All keys: from the first one that can be.
        true => vec![0],
        false => prefix.as_bytes().to_vec(),
    }
}

fn encode(name: &str) -> String {
    name.replace('%', "%25").replace('/', "%2F")
}

fn decode(name: &str) -> Option<String> {
    let known = name.matches('%').count();
    let ours = name.matches("%25").count() + name.matches("%2F").count();
    (known == ours && !name.contains('/')).then(|| name.replace("%2F", "/").replace("%25", "%"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_made_and_read() {
        for namespace in ["palisade", "a/b", "ü", ""] {
            let keys = Keys::new(namespace).unwrap();
            for name in ["x", "a/b", "100%", "%2F", "a%25/b", "α β", "/x", "x/"] {
                let name = Name::new(name).unwrap();
                let key = keys.place(&name, 0x1a2b, ClaimId(7)).unwrap();
                assert!(key.starts_with(&keys.line(&name).unwrap()));
                let parsed = keys.parse(key.as_bytes()).unwrap();
                assert_eq!(parsed.name, name.as_str(), "{namespace:?}");
                assert_eq!(parsed.ours, Some((0x1a2b, ClaimId(7))));
            }
        }
    }

    #[test]
    fn in_a_namespace_of_ours_no_line_is_inside_another() {
        let keys = Keys::new("palisade").unwrap();
        let (a, ab) = (Name::new("a").unwrap(), Name::new("a/b").unwrap());
        let inside = keys.place(&ab, 1, ClaimId(1)).unwrap();
        assert!(!inside.starts_with(&keys.line(&a).unwrap()));
        assert!(inside.starts_with(&keys.scope("a/")));
    }

    #[test]
    fn the_keys_of_other_tools_are_told_apart() {
        let keys = Keys::new("").unwrap();
        let parsed = keys.parse(b"nightly/694d81417acd4754").unwrap();
        assert_eq!((parsed.name.as_str(), parsed.ours), ("nightly", None));
        assert!(keys.parse(b"no-slash").is_none());
        assert!(keys.parse(b".palisade/owner/x/1-2").is_none());
        for odd in ["1-2", "x-0000000000000000000000000000000a", "-"] {
            assert_eq!(ours(odd), None, "{odd}");
        }
        assert_eq!(
            Keys::new(".palisade").err().map(|e| e.kind()),
            Some(Kind::Config)
        );
        let reserved = Name::new(".palisade/evict").unwrap();
        assert_eq!(
            keys.line(&reserved).err().unwrap().kind(),
            Kind::InvalidName
        );
    }
}
