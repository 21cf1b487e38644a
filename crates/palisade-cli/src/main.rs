//! The `palisade` command.
//!
//! It reads the arguments, runs one verb on a runtime of one thread, and ends with the exit code
//! that [`exit::code`] finds for the verdict: nowhere else is an exit code chosen. Nothing is
//! opened or started before a verb asks for it, because a lock that guards a short command is
//! mostly start-up time.

mod args;
mod child;
mod config;
mod connect;
mod exit;
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
        Ok(args) => (run(args.verb, &args.global), args.global.printer()),
        Err((refusal, printer)) => (Err(refusal), printer),
    };
    finish(&verdict, printer)
}

fn run(verb: verbs::Verb, global: &args::Global) -> Verdict {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::Start(format!("can't start: {error}")))?;
    let verdict = runtime.block_on(verb.run(global));
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
