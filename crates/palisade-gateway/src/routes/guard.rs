//! Checks before a request is routed: the right `Host`, the right `Origin`, and no secret in its
//! URL.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::Path;

use hyper::StatusCode;
use hyper::header::{
    AUTHORIZATION, CONTENT_TYPE, HOST, HeaderMap, HeaderName, HeaderValue, ORIGIN,
};
use palisade::{Error, ErrorKind, Result};

use super::sessions::SESSION;
use crate::access::Door;
use crate::problem::Problem;
use crate::spans::TRACE;

/// Fields that must not be in a URL, because URLs are logged.
const SECRETS: &[&str] = &[
    "token",
    "access_token",
    "secret",
    "session",
    "palisade-session",
    "authorization",
];

/// The names of this gateway.
#[derive(Debug, Default)]
pub(crate) struct Names {
    /// What `Host` must be on the port.
    hosts: Vec<String>,
    /// What `Origin` must be if a browser writes.
    origins: Vec<String>,
    /// The URL that a session's client is to use from now on, for each way in.
    port: Option<String>,
    socket: Option<String>,
}

impl Names {
    /// The names of a port that listens at `bound`, of a socket, and those given by the operator.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for an invalid URL.
    pub(crate) fn new(
        bound: Option<SocketAddr>,
        tls: bool,
        socket: Option<&Path>,
        public: &[String],
    ) -> Result<Self> {
        let mut names = Self {
            socket: socket.map(|path| format!("http+unix:{}", path.display())),
            ..Self::default()
        };
        for url in public {
            let url = url.trim_end_matches('/');
            let parts = url.split_once("://");
            let host = parts.filter(|(scheme, host)| {
                matches!(*scheme, "http" | "https")
                    && !host.is_empty()
                    && !host.contains(['/', '@'])
            });
            let Some((scheme, host)) = host else {
                let message = "--public-url is http:// or https:// and a host";
                return Err(Error::new(ErrorKind::Config, "serve", message));
            };
            names.add(scheme, host);
            names.port.get_or_insert_with(|| url.to_owned());
        }
        if let Some(addr) = bound {
            let scheme = if tls { "https" } else { "http" };
            names.add(scheme, &addr.to_string());
            if addr.ip().is_loopback() {
                for host in ["localhost", "127.0.0.1", "[::1]"] {
                    names.add(scheme, &format!("{host}:{}", addr.port()));
                }
            }
            names.port.get_or_insert(format!("{scheme}://{addr}"));
        }
        Ok(names)
    }

    /// Also without the default port of the scheme, which clients leave out.
    fn add(&mut self, scheme: &str, host: &str) {
        let implied = if scheme == "https" { ":443" } else { ":80" };
        let host = host.strip_suffix(implied).unwrap_or(host);
        for host in [host.to_owned(), format!("{host}{implied}")] {
            self.origins.push(format!("{scheme}://{host}"));
            self.hosts.push(host);
        }
    }

    /// The gateway's own URL for a client that came in this way.
    pub(crate) fn url(&self, door: Door) -> &str {
        let url = match door {
            Door::Port => self.port.as_ref(),
            Door::Socket => self.socket.as_ref(),
        };
        url.map_or("", String::as_str)
    }

    /// A foreign name for this address is a sign of DNS rebinding by another site.
    pub(super) fn check_host(&self, headers: &HeaderMap) -> Result<(), Problem> {
        let host = headers.get(HOST).and_then(|host| host.to_str().ok());
        let ours = |host: &str| {
            self.hosts
                .iter()
                .any(|known| known.eq_ignore_ascii_case(host))
        };
        if host.is_some_and(ours) {
            return Ok(());
        }
        let detail = "this gateway is not called so; set --public-url to what clients call it";
        let status = StatusCode::MISDIRECTED_REQUEST;
        Err(Problem::new(status, "wrong_host", detail))
    }

    /// A browser sends the origin of a page that writes: only our own may.
    pub(super) fn check_origin(&self, door: Door, headers: &HeaderMap) -> Result<(), Problem> {
        let Some(origin) = headers.get(ORIGIN) else {
            return Ok(());
        };
        let origin = origin.to_str().unwrap_or_default();
        let ours = |known: &String| known.eq_ignore_ascii_case(origin);
        if door == Door::Port && self.origins.iter().any(ours) {
            return Ok(());
        }
        let detail = "a page of another origin may not change anything here";
        Err(Problem::forbidden(detail))
    }
}

/// Of two hosts, whatever is in front of the gateway may have checked the other one.
pub(super) fn check_one_host(headers: &HeaderMap) -> Result<(), Problem> {
    if headers.get_all(HOST).iter().nth(1).is_some() {
        return Err(Problem::bad_request("send one Host field"));
    }
    Ok(())
}

pub(super) fn bearer(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

/// Copies of the headers that a handler reads: the originals would keep the buffer of the request
/// alive, which is 8 KiB for each of thousands of waiting requests.
pub(super) fn copied(headers: &HeaderMap) -> HeaderMap {
    let names = [CONTENT_TYPE.as_str(), SESSION, TRACE];
    let mut copies = HeaderMap::with_capacity(names.len());
    for name in names {
        let value = headers.get(name).map(HeaderValue::as_bytes);
        if let Some(Ok(copy)) = value.map(HeaderValue::from_bytes) {
            copies.insert(HeaderName::from_static(name), copy);
        }
    }
    copies
}

/// The fields of a query.
///
/// # Errors
/// When it is not UTF-8, and when it contains a secret.
pub(super) fn query(text: &str) -> Result<HashMap<String, String>, Problem> {
    let mut found = HashMap::new();
    for pair in text.split('&').filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        let decode = |text: &str| {
            let text = text.replace('+', " ");
            let decoded = percent_encoding::percent_decode_str(&text).decode_utf8();
            decoded.map(|text| text.into_owned())
        };
        let (Ok(key), Ok(value)) = (decode(key), decode(value)) else {
            return Err(Problem::bad_request("the query is not UTF-8"));
        };
        if SECRETS.contains(&key.to_ascii_lowercase().as_str()) {
            let detail = "a secret must not be in an address, because addresses are logged; send \
                          it in a header, and take another one now";
            let status = StatusCode::BAD_REQUEST;
            return Err(Problem::new(status, "secret_in_query", detail));
        }
        found.insert(key, value);
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_port_and_the_operator() {
        let bound = Some("127.0.0.1:7420".parse().unwrap());
        let socket = Some(Path::new("/run/x.sock"));
        let names = Names::new(bound, false, socket, &[]).unwrap();
        assert_eq!(names.url(Door::Port), "http://127.0.0.1:7420");
        assert_eq!(names.url(Door::Socket), "http+unix:/run/x.sock");
        assert!(names.hosts.contains(&"localhost:7420".to_owned()));
        assert!(!names.hosts.contains(&"localhost".to_owned()));
        let public = [
            "https://locks.example.com/".to_owned(),
            "https://all:443".into(),
        ];
        let bound = Some("0.0.0.0:443".parse().unwrap());
        let names = Names::new(bound, true, None, &public).unwrap();
        assert_eq!(names.url(Door::Port), "https://locks.example.com");
        for host in ["locks.example.com", "locks.example.com:443", "all"] {
            assert!(names.hosts.contains(&host.to_owned()), "{host}");
        }
        assert!(names.origins.contains(&"https://all".to_owned()));
        assert!(!names.origins.contains(&"http://all".to_owned()));
        for bad in [
            "locks.example.com",
            "ftp://x",
            "https://",
            "https://a@b",
            "https://a/b",
        ] {
            Names::new(None, false, None, &[bad.to_owned()]).unwrap_err();
        }
    }
}
