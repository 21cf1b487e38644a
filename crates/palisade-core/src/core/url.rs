//! `Url`: where an engine is and how to use it. `Settings`: the options common to all engines.
//!
//! `scheme://user:password@host1,host2/path?option=value` or `scheme:path?option=value`.
//! Messages and `Debug` show only scheme and hosts. Option values are never echoed, because one may
//! be a secret under a mistyped name.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use super::duration::parse_duration;
use super::error::{Result, config_error};
use super::token::Era;

/// A parsed engine URL. Its options are taken out one by one; any left over is an error.
pub struct Url {
    /// The part before the colon, in lower case.
    pub scheme: String,
    /// `host` or `host:port`; several are separated by commas.
    pub hosts: Vec<String>,
    /// The part after the hosts, or all of it if there are none. Percent-decoded.
    pub path: String,
    /// The user before the `@`.
    pub user: Option<String>,
    /// The password before the `@`. A secret.
    pub password: Option<String>,
    options: BTreeMap<String, String>,
    /// Values that text can't express: a TLS configuration of the program, for example.
    given: Vec<Box<dyn Any + Send + Sync>>,
}

/// Where to connect: a URL as text, or a typed configuration (`palisade::config`).
pub trait IntoUrl {
    /// The URL.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::ErrorKind::Config) when it can't be parsed. The message does not repeat the text.
    fn into_url(self) -> Result<Url>;
}

impl IntoUrl for Url {
    fn into_url(self) -> Result<Url> {
        Ok(self)
    }
}

impl IntoUrl for &str {
    fn into_url(self) -> Result<Url> {
        Url::parse(self)
    }
}

impl IntoUrl for &String {
    fn into_url(self) -> Result<Url> {
        Url::parse(self)
    }
}

impl Url {
    /// Parses a URL.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::ErrorKind::Config), saying what is wrong without repeating the
    /// URL.
    pub fn parse(text: &str) -> Result<Self> {
        let Some((scheme, rest)) = text.split_once(':') else {
            return Err(config_error(
                "a URL starts with its scheme, as in file:/var/lib/locks or redis://localhost:6379",
            ));
        };
        refuse_stray_login(rest)?;
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        let mut url = Self::new(&scheme.to_ascii_lowercase(), Vec::new());
        url.options = parse_query(query)?;
        let Some(authority) = place.strip_prefix("//") else {
            url.path = decode(place)?;
            return Ok(url);
        };
        let (authority, path) = match authority.find('/') {
            Some(at) => authority.split_at(at),
            None => (authority, ""),
        };
        url.path = decode(path)?;
        let hosts = match authority.rsplit_once('@') {
            None => authority,
            Some((login, hosts)) => {
                let (user, password) = match login.split_once(':') {
                    Some((user, password)) => (user, Some(password)),
                    None => (login, None),
                };
                url.user = Some(decode(user)?).filter(|user| !user.is_empty());
                url.password = password.map(decode).transpose()?;
                hosts
            }
        };
        url.hosts = hosts
            .split(',')
            .filter(|host| !host.is_empty())
            .map(str::to_owned)
            .collect();
        Ok(url)
    }

    /// The URL of a typed configuration, without options.
    pub fn new(scheme: &str, hosts: Vec<String>) -> Self {
        Self {
            scheme: scheme.to_owned(),
            hosts,
            path: String::new(),
            user: None,
            password: None,
            options: BTreeMap::new(),
            given: Vec::new(),
        }
    }

    /// Sets an option; replaces an earlier value.
    pub fn set(&mut self, option: &str, value: impl fmt::Display) {
        self.options.insert(option.to_owned(), value.to_string());
    }

    /// Sets an option that is a duration.
    pub fn set_duration(&mut self, option: &str, value: Duration) {
        let (seconds, below) = (value.as_secs(), value.subsec_nanos());
        self.set(option, format_args!("{seconds}.{below:09}s"));
    }

    /// Adds a value that text can't express.
    pub fn give<T: Any + Send + Sync>(&mut self, thing: T) {
        self.given.push(Box::new(thing));
    }

    /// Takes out a value of this type.
    pub fn take_given<T: Any>(&mut self) -> Option<T> {
        let at = self.given.iter().position(|thing| thing.is::<T>())?;
        self.given
            .swap_remove(at)
            .downcast()
            .ok()
            .map(|thing| *thing)
    }

    /// Takes out an option.
    pub fn take(&mut self, option: &str) -> Option<String> {
        self.options.remove(option)
    }

    /// Whether an option is set and was not taken out yet.
    pub fn has(&self, option: &str) -> bool {
        self.options.contains_key(option)
    }

    /// Takes out a flag; absent means `false`.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::ErrorKind::Config) for anything but `true`, `false` and an empty value.
    pub fn take_flag(&mut self, option: &'static str) -> Result<bool> {
        match self.take(option).as_deref() {
            None | Some("false") => Ok(false),
            Some("true" | "") => Ok(true),
            Some(_) => Err(config_error(format!(
                "option {option} must be true or false"
            ))),
        }
    }

    /// Takes out a duration.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::ErrorKind::Config) when it can't be parsed or is zero.
    pub fn take_duration(&mut self, option: &'static str) -> Result<Option<Duration>> {
        let Some(text) = self.take(option) else {
            return Ok(None);
        };
        match parse_duration(&text) {
            Ok(duration) if duration > Duration::ZERO => Ok(Some(duration)),
            Ok(_) => Err(config_error(format!(
                "option {option} must be greater than zero"
            ))),
            Err(why) => Err(config_error(format!("option {option}: {why}"))),
        }
    }

    /// Takes out the options common to all engines.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::ErrorKind::Config) when one is invalid.
    pub fn take_settings(&mut self) -> Result<Settings> {
        let era = match self.take("era").map(|era| era.parse::<u64>()) {
            None => Era::default(),
            Some(Ok(era)) => Era::new(era)?,
            Some(Err(_)) => return Err(config_error("era must be a whole number, 0 to 127")),
        };
        let namespace = self
            .take("namespace")
            .unwrap_or_else(|| "palisade".to_owned());
        if namespace.chars().any(char::is_control) || namespace.len() > super::name::MAX_NAME {
            return Err(config_error(
                "namespace: at most 255 bytes without control characters",
            ));
        }
        Ok(Settings {
            namespace,
            ttl: self.take_duration("ttl")?,
            timeout: self
                .take_duration("timeout")?
                .unwrap_or(Duration::from_secs(2)),
            connect_timeout: self
                .take_duration("connect_timeout")?
                .unwrap_or(Duration::from_secs(2)),
            era,
            label: self.take("label"),
        })
    }

    /// Refuses options that were not taken out. `known` lists the engine's own options, to suggest
    /// the nearest spelling.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::ErrorKind::Config) with the option's name, never its value.
    pub fn finish(&self, known: &[&str]) -> Result<()> {
        let Some(unknown) = self.options.keys().next() else {
            return Ok(());
        };
        let all = known.iter().chain(COMMON_OPTIONS).copied();
        let hint = match nearest(unknown, all.clone()) {
            Some(near) => format!("did you mean {near}?"),
            None => format!("it takes {}", all.collect::<Vec<_>>().join(", ")),
        };
        let shown = unknown
            .chars()
            .take(40)
            .filter(|c| !c.is_control())
            .collect::<String>();
        Err(config_error(format!(
            "unknown option {shown:?} for {}:; {hint}",
            self.scheme
        )))
    }

    /// Scheme and hosts: the part of a URL that is safe to show.
    pub fn shown(&self) -> String {
        if self.hosts.is_empty() {
            format!("{}:", self.scheme)
        } else {
            format!("{}://{}", self.scheme, self.hosts.join(","))
        }
    }
}

impl fmt::Debug for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown())
    }
}

const COMMON_OPTIONS: &[&str] = &[
    "namespace",
    "ttl",
    "timeout",
    "connect_timeout",
    "era",
    "label",
];

/// The options that every engine accepts.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Settings {
    /// The prefix of all names; if it is empty, names are used as they are.
    pub namespace: String,
    /// The requested ttl, if any.
    pub ttl: Option<Duration>,
    /// How long one request may take.
    pub timeout: Duration,
    /// How long connecting may take.
    pub connect_timeout: Duration,
    /// The part of every token above the engine's sequence.
    pub era: Era,
    /// Shown with the owner.
    pub label: Option<String>,
}

/// Refuses an `@` after the hosts. A password with an unescaped `/` or `?` ends there, and its rest
/// would be taken for a path or options and shown as such.
fn refuse_stray_login(rest: &str) -> Result<()> {
    let Some(authority) = rest.strip_prefix("//") else {
        return Ok(());
    };
    match authority.find(['/', '?']) {
        // Without a host there is no login: this is a path, as in file:///home/me@work.
        None | Some(0) => Ok(()),
        Some(end) if !authority[end..].contains('@') => Ok(()),
        Some(_) => Err(config_error(
            "the URL has an @ after its host. In a user or password write / as %2F, ? as %3F, \
             @ as %40 and % as %25, or name a file with password_file=; elsewhere write @ as %40",
        )),
    }
}

fn parse_query(query: &str) -> Result<BTreeMap<String, String>> {
    let mut options = BTreeMap::new();
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        let key = decode(key)?;
        if options.insert(key, decode(value)?).is_some() {
            return Err(config_error("the URL has an option twice"));
        }
    }
    Ok(options)
}

fn decode(text: &str) -> Result<String> {
    let bad = || {
        config_error(
            "the URL has a % that is not followed by two hex digits of UTF-8; a % itself is \
             written as %25",
        )
    };
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        rest = tail;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let [high, low, tail @ ..] = rest else {
            return Err(bad());
        };
        let digit = |d: u8| char::from(d).to_digit(16).ok_or_else(bad);
        bytes.push((digit(*high)? * 16 + digit(*low)?) as u8);
        rest = tail;
    }
    String::from_utf8(bytes).map_err(|_| bad())
}

/// The known word nearest to `word`, if it is near enough to be a likely typo.
pub fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    known
        .into_iter()
        .map(|candidate| (distance(word, candidate), candidate))
        .min()
        .filter(|(distance, candidate)| *distance <= candidate.len().div_ceil(3))
        .map(|(_, candidate)| candidate)
}

/// The edit distance of two words: insertions, deletions and replacements.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = i;
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::error::ErrorKind;

    #[test]
    fn every_part_is_found() {
        let mut url =
            Url::parse("Redis://me:s%40cret@h1:1,h2:2/0?ttl=5s&namespace=&label=a%20b").unwrap();
        assert_eq!((url.scheme.as_str(), url.path.as_str()), ("redis", "/0"));
        assert_eq!(url.hosts, ["h1:1", "h2:2"]);
        assert_eq!(
            (url.user.as_deref(), url.password.as_deref()),
            (Some("me"), Some("s@cret"))
        );
        let settings = url.take_settings().unwrap();
        assert_eq!(settings.namespace, "");
        assert_eq!(settings.ttl, Some(Duration::from_secs(5)));
        assert_eq!(settings.label.as_deref(), Some("a b"));
        url.finish(&[]).unwrap();
    }

    #[test]
    fn places_without_hosts_are_paths() {
        for (text, path) in [
            ("file:", ""),
            ("file:/a%3Fb", "/a?b"),
            ("file:rel", "rel"),
            ("file:///abs", "/abs"),
        ] {
            let url = Url::parse(text).unwrap();
            assert_eq!((url.path.as_str(), url.hosts.len()), (path, 0), "{text}");
        }
    }

    #[test]
    fn an_unknown_option_is_named_with_the_nearest_but_without_its_value() {
        let mut url = Url::parse("file:/x?tll=hunter2").unwrap();
        url.take_settings().unwrap();
        let error = url.finish(&[]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("did you mean ttl?"), "{error}");
        assert!(!format!("{error:?}{url:?}").contains("hunter2"));
    }

    #[test]
    fn secrets_are_not_shown() {
        let url = Url::parse("redis://u:hunter2@host/0?password_file=hunter2").unwrap();
        assert_eq!(format!("{url:?}"), "redis://host");
    }

    #[test]
    fn no_part_of_a_password_is_taken_for_something_else() {
        for scheme in [
            "redis",
            "rediss",
            "postgres",
            "postgres+advisory",
            "etcd",
            "consul",
            "zookeeper",
        ] {
            for special in ["/", "?", "#", "@", "%", ":", "?a=", "/?a=b&", "%zz", "&"] {
                let text = format!("{scheme}://me:12{special}34@h");
                let told = match Url::parse(&text) {
                    Ok(url) => format!("{url:?} {:?}", url.finish(&[])),
                    Err(error) => format!("{error} {error:?}"),
                };
                assert!(
                    !told.contains("12") && !told.contains("34"),
                    "{text}: {told}"
                );
            }
        }
        assert!(Url::parse("file:///home/me@work/x").is_ok());
        assert!(Url::parse("file:/home/me@work/x?label=a@b").is_ok());
    }

    #[test]
    fn bad_urls_are_refused_without_repeating_them() {
        for bad in [
            "hunter2",
            "file:%zz",
            "file:%ff",
            "file:x?a=1&a=2",
            "file:%e",
        ] {
            let error = Url::parse(bad).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config);
            assert!(!error.to_string().contains("hunter2"));
        }
        for bad in [
            "era=128",
            "era=x",
            "ttl=0s",
            "ttl=5",
            "timeout=-1s",
            "namespace=%00",
        ] {
            let error = Url::parse(&format!("file:x?{bad}"))
                .unwrap()
                .take_settings()
                .unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{bad}");
        }
    }

    #[test]
    fn nearest_is_near() {
        assert_eq!(nearest("fiel", ["file", "memory"]), Some("file"));
        assert_eq!(
            nearest("zookeper", ["file", "zookeeper"]),
            Some("zookeeper")
        );
        assert_eq!(nearest("bananas", ["file", "memory"]), None);
    }
}
