//! One connection through the proxy: two sockets, two pumps, one end.
//!
//! A rule, `cut_all` or a peer only requests the end and how; the task here stops both pumps and
//! closes both sockets, so that neither side sees anything after it.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::net::sockopt::set_socket_linger;
use tokio::net::TcpStream;
use tokio::sync::watch;

use super::guard::Live;
use super::message::{Direction, Splitter};
use super::rule::Extent;
use super::{Shared, pump};

/// How a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Open,
    Close,
    Reset,
}

/// What both pumps of a connection share.
pub(super) struct Connection {
    pub(super) shared: Arc<Shared>,
    pub(super) number: u64,
    pub(super) splitter: Mutex<Splitter>,
    /// Set when the splitter has become raw, so that the other pump flushes its incomplete message.
    pub(super) raw: watch::Sender<bool>,
    client: TcpStream,
    engine: TcpStream,
    end: watch::Sender<End>,
    swallowed: Mutex<Swallowed>,
}

#[derive(Default)]
struct Swallowed {
    /// The rules that swallow a direction, as long as they are active.
    directions: [Vec<Arc<Live>>; 2],
    /// The rules that swallow a stream, as long as they are active.
    streams: HashMap<u64, Arc<Live>>,
    /// Units whose first message was lost: the peer could not understand the rest.
    headless: [HashSet<u64>; 2],
}

pub(super) async fn run(shared: Arc<Shared>, number: u64, client: TcpStream) {
    let mut cuts = shared.cuts.subscribe();
    let connecting = TcpStream::connect(shared.target);
    let engine = tokio::select! {
        engine = connecting => engine.ok(),
        _ = cuts.changed() => None,
    };
    let Some(engine) = engine else {
        return reset(client);
    };
    // Otherwise the kernel could merge messages that arrived one by one.
    let _ = client.set_nodelay(true);
    let _ = engine.set_nodelay(true);
    let connection = Connection {
        splitter: Mutex::new(Splitter::new(shared.protocol)),
        raw: watch::Sender::new(false),
        shared,
        number,
        client,
        engine,
        end: watch::Sender::new(End::Open),
        swallowed: Mutex::default(),
    };
    let end = tokio::select! {
        _ = async {
            tokio::join!(
                pump::run(&connection, Direction::ToEngine),
                pump::run(&connection, Direction::ToClient),
            )
        } => End::Close,
        end = connection.ended() => end,
        _ = cuts.changed() => End::Close,
    };
    match end {
        End::Reset => {
            reset(connection.client);
            reset(connection.engine);
        }
        End::Open | End::Close => {
            close(&connection.client);
            close(&connection.engine);
        }
    }
}

impl Connection {
    /// The socket that a direction's bytes come from.
    pub(super) fn source(&self, direction: Direction) -> &TcpStream {
        match direction {
            Direction::ToEngine => &self.client,
            Direction::ToClient => &self.engine,
        }
    }

    /// The socket that a direction's bytes go to.
    pub(super) fn sink(&self, direction: Direction) -> &TcpStream {
        self.source(direction.back())
    }

    /// Ends the connection; if there are several requests, the first one counts.
    pub(super) fn end(&self, how: End) {
        self.end.send_if_modified(|end| {
            let first = *end == End::Open;
            if first {
                *end = how;
            }
            first
        });
    }

    async fn ended(&self) -> End {
        let mut end = self.end.subscribe();
        match end.wait_for(|end| *end != End::Open).await {
            Ok(end) => *end,
            Err(_) => End::Close,
        }
    }

    /// Begins a black hole that lasts as long as the rule.
    pub(super) fn swallow(
        &self,
        live: &Arc<Live>,
        extent: Extent,
        direction: Direction,
        unit: Option<u64>,
    ) {
        let mut swallowed = self.swallowed.lock();
        let mut add = |direction: Direction| {
            swallowed.directions[direction.index()].push(live.clone());
        };
        match (extent, unit) {
            (Extent::Stream, Some(stream)) => {
                swallowed.streams.insert(stream, live.clone());
            }
            (Extent::Stream | Extent::Direction, _) => add(direction),
            (Extent::Connection, _) => Direction::ALL.into_iter().for_each(add),
        }
    }

    /// Marks a unit as lost in a direction for good.
    pub(super) fn behead(&self, direction: Direction, unit: u64) {
        self.swallowed.lock().headless[direction.index()].insert(unit);
    }

    /// Whether everything in a direction is swallowed now.
    pub(super) fn holed(&self, direction: Direction) -> bool {
        let silent = self.number <= self.shared.silent.load(Ordering::SeqCst);
        if silent || self.shared.holes.lock()[direction.index()] {
            return true;
        }
        let mut swallowed = self.swallowed.lock();
        let rules = &mut swallowed.directions[direction.index()];
        rules.retain(|live| !live.has_ended());
        !rules.is_empty()
    }

    /// Whether a message of this unit is swallowed now.
    pub(super) fn swallows(&self, direction: Direction, unit: Option<u64>) -> bool {
        if self.holed(direction) {
            return true;
        }
        let Some(unit) = unit else {
            return false;
        };
        let mut swallowed = self.swallowed.lock();
        swallowed.streams.retain(|_, live| !live.has_ended());
        swallowed.streams.contains_key(&unit)
            || swallowed.headless[direction.index()].contains(&unit)
    }

    /// Waits until a direction is no longer swallowed.
    pub(super) async fn healed(&self, direction: Direction) {
        let mut change = self.shared.change.subscribe();
        while self.holed(direction) {
            if change.changed().await.is_err() {
                return;
            }
        }
    }
}

/// Closes with FIN, so that earlier data still arrives. Unread bytes would make the kernel send RST
/// instead.
fn close(stream: &TcpStream) {
    let _ = rustix::net::shutdown(stream, rustix::net::Shutdown::Write);
    let mut rest = [0; 4096];
    while stream.try_read(&mut rest).is_ok_and(|length| length > 0) {}
}

/// Closes with RST.
fn reset(stream: TcpStream) {
    let _ = set_socket_linger(&stream, Some(Duration::ZERO));
}
