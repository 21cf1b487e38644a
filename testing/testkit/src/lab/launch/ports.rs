//! Free ports on loopback.
//!
//! They are below the range that the kernel uses for outgoing connections, and reserved among all
//! processes of tests, so that a killed server finds its port still free when it restarts, and no
//! cluster meets a member of another one there. If another program takes a port first, the start is
//! repeated with others.

use std::net::{Ipv4Addr, TcpListener};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};

use parking_lot::Mutex;

/// The reservations of this process: sockets in the abstract namespace, one for each port, which
/// the kernel removes when the process ends.
static RESERVED: Mutex<Vec<UnixListener>> = Mutex::new(Vec::new());

/// The lowest port to try: most well-known services are below.
const LOWEST: u16 = 12_000;

/// A port that nobody listens on and that no process of tests has reserved; it is ours from now on.
pub(super) fn free() -> Result<u16, String> {
    let end = outgoing_from().unwrap_or(32_768);
    if end > LOWEST + 1_000 {
        for _ in 0..200 {
            let port = rand::random_range(LOWEST..end);
            if reserve(port) && listen(port).is_ok() {
                return Ok(port);
            }
        }
    }
    for _ in 0..200 {
        let port = listen(0)
            .and_then(|listener| listener.local_addr())
            .map_err(|error| format!("no free port: {error}"))?
            .port();
        if reserve(port) {
            return Ok(port);
        }
    }
    Err("no free port".to_owned())
}

fn listen(port: u16) -> std::io::Result<TcpListener> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, port))
}

/// Whether this process is the first to reserve a port.
fn reserve(port: u16) -> bool {
    let name = format!("palisade-testkit-port-{port}");
    let reserved =
        SocketAddr::from_abstract_name(name).and_then(|name| UnixListener::bind_addr(&name));
    reserved
        .map(|reservation| RESERVED.lock().push(reservation))
        .is_ok()
}

/// Several free ports.
pub(super) fn several(count: usize) -> Result<Vec<u16>, String> {
    (0..count).map(|_| free()).collect()
}

fn outgoing_from() -> Option<u16> {
    let text = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").ok()?;
    text.split_whitespace().next()?.parse().ok()
}
