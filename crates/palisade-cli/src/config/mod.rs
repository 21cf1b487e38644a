//! The configuration: which engine to use, and a few defaults.
//!
//! The URL is that of `--url`, then of `PALISADE_URL`, then of the config file, then the embedded
//! default. The file's other keys are defaults for what neither a flag nor the URL sets; those that
//! are also options of URLs are added to the URL, so that every verb uses them.

mod file;

use std::path::{Path, PathBuf};

use palisade::command::parse_duration;
use palisade::engine::Url;
use palisade::{Error, ErrorKind, Patience};
use serde::Serialize;

pub(crate) use self::file::candidates;
use self::file::{Values, read};
use crate::exit::Failure;
use crate::view::shown;

/// All processes of this machine, with nothing to install.
const EMBEDDED: &str = "file:";

/// Where a value comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum From {
    /// The command line.
    Flag,
    /// The environment.
    Environment,
    /// An option of the URL.
    Url,
    /// The config file.
    File,
    /// The built-in default.
    Default,
}

/// A value in force, and where it comes from.
#[derive(Debug, Serialize)]
pub(crate) struct Setting {
    pub(crate) value: Option<String>,
    pub(crate) from: From,
}

/// What is configured.
pub(crate) struct Config {
    /// The file that was read.
    pub(crate) path: Option<PathBuf>,
    /// The URL as it was given. May hold a secret.
    pub(crate) url: (String, From),
    file: Values,
}

impl Config {
    /// Finds the file and the URL.
    pub(crate) fn find(flag: Option<&str>) -> Result<Self, Failure> {
        let environment = from_environment()?;
        let (path, file) = read(flag.is_none() && environment.is_none())?;
        let url = match (flag, environment, &file.url) {
            (Some(url), _, _) => (url.to_owned(), From::Flag),
            (None, Some(url), _) => (url, From::Environment),
            (None, None, Some(url)) => (url.clone(), From::File),
            (None, None, None) => (EMBEDDED.to_owned(), From::Default),
        };
        Ok(Self { path, url, file })
    }

    /// The URL with the file's defaults in it.
    pub(crate) fn full_url(&self) -> Result<String, Failure> {
        let mut url = self.url.0.clone();
        if self.file.ttl.is_none() && self.file.label.is_none() {
            return Ok(url);
        }
        let mut parsed = Url::parse(&url)?;
        for (key, value) in [("ttl", &self.file.ttl), ("label", &self.file.label)] {
            if let (Some(value), None) = (value, parsed.take(key)) {
                let sign = if url.contains('?') { '&' } else { '?' };
                url.push_str(&format!("{sign}{key}={}", encode(value)));
            }
        }
        Ok(url)
    }

    /// How long the file says to wait.
    pub(crate) fn wait(&self) -> Option<Patience> {
        self.file.wait.as_ref().map(|(patience, _)| *patience)
    }

    /// Whether the file asks for an engine that is fit for correctness.
    pub(crate) fn for_correctness(&self) -> bool {
        self.file.for_correctness.unwrap_or(false)
    }

    /// A warning if the file shows a password to other users.
    pub(crate) fn exposed(&self) -> Option<String> {
        let path = self.path.as_ref().filter(|_| self.file.exposed)?;
        let path = shown(&path.to_string_lossy());
        Some(format!(
            "config file {path} holds a password, and other users may read it"
        ))
    }

    /// The value in force of `ttl`, `wait`, `label` or `for_correctness`.
    pub(crate) fn setting(&self, key: &str) -> Result<Setting, Failure> {
        let mut url = Url::parse(&self.url.0)?;
        let (file, default) = match key {
            "ttl" => {
                // An invalid value is refused and not shown: it may be a secret.
                Url::parse(&self.url.0)?.take_duration("ttl")?;
                (self.file.ttl.clone(), Some("30s"))
            }
            "label" => (self.file.label.clone(), None),
            "wait" => (
                self.file.wait.as_ref().map(|(_, text)| text.clone()),
                Some("forever"),
            ),
            _ => (
                self.file.for_correctness.map(|yes| yes.to_string()),
                Some("false"),
            ),
        };
        let in_url = matches!(key, "ttl" | "label")
            .then(|| url.take(key))
            .flatten();
        let (value, from) = match (in_url, file) {
            (Some(value), _) => (Some(value), From::Url),
            (None, Some(value)) => (Some(value), From::File),
            (None, None) => (default.map(str::to_owned), From::Default),
        };
        Ok(Setting { value, from })
    }
}

/// The URL of the engine to use, with the file's defaults in it. May hold a secret.
pub(crate) fn url(flag: Option<&str>) -> Result<String, Failure> {
    Config::find(flag)?.full_url()
}

/// Reads how long to wait: a duration, or `forever`.
pub(crate) fn parse_wait(text: &str) -> Result<Patience, String> {
    if text == "forever" {
        return Ok(Patience::Forever);
    }
    Ok(match parse_duration(text)? {
        wait if wait.is_zero() => Patience::NoWait,
        wait => Patience::For(wait),
    })
}

fn from_environment() -> Result<Option<String>, Failure> {
    match std::env::var_os("PALISADE_URL").map(|url| url.into_string()) {
        None => Ok(None),
        Some(Ok(url)) => Ok(Some(url).filter(|url| !url.is_empty())),
        Some(Err(_)) => Err(bad("PALISADE_URL is not valid UTF-8")),
    }
}

fn bad(why: impl Into<String>) -> Failure {
    Error::new(ErrorKind::Config, "connect", why).into()
}

fn bad_file(path: &Path, why: impl std::fmt::Display) -> Failure {
    let path = path.to_string_lossy();
    bad(format!("config file {}: {why}", shown(&path)))
}

/// As an option's value in a URL.
fn encode(value: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric();
    let encode = |byte| {
        if plain(byte) {
            char::from(byte).to_string()
        } else {
            format!("%{byte:02x}")
        }
    };
    value.bytes().map(encode).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(url: &str, ttl: Option<&str>, label: Option<&str>) -> Config {
        let file = Values {
            ttl: ttl.map(str::to_owned),
            label: label.map(str::to_owned),
            ..Values::default()
        };
        let url = (url.to_owned(), From::Flag);
        let path = None;
        Config { path, url, file }
    }

    #[test]
    fn the_url_has_the_last_word() {
        let full = |url, ttl, label| config(url, ttl, label).full_url().unwrap();
        assert_eq!(full("file:", None, None), "file:");
        assert_eq!(full("file:", Some("5s"), None), "file:?ttl=5s");
        let both = full("file:x?ttl=1m", Some("5s"), Some("a&b é"));
        assert_eq!(both, "file:x?ttl=1m&label=a%26b%20%c3%a9");
        let mut read = Url::parse(&both).unwrap();
        assert_eq!(read.take("label").as_deref(), Some("a&b é"));
    }
}
