//! `Host`: the address of a server: `name`, `name:port`, `1.2.3.4:port`, `[::1]:port`.

use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use palisade_core::Result;
use palisade_core::engine::{Url, config_error, no_connection, rounded};

/// A server's name or address, and its port.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Host {
    /// Without brackets.
    pub name: String,
    /// The port, the engine's default one if the URL names none.
    pub port: u16,
}

impl Host {
    /// The hosts of a URL, with `port` as the default port.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](palisade_core::ErrorKind::Config) when there is no host, or a port is invalid.
    pub fn all(url: &Url, port: u16) -> Result<Vec<Self>> {
        if url.hosts.is_empty() {
            let message = format!("{0}: needs a host, as in {0}://localhost", url.scheme);
            return Err(config_error(message));
        }
        url.hosts
            .iter()
            .map(|text| Self::parse(text, port))
            .collect()
    }

    fn parse(text: &str, default: u16) -> Result<Self> {
        let bad = || {
            let message = "a host is written name, name:port or [address]:port";
            config_error(message)
        };
        let (name, port) = match text.strip_prefix('[') {
            Some(rest) => {
                let (address, port) = rest.split_once(']').ok_or_else(bad)?;
                (address, port.strip_prefix(':'))
            }
            None => match text.split_once(':') {
                // With several colons it is ambiguous which one precedes the port.
                Some((_, port)) if port.contains(':') => {
                    let message = "an IPv6 address is written in brackets, as in [::1]:6379";
                    return Err(config_error(message));
                }
                Some((name, port)) => (name, Some(port)),
                None => (text, None),
            },
        };
        let port = match port {
            None => default,
            Some(port) => port.parse().map_err(|_| bad())?,
        };
        if name.is_empty() || port == 0 {
            Err(bad())
        } else {
            Ok(Self {
                name: name.to_owned(),
                port,
            })
        }
    }

    /// Whether it is this machine, so that nobody can eavesdrop on the network.
    pub fn is_local(&self) -> bool {
        match self.name.parse::<IpAddr>() {
            Ok(address) => address.is_loopback(),
            Err(_) => self.name == "localhost" || self.name.starts_with('/'),
        }
    }
}

/// Connects to the first of `hosts` that answers. It gives up a little before `limit`, which is also
/// the caller's timeout: the caller can't name the hosts.
///
/// # Errors
/// Those of `connecting`; [`ErrorKind::Unreachable`](palisade_core::ErrorKind::Unreachable) when none answers.
pub async fn first_to_answer<T>(
    hosts: &[Host],
    limit: Duration,
    connecting: impl Future<Output = Result<T>>,
) -> Result<T> {
    let connected = tokio::time::timeout(limit - limit / 20, connecting).await;
    connected.unwrap_or_else(|_| {
        let hosts: Vec<String> = hosts.iter().map(Host::to_string).collect();
        let message = format!(
            "no answer from {} within {}",
            hosts.join(", "),
            rounded(limit)
        );
        Err(no_connection(message))
    })
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.name.contains(':') {
            write!(f, "[{}]:{}", self.name, self.port)
        } else {
            write!(f, "{}:{}", self.name, self.port)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use palisade_core::ErrorKind;

    #[test]
    fn hosts_are_read_and_shown() {
        for (text, shown, local) in [
            ("db", "db:7", false),
            ("db:1", "db:1", false),
            ("localhost", "localhost:7", true),
            ("127.0.0.2:9", "127.0.0.2:9", true),
            ("[::1]:9", "[::1]:9", true),
            ("[fe80::1]", "[fe80::1]:7", false),
        ] {
            let host = Host::parse(text, 7).unwrap();
            assert_eq!(
                (host.to_string().as_str(), host.is_local()),
                (shown, local),
                "{text}"
            );
        }
        for bad in [
            "db:", "db:x", "db:0", "db:70000", ":1", "[::1", "::1", "::1:9",
        ] {
            assert_eq!(
                Host::parse(bad, 7).unwrap_err().kind(),
                ErrorKind::Config,
                "{bad}"
            );
        }
    }
}
