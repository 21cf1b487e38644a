//! A real server, for what only an engine behind a network can show.

use std::process::{Child, Command, Stdio};

use crate::support::*;

/// A Redis server of the test's own.
pub(crate) struct Redis {
    pub(crate) server: Child,
    pub(crate) url: String,
}

impl Redis {
    /// `None` where there is no Redis to start.
    pub(crate) fn start(store: &Store) -> Option<Self> {
        let port = std::net::TcpListener::bind("127.0.0.1:0").ok()?;
        let number = port.local_addr().ok()?.port().to_string();
        drop(port);
        let server = Command::new("redis-server")
            .args(["--port", &number, "--bind", "127.0.0.1", "--save", ""])
            .arg("--dir")
            .arg(store.path(""))
            .stdout(Stdio::null())
            .spawn()
            .ok()?;
        let url = format!("redis://127.0.0.1:{number}");
        let redis = Self { server, url };
        until("Redis answers", || {
            let mut ls = palisade();
            ls.args(["--url", &redis.url, "ls"]);
            code(ls) == Some(0)
        });
        Some(redis)
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}
