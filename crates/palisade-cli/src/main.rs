//! The `palisade` command.
//!
//! It parses the arguments, runs one verb, and ends with the exit code that [`exit::code`] gives
//! for the verdict; no other code chooses one. Nothing is opened or started before a verb needs it:
//! with a short command most of the time is start-up, and a guardian can only be forked while there
//! is no other thread.

mod abilities;
mod args;
mod argv;
mod child;
mod config;
mod connect;
mod exit;
mod guardian;
mod holder;
mod job;
mod json;
mod lineage;
mod live;
mod lock_args;
mod print;
mod proc;
mod signals;
mod spans;
mod supervise;
mod sys;
mod table;
mod terminal;
mod tips;
mod traces;
mod verbs;
mod view;
mod waiting;
mod worker;

use std::process::ExitCode;

use args::Args;
use exit::{Failure, Verdict};
use print::Printer;

/// The most files that a verb opens, with some reserve. A lower limit is refused at the start:
/// running out of files half-way gives errors that are harder to understand.
const FILES: usize = 24;

fn main() -> ExitCode {
    sys::ignore_file_size_signal();
    let (verdict, printer) = match Args::read() {
        Ok(args) => {
            let printer = args.global.printer();
            argv::hide_passwords(printer);
            (
                enough_files(FILES).and_then(|()| args.verb.run(&args.global)),
                printer,
            )
        }
        Err((refusal, printer)) => (Err(refusal), printer),
    };
    finish(verdict, printer)
}

fn enough_files(files: usize) -> Result<(), Failure> {
    sys::can_open(files).map_err(|error| {
        Failure::Start(format!(
            "palisade needs {files} open files beside those that it was started with; raise the \
             limit with `ulimit -n`: {error}"
        ))
    })
}

/// Runs `work` on a single-threaded runtime.
fn on_runtime(work: impl Future<Output = Verdict>) -> Verdict {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::Start(format!("can't start: {error}")))?;
    let verdict = runtime.block_on(work);
    // Blocking work that still runs must not delay the exit.
    runtime.shutdown_background();
    verdict
}

fn finish(mut verdict: Verdict, printer: Printer) -> ExitCode {
    // Help and version are output, and fail as other output does.
    if let Err(Failure::Arguments(text)) = &verdict
        && !text.use_stderr()
        && let Err(error) = print::help(text)
    {
        verdict = Err(error.into());
    }
    if let Err(failure) = &verdict {
        printer.failure(failure);
    }
    ExitCode::from(exit::code(&verdict))
}
