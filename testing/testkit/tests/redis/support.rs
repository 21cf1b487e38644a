//! The test's own server, with or without the proxy, and direct commands to it.

use std::net::Ipv4Addr;
use std::time::Duration;

use palisade::report::{LineReport, Scope};
use palisade::{Client, Mutex, Name};
use palisade_testkit::lab::launch::{self, Running, wire};
use palisade_testkit::lab::proxy::{Protocol, Proxy};
use palisade_testkit::lab::trial::started;
pub(crate) use palisade_testkit::lab::trial::{cycle, fails, soon, until, until_one_waits};

pub(crate) struct Server {
    // Declared before the server, so that connections end first.
    pub(crate) proxy: Proxy,
    pub(crate) running: Running,
}

impl Server {
    /// A server, or `None` if it is not available here.
    pub(crate) fn start() -> Option<Self> {
        launch::need("redis").map(Self::behind_a_proxy)
    }

    /// A server with further settings.
    pub(crate) fn with(settings: &[&str]) -> Option<Self> {
        started("redis", settings).map(Self::behind_a_proxy)
    }

    fn behind_a_proxy(running: Running) -> Self {
        let target = (Ipv4Addr::LOCALHOST, running.nodes()[0].port());
        let proxy = Proxy::start(target.into(), Protocol::Resp).unwrap();
        Self { proxy, running }
    }

    pub(crate) fn port(&self) -> u16 {
        self.running.nodes()[0].port()
    }

    /// Sends one command, bypassing the proxy.
    pub(crate) fn ask(&self, command: &[&str]) -> String {
        wire::redis(self.port(), command).unwrap_or_else(|why| why)
    }

    /// Adds the user `locks` with the password `hunter2` and these rules.
    pub(crate) fn user(&self, rules: &[&str]) {
        let user = ["ACL", "SETUSER", "locks", "on", ">hunter2"];
        assert_eq!(self.ask(&[&user[..], rules].concat()), "OK");
    }

    /// How often the server has run a command since its statistics were reset.
    pub(crate) fn calls(&self, command: &str) -> u64 {
        let stats = self.ask(&["INFO", "commandstats"]);
        let row = stats
            .lines()
            .find(|row| row.starts_with(&format!("cmdstat_{command}:")));
        let calls = row.and_then(|row| row.split("calls=").nth(1)?.split(',').next()?.parse().ok());
        calls.unwrap_or(0)
    }

    /// The URL that bypasses the proxy.
    pub(crate) fn direct(&self, options: &str) -> String {
        format!("{}?{options}", self.running.url())
    }

    /// The URL through the proxy.
    pub(crate) fn proxied(&self, options: &str) -> String {
        format!("redis://{}?{options}", self.proxy.addr())
    }

    pub(crate) async fn client(&self, options: &str) -> Client {
        palisade::connect(&self.proxied(options)).await.unwrap()
    }

    pub(crate) async fn direct_client(&self, options: &str) -> Client {
        palisade::connect(&self.direct(options)).await.unwrap()
    }
}

pub(crate) fn mutex(client: &Client, name: &str, ttl: Duration) -> Mutex {
    client.mutex(name).ttl(ttl)
}

pub(crate) async fn line(client: &Client, name: &str) -> Option<LineReport> {
    let scope = Scope::Line(Name::new(name).unwrap());
    client.survey(scope).await.unwrap().pop()
}
