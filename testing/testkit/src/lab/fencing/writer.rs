//! The process that is stopped: takes the lock, reads and checks, stops itself, and writes when it
//! is continued.

use std::io::{BufRead, Write};
use std::process::ExitCode;

use rustix::process::{Signal, getpid, kill_process};
use serde::{Deserialize, Serialize};

use super::ledger::{Kind, Ledger, Wrote};
use crate::lab::faults::worker::as_asked;

/// The instructions for a writer on its command line, as JSON.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Spec {
    /// The URL of the engine that has the lock.
    pub url: String,
    /// The lock.
    pub name: String,
    /// The kind of store.
    pub kind: Kind,
    /// The address of the store: a URL, a file, or host and port.
    pub store: String,
    /// Whether the token is compared. In the control it is not.
    pub fenced: bool,
    /// Whether it takes before it reads; with `fenced` only.
    pub takes: bool,
    /// Whether the first writes before the second does, which has taken or read by then; else after
    /// it.
    pub between: bool,
}

/// Runs `fence-writer SPEC` if the arguments ask for it.
pub fn main(arguments: &[String]) -> Option<ExitCode> {
    as_asked("fence-writer", arguments, write)
}

async fn write(spec: Spec) -> Result<(), String> {
    let words = |error: palisade::Error| format!("{error:?}");
    let client = palisade::connect(&spec.url).await.map_err(words)?;
    let mut ledger = Ledger::open(&spec, false).await?;
    // Blocking is fine: the keeper has its own thread.
    for (round, line) in std::io::stdin().lock().lines().enumerate() {
        line.map_err(|error| error.to_string())?;
        let hold = client.mutex(&spec.name).lock().await.map_err(words)?;
        let failpoint = async || {
            if !hold.is_valid() {
                return Err("the lock was not held at the failpoint".to_owned());
            }
            kill_process(getpid(), Signal::STOP).map_err(|error| error.to_string())
        };
        let wrote = ledger
            .add(&hold, &format!("first-{round}"), failpoint)
            .await?;
        let said = match wrote {
            Wrote::Done => "written",
            Wrote::Refused => "refused",
        };
        let mut out = std::io::stdout().lock();
        writeln!(out, "{said} {}", hold.token())
            .and_then(|()| out.flush())
            .map_err(|error| error.to_string())?;
        // It was taken away.
        let _ = hold.release().await;
    }
    Ok(())
}
