//! The engine that uses a gateway: gateways that are killed, stopped, drained and behind proxies
//! that lose answers, and access control.

#![allow(clippy::unwrap_used)]

mod access;
mod faults;
mod several;

use palisade::Client;
use palisade_testkit::lab::launch::gateway::Gateway;

/// Locks in a directory, which end only with their leases, and the gateways in front of them.
struct House {
    folder: tempfile::TempDir,
}

impl House {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        Self { folder }
    }

    fn url(&self) -> String {
        format!("file:{}/store", self.folder.path().display())
    }

    fn gateway(&self, arguments: &[&str]) -> Gateway {
        Gateway::start(&self.url(), arguments).unwrap()
    }

    fn gateway_at(&self, port: u16, arguments: &[&str]) -> Gateway {
        Gateway::start_at(port, &self.url(), arguments).unwrap()
    }

    /// A client that bypasses the gateways.
    async fn outsider(&self) -> Client {
        palisade::connect(&self.url()).await.unwrap()
    }
}

/// A URL with further options.
fn with(url: &str, options: &str) -> String {
    let joint = if url.contains('?') { '&' } else { '?' };
    format!("{url}{joint}{options}")
}
