//! `Audit`: who did what that others may ask about later, as lines of JSON.
//!
//! Evictions, refusals, ended sessions and changes of the access file. A line never holds a token,
//! a session's secret, a query or a body.

use std::fmt;
use std::io::Write;
use std::sync::Arc;
use std::time::SystemTime;

use parking_lot::Mutex;
use serde_json::{Value, json};

/// Where audit events go.
#[derive(Clone)]
pub struct Audit(Arc<Mutex<dyn Write + Send>>);

impl Audit {
    /// Writes a line for each event to `out`.
    pub fn to(out: impl Write + Send + 'static) -> Self {
        Self(Arc::new(Mutex::new(out)))
    }

    pub(crate) fn tell(&self, event: &str, details: Value) {
        let at = humantime::format_rfc3339_millis(SystemTime::now()).to_string();
        let mut line = json!({ "at": at, "event": event });
        if let (Some(line), Value::Object(details)) = (line.as_object_mut(), details) {
            line.extend(details);
        }
        // An event that can't be written must not stop what it is about.
        let mut out = self.0.lock();
        let _ = writeln!(out, "{line}").and_then(|()| out.flush());
    }
}

impl fmt::Debug for Audit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Audit")
    }
}
