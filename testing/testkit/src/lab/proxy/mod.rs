//! A TCP proxy between a client and an engine that applies network faults to single messages.
//!
//! [`Proxy::start`] listens on its own port and passes everything on to the engine, byte for byte,
//! until a fault is injected: [`Proxy::inject`] takes a [`Rule`] (which messages, how often, what
//! happens) and returns a [`Guard`]; the fault ends with the guard. The proxy knows the engines'
//! protocols, so that a rule can select "the reply to this command".
//!
//! ```no_run
//! use palisade_testkit::lab::proxy::{Direction, Protocol, Proxy, to_client};
//! # fn example(engine: std::net::SocketAddr) -> std::io::Result<()> {
//! let proxy = Proxy::start(engine, Protocol::Resp)?;
//! let lost = proxy.inject(to_client().label("INCR").once().eat());
//! // … a client on proxy.addr() asks, waits in vain, and asks again …
//! assert_eq!(lost.hits(), 1);
//! assert_eq!(proxy.passed(Direction::ToEngine, "INCR"), 2);
//! # Ok(())
//! # }
//! ```
//!
//! It runs on its own thread and runtime, for async and blocking tests alike. With the same seed
//! the same faults hit the same messages of the same connections. Messages of one direction of a
//! connection never overtake each other.
//!
//! Flow: `serve` accepts → `connection` pairs two sockets → `read` splits one direction with a
//! protocol's framing (`message`) → `pump` applies the rules (`rule`, `guard`) and writes.

mod connection;
mod grpc;
mod guard;
mod http1;
mod message;
mod postgres;
mod proxies;
mod pump;
mod read;
mod resp;
mod rule;
mod seen;
mod serve;
#[cfg(test)]
mod tests;
mod zookeeper;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc as blocking;
use std::thread;

use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};

pub use guard::Guard;
pub use message::{Direction, Kind, Protocol};
pub use proxies::Proxies;
pub use rule::{Extent, Match, Rule, both_ways, to_client, to_engine};
pub use seen::Seen;

use guard::Live;
use seen::Log;
use serve::Command;

/// What the proxy's thread, its guards and its owner share.
struct Shared {
    target: SocketAddr,
    protocol: Protocol,
    seed: u64,
    rules: Mutex<Vec<Arc<Live>>>,
    next_rule: AtomicU64,
    log: Mutex<Log>,
    /// Which directions are swallowed on all connections.
    holes: Mutex<[bool; 2]>,
    /// How many connections were accepted, and how many of the first of them are silent.
    accepted: AtomicU64,
    silent: AtomicU64,
    /// Incremented when a rule ends or holes change, for those that wait for the end of a hole.
    change: watch::Sender<u64>,
    /// Incremented when all connections are cut; each remembers the number that it began with.
    cuts: watch::Sender<u64>,
}

impl Shared {
    fn changed(&self) {
        self.change.send_modify(|number| *number += 1);
    }
}

/// A proxy in front of one engine. Dropping it closes its connections, its port and its thread.
pub struct Proxy {
    shared: Arc<Shared>,
    addr: SocketAddr,
    commands: Option<mpsc::UnboundedSender<Command>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Proxy {
    /// Listens on a free port of 127.0.0.1 and passes connections on to `target`. Seed 0.
    ///
    /// # Errors
    ///
    /// If no port, thread or runtime is available.
    pub fn start(target: SocketAddr, protocol: Protocol) -> io::Result<Proxy> {
        Proxy::seeded(target, protocol, 0)
    }

    /// As [`Proxy::start`], with a seed for chances, jitter and corruption.
    ///
    /// # Errors
    ///
    /// As [`Proxy::start`].
    pub fn seeded(target: SocketAddr, protocol: Protocol, seed: u64) -> io::Result<Proxy> {
        let shared = Arc::new(Shared {
            target,
            protocol,
            seed,
            rules: Mutex::default(),
            next_rule: AtomicU64::new(1),
            log: Mutex::default(),
            holes: Mutex::default(),
            accepted: AtomicU64::new(0),
            silent: AtomicU64::new(0),
            change: watch::Sender::new(0),
            cuts: watch::Sender::new(0),
        });
        let (commands, orders) = mpsc::unbounded_channel();
        let (ready, started) = blocking::channel();
        let served = shared.clone();
        let thread = thread::Builder::new()
            .name("fault-proxy".to_owned())
            .spawn(move || serve::run(served, orders, &ready))?;
        let gone = |_| Err(io::Error::other("the proxy's thread ended at once"));
        let addr = started.recv().unwrap_or_else(gone)?;
        Ok(Proxy {
            shared,
            addr,
            commands: Some(commands),
            thread: Some(thread),
        })
    }

    /// The address for clients.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The address of the engine.
    pub fn target(&self) -> SocketAddr {
        self.shared.target
    }

    /// The seed of chances, jitter and corruption.
    pub fn seed(&self) -> u64 {
        self.shared.seed
    }

    /// Injects a fault, on present and future connections; it ends with the guard.
    ///
    /// # Behavior
    ///
    /// - Rules are asked in the order in which they were injected.
    /// - All that match a message act on it, until one takes it away.
    pub fn inject(&self, rule: Rule) -> Guard {
        let id = self.shared.next_rule.fetch_add(1, Ordering::Relaxed);
        let live = Arc::new(Live::new(id, rule));
        self.shared.rules.lock().push(live.clone());
        Guard {
            live,
            shared: self.shared.clone(),
        }
    }

    /// Swallows everything in one direction, on all connections, until [`Proxy::heal`]. Sockets
    /// stay open, and the end of a stream is not passed on either.
    pub fn blackhole(&self, direction: Direction) {
        self.shared.holes.lock()[direction.index()] = true;
        self.shared.changed();
    }

    /// Swallows everything on present connections, both ways and for good. New ones are served.
    /// This simulates a firewall that dropped its connection state, or a host that has moved.
    pub fn silence(&self) {
        let accepted = self.shared.accepted.load(Ordering::SeqCst);
        self.shared.silent.store(accepted, Ordering::SeqCst);
        self.shared.changed();
    }

    /// Closes all present connections on both sides. New ones are served.
    pub fn cut_all(&self) {
        self.shared.cuts.send_modify(|number| *number += 1);
    }

    /// Refuses new connections (ECONNREFUSED) until [`Proxy::heal`]; present ones continue.
    pub fn refuse(&self) {
        self.order(Command::Refuse);
    }

    /// Ends what [`Proxy::blackhole`] and [`Proxy::refuse`] began. Rules end with their guards.
    pub fn heal(&self) {
        *self.shared.holes.lock() = [false; 2];
        self.shared.changed();
        self.order(Command::Accept);
    }

    /// The messages so far, in the order in which each direction of a connection was handled. The
    /// newest 100,000 are kept.
    pub fn seen(&self) -> Vec<Seen> {
        self.shared.log.lock().list()
    }

    /// How many messages with exactly this label were passed on.
    pub fn passed(&self, direction: Direction, label: &str) -> usize {
        self.shared.log.lock().passed(direction, label)
    }

    /// Clears the log.
    pub fn forget(&self) {
        self.shared.log.lock().clear();
    }

    /// Sends a command and waits until it has been executed.
    fn order(&self, command: fn(blocking::Sender<()>) -> Command) {
        let (done, carried_out) = blocking::channel();
        if let Some(commands) = &self.commands
            && commands.send(command(done)).is_ok()
        {
            let _ = carried_out.recv();
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.commands = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
