//! `Access`: who may do what. Deny by default.
//!
//! Principals are identified by the SHA-256 of a 256-bit token, compared in constant time. Prefixes
//! end in `/`, so that `billing/` does not match `billing-x`; the empty prefix matches everything.
//! The file is read again when it changes; an invalid one, and one that others may write, is refused
//! and the old one stays.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use palisade::{Error, ErrorKind, Result};
use parking_lot::RwLock;
use ring::digest::{SHA256, digest};
use serde::Deserialize;
use serde_json::{Value, json};
use subtle::ConstantTimeEq;
use tokio::sync::watch;

use crate::fields;
use crate::files::{Seen, read_trusted};

/// A client with rights.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Principal {
    pub(crate) name: String,
    token: Option<[u8; 32]>,
    uses: Vec<String>,
    sees: Vec<String>,
    operates: Vec<String>,
}

impl Principal {
    /// The principal that may do everything: this user, if there is no access file.
    fn local(token: Option<[u8; 32]>) -> Self {
        let all = || vec![String::new()];
        Self {
            name: "local".into(),
            token,
            uses: all(),
            sees: all(),
            operates: all(),
        }
    }

    pub(crate) fn may_use(&self, name: &str) -> bool {
        covered(&self.uses, name)
    }

    /// The rights to use and to operate include the right to see.
    pub(crate) fn may_see(&self, name: &str) -> bool {
        covered(&self.sees, name) || self.may_use(name) || self.may_operate(name)
    }

    pub(crate) fn may_operate(&self, name: &str) -> bool {
        covered(&self.operates, name)
    }

    /// Whether it may use anything.
    pub(crate) fn uses_anything(&self) -> bool {
        !self.uses.is_empty()
    }

    /// Whether it may see anything.
    pub(crate) fn sees_anything(&self) -> bool {
        !self.visible().is_empty()
    }

    /// The prefixes that it may see, none of them within another.
    pub(crate) fn visible(&self) -> Vec<&str> {
        let all = [&self.sees, &self.uses, &self.operates];
        let mut all: Vec<&str> = all.into_iter().flatten().map(String::as_str).collect();
        // A prefix comes before those that begin with it.
        all.sort_unstable();
        all.dedup_by(|later, earlier| later.starts_with(*earlier));
        all
    }

    /// Its rights, as it may read them.
    pub(crate) fn rights(&self) -> Value {
        json!({
            "name": self.name,
            "use": self.uses,
            "see": self.sees,
            "operate": self.operates,
        })
    }
}

fn covered(prefixes: &[String], name: &str) -> bool {
    prefixes
        .iter()
        .any(|prefix| name.starts_with(prefix.as_str()))
}

/// How a request came in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Door {
    /// The socket of this user; its peer's uid was checked.
    Socket,
    Port,
}

#[derive(Debug)]
enum Rule {
    /// The socket is this user's; the port needs the token made at the start.
    Local { user: Arc<Principal>, open: bool },
    File {
        path: PathBuf,
        read: RwLock<(Vec<Arc<Principal>>, Seen)>,
        changed: watch::Sender<()>,
    },
}

/// See the module's documentation.
#[derive(Debug, Clone)]
pub(crate) struct Access(Arc<Rule>);

impl Access {
    /// Without a file: this user's socket, and a port that needs `token` unless it is `open`.
    pub(crate) fn local(token: Option<&str>, open: bool) -> Self {
        let user = Principal::local(token.map(hash));
        Self(Arc::new(Rule::Local {
            user: Arc::new(user),
            open,
        }))
    }

    /// The access of a file.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] when it can't be used.
    pub(crate) fn from_file(path: &Path) -> Result<Self> {
        let seen = Seen::look(path);
        let principals = read(path)?;
        Ok(Self(Arc::new(Rule::File {
            path: path.to_owned(),
            read: RwLock::new((principals, seen)),
            changed: watch::Sender::new(()),
        })))
    }

    /// The principal of a request; `None` if it is unknown.
    pub(crate) fn principal(&self, door: Door, token: Option<&str>) -> Option<Arc<Principal>> {
        match &*self.0 {
            Rule::Local { user, open } => {
                let known =
                    door == Door::Socket || *open || find(&[Arc::clone(user)], token).is_some();
                known.then(|| Arc::clone(user))
            }
            Rule::File { read, .. } => find(&read.read().0, token),
        }
    }

    /// Reads the file again if it has changed. Returns the result, if it was read.
    pub(crate) fn refresh(&self) -> Option<Result<usize>> {
        let Rule::File {
            path,
            read: known,
            changed,
        } = &*self.0
        else {
            return None;
        };
        let seen = Seen::look(path);
        if known.read().1 == seen {
            return None;
        }
        let fresh = read(path);
        let mut known = known.write();
        known.1 = seen;
        Some(fresh.map(|principals| {
            known.0 = principals;
            changed.send_replace(());
            known.0.len()
        }))
    }

    /// Resolves when this principal's token is not valid any more, or its rights have changed.
    pub(crate) async fn ended(self, principal: Arc<Principal>) {
        let Rule::File { read, changed, .. } = &*self.0 else {
            return std::future::pending().await;
        };
        let mut changed = changed.subscribe();
        while read.read().0.contains(&principal) {
            // The sender is not dropped before.
            let _ = changed.changed().await;
        }
    }
}

/// Compares with every principal, so that the time reveals nothing.
fn find(principals: &[Arc<Principal>], token: Option<&str>) -> Option<Arc<Principal>> {
    let hashed = hash(token?);
    let mut found = None;
    for principal in principals {
        if let Some(known) = &principal.token
            && bool::from(known.ct_eq(&hashed))
        {
            found = Some(Arc::clone(principal));
        }
    }
    found
}

pub(crate) fn hash(text: &str) -> [u8; 32] {
    let mut out = [0; 32];
    out.copy_from_slice(digest(&SHA256, text.as_bytes()).as_ref());
    out
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn unhex(text: &str) -> Option<[u8; 32]> {
    let mut out = [0; 32];
    if text.len() != 64 || !text.is_ascii() {
        return None;
    }
    for (at, byte) in out.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).ok()?;
    }
    Some(out)
}

/// A fresh secret of 256 bits, in hex.
pub(crate) fn secret() -> String {
    hex(&rand::random::<[u8; 32]>())
}

/// A fresh token, and its hash for the access file.
pub fn new_token() -> (String, String) {
    let token = secret();
    let hashed = hex(&hash(&token));
    (token, hashed)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    principal: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    token_sha256: String,
    #[serde(default, rename = "use")]
    uses: Vec<String>,
    #[serde(default)]
    see: Vec<String>,
    #[serde(default)]
    operate: Vec<String>,
}

fn read(path: &Path) -> Result<Vec<Arc<Principal>>> {
    let refuse = |why: String| {
        let message = format!("access file {}: {why}", path.display());
        Error::new(ErrorKind::Config, "serve", message)
    };
    let (bytes, _) = read_trusted(path).map_err(refuse)?;
    let text = String::from_utf8(bytes).map_err(|_| refuse("it is not UTF-8".into()))?;
    // The parser's message may repeat a line of the file, and with it a misplaced token.
    let file: File = toml::from_str(&text).map_err(|error| {
        let at = error
            .span()
            .map_or(0, |span| text[..span.start].lines().count().max(1));
        let why = misfit(&text).unwrap_or_else(|| "it is not as expected".into());
        refuse(format!(
            "line {at}: {why}; a principal has name, token_sha256, use, see and operate"
        ))
    })?;
    let mut principals: Vec<Arc<Principal>> = Vec::new();
    for entry in file.principal {
        let name = entry.name;
        let Some(token) = unhex(&entry.token_sha256) else {
            return Err(refuse(format!(
                "token_sha256 of {name:?} must be 64 hex digits; `palisade serve token` prints it"
            )));
        };
        let prefixes = [&entry.uses, &entry.see, &entry.operate];
        if let Some(bad) = prefixes
            .into_iter()
            .flatten()
            .find(|prefix| !prefix.is_empty() && !prefix.ends_with('/'))
        {
            return Err(refuse(format!(
                "the prefix {bad:?} of {name:?} must end in / (the empty one is everything)"
            )));
        }
        let known = |old: &Arc<Principal>| old.name == name || old.token == Some(token);
        if principals.iter().any(known) {
            return Err(refuse(format!(
                "the name or the token of {name:?} is there twice"
            )));
        }
        principals.push(Arc::new(Principal {
            name,
            token: Some(token),
            uses: entry.uses,
            sees: entry.see,
            operates: entry.operate,
        }));
    }
    Ok(principals)
}

/// Which field of the file is not as expected.
fn misfit(text: &str) -> Option<String> {
    let table: toml::Table = text.parse().ok()?;
    let file = serde_json::to_value(table).ok()?;
    let entries = file.get("principal").and_then(Value::as_array);
    for (at, entry) in entries.into_iter().flatten().enumerate() {
        if serde_json::from_value::<Entry>(entry.clone()).is_err() {
            let why = fields::explain::<Entry>(entry);
            return Some(format!("in principal {}, {why}", at + 1));
        }
    }
    Some(fields::explain::<File>(&file))
}
