//! The test's own five servers, each behind a proxy, and direct commands to each.

use std::net::Ipv4Addr;

use palisade::{Client, Hold};
use palisade_testkit::lab::launch::{self, Running, wire};
use palisade_testkit::lab::proxy::{Protocol, Proxy};
pub(crate) use palisade_testkit::lab::trial::{soon, until};

pub(crate) struct Five {
    // Declared before the servers, so that connections end first.
    pub(crate) proxies: Vec<Proxy>,
    pub(crate) running: Running,
}

/// Options for servers that have just started.
pub(crate) const FRESH: &str = "restart_guard=off&namespace=";

impl Five {
    /// Five servers, or `None` if they are not available here.
    pub(crate) fn start() -> Option<Self> {
        let running = launch::need("redis5")?;
        let proxy = |port| Proxy::start((Ipv4Addr::LOCALHOST, port).into(), Protocol::Resp);
        let nodes = running.nodes().iter();
        let proxies = nodes.map(|node| proxy(node.port()).unwrap()).collect();
        Some(Self { proxies, running })
    }

    pub(crate) fn url(&self, options: &str) -> String {
        format!("{}?{options}", self.running.url())
    }

    /// A client that bypasses the proxies.
    pub(crate) async fn client(&self, options: &str) -> Client {
        palisade::connect(&self.url(options)).await.unwrap()
    }

    /// A client through the proxies.
    pub(crate) async fn proxied(&self, options: &str) -> Client {
        let hosts: Vec<String> = self.proxies.iter().map(|p| p.addr().to_string()).collect();
        let url = format!("redlock://{}?{options}", hosts.join(","));
        palisade::connect(&url).await.unwrap()
    }

    /// Sends one command to one server.
    pub(crate) fn ask(&self, node: usize, command: &[&str]) -> String {
        let port = self.running.nodes()[node].port();
        wire::redis(port, command).unwrap_or_else(|why| why)
    }

    /// The servers that have `key`.
    pub(crate) fn having(&self, key: &str) -> Vec<usize> {
        let nodes = 0..self.running.nodes().len();
        nodes
            .filter(|node| self.ask(*node, &["EXISTS", key]) == "1")
            .collect()
    }

    /// How many scripts a server has run.
    pub(crate) fn scripts_run(&self, node: usize) -> u64 {
        let stats = self.ask(node, &["INFO", "commandstats"]);
        let row = stats
            .lines()
            .find_map(|row| row.strip_prefix("cmdstat_evalsha:calls="));
        let calls = row.and_then(|row| row.split(',').next()?.parse().ok());
        calls.unwrap_or(0)
    }

    /// A lock that only the first three servers voted for, because another tool had it on the other
    /// two.
    pub(crate) async fn lock_on_three(&self, client: &Client, name: &str) -> Hold {
        let others = [3, 4];
        self.occupy(name, &others);
        let before = others.map(|node| self.scripts_run(node));
        let hold = client.mutex(name).lock().await.unwrap();
        // Three votes are enough: requests in flight to the others must not find them free.
        until("the votes of the others", async || {
            let now = others.map(|node| self.scripts_run(node));
            now.iter().zip(&before).all(|(now, before)| now > before)
        })
        .await;
        self.free(name, &others);
        assert_eq!(self.having(name), [0, 1, 2]);
        hold
    }

    /// Takes another tool's lock on some of the servers.
    pub(crate) fn occupy(&self, key: &str, nodes: &[usize]) {
        for node in nodes {
            assert_eq!(
                self.ask(*node, &["SET", key, "another", "PX", "60000", "NX"]),
                "OK"
            );
        }
    }

    pub(crate) fn free(&self, key: &str, nodes: &[usize]) {
        for node in nodes {
            assert_eq!(self.ask(*node, &["DEL", key]), "1");
        }
    }
}
