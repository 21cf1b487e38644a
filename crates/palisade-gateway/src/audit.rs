//! `Audit`: security-relevant events, as lines of JSON.
//!
//! Evictions, refusals, ended sessions and changes of files. A line says who (the principal, the
//! address) and about which lock; it never contains a token, a session's secret, a query or a body.
//!
//! A thread writes, so that a reader of stderr that does not read blocks no request. If it can't
//! keep up, or there are too many refusals, lines are dropped and counted.

use std::collections::HashMap;
use std::fmt;
use std::io::Write;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, SystemTime};

use palisade::BootTime;
use parking_lot::Mutex;
use serde_json::{Value, json};

/// How many lines may wait to be written.
const QUEUE: usize = 4096;
/// How many refusals a second are written of each source, so that no flood hides those of others.
const REFUSALS: u32 = 50;
/// The same of all addresses together: whoever has no token may have any number of addresses.
const UNKNOWN_REFUSALS: u32 = 200;

/// Where audit events go.
#[derive(Clone)]
pub struct Audit(Arc<Inner>);

struct Inner {
    lines: SyncSender<Line>,
    left_out: AtomicU64,
    refusals: Mutex<Refusals>,
}

/// Who caused a refusal.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Source {
    Principal(String),
    Peer(IpAddr),
    Socket,
}

/// The current second, and the number of refusals in it.
struct Refusals {
    since: BootTime,
    of: HashMap<Source, u32>,
    /// Of all addresses.
    unknown: u32,
}

impl Refusals {
    /// Counts one; returns whether it is to be written.
    fn count(&mut self, source: &Source) -> bool {
        if (self.since + Duration::from_secs(1)).has_passed() {
            self.since = BootTime::now();
            self.of.clear();
            self.unknown = 0;
        }
        let unknown = matches!(source, Source::Peer(_));
        // So the table is bounded too: principals are those of the access file.
        if unknown && self.unknown >= UNKNOWN_REFUSALS {
            return false;
        }
        let count = self.of.entry(source.clone()).or_default();
        let few = *count < REFUSALS;
        *count += u32::from(few);
        self.unknown += u32::from(few && unknown);
        few
    }
}

enum Line {
    Event(String),
    /// Answered when everything before it is written.
    Flush(SyncSender<()>),
}

impl Audit {
    /// Writes a line for each event to `out`.
    pub fn to(out: impl Write + Send + 'static) -> Self {
        let (lines, receive) = sync_channel(QUEUE);
        // Without the thread, events are dropped and counted.
        let _ = std::thread::Builder::new()
            .name("palisade-audit".into())
            .spawn(move || write(out, &receive));
        Self(Arc::new(Inner {
            lines,
            left_out: AtomicU64::new(0),
            refusals: Mutex::new(Refusals {
                since: BootTime::PAST,
                of: HashMap::new(),
                unknown: 0,
            }),
        }))
    }

    pub(crate) fn tell(&self, event: &str, details: Value) {
        let mut line = line(event);
        if let (Some(line), Value::Object(details)) = (line.as_object_mut(), details) {
            line.extend(details);
        }
        let left_out = &self.0.left_out;
        let before = left_out.swap(0, Ordering::AcqRel);
        if before > 0
            && let Some(line) = line.as_object_mut()
        {
            line.insert("left_out_before".into(), before.into());
        }
        if self
            .0
            .lines
            .try_send(Line::Event(line.to_string()))
            .is_err()
        {
            left_out.fetch_add(before + 1, Ordering::AcqRel);
        }
    }

    /// Writes a refusal, unless there were too many of this source this second.
    pub(crate) fn refused(&self, source: &Source, mut details: Value) {
        let (key, who) = match source {
            Source::Principal(name) => ("principal", name.clone()),
            Source::Peer(peer) => ("peer", peer.to_string()),
            Source::Socket => ("peer", "socket".into()),
        };
        details[key] = who.into();
        let few = self.0.refusals.lock().count(source);
        if few {
            self.tell("refused", details);
        } else {
            self.0.left_out.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Waits until everything is written, for at most a second.
    pub(crate) fn flush(&self) {
        let (done, written) = sync_channel(1);
        if self.0.lines.try_send(Line::Flush(done)).is_ok() {
            let _ = written.recv_timeout(Duration::from_secs(1));
        }
    }
}

fn line(event: &str) -> Value {
    let at = humantime::format_rfc3339_millis(SystemTime::now()).to_string();
    json!({ "at": at, "event": event })
}

fn write(mut out: impl Write, lines: &Receiver<Line>) {
    for line in lines {
        match line {
            // A failed write must not block the audited operation.
            Line::Event(line) => drop(writeln!(out, "{line}").and_then(|()| out.flush())),
            Line::Flush(done) => drop(done.send(())),
        }
    }
}

impl fmt::Debug for Audit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Audit")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_source_has_a_budget_of_its_own() {
        let mut refusals = Refusals {
            since: BootTime::now() + Duration::from_secs(3600),
            of: HashMap::new(),
            unknown: 0,
        };
        let mut count = |source: &Source| (0..1000).filter(|_| refusals.count(source)).count();
        let peer = |last: u8| Source::Peer(IpAddr::from([192, 0, 2, last]));
        let of_peers: Vec<_> = (0..6).map(|last| count(&peer(last))).collect();
        assert_eq!(of_peers, [50, 50, 50, 50, 0, 0]);
        for name in ["a", "b"] {
            assert_eq!(count(&Source::Principal(name.into())), 50);
        }
        assert_eq!(count(&Source::Socket), 50);
    }
}
