//! The layout: the znode of a line, the names of its children, and their data.
//!
//! ```text
//! /CHROOT/NS/NAME                             the line: a container, gone when it is empty
//!   _c_<uuid>-lock-<seq>                      the whole line, as Curator's InterProcessMutex
//!   _c_<uuid>-r-lock-<seq>                    a reader
//!   _c_<uuid>-<k>of<n>-lock-<seq>             k of n permits
//! ```
//! With `layout=readwrite` the last word is `__WRIT__`, and a reader is `_c_<uuid>-__READ__<seq>`,
//! as in Curator's InterProcessReadWriteLock. The uuid is the claim; the sequence is the order. The
//! names contain kind and weight, because Curator sorts *all* children of a path, and so that a
//! list of names is enough to decide a place. A child of another tool whose name ends in a sequence
//! takes the whole line; other children are not in it.
//!
//! ```text
//! /CHROOT/.palisade/fence/NS/NAME             the mark of a fenced resource
//! /CHROOT/.palisade/data/NS/NAME              its data
//! /CHROOT/.palisade/sessions/<id>             written to by the renewals of a session with agents
//! ```
//! With `namespace=` NS is `%`. A resource's data is never in the znode NAME itself: that may be a
//! line, and ZooKeeper does not show whether a znode is a container, which is removed when it is
//! empty.
//!
//! With a namespace a name is one segment: `/`, `%`, non-ASCII bytes, and the dots of `.` and `..`
//! are escaped as `%XX`, because ZooKeeper refuses some Unicode characters. With `namespace=` a
//! name is used as a path unchanged.

use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, utf8_percent_encode};
use serde::{Deserialize, Serialize};

use palisade_core::engine::{Ask, Claim, ClaimId, config_error};
use palisade_core::report::Owner;
use palisade_core::{Error, ErrorKind, Name, Result};
use palisade_kit::uuid::{read_uuid, uuid};

/// What Curator writes into a holder's znode to ask for its release.
const REVOKE: &[u8] = b"__REVOKE__";

/// The number of digits of a sequence.
const DIGITS: usize = 10;

/// The subtree of palisade's own records, below the chroot.
const OWN: &str = ".palisade";

/// The characters that are escaped in a segment of a path.
const ENCODED: &AsciiSet = &CONTROLS.add(b'/').add(b'%');

/// The Curator recipe that the names of children follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Layout {
    Mutex,
    ReadWrite,
}

/// The nodes of one namespace.
#[derive(Debug, Clone)]
pub(super) struct Keys {
    /// Without a trailing slash.
    chroot: String,
    /// The namespace as one segment.
    namespace: String,
    /// The chroot, and the namespace if there is one, without a trailing slash.
    base: String,
    bare: bool,
    layout: Layout,
}

impl Keys {
    /// # Errors
    /// [`ErrorKind::Config`] for a chroot or a namespace that is not a valid path.
    pub(super) fn new(chroot: &str, namespace: &str, layout: Layout) -> Result<Self> {
        let chroot = chroot.trim_matches('/');
        for (path, what) in [(chroot, "the path of the URL"), (namespace, "namespace")] {
            if !path.is_empty() && !is_path(path) {
                let message = format!(
                    "{what}: on ZooKeeper, words joined by single slashes, none of them . or .., \
                     and none with characters beyond U+D7FF"
                );
                return Err(config_error(message));
            }
        }
        let below = |part: &str| match part {
            "" => String::new(),
            part => format!("/{part}"),
        };
        let keys = Self {
            base: below(chroot) + &below(namespace),
            chroot: below(chroot),
            namespace: match namespace {
                // No namespace is encoded like this.
                "" => "%".to_owned(),
                namespace => encode(namespace),
            },
            bare: namespace.is_empty(),
            layout,
        };
        if keys.is_reserved(&keys.base) {
            let message = "/zookeeper and .palisade are where ZooKeeper and palisade keep records \
                           of their own; use another path";
            return Err(config_error(message));
        }
        Ok(keys)
    }

    /// Whether names are used unchanged, next to other tools.
    pub(super) fn is_bare(&self) -> bool {
        self.bare
    }

    /// The parent of all lines.
    pub(super) fn base(&self) -> &str {
        match self.base.as_str() {
            "" => "/",
            base => base,
        }
    }

    /// Whether a path is in a subtree that ZooKeeper or palisade reserves.
    pub(super) fn is_reserved(&self, path: &str) -> bool {
        let apart = ["/zookeeper".to_owned(), format!("{}/{OWN}", self.chroot)];
        let mut rests = apart.iter().map(|apart| path.strip_prefix(apart.as_str()));
        rests.any(|rest| rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/')))
    }

    /// The znodes of a fenced resource: its mark, and its data.
    ///
    /// # Errors
    /// As [`Keys::line`].
    pub(super) fn fenced(&self, resource: &Name) -> Result<(String, String)> {
        self.line(resource)?;
        let name = match resource.as_str().strip_prefix('/') {
            Some(same) if self.bare => encode(same),
            _ => encode(resource.as_str()),
        };
        let of = |kind| format!("{}/{OWN}/{kind}/{}/{name}", self.chroot, self.namespace);
        Ok((of("fence"), of("data")))
    }

    /// The znode that the renewals of a session write to.
    pub(super) fn session(&self, session: i64) -> String {
        format!("{}/{OWN}/sessions/{session:016x}", self.chroot)
    }

    /// The znode of a line.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidName`] for a name that can't be used unchanged.
    pub(super) fn line(&self, name: &Name) -> Result<String> {
        let name = name.as_str();
        if !self.bare {
            return Ok(format!("{}/{}", self.base, encode(name)));
        }
        let path = name.strip_prefix('/').unwrap_or(name);
        let line = format!("{}/{path}", self.base);
        if !is_path(path) || self.is_reserved(&line) {
            let message = "with namespace= a name is a path of ZooKeeper: words joined by single \
                           slashes, none of them . or .., not below /zookeeper or .palisade, and \
                           none with characters beyond U+D7FF; omit namespace= for other names";
            return Err(Error::new(ErrorKind::InvalidName, "name", message));
        }
        Ok(line)
    }

    /// The deepest znode above all lines whose names begin with `prefix`.
    pub(super) fn above(&self, prefix: &str) -> String {
        let folder = prefix.trim_start_matches('/').rsplit_once('/');
        match folder.map(|(folder, _)| folder) {
            Some(folder) if self.bare && is_path(folder) => format!("{}/{folder}", self.base),
            _ => self.base().to_owned(),
        }
    }

    /// The name of the line with this znode.
    pub(super) fn name(&self, line: &str) -> Option<String> {
        let rest = line.strip_prefix(&self.base)?.strip_prefix('/')?;
        if self.bare {
            return Some(rest.to_owned());
        }
        let decoded = percent_decode_str(rest).decode_utf8().ok()?;
        (!rest.contains('/')).then(|| decoded.into_owned())
    }

    /// The znodes from the chroot down to `line`, which must exist before a place is created.
    pub(super) fn parents(line: &str) -> impl Iterator<Item = &str> {
        let ends = line.match_indices('/').map(|(at, _)| at).skip(1);
        ends.chain([line.len()]).map(|end| &line[..end])
    }

    /// The name of a new ticket, without the sequence that the server appends.
    pub(super) fn ticket(&self, claim: ClaimId, ask: Ask) -> String {
        let id = uuid(claim.0);
        let word = match self.layout {
            Layout::Mutex => "lock-",
            Layout::ReadWrite => "__WRIT__",
        };
        match (ask, self.layout) {
            (Ask::Whole, _) => format!("_c_{id}-{word}"),
            (Ask::READ, Layout::Mutex) => format!("_c_{id}-r-{word}"),
            (Ask::READ, Layout::ReadWrite) => format!("_c_{id}-__READ__"),
            (Ask::Part { weight, capacity }, _) => {
                format!("_c_{id}-{weight}of{capacity}-{word}")
            }
        }
    }
}

/// A child of a line that is a ticket of ours or of another tool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Child {
    pub(super) name: String,
    /// The claim; `None` for another tool's ticket.
    pub(super) claim: Option<ClaimId>,
    pub(super) ask: Ask,
    pub(super) sequence: i32,
}

impl Child {
    /// Parses the name of a child; `None` when it is not a ticket.
    pub(super) fn read(name: &str) -> Option<Self> {
        let (head, number) = name.split_at_checked(name.len().checked_sub(DIGITS)?)?;
        let (head, sequence) = read_sequence(head, number)?;
        let ours = read_ours(head);
        Some(Self {
            name: name.to_owned(),
            claim: ours.map(|(claim, _)| claim),
            ask: ours.map_or(Ask::Whole, |(_, ask)| ask),
            sequence,
        })
    }

    /// The id for operators: the claim, or the name of another tool's znode.
    pub(super) fn id(&self) -> String {
        self.claim
            .map_or_else(|| self.name.clone(), |claim| claim.to_string())
    }

    /// Whether it came before another. Sequences wrap, but a line is never half as long as their
    /// range.
    pub(super) fn is_before(&self, other: &Self) -> bool {
        other.sequence.wrapping_sub(self.sequence) > 0
    }
}

/// The sequence in the last ten characters, and the name before it. Past 2^31 the server continues
/// with negative numbers, which take eleven characters, or ten with nine digits.
fn read_sequence<'a>(head: &'a str, number: &str) -> Option<(&'a str, i32)> {
    let is_number = |text: &str| text.bytes().all(|digit| digit.is_ascii_digit());
    let ends_a_word = |head: &str| head.ends_with(['-', '_']);
    if let Some(short) = number.strip_prefix('-') {
        let fits = is_number(short) && ends_a_word(head);
        return fits.then(|| Some((head, -short.parse::<i32>().ok()?)))?;
    }
    if !is_number(number) {
        return None;
    }
    let number: i64 = number.parse().ok()?;
    match head.strip_suffix('-').filter(|head| ends_a_word(head)) {
        Some(head) if number >= 1_000_000_000 => Some((head, i32::try_from(-number).ok()?)),
        _ => Some((head, i32::try_from(number).ok()?)),
    }
}

/// The claim and its share, from a name without its sequence.
fn read_ours(head: &str) -> Option<(ClaimId, Ask)> {
    let rest = head.strip_prefix("_c_")?;
    let (id, rest) = rest.split_at_checked(36)?;
    let claim = ClaimId(read_uuid(id)?);
    let kind = rest.strip_prefix('-')?;
    let whole = ["lock-", "__WRIT__"];
    if whole.contains(&kind) {
        return Some((claim, Ask::Whole));
    }
    if kind == "r-lock-" || kind == "__READ__" {
        return Some((claim, Ask::READ));
    }
    let part = whole.iter().find_map(|word| kind.strip_suffix(word))?;
    let (weight, capacity) = part.strip_suffix('-')?.split_once("of")?;
    let (weight, capacity) = (weight.parse().ok()?, capacity.parse().ok()?);
    let is_sound = weight >= 1 && weight <= capacity;
    is_sound.then_some((claim, Ask::Part { weight, capacity }))
}

fn encode(name: &str) -> String {
    match name {
        "." | ".." => name.replace('.', "%2E"),
        _ => utf8_percent_encode(name, ENCODED).to_string(),
    }
}

/// Whether ZooKeeper accepts it as the rest of a path.
fn is_path(path: &str) -> bool {
    let fits = |c: char| !c.is_control() && u32::from(c) < 0xd800;
    let is_segment = |part: &str| !matches!(part, "" | "." | "..") && part.chars().all(fits);
    path.split('/').all(is_segment)
}

/// The data of one of our tickets: its owner and its value.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) owner: Owner,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) value: Option<String>,
    /// How long it lasts without a renewal, in milliseconds.
    #[serde(default)]
    pub(super) ttl: u64,
    /// The token, if the znode is not the first one of its claim.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) token: Option<i64>,
    /// Whether an operator evicts it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) evicted: bool,
}

impl Record {
    pub(super) fn new(claim: &Claim) -> Self {
        Self {
            owner: claim.owner.clone(),
            value: claim.value.clone(),
            ttl: u64::try_from(claim.ttl.as_millis()).unwrap_or(u64::MAX),
            token: None,
            evicted: false,
        }
    }

    pub(super) fn json(&self) -> Vec<u8> {
        // Strings and numbers always serialize.
        serde_json::to_vec(self).unwrap_or_default()
    }

    pub(super) fn read(data: &[u8]) -> Option<Self> {
        serde_json::from_slice(data).ok()
    }
}

/// Whether the data of a ticket ask its owner to release it.
pub(super) fn is_marked(data: &[u8]) -> bool {
    data == REVOKE || Record::read(data).is_some_and(|record| record.evicted)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(namespace: &str, layout: Layout) -> Keys {
        Keys::new("/locks", namespace, layout).unwrap()
    }

    #[test]
    fn lines_are_made_and_read() {
        for namespace in ["palisade", "a/b"] {
            let keys = keys(namespace, Layout::Mutex);
            for name in [
                "x", "a/b", "100%", "%2F", ".", "..", "α 🔒", "/x", "x/", "\u{f000}",
            ] {
                let line = keys.line(&Name::new(name).unwrap()).unwrap();
                assert!(is_path(line.trim_start_matches('/')), "{line}");
                assert_eq!(keys.name(&line).as_deref(), Some(name));
            }
        }
        let bare = keys("", Layout::Mutex);
        for (name, line) in [("x", "/locks/x"), ("a/b", "/locks/a/b"), ("/a", "/locks/a")] {
            assert_eq!(bare.line(&Name::new(name).unwrap()).unwrap(), line);
        }
        for name in ["a//b", "a/", "/", "..", "a/./b", "🔒"] {
            let refused = bare.line(&Name::new(name).unwrap()).err().unwrap();
            assert_eq!(refused.kind(), ErrorKind::InvalidName, "{name}");
        }
        for (chroot, namespace) in [("zookeeper", "x"), ("", "zookeeper"), ("a//b", "x")] {
            assert!(Keys::new(chroot, namespace, Layout::Mutex).is_err());
        }
        let parents: Vec<&str> = Keys::parents("/locks/a/x").collect();
        assert_eq!(parents, ["/locks", "/locks/a", "/locks/a/x"]);
    }

    #[test]
    fn fenced_resources_are_apart_from_lines_and_from_each_other() {
        let of = |namespace: &str, name: &str| {
            let name = Name::new(name).unwrap();
            keys(namespace, Layout::Mutex).fenced(&name).unwrap()
        };
        let path = |kind: &str, rest: &str| format!("/locks/.palisade/{kind}/{rest}");
        assert_eq!(
            of("a/b", "x/y"),
            (path("fence", "a%2Fb/x%2Fy"), path("data", "a%2Fb/x%2Fy"))
        );
        assert_ne!(of("a", "/x"), of("a", "x"));
        assert_eq!(of("", "/x/y"), of("", "x/y"));
        assert_eq!(of("", "x/y").1, path("data", "%/x%2Fy"));
        let bare = keys("", Layout::Mutex);
        assert!(bare.is_reserved("/locks/.palisade/fence"));
        assert!(!bare.is_reserved("/locks/.palisades"));
        assert!(bare.line(&Name::new(".palisade/x").unwrap()).is_err());
        assert!(Keys::new("/locks", ".palisade", Layout::Mutex).is_err());
    }

    #[test]
    fn tickets_say_kind_and_weight_in_both_layouts() {
        let permits = Ask::Part {
            weight: 2,
            capacity: 5,
        };
        for layout in [Layout::Mutex, Layout::ReadWrite] {
            for ask in [Ask::Whole, Ask::READ, permits] {
                let claim = ClaimId::random();
                for (digits, sequence) in [
                    ("0000000007", 7),
                    ("2147483647", i32::MAX),
                    ("-2147483648", i32::MIN),
                    ("-000000007", -7),
                ] {
                    let name = keys("", layout).ticket(claim, ask) + digits;
                    let child = Child::read(&name).unwrap();
                    assert_eq!((child.claim, child.ask), (Some(claim), ask), "{name}");
                    assert_eq!(child.sequence, sequence, "{name}");
                }
            }
        }
    }

    #[test]
    fn the_names_of_other_tools_take_the_whole_line() {
        for name in [
            "lock-0000000003",
            "_c_3fa0d9e0-0000-4000-8000-00000000000X-lock-0000000003",
            "0123456789abcdef0123456789abcdef__lock__0000000003",
            "0123456789abcdef0123456789abcdef__rlock__0000000003",
            "x-72057594037927936-0000000003",
            "n-0000000003",
            "read-0000000003",
        ] {
            let child = Child::read(name).unwrap();
            assert_eq!(
                (child.claim, child.ask, child.sequence),
                (None, Ask::Whole, 3)
            );
        }
        let wrapped = Child::read("0123456789abcdef0123456789abcdef__lock__-2147483600");
        assert_eq!(wrapped.unwrap().sequence, -2147483600);
        for name in ["b", "leases", "lock-", "lock-00000003", "0123456789abcdef"] {
            assert_eq!(Child::read(name), None, "{name}");
        }
    }

    #[test]
    fn order_goes_on_past_the_wrap() {
        let child = |digits: &str| Child::read(&format!("lock-{digits}")).unwrap();
        let (last, first) = (child("2147483647"), child("-2147483648"));
        assert!(last.is_before(&first) && !first.is_before(&last));
        assert!(child("0000000001").is_before(&child("0000000002")));
    }

    #[test]
    fn a_mark_is_seen_and_a_record_comes_back() {
        let mut record = Record {
            owner: Owner::here("me", None),
            value: Some("v".into()),
            ttl: 1000,
            token: Some(7),
            evicted: false,
        };
        assert_eq!(Record::read(&record.json()).as_ref(), Some(&record));
        assert!(!is_marked(&record.json()));
        record.evicted = true;
        assert!(is_marked(&record.json()) && is_marked(REVOKE));
        assert!(!is_marked(b"10.0.0.1"));
    }
}
