//! `Servers`: a started engine with or without a fault proxy before each node, and its outages.
//!
//! Stopping and killing affect the node that leads, if there is one. Cutting and black-holing need
//! proxies and affect all nodes at once: they cut the clients off.

use std::net::SocketAddr;
use std::sync::Arc;

use parking_lot::Mutex;

use super::launch::Running;
use super::proxy::{Direction, Protocol, Proxy};
use crate::engine::{Outage, Outages};

/// A started engine with its proxies. Clones share it.
#[derive(Clone)]
pub struct Servers(Arc<Inner>);

struct Inner {
    running: Running,
    proxies: Vec<Proxy>,
    /// The node that is stopped or dead now.
    out: Mutex<Option<usize>>,
}

impl Servers {
    /// Without proxies: clients connect to the nodes.
    pub fn new(running: Running) -> Self {
        Self::behind(running, Vec::new())
    }

    /// With a proxy before each node.
    ///
    /// # Errors
    /// A message if one can't be started.
    pub fn proxied(running: Running, protocol: Protocol) -> Result<Self, String> {
        let ports = running.nodes().iter().map(|node| node.port());
        let proxies: Result<Vec<Proxy>, _> = ports
            .map(|port| Proxy::start(SocketAddr::from(([127, 0, 0, 1], port)), protocol))
            .collect();
        let proxies = proxies.map_err(|error| format!("no proxy: {error}"))?;
        Ok(Self::behind(running, proxies))
    }

    fn behind(running: Running, proxies: Vec<Proxy>) -> Self {
        Self(Arc::new(Inner {
            running,
            proxies,
            out: Mutex::new(None),
        }))
    }

    /// The URL for clients.
    pub fn url(&self) -> String {
        let (url, proxies) = (self.0.running.url(), &self.0.proxies);
        let Some((scheme, _)) = url.split_once("://").filter(|_| !proxies.is_empty()) else {
            return url.to_owned();
        };
        let hosts = proxies.iter().map(|proxy| proxy.addr().to_string());
        format!("{scheme}://{}", hosts.collect::<Vec<_>>().join(","))
    }
}

impl Outages for Servers {
    fn can(&self, outage: Outage) -> bool {
        matches!(outage, Outage::Stop | Outage::Kill) || !self.0.proxies.is_empty()
    }

    fn begin(&self, outage: Outage) -> Result<(), String> {
        let Inner {
            running,
            proxies,
            out,
        } = &*self.0;
        let leader = || {
            let at = running.leader().unwrap_or(0);
            *out.lock() = Some(at);
            &running.nodes()[at]
        };
        match outage {
            Outage::Stop => return leader().stop(),
            Outage::Kill => return leader().kill(),
            Outage::Cut => {
                proxies.iter().for_each(Proxy::refuse);
                proxies.iter().for_each(Proxy::cut_all);
            }
            Outage::Blackhole => {
                for (proxy, direction) in
                    proxies.iter().flat_map(|p| Direction::ALL.map(|d| (p, d)))
                {
                    proxy.blackhole(direction);
                }
            }
        }
        Ok(())
    }

    fn end(&self, outage: Outage) -> Result<(), String> {
        let Inner { running, out, .. } = &*self.0;
        let node = || match out.lock().take() {
            Some(at) => Ok(&running.nodes()[at]),
            None => Err("no outage has begun"),
        };
        match outage {
            Outage::Stop => node()?.cont()?,
            Outage::Kill => node()?.restart()?,
            Outage::Cut | Outage::Blackhole => {
                self.0.proxies.iter().for_each(Proxy::heal);
                return Ok(());
            }
        }
        running.ready()
    }
}
