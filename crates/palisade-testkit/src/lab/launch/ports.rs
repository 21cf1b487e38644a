//! Free ports on loopback.
//!
//! They are below the range that the kernel uses for outgoing connections, so that a killed server
//! finds its port still free when it restarts. Two processes may still choose the same port; the
//! start is then repeated with others.

use std::collections::HashSet;
use std::net::{Ipv4Addr, TcpListener};

use parking_lot::Mutex;

/// The ports that this process has handed out.
static GIVEN: Mutex<Option<HashSet<u16>>> = Mutex::new(None);

/// The lowest port to try: most well-known services are below.
const LOWEST: u16 = 12_000;

/// A port that nobody listens on and that this process has not handed out before.
pub(super) fn free() -> Result<u16, String> {
    let end = outgoing_from().unwrap_or(32_768);
    let mut given = GIVEN.lock();
    let given = given.get_or_insert_default();
    let free = |port: u16| TcpListener::bind((Ipv4Addr::LOCALHOST, port));
    if end > LOWEST + 1_000 {
        for _ in 0..200 {
            let port = rand::random_range(LOWEST..end);
            if !given.contains(&port) && free(port).is_ok() {
                given.insert(port);
                return Ok(port);
            }
        }
    }
    for _ in 0..200 {
        let listener = free(0).map_err(|error| format!("no free port: {error}"))?;
        let port = listener
            .local_addr()
            .map_err(|error| error.to_string())?
            .port();
        if given.insert(port) {
            return Ok(port);
        }
    }
    Err("no free port".to_owned())
}

/// Several free ports.
pub(super) fn several(count: usize) -> Result<Vec<u16>, String> {
    (0..count).map(|_| free()).collect()
}

fn outgoing_from() -> Option<u16> {
    let text = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").ok()?;
    text.split_whitespace().next()?.parse().ok()
}
