//! The worker process: runs its workload until stdin says `stop` or ends, and records everything.
//!
//! It reports on stdout what it is doing (`waiting`, `held`, `gate`, `wrote`, `free`), so that the
//! harness disturbs it at the right time. When told `gate`, it keeps its hold until it is told
//! `go`; if it writes to a store, it waits between its last check of the lock and its next write.
//! That is the pause that no check by the holder can detect.

use std::io::{BufRead, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use palisade::{BootTime, Client};
use rand::SeedableRng;
use rand::rngs::StdRng;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

use super::Workload;
use super::work::Worker;
use crate::engine::EngineUnderTest;
use crate::lab::history::{Recorder, What};
use crate::taker::process::connect_of;

/// The instructions for a worker on its command line, as JSON.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Spec {
    /// Its name in the history.
    pub client: String,
    /// The engine's URL, with the run's namespace.
    pub url: String,
    /// The lock.
    pub name: String,
    /// The name of its workload.
    pub workload: String,
    /// How long a place lasts without renewal.
    pub ttl_ms: u64,
    /// The seed for its random choices.
    pub seed: u64,
    /// The file to append events to.
    pub history: PathBuf,
    /// The directory of the store.
    pub store: PathBuf,
    /// Whether to drop acquires and holds.
    pub drops: bool,
}

/// Runs `worker SPEC` if the arguments ask for it.
pub fn main(arguments: &[String], table: &[EngineUnderTest]) -> Option<ExitCode> {
    let connect = connect_of(table);
    as_asked("worker", arguments, async |spec: Spec| {
        let client = connect(spec.url.clone()).await.map_err(|e| e.to_string())?;
        work(spec, client).await
    })
}

/// Runs `work` on the SPEC of `VERB SPEC`, if that is what the arguments are.
pub(crate) fn as_asked<S: DeserializeOwned>(
    verb: &str,
    arguments: &[String],
    work: impl AsyncFnOnce(S) -> Result<(), String>,
) -> Option<ExitCode> {
    let [asked, spec] = arguments else {
        return None;
    };
    if asked != verb {
        return None;
    }
    let done = serde_json::from_str(spec)
        .map_err(|error| error.to_string())
        .and_then(|spec| {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .map_err(|error| error.to_string())?;
            runtime.block_on(work(spec))
        });
    Some(match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{verb}: {why}");
            ExitCode::FAILURE
        }
    })
}

async fn work(spec: Spec, client: Client) -> Result<(), String> {
    let workload = Workload::ALL.iter().find(|w| w.name() == spec.workload);
    let workload = *workload.ok_or("unknown workload")?;
    let record = Recorder::open(&spec.history, &spec.client, &spec.name)
        .map_err(|error| error.to_string())?;
    record.record(What::Start {
        pid: std::process::id(),
        owner: client.owner().to_owned(),
    });
    notice_stalls(record.clone());
    let mut worker = Worker {
        rng: StdRng::seed_from_u64(spec.seed),
        control: Control::start(),
        record: record.clone(),
        client: client.clone(),
        workload,
        spec,
        op: 0,
    };
    worker.run().await.map_err(|error| format!("{error:?}"))?;
    client.close().await;
    record.record(What::End);
    Ok(())
}

/// Reports what it is doing.
pub(super) fn say(what: &str) {
    let mut out = std::io::stdout().lock();
    // If the harness has ended, stdin ends as well.
    let _ = writeln!(out, "{what}");
    let _ = out.flush();
}

/// Records when the process got no CPU time, so that this is not blamed on the lock.
fn notice_stalls(record: Recorder) {
    const TICK: Duration = Duration::from_millis(10);
    /// Far above the usual lateness of a timer, far below any lease.
    const LATE: Duration = Duration::from_millis(40);
    std::thread::spawn(move || {
        let mut last = BootTime::now();
        loop {
            std::thread::sleep(TICK);
            let now = BootTime::now();
            if now.saturating_since(last) > LATE {
                let since = last.as_nanos();
                record.record(What::Stall { since });
            }
            last = now;
        }
    });
}

/// The state that stdin sets.
#[derive(Debug, Clone)]
pub(super) struct Control(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    stop: AtomicBool,
    gate: AtomicBool,
    open: AtomicBool,
    told: Notify,
}

impl Control {
    fn start() -> Self {
        let control = Self(Arc::default());
        let inner = Arc::clone(&control.0);
        std::thread::spawn(move || {
            for line in std::io::stdin().lock().lines().map_while(Result::ok) {
                match line.trim() {
                    "gate" => inner.gate.store(true, Ordering::SeqCst),
                    "go" => inner.open.store(true, Ordering::SeqCst),
                    _ => break,
                }
                inner.told.notify_waiters();
            }
            inner.stop.store(true, Ordering::SeqCst);
            inner.open.store(true, Ordering::SeqCst);
            inner.told.notify_waiters();
        });
        control
    }

    /// Whether to finish.
    pub(super) fn stops(&self) -> bool {
        self.0.stop.load(Ordering::SeqCst)
    }

    /// Waits at the gate if told to.
    pub(super) async fn gate(&self) {
        if !self.0.gate.swap(false, Ordering::SeqCst) {
            return;
        }
        say("gate");
        loop {
            let told = self.0.told.notified();
            if self.0.open.load(Ordering::SeqCst) {
                break;
            }
            told.await;
        }
        // A worker that is to stop passes every later gate.
        self.0.open.store(self.stops(), Ordering::SeqCst);
    }
}
