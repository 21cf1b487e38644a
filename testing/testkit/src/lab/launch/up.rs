//! `palisade-testkit up ENGINE`: runs an engine for a person, until Ctrl-C or the end of input.

use std::io::{Read, Write};
use std::process::ExitCode;

use super::apiserver::ApiServer;
use super::{running::Running, start_with, table};

/// Has no program of its own, but runs inside this process.
const KUBERNETES: &str = "kubernetes";

/// `up`: lists the engines, and whether each is installed.
pub fn list() -> ExitCode {
    let mut out = std::io::stdout().lock();
    for recipe in table::ENGINES {
        let state = match recipe.installed() {
            Ok(path) => path,
            Err(why) => why,
        };
        // The reader has closed the pipe.
        if writeln!(out, "{:<15} {:<50} {state}", recipe.name, recipe.about).is_err() {
            return ExitCode::SUCCESS;
        }
    }
    let (name, about) = (KUBERNETES, "a stand-in for the API server, for Leases");
    let _ = writeln!(out, "{name:<15} {about:<50} part of the testkit");
    ExitCode::SUCCESS
}

/// `up ENGINE SETTING…`: starts it, prints it, waits, and removes it.
pub fn up(name: &str, settings: &[&str]) -> ExitCode {
    // Registered before the start, so that a signal during the start takes effect after it.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let done = runtime
        .map_err(|error| error.to_string())
        .and_then(|runtime| {
            let _in = runtime.enter();
            let stopped = stopped().map_err(|error| error.to_string())?;
            if name == KUBERNETES {
                let server = ApiServer::start()?;
                println!("{}\nCtrl-C or the end of input stops it.", server.url());
                runtime.block_on(stopped);
                runtime.shutdown_background();
                return Ok(None);
            }
            let running = start_with(name, settings).map_err(|error| error.to_string())?;
            show(&running).map_err(|error| error.to_string())?;
            runtime.block_on(stopped);
            // The thread that reads the input may never end.
            runtime.shutdown_background();
            Ok(Some(running))
        });
    match done {
        Ok(running) => {
            drop(running);
            ExitCode::SUCCESS
        }
        Err(why) => {
            eprintln!("{name}: {why}");
            ExitCode::FAILURE
        }
    }
}

fn show(running: &Running) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", running.url())?;
    for node in running.nodes() {
        let pid = node.pid().unwrap_or_default();
        writeln!(out, "{:<4} pid {pid:<8} {}", node.name(), node.address())?;
    }
    writeln!(out, "folder {}", running.folder().display())?;
    writeln!(out, "Ctrl-C or the end of input stops it.")?;
    out.flush()
}

/// Resolves on a signal to stop, or at the end of input.
fn stopped() -> std::io::Result<impl Future<Output = ()>> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let (sender, end_of_input) = tokio::sync::oneshot::channel::<()>();
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut std::io::stdin().lock().by_ref(), &mut std::io::sink());
        drop(sender);
    });
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = end_of_input => {}
        }
    })
}
