//! `Proxies`: one proxy before each host of a URL, for a test that disturbs only its own
//! connections.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};

use super::{Protocol, Proxy};

/// Proxies before all hosts of a URL, which pass bytes without parsing them.
pub struct Proxies {
    all: Vec<Proxy>,
    url: String,
    /// A kubeconfig that names the proxy.
    _folder: Option<tempfile::TempDir>,
}

impl Proxies {
    /// Starts a proxy before each `host:port` of `url`.
    ///
    /// # Errors
    /// If the URL has no host or an unknown one, or no port is available.
    pub fn before(url: &str) -> io::Result<Self> {
        let (scheme, rest) = url
            .split_once("://")
            .ok_or_else(|| io::Error::other("a URL without hosts"))?;
        if scheme == "kubernetes" {
            return Self::before_cluster(url);
        }
        let (authority, tail) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
        let (user, hosts) = authority.rsplit_once('@').unwrap_or(("", authority));
        let all: Vec<Proxy> = hosts
            .split(',')
            .map(|host| Proxy::start(address(host)?, Protocol::Raw))
            .collect::<io::Result<_>>()?;
        let hosts: Vec<String> = all.iter().map(|proxy| proxy.addr().to_string()).collect();
        let at = if user.is_empty() { "" } else { "@" };
        let url = format!("{scheme}://{user}{at}{}{tail}", hosts.join(","));
        let _folder = None;
        Ok(Self { all, url, _folder })
    }

    /// A cluster's URL names a kubeconfig, which names the server. A copy of it names the proxy.
    fn before_cluster(url: &str) -> io::Result<Self> {
        let unfit = || io::Error::other("no kubeconfig with a server in this URL");
        let options = url.split_once('?').ok_or_else(unfit)?.1.split('&');
        let mut values = options.filter_map(|option| option.strip_prefix("kubeconfig="));
        let path = values.next().ok_or_else(unfit)?;
        let text = std::fs::read_to_string(path)?;
        let server = text
            .lines()
            .find_map(|line| line.trim().strip_prefix("server: "));
        let server = server.ok_or_else(unfit)?.trim_matches('"');
        let (scheme, host) = server.split_once("://").ok_or_else(unfit)?;
        let proxy = Proxy::start(address(host.trim_end_matches('/'))?, Protocol::Raw)?;
        // The certificate is for the original host.
        let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
        let name = match scheme {
            "https" => format!("\n    tls-server-name: {name}"),
            _ => String::new(),
        };
        let text = text.replace(server, &format!("{scheme}://{}{name}", proxy.addr()));
        let folder = tempfile::tempdir()?;
        let copy = folder.path().join("config");
        std::fs::write(&copy, text)?;
        Ok(Self {
            all: vec![proxy],
            url: url.replace(path, &copy.display().to_string()),
            _folder: Some(folder),
        })
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
