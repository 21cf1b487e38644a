//! The `palisade` command.
//!
//! It reads the arguments, runs one verb, and ends with the exit code that [`exit::code`] finds for
//! the verdict: nowhere else is an exit code chosen. Nothing is opened or started before a verb
//! asks for it, because a lock that guards a short command is mostly start-up time, and because a
//! guardian can only be forked while there is no other thread.

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
mod traces;
mod verbs;
mod view;
mod worker;

use std::process::ExitCode;

use args::Args;
use exit::{Failure, Verdict};
use print::Printer;

/// How many files a verb opens at the most, with room to spare. Less is refused at the start:
/// what runs out of them half-way fails in ways that are harder to understand.
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

fn finish(mut verdict: Verdict, printer: Printer) -> ExitCode {
    // Help and version are answers, and fail as answers do.
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
