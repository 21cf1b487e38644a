//! The `palisade` command.
//!
//! It reads the arguments, runs one verb, and ends with the exit code that [`exit::code`] finds for
//! the verdict: nowhere else is an exit code chosen. Nothing is opened or started before a verb
//! asks for it, because a lock that guards a short command is mostly start-up time, and because a
//! guardian can only be forked while there is no other thread.

mod abilities;
mod args;
mod child;
mod config;
mod connect;
mod exit;
mod guardian;
mod holder;
mod job;
mod live;
mod print;
mod signals;
mod supervise;
mod sys;
mod terminal;
mod verbs;
mod view;

use std::process::ExitCode;

use args::Args;
use exit::{Failure, Verdict};
use print::Printer;

fn main() -> ExitCode {
    let (verdict, printer) = match Args::read() {
        Ok(args) => (args.verb.run(&args.global), args.global.printer()),
        Err((refusal, printer)) => (Err(refusal), printer),
    };
    finish(&verdict, printer)
}

/// Does `work` on a runtime of one thread.
fn on_runtime(work: impl Future<Output = Verdict>) -> Verdict {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::Start(format!("can't start: {error}")))?;
    let verdict = runtime.block_on(work);
    // Blocking work that is still under way must not hold back the end.
    runtime.shutdown_background();
    verdict
}

fn finish(verdict: &Verdict, printer: Printer) -> ExitCode {
    if let Err(failure) = verdict {
        printer.failure(failure);
    }
    ExitCode::from(exit::code(verdict))
}
