//! The config file: where palisade searches for it, and its keys.
//!
//! A file that exists must be valid: an unknown key, a value of the wrong type or an unreadable
//! file is an error that names the line or the key. Messages never repeat a value, since a URL may
//! hold a secret. A missing file costs one failed `open` per location.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use palisade::Patience;
use palisade::command::{nearest, parse_duration};
use palisade::engine::Url;
use palisade_gateway::distrusted;

use super::{bad_file, parse_wait};
use crate::exit::Failure;
use crate::view::shown;

/// For all users of the machine.
const SYSTEM: &str = "/etc/palisade/config.toml";

/// Far more than a few keys and many comments need; anything longer is not a config file.
const LONGEST: u64 = 64 * 1024;

const KEYS: [&str; 5] = ["url", "ttl", "wait", "label", "for_correctness"];

/// What the file says.
#[derive(Debug, Default)]
pub(super) struct Values {
    pub(super) url: Option<String>,
    pub(super) ttl: Option<String>,
    pub(super) wait: Option<(Patience, String)>,
    pub(super) label: Option<String>,
    pub(super) for_correctness: Option<bool>,
    /// Whether the URL has a password that others can read here.
    pub(super) exposed: bool,
}

/// The locations of the file, in order. The first that exists is used.
pub(crate) fn candidates() -> Vec<PathBuf> {
    if let Some(path) = variable("PALISADE_CONFIG") {
        return vec![path];
    }
    let folder = |name| variable(name).filter(|path| path.is_absolute());
    let folders = [
        folder("XDG_CONFIG_HOME"),
        folder("HOME").map(|home| home.join(".config")),
    ];
    let mut candidates: Vec<_> = folders.into_iter().flatten().collect();
    candidates.dedup();
    let file = |folder: PathBuf| folder.join("palisade/config.toml");
    candidates
        .into_iter()
        .map(file)
        .chain([PathBuf::from(SYSTEM)])
        .collect()
}

fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name)
        .filter(|value| !value.is_empty())
        .map(PathBuf::from)
}

/// The file in force, and its content. A file in a folder that can't be entered is an error only if
/// the caller `needs` it, because nothing else names the engine.
pub(super) fn read(needs: bool) -> Result<(Option<PathBuf>, Values), Failure> {
    let asked_for = variable("PALISADE_CONFIG").is_some();
    for path in candidates() {
        // Opening must not block on a FIFO without a writer.
        let mut how = OpenOptions::new();
        how.read(true).custom_flags(libc::O_NONBLOCK);
        match how.open(&path) {
            Ok(file) => {
                let found = file.metadata();
                let mode = found.as_ref().map_or(0, |data| data.permissions().mode());
                // Whoever can write it decides which engine guards this user's work.
                if let Some(why) = found.as_ref().ok().and_then(distrusted) {
                    return Err(bad_file(&path, why));
                }
                let mut values = text(file, &path).and_then(|text| parse(&text, &path))?;
                let url = values.url.as_deref().map(Url::parse);
                let secret = url.is_some_and(|url| url.is_ok_and(|url| url.password.is_some()));
                values.exposed = secret && mode & 0o044 != 0;
                return Ok((Some(path), values));
            }
            Err(error) if asked_for && error.kind() == ErrorKind::NotFound => {
                let why = "PALISADE_CONFIG names it, but it does not exist";
                return Err(bad_file(&path, why));
            }
            Err(error)
                if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
                    && !asked_for => {}
            Err(_) if !needs && !asked_for && path.symlink_metadata().is_err() => {}
            Err(error) => return Err(bad_file(&path, format!("it can't be opened: {error}"))),
        }
    }
    Ok((None, Values::default()))
}

fn text(file: File, path: &Path) -> Result<String, Failure> {
    let mut bytes = Vec::new();
    file.take(LONGEST + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| bad_file(path, format!("it can't be read: {error}")))?;
    if bytes.len() as u64 > LONGEST {
        return Err(bad_file(path, "it is longer than 64 KiB"));
    }
    String::from_utf8(bytes).map_err(|_| bad_file(path, "it is not valid UTF-8"))
}

fn parse(text: &str, path: &Path) -> Result<Values, Failure> {
    let table: toml::Table = text.parse().map_err(|error: toml::de::Error| {
        // The parser's message may repeat the line.
        let at = error.span().map_or(0, |span| span.start);
        let before = text.as_bytes().iter().take(at);
        let line = before.filter(|byte| **byte == b'\n').count() + 1;
        bad_file(path, format!("line {line} is not valid TOML"))
    })?;
    let mut values = Values::default();
    for (key, value) in table {
        let value = match (key.as_str(), value) {
            ("for_correctness", toml::Value::Boolean(value)) => {
                values.for_correctness = Some(value);
                continue;
            }
            ("for_correctness", _) => {
                return Err(bad_file(path, "for_correctness must be true or false"));
            }
            (_, toml::Value::String(value)) => value,
            (known, _) if KEYS.contains(&known) => {
                return Err(bad_file(path, format!("{key} must be text in quotes")));
            }
            _ => return Err(unknown(&key, path)),
        };
        let wrong = |why: String| bad_file(path, format!("{key}: {why}"));
        match key.as_str() {
            "url" if value.is_empty() => return Err(wrong("it is empty".into())),
            "url" => values.url = Some(value),
            "ttl" => {
                parse_duration(&value).map_err(wrong)?;
                values.ttl = Some(value);
            }
            "wait" => values.wait = Some((parse_wait(&value).map_err(wrong)?, value)),
            "label" => values.label = Some(value),
            _ => return Err(unknown(&key, path)),
        }
    }
    Ok(values)
}

fn unknown(key: &str, path: &Path) -> Failure {
    let hint = match nearest(key, KEYS) {
        Some(near) => format!("did you mean {near}?"),
        None => format!("it takes {}", KEYS.join(", ")),
    };
    let key: String = key.chars().take(40).collect();
    bad_file(path, format!("unknown key {}; {hint}", shown(&key)))
}
