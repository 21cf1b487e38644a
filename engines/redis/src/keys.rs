//! Key names: a line's own key, and its state key in the same hash slot.
//!
//! With a namespace the key is `NAMESPACE:NAME`. In the name, `%`, `{` and `}` are escaped as
//! `%25`, `%7B` and `%7D`; in the namespace, `%` and `:` as `%25` and `%3A`, so the first colon
//! ends it. With an empty namespace the key is the name itself, as other tools use it.
//!
//! Redis hashes what is between the first `{` and the next `}`, or else the whole key. So the state
//! key is `{KEY}:palisade`, or `KEY:palisade` if KEY has a hash tag of its own. No line's own key
//! may look like a state key of another line.

use palisade_core::engine::config_error;
use palisade_core::{Error, ErrorKind, Name, Result};

/// The suffix of a state key.
const SUFFIX: &str = ":palisade";

/// What follows [`SUFFIX`] in the names of a line's further keys; see `line.lua`.
const SETS: [&str; 8] = [
    ":claims", ":shares", ":queue", ":leases", ":left", MARK, DATA, WORK,
];

/// What follows [`SUFFIX`] in the keys of a fenced resource: its highest token, and its data.
const MARK: &str = ":fence";
const DATA: &str = ":data";

/// What follows [`SUFFIX`] in the key of a work queue; its further keys begin with that key.
const WORK: &str = ":work";

/// Maps names to keys.
#[derive(Debug, Clone)]
pub(crate) struct Keys {
    /// The encoded namespace and its colon, or empty.
    prefix: String,
}

/// The keys of one line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LineKeys {
    /// The string key that other tools know.
    pub(crate) key: String,
    /// The state key; further keys of the line begin with it.
    pub(crate) state: String,
}

impl Keys {
    /// The keys of `namespace`, which may be empty.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for braces that would put the keys of one line into different slots.
    pub(crate) fn new(namespace: &str) -> Result<Self> {
        let prefix = match namespace {
            "" => String::new(),
            namespace => format!("{}:", namespace.replace('%', "%25").replace(':', "%3A")),
        };
        match beside(&prefix) {
            Some(_) => Ok(Self { prefix }),
            None => Err(config_error(
                "namespace: a } needs a { before it, with something in between",
            )),
        }
    }

    /// The prefixes of all keys of lines whose names begin with `prefix`; none if every key
    /// matches.
    pub(crate) fn beginnings(&self, prefix: &str) -> Vec<String> {
        let key = self.key(prefix);
        if key.is_empty() {
            return Vec::new();
        }
        let beside = format!("{{{key}");
        if hash_tag(&self.prefix).is_some() || beside.starts_with(&key) {
            vec![key]
        } else {
            vec![key, beside]
        }
    }

    /// The key of a name, or the beginning of the keys of all names that begin so.
    fn key(&self, name: &str) -> String {
        if self.prefix.is_empty() {
            name.to_owned()
        } else {
            [self.prefix.as_str(), &encode(name)].concat()
        }
    }

    /// The keys of the line `name`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidName`] with an empty namespace, if the braces of the name allow no state
    /// key in the same slot; also if the key could be a state key of another line.
    pub(crate) fn line(&self, name: &Name) -> Result<LineKeys> {
        let key = self.key(name.as_str());
        let refuse = |message| Error::new(ErrorKind::InvalidName, "name", message);
        let state = beside(&key).ok_or_else(|| {
            refuse("with an empty namespace, a } in a name needs a { before it, with something in between")
        })?;
        // State keys have a hash tag, so a key without one needs no closer look.
        if hash_tag(&key).is_some() && is_beside(&key) {
            return Err(refuse(
                "palisade keeps the records of another lock under this key; use a name that does not end so",
            ));
        }
        Ok(LineKeys { key, state })
    }

    /// The keys of the fenced resource `name`: its data as `key`, its highest token as `state`.
    /// With an empty namespace the data is under the name itself, where other programs find it.
    ///
    /// # Errors
    /// As [`Keys::line`].
    pub(super) fn fenced(&self, name: &Name) -> Result<LineKeys> {
        let LineKeys { key, state } = self.line(name)?;
        Ok(LineKeys {
            key: if self.prefix.is_empty() {
                key
            } else {
                format!("{state}{DATA}")
            },
            state: format!("{state}{MARK}"),
        })
    }

    /// The keys of the work queue `name`: the queue as `key`, its set of due messages as `state`.
    ///
    /// # Errors
    /// As [`Keys::line`].
    pub(super) fn queue(&self, name: &Name) -> Result<LineKeys> {
        let key = self.line(name)?.state + WORK;
        let state = format!("{key}:due");
        Ok(LineKeys { key, state })
    }

    /// A SCAN pattern for work queues whose names begin with `prefix`; it may match more.
    pub(super) fn queue_pattern(&self, prefix: &str) -> String {
        self.pattern(prefix) + WORK
    }

    /// The work queue with this key, if it is in this namespace.
    pub(super) fn queue_of(&self, key: &str) -> Option<Name> {
        Some(self.name_of(key.strip_suffix(WORK)?)?.0)
    }

    /// A SCAN pattern for the state keys of lines whose names begin with `prefix`; it may match
    /// more.
    pub(crate) fn pattern(&self, prefix: &str) -> String {
        if self.prefix.is_empty() {
            return format!("*{SUFFIX}");
        }
        let begin = escape(&self.key(prefix));
        if hash_tag(&self.prefix).is_some() {
            format!("{begin}*{SUFFIX}")
        } else {
            format!("{{{begin}*}}{SUFFIX}")
        }
    }

    /// The line with this state key, if it is in this namespace.
    pub(crate) fn name_of(&self, state: &str) -> Option<(Name, LineKeys)> {
        let key = owner_of(state)?;
        let keys = LineKeys {
            key: key.to_owned(),
            state: state.to_owned(),
        };
        Some((self.name(key)?, keys))
    }

    /// The line with this key, if it is in this namespace.
    pub(crate) fn name(&self, key: &str) -> Option<Name> {
        let name = key.strip_prefix(&self.prefix)?;
        let name = if self.prefix.is_empty() {
            name.to_owned()
        } else {
            decode(name)?
        };
        Name::new(name).ok()
    }
}

/// The hash tag of a key: the part that Redis hashes in place of the whole key.
pub(super) fn hash_tag(key: &str) -> Option<&str> {
    key.split_once('{')
        .and_then(|(_, rest)| rest.split_once('}'))
        .map(|(tag, _)| tag)
        .filter(|tag| !tag.is_empty())
}

/// The state key of a key; `None` if no such key is in the same slot.
fn beside(key: &str) -> Option<String> {
    match (hash_tag(key), key.contains('}')) {
        (Some(_), _) => Some([key, SUFFIX].concat()),
        (None, true) => None,
        (None, false) => Some(["{", key, "}", SUFFIX].concat()),
    }
}

/// The key that has this state key.
fn owner_of(state: &str) -> Option<&str> {
    let inside = state.strip_suffix(SUFFIX)?;
    let bare = inside.strip_prefix('{').and_then(|k| k.strip_suffix('}'));
    [bare, Some(inside)]
        .into_iter()
        .flatten()
        .find(|key| beside(key).as_deref() == Some(state))
}

/// Whether `key` could be a state key, or a further key, of another line.
fn is_beside(key: &str) -> bool {
    // The keys of a work queue may end with anything.
    let work = key.rfind(&[SUFFIX, WORK, ":"].concat());
    if work.is_some_and(|at| owner_of(&key[..at + SUFFIX.len()]).is_some()) {
        return true;
    }
    let states = SETS.iter().filter_map(|set| key.strip_suffix(set));
    states.chain([key]).any(|state| owner_of(state).is_some())
}

fn encode(name: &str) -> String {
    name.replace('%', "%25")
        .replace('{', "%7B")
        .replace('}', "%7D")
}

fn decode(key: &str) -> Option<String> {
    let decoded = key
        .replace("%7B", "{")
        .replace("%7D", "}")
        .replace("%25", "%");
    (encode(&decoded) == key).then_some(decoded)
}

/// Escapes the special characters of a SCAN pattern.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        if "*?[]\\^-".contains(c) {
            escaped.push('\\');
        }
        escaped.push(c);
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The part of a key that Redis hashes.
    fn hashed(key: &str) -> &str {
        hash_tag(key).unwrap_or(key)
    }

    #[test]
    fn the_keys_of_a_line_share_a_slot_and_tell_their_name() {
        let names = [
            "a",
            "a:b",
            "{x}",
            "{x",
            "a{}b",
            "x}y",
            "100%",
            "%7B",
            "a{b}c",
            "ü*?[a]\\",
        ];
        for namespace in ["palisade", "{tag}", "a{b}c", "x{"] {
            let keys = Keys::new(namespace).unwrap();
            for name in names {
                let name = Name::new(name).unwrap();
                let line = keys.line(&name).unwrap();
                assert_eq!(hashed(&line.key), hashed(&line.state), "{line:?}");
                assert_eq!(keys.name_of(&line.state), Some((name, line)), "{namespace}");
            }
        }
    }

    #[test]
    fn an_empty_namespace_uses_names_as_they_are() {
        let keys = Keys::new("").unwrap();
        for good in ["job", "a{b}c", "a{b", "{a}{}"] {
            let name = Name::new(good).unwrap();
            let line = keys.line(&name).unwrap();
            assert_eq!(line.key, good);
            assert_eq!(hashed(&line.key), hashed(&line.state), "{line:?}");
            assert_eq!(keys.name_of(&line.state), Some((name, line)));
        }
        for bad in ["a}b", "{}", "a{}b{c}"] {
            let refused = keys.line(&Name::new(bad).unwrap()).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::InvalidName, "{bad}");
        }
        assert_eq!(Keys::new("a}b").unwrap_err().kind(), ErrorKind::Config);
    }

    #[test]
    fn no_two_lines_share_a_key() {
        let mut seen = std::collections::HashMap::new();
        for namespace in [
            "", "a", "a:x", "a%3Ax", "a:", "{a}", "{a:x}", "{a}:x", "{a:",
        ] {
            let keys = Keys::new(namespace).unwrap();
            for name in [
                "x",
                "x:y",
                ":x",
                "%3Ax",
                "palisade",
                "y:palisade",
                "{a}:palisade",
                "{a:x}:palisade",
                "{a}:palisade:queue",
                "{{a:x}:palisade",
                "a{b}c:palisade:left",
                "a{b}c",
            ] {
                // With an empty namespace a name can be any key, also that of a line in a
                // namespace.
                let Ok(line) = keys.line(&Name::new(name).unwrap()) else {
                    continue;
                };
                let sets = SETS.map(|set| format!("{}{set}", line.state));
                let own = [&line.key, &line.state].into_iter().chain(&sets);
                for (at, key) in own.enumerate() {
                    let other = seen.insert(key.clone(), (namespace, name, at));
                    let foreign = other.filter(|(other, _, of)| {
                        at != *of || (!other.is_empty() && !namespace.is_empty())
                    });
                    assert_eq!(foreign, None, "{key} of {namespace:?} {name:?}");
                }
            }
        }
        let bare = Keys::new("").unwrap();
        for state in ["{job}:palisade", "{job}:palisade:claims", "a{b}c:palisade"] {
            let refused = bare.line(&Name::new(state).unwrap()).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::InvalidName, "{state}");
        }
        for plain in ["job:palisade", "palisade", "job:palisade:queue"] {
            assert_eq!(bare.line(&Name::new(plain).unwrap()).unwrap().key, plain);
        }
    }

    #[test]
    fn a_pattern_means_what_it_says() {
        let keys = Keys::new("ns").unwrap();
        assert_eq!(keys.pattern("a*"), "{ns:a\\**}:palisade");
        assert_eq!(Keys::new("{t}").unwrap().pattern("a"), "{t}:a*:palisade");
        assert_eq!(keys.beginnings("a"), ["ns:a", "{ns:a"]);
        assert_eq!(Keys::new("").unwrap().beginnings(""), [""; 0]);
    }
}
