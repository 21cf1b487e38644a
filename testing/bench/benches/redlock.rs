//! What a lock on a majority of five Redis servers costs, beside five raw SETs and five
//! compare-and-deletes, each five awaited together, in the same run.
//!
//! - sequential: lock + unlock, one after the other;
//! - parallel: 64 names at once;
//! - pass: from the call of release to the grant of the one that waits; each holds for 10 ms and
//!   stays away until the other has the lock, as in `palisade bench`.
//!
//! `PALISADE_BENCH_REDLOCK=host:port,…` names servers; otherwise five are started, with nothing on
//! disk. Both sides take short turns, so that whatever else the machine does hits both; the ratio is
//! the median over the turns.

#![allow(clippy::unwrap_used)]

mod common;

use std::process::Command;

use common::{SHORT, Server, answers, beside_raw, pass};

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let named = std::env::var("PALISADE_BENCH_REDLOCK").ok();
    let count = if named.is_none() { 5 } else { 0 };
    let servers: Vec<Server> = (0..count).map_while(|_| start()).collect();
    if servers.len() < count {
        return println!("skipped: there is no redis-server to start");
    }
    let hosts: Vec<&str> = servers.iter().map(|server| server.host.as_str()).collect();
    let hosts = named.unwrap_or_else(|| hosts.join(","));
    let url = format!("redlock://{hosts}?restart_guard=off&node_timeout=1s");
    answers(&url).await;
    let raw = palisade::command::baseline(&url).await.unwrap().unwrap();
    for (what, tasks) in [("sequential", 1), ("64 names", 64)] {
        beside_raw(what, tasks, SHORT, &url, &raw).await;
    }
    pass(&url).await;
}

/// A server of our own.
fn start() -> Option<Server> {
    Server::start(|port, folder| {
        let mut redis = Command::new("redis-server");
        redis.args(["--port", &port.to_string(), "--bind", "127.0.0.1"]);
        redis
            .args(["--save", "", "--appendonly", "no", "--dir"])
            .arg(folder);
        redis
    })
}
