//! `Keys`: maps lines to keys in Consul's store, and back.
//!
//! ```text
//! NS/NAME                     the lock, held by a session; or the readers' gate
//! NS/NAME/.readers/CLAIM      a reader, held by its session
//! NS/NAME/.lock               the semaphore's holders (Consul's own layout)
//! NS/NAME/SESSION             a permit, held by that session
//! NS/NAME/.value/CLAIM        the amended value of a claim
//! NS/.evict/CLAIM             an operator's eviction mark on this claim
//! ```
//! With a namespace a name is one segment: `/`, `%`, a leading dot and every non-ASCII byte are
//! escaped as `%XX`. Consul's HTTP server refuses characters that its Unicode version does not
//! consider printable; this rule needs no table of them, and is the same for every client. With
//! `namespace=` names are keys unchanged, and marks are under `.palisade/.evict/`.

use percent_encoding::{AsciiSet, percent_decode_str, utf8_percent_encode};

use palisade_core::engine::{ClaimId, config_error};
use palisade_core::{Error, ErrorKind, Name, Result};

/// The prefix of eviction marks with `namespace=`.
const BARE: &str = ".palisade";

/// The keys of one namespace.
#[derive(Debug, Clone)]
pub(super) struct Keys {
    /// Empty, or ends with a slash.
    prefix: String,
}

/// The keys of one line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Line {
    /// The key of the lock itself.
    pub(super) lock: String,
}

impl Line {
    /// The prefix of everything below the lock.
    pub(super) fn tree(&self) -> String {
        format!("{}/", self.lock)
    }

    pub(super) fn semaphore(&self) -> String {
        format!("{}/.lock", self.lock)
    }

    pub(super) fn permit(&self, session: &str) -> String {
        format!("{}/{session}", self.lock)
    }

    pub(super) fn reader(&self, claim: ClaimId) -> String {
        format!("{}/.readers/{claim}", self.lock)
    }

    pub(super) fn value(&self, claim: &str) -> String {
        format!("{}/.value/{claim}", self.lock)
    }
}

impl Keys {
    /// # Errors
    /// [`ErrorKind::Config`] for a namespace that can't be the prefix of a key.
    pub(super) fn new(namespace: &str) -> Result<Self> {
        if namespace.is_empty() {
            let prefix = String::new();
            return Ok(Self { prefix });
        }
        if !is_path(namespace) || namespace.starts_with(BARE) {
            let message = "namespace: on Consul, printable words joined by single slashes, none of them . or ..";
            return Err(config_error(message));
        }
        let prefix = format!("{namespace}/");
        Ok(Self { prefix })
    }

    /// Whether names are used unchanged.
    pub(super) fn is_bare(&self) -> bool {
        self.prefix.is_empty()
    }

    /// # Errors
    /// [`ErrorKind::InvalidName`] for a name that can't be a key unchanged.
    pub(super) fn line(&self, name: &Name) -> Result<Line> {
        let name = name.as_str();
        if self.is_bare() && (!is_path(name) || name.starts_with(BARE)) {
            let message = "with namespace= a name is a key of Consul: printable words joined by single slashes, none of them . or .., and not below .palisade; omit namespace= for other names";
            return Err(Error::new(ErrorKind::InvalidName, "name", message));
        }
        let lock = self.beginning(name);
        Ok(Line { lock })
    }

    /// The prefix of the keys of all lines whose names begin with `prefix`.
    pub(super) fn beginning(&self, prefix: &str) -> String {
        if self.is_bare() {
            prefix.to_owned()
        } else {
            format!("{}{}", self.prefix, encode(prefix))
        }
    }

    /// Splits a key into the name of its line and the rest below it.
    pub(super) fn split<'a>(&self, key: &'a str) -> Option<(String, &'a str)> {
        let rest = key.strip_prefix(self.prefix.as_str())?;
        if !self.is_bare() {
            let (name, below) = rest.split_once('/').unwrap_or((rest, ""));
            return (!name.starts_with('.')).then(|| Some((decode(name)?, below)))?;
        }
        if rest.starts_with(BARE) {
            return None;
        }
        let below = |marker: &str| {
            let at = rest.rfind(marker)?;
            Some((rest[..at].to_owned(), &rest[at + 1..]))
        };
        below("/.readers/")
            .or_else(|| below("/.value/"))
            .or_else(|| Some((rest.to_owned(), "")))
    }

    /// The key of a claim's eviction mark.
    pub(super) fn mark(&self, claim: &str) -> String {
        format!("{}{claim}", self.marks())
    }

    /// The key that names the claim that was removed last. It stays among the marks, because a
    /// watcher between two queries would miss a mark that comes and goes.
    pub(super) fn removed_last(&self) -> String {
        self.mark("last")
    }

    /// The prefix of all marks.
    pub(super) fn marks(&self) -> String {
        if self.is_bare() {
            return format!("{BARE}/.evict/");
        }
        format!("{}.evict/", self.prefix)
    }
}

/// Whether Consul's HTTP server accepts it as a path unchanged.
fn is_path(text: &str) -> bool {
    let is_segment = |segment: &str| !matches!(segment, "" | "." | "..");
    text.split('/').all(is_segment) && text.chars().all(is_printable)
}

/// Whether Go considers a character printable, as far as the standard library's table tells. It is
/// tested after a letter, where combining marks are not escaped.
fn is_printable(letter: char) -> bool {
    letter.is_ascii() || format!("a{letter}").escape_debug().count() == 2
}

/// What is escaped inside a name, besides every non-ASCII byte.
const ESCAPED: &AsciiSet = &AsciiSet::EMPTY.add(b'/').add(b'%');

fn encode(name: &str) -> String {
    match name.strip_prefix('.') {
        Some(rest) => format!("%2E{}", utf8_percent_encode(rest, ESCAPED)),
        None => utf8_percent_encode(name, ESCAPED).to_string(),
    }
}

/// Decodes what [`encode`] writes, and nothing else.
fn decode(text: &str) -> Option<String> {
    let decoded = percent_decode_str(text).decode_utf8().ok()?;
    (encode(&decoded) == text).then(|| decoded.into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_go_there_and_back() {
        let keys = Keys::new("apps/locks").unwrap();
        for name in [
            "a",
            "a/b",
            "..",
            ".lock",
            "%2F",
            "a.b",
            "ünï/🔒",
            "a b",
            "zero\u{200b}width",
            "\u{202e}turned",
            "👩\u{200d}🚀",
            "not\u{378}assigned",
        ] {
            let line = keys.line(&Name::new(name).unwrap()).unwrap();
            assert!(!line.lock["apps/locks/".len()..].contains('/'));
            assert!(line.lock.is_ascii());
            assert_eq!(keys.split(&line.lock), Some((name.to_owned(), "")));
            let reader = line.reader(ClaimId(7));
            let (of, below) = keys.split(&reader).unwrap();
            assert_eq!(of, name);
            assert!(below.starts_with(".readers/"));
        }
        assert_eq!(keys.split("apps/locks/.evict/7"), None);
        for none_of_ours in ["%", "%2", "%2f", "%zz", "%FF", "%61", "ü"] {
            let key = format!("apps/locks/{none_of_ours}");
            assert_eq!(keys.split(&key), None, "{none_of_ours}");
        }
        assert_eq!(keys.split("elsewhere/a"), None);
    }

    #[test]
    fn bare_names_are_keys_or_refused() {
        let keys = Keys::new("").unwrap();
        let line = |name: &str| keys.line(&Name::new(name).unwrap());
        assert_eq!(line("web/.lock").unwrap().lock, "web/.lock");
        for good in ["ünï", "e\u{301}", "🔒", "a b", "%2F"] {
            assert_eq!(line(good).unwrap().lock, good);
        }
        for bad in [
            "/a",
            "a/",
            "a//b",
            "a/../b",
            ".",
            ".palisade/x",
            "zero\u{200b}width",
            "\u{202e}turned",
            "👩\u{200d}🚀",
            "no\u{a0}break",
            "private\u{e000}",
            "not\u{378}assigned",
        ] {
            assert_eq!(
                line(bad).unwrap_err().kind(),
                ErrorKind::InvalidName,
                "{bad}"
            );
        }
        assert_eq!(keys.split("web/.lock"), Some(("web/.lock".to_owned(), "")));
        assert_eq!(
            keys.split("web/.readers/07"),
            Some(("web".to_owned(), ".readers/07"))
        );
        assert!(Keys::new("a//b").is_err());
    }
}
