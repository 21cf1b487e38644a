//! A site for the conformance suite and the fault runner: a real engine of one server, behind the
//! fault proxy, that can be stopped, killed, cut off and silenced.

use std::net::SocketAddr;
use std::sync::Arc;

use super::{Error, Running, start};
use crate::proxy::{Direction, Protocol, Proxy};
use crate::subject::{Harm, Hurt, Outage, Site};

/// An engine and the proxy before it.
struct Served {
    // Before the server: connections end first.
    proxy: Proxy,
    running: Running,
}

/// Starts the engine `name` and a proxy before it. Its clients connect to the proxy.
///
/// # Errors
/// A sentence when it can't be had or does not start.
pub fn proxied(name: &str, protocol: Protocol) -> Result<Site, String> {
    let running = start(name).map_err(|error: Error| error.to_string())?;
    let node = running.nodes().first().ok_or("an engine without servers")?;
    let target = SocketAddr::from(([127, 0, 0, 1], node.port()));
    let proxy = Proxy::start(target, protocol).map_err(|error| format!("no proxy: {error}"))?;
    let url = running
        .url()
        .replace(&node.address(), &proxy.addr().to_string());
    let served = Arc::new(Served { proxy, running });
    Ok(Site {
        processes: true,
        hurt: Some(served.clone()),
        keep: Some(served),
        ..Site::new(url)
    })
}

/// Starts the engine `name` for clients that connect to it directly.
///
/// # Errors
/// As [`proxied`].
pub fn direct(name: &str) -> Result<Site, String> {
    let running = start(name).map_err(|error: Error| error.to_string())?;
    let site = Site {
        processes: true,
        ..Site::new(running.url())
    };
    Ok(site.keeping(running))
}

/// Starts the engine `name` for one trial alone, which may cut it off.
///
/// # Errors
/// As [`proxied`].
pub fn severable(name: &str) -> Result<Site, String> {
    let running = Arc::new(start(name).map_err(|error: Error| error.to_string())?);
    Ok(Site {
        processes: true,
        outage: Some(running.clone() as Arc<dyn Outage>),
        keep: Some(running.clone()),
        ..Site::new(running.url())
    })
}

impl Hurt for Served {
    fn can(&self, _: Harm) -> bool {
        true
    }

    fn begin(&self, harm: Harm) -> Result<(), String> {
        match harm {
            Harm::Stop => self.running.nodes().iter().try_for_each(|node| node.stop()),
            Harm::Kill => self.running.nodes().iter().try_for_each(|node| node.kill()),
            Harm::Cut => {
                self.proxy.refuse();
                self.proxy.cut_all();
                Ok(())
            }
            Harm::Blackhole => {
                self.proxy.blackhole(Direction::ToEngine);
                self.proxy.blackhole(Direction::ToClient);
                Ok(())
            }
        }
    }

    fn end(&self, harm: Harm) -> Result<(), String> {
        match harm {
            Harm::Stop => self
                .running
                .nodes()
                .iter()
                .try_for_each(|node| node.cont())?,
            Harm::Kill => self
                .running
                .nodes()
                .iter()
                .try_for_each(|node| node.restart())?,
            Harm::Cut | Harm::Blackhole => self.proxy.heal(),
        }
        self.running.ready()
    }
}
