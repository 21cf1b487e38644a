//! `Audit`: security-relevant events, as lines of JSON.
//!
//! Evictions, refusals, ended sessions and changes of the access file. A line never contains a
//! token, a session's secret, a query or a body.
//!
//! A thread writes, so that a reader of stderr that does not read blocks no request. If it can't
//! keep up, or there are too many refusals, lines are dropped and counted.

use std::fmt;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, SystemTime};

use palisade::BootTime;
use parking_lot::Mutex;
use serde_json::{Value, json};

/// How many lines may wait to be written.
const QUEUE: usize = 4096;
/// How many refusals a second are written: a client without a token can cause any number.
const REFUSALS: u32 = 50;

/// Where audit events go.
#[derive(Clone)]
pub struct Audit(Arc<Inner>);

struct Inner {
    lines: SyncSender<Line>,
    left_out: AtomicU64,
    /// The current second, and the number of refusals in it.
    refusals: Mutex<(BootTime, u32)>,
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
            refusals: Mutex::new((BootTime::PAST, 0)),
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

    /// Writes a refusal, unless there were too many of them this second.
    pub(crate) fn refused(&self, details: Value) {
        let few = {
            let (since, count) = &mut *self.0.refusals.lock();
            if (*since + Duration::from_secs(1)).has_passed() {
                (*since, *count) = (BootTime::now(), 0);
            }
            *count += 1;
            *count <= REFUSALS
        };
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
