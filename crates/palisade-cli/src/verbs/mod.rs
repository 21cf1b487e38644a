//! The verbs: one file each, with its arguments and its `run`. A new verb is a file, its `mod`
//! line, and its line in the list below. A verb that forks comes first there: it starts the
//! runtime itself.

mod bench;
mod evict;
mod ls;
mod permits;
mod run;
mod schema;
mod show;

use crate::args::Global;
use crate::exit::Verdict;
use crate::on_runtime;

/// Makes the enum that clap reads and the dispatch from the list of verbs.
macro_rules! verbs {
    (forking { $($fork:ident => $fork_module:ident),* $(,)? } $($verb:ident => $module:ident),* $(,)?) => {
        /// A verb with its arguments.
        #[derive(Debug, clap::Subcommand)]
        pub(crate) enum Verb {
            $(#[allow(missing_docs)] $fork($fork_module::$fork),)*
            $(#[allow(missing_docs)] $verb($module::$verb),)*
        }

        impl Verb {
            /// Does what it says.
            pub(crate) fn run(self, global: &Global) -> Verdict {
                match self {
                    $(Self::$fork(verb) => verb.run(global),)*
                    $(Self::$verb(verb) => on_runtime(verb.run(global)),)*
                }
            }
        }
    };
}

verbs! {
    forking { Run => run }
    Ls => ls,
    Show => show,
    Evict => evict,
    Bench => bench,
    Schema => schema,
}
