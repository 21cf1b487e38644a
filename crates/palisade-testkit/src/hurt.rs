//! `Servers`: a started engine that can be hurt, with or without a fault proxy before each node.
//!
//! Stopping and killing hit the node that leads, where there is one. Cutting and swallowing need
//! proxies, and hit all nodes at once: it is the clients that are cut off.

use std::net::SocketAddr;

use parking_lot::Mutex;

use crate::launch::Running;
use crate::proxy::{Direction, Protocol, Proxy};
use crate::subject::{Harm, Hurt};

/// A started engine, and what stands before it.
pub struct Servers {
    running: Running,
    proxies: Vec<Proxy>,
    /// The node that is hurt now.
    hurt: Mutex<Option<usize>>,
}

impl Servers {
    /// Without proxies: clients talk to the nodes.
    pub fn new(running: Running) -> Self {
        Self {
            running,
            proxies: Vec::new(),
            hurt: Mutex::new(None),
        }
    }

    /// With a proxy before each node.
    ///
    /// # Errors
    /// A sentence when one can't be started.
    pub fn proxied(running: Running, protocol: Protocol) -> Result<Self, String> {
        let proxy = |port: u16| Proxy::start(SocketAddr::from(([127, 0, 0, 1], port)), protocol);
        let proxies: Result<Vec<Proxy>, _> = running
            .nodes()
            .iter()
            .map(|node| proxy(node.port()))
            .collect();
        Ok(Self {
            proxies: proxies.map_err(|error| format!("no proxy: {error}"))?,
            ..Self::new(running)
        })
    }

    /// Where clients connect to.
    pub fn url(&self) -> String {
        let url = self.running.url();
        let Some((scheme, _)) = url.split_once("://").filter(|_| !self.proxies.is_empty()) else {
            return url.to_owned();
        };
        let hosts = self.proxies.iter().map(|proxy| proxy.addr().to_string());
        format!("{scheme}://{}", hosts.collect::<Vec<_>>().join(","))
    }
}

impl Hurt for Servers {
    fn can(&self, harm: Harm) -> bool {
        match harm {
            Harm::Stop | Harm::Kill => true,
            Harm::Cut | Harm::Blackhole => !self.proxies.is_empty(),
        }
    }

    fn begin(&self, harm: Harm) -> Result<(), String> {
        match harm {
            Harm::Stop | Harm::Kill => {
                let at = self.running.leader().unwrap_or(0);
                *self.hurt.lock() = Some(at);
                let node = &self.running.nodes()[at];
                match harm {
                    Harm::Stop => node.stop(),
                    _ => node.kill(),
                }
            }
            Harm::Cut => {
                self.proxies.iter().for_each(Proxy::refuse);
                self.proxies.iter().for_each(Proxy::cut_all);
                Ok(())
            }
            Harm::Blackhole => {
                for proxy in &self.proxies {
                    proxy.blackhole(Direction::ToEngine);
                    proxy.blackhole(Direction::ToClient);
                }
                Ok(())
            }
        }
    }

    fn end(&self, harm: Harm) -> Result<(), String> {
        match harm {
            Harm::Stop | Harm::Kill => {
                let at = self.hurt.lock().take().ok_or("nothing is hurt")?;
                let node = &self.running.nodes()[at];
                match harm {
                    Harm::Stop => node.cont()?,
                    _ => node.restart()?,
                }
                self.running.ready()
            }
            Harm::Cut | Harm::Blackhole => {
                self.proxies.iter().for_each(Proxy::heal);
                Ok(())
            }
        }
    }
}
