//! `History`: the files of a run, merged by time.
//!
//! A killed process may leave a torn last line, which is counted. A malformed line anywhere else is
//! an error, because an incomplete history proves nothing.

use std::fmt;
use std::fs;
use std::path::Path;

use super::Event;

/// The events of a run in the order of time.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct History {
    /// All events, earliest first. Checkers name events by their index here.
    pub events: Vec<Event>,
    /// How many files end in a torn line.
    pub torn: usize,
}

/// An invalid line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Malformed {
    /// The file, if it came from one.
    pub file: String,
    /// The line number, from 1.
    pub line: usize,
    /// The reason.
    pub why: String,
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} line {}: {}", self.file, self.line, self.why)
    }
}

impl std::error::Error for Malformed {}

impl History {
    /// Merges events. Those of the same time keep the given order.
    pub fn of(mut events: Vec<Event>) -> Self {
        events.sort_by_key(|event| event.at);
        Self { events, torn: 0 }
    }

    /// Reads every `*.jsonl` file of a directory.
    ///
    /// # Errors
    /// For an invalid line that is not a torn last one, or an unreadable file.
    pub fn read(dir: &Path) -> Result<Self, Malformed> {
        let broken = |file: &Path, error: std::io::Error| Malformed {
            file: file.display().to_string(),
            line: 0,
            why: error.to_string(),
        };
        let entries = fs::read_dir(dir).map_err(|error| broken(dir, error))?;
        let mut paths = Vec::new();
        for entry in entries {
            paths.push(entry.map_err(|error| broken(dir, error))?.path());
        }
        paths.retain(|path| path.extension().is_some_and(|end| end == "jsonl"));
        paths.sort();
        let mut texts = Vec::new();
        for path in paths {
            let bytes = fs::read(&path).map_err(|error| broken(&path, error))?;
            // A torn line may end inside a character.
            let text = String::from_utf8_lossy(&bytes).into_owned();
            texts.push((path.display().to_string(), text));
        }
        Self::merge(&texts)
    }

    /// Merges files, given as (name, content).
    ///
    /// # Errors
    /// For an invalid line that is not a torn last one.
    pub fn merge(files: &[(String, String)]) -> Result<Self, Malformed> {
        let mut events: Vec<Event> = Vec::new();
        let mut torn = 0;
        for (file, text) in files {
            for (at, line) in text.split_inclusive('\n').enumerate() {
                // Only the last line can lack its newline.
                if !line.ends_with('\n') {
                    torn += 1;
                    continue;
                }
                match serde_json::from_str(line) {
                    Ok(event) => events.push(event),
                    Err(error) => {
                        return Err(Malformed {
                            file: file.clone(),
                            line: at + 1,
                            why: error.to_string(),
                        });
                    }
                }
            }
        }
        let merged = Self::of(events);
        Ok(Self { torn, ..merged })
    }

    /// The history as JSON lines.
    pub fn to_lines(&self) -> String {
        let lines = self.events.iter().map(|event| {
            // An event is plain data with text keys, so serialising it can't fail.
            serde_json::to_string(event).unwrap_or_default() + "\n"
        });
        lines.collect()
    }

    /// When it begins.
    pub fn begin(&self) -> u64 {
        self.events.first().map_or(0, |event| event.at)
    }

    /// When it ends.
    pub fn end(&self) -> u64 {
        self.events.last().map_or(0, |event| event.at)
    }
}
