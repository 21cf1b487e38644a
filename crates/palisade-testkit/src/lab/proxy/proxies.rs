//! `Proxies`: one proxy before each host of a URL, for a test that hurts its own connections only.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};

use super::{Protocol, Proxy};

/// Proxies before all hosts of a URL, which pass bytes without looking into them.
pub struct Proxies {
    all: Vec<Proxy>,
    url: String,
}

impl Proxies {
    /// Starts a proxy before each `host:port` of `url`.
    ///
    /// # Errors
    /// No host in the URL, one that is not known, or no port to be had.
    pub fn before(url: &str) -> io::Result<Self> {
        let (scheme, rest) = url
            .split_once("://")
            .ok_or_else(|| io::Error::other("a URL without hosts"))?;
        let (authority, tail) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
        let (user, hosts) = authority.rsplit_once('@').unwrap_or(("", authority));
        let all: Vec<Proxy> = hosts
            .split(',')
            .map(|host| Proxy::start(address(host)?, Protocol::Raw))
            .collect::<io::Result<_>>()?;
        let hosts: Vec<String> = all.iter().map(|proxy| proxy.addr().to_string()).collect();
        let at = if user.is_empty() { "" } else { "@" };
        let url = format!("{scheme}://{user}{at}{}{tail}", hosts.join(","));
        Ok(Self { all, url })
    }

    /// The same URL through the proxies.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// See [`Proxy::silence`].
    pub fn silence(&self) {
        self.all.iter().for_each(Proxy::silence);
    }
}

fn address(host: &str) -> io::Result<SocketAddr> {
    let unknown = || io::Error::other(format!("{host:?} is not host:port"));
    host.to_socket_addrs()?.next().ok_or_else(unknown)
}
