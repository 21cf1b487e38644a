//! `Recorder`: appends the events of one process to its file.
//!
//! Each line is one `write` to a file opened for appending. So however the process dies, every line
//! but the last is complete.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

use palisade::BootTime;
use parking_lot::Mutex;

use super::{Event, What};

/// Records the events of one process. Clones share the file.
#[derive(Debug, Clone)]
pub struct Recorder {
    file: Arc<Mutex<File>>,
    client: String,
    name: String,
}

impl Recorder {
    /// Appends to the file at `path`, as `client`, about `name`.
    ///
    /// # Errors
    /// Those of the file.
    pub fn open(path: &Path, client: &str, name: &str) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        Ok(Self {
            file: Arc::new(Mutex::new(file)),
            client: client.to_owned(),
            name: name.to_owned(),
        })
    }

    /// Records an event with the current time.
    pub fn record(&self, what: What) {
        self.record_at(BootTime::now(), &self.client, what);
    }

    /// Records an event with the time `at`.
    pub fn record_as_of(&self, at: BootTime, what: What) {
        self.record_at(at, &self.client, what);
    }

    /// Records an event of `client` with the time `at`.
    pub fn record_at(&self, at: BootTime, client: &str, what: What) {
        let event = Event {
            at: at.as_nanos(),
            client: client.to_owned(),
            name: self.name.clone(),
            what,
        };
        // An event is plain data with text keys, so serialising it can't fail.
        let Ok(line) = serde_json::to_string(&event) else {
            return;
        };
        if let Err(error) = self.file.lock().write_all(format!("{line}\n").as_bytes()) {
            // An incomplete history proves nothing.
            eprintln!("the history can't be written: {error}");
            std::process::exit(74);
        }
    }
}
