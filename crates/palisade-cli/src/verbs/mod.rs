//! The verbs: one file each, with its arguments and its `run`. A new verb is a file, its `mod`
//! line, and its line in the list below. A verb that forks comes first there: it starts the
//! runtime itself.

mod acquire;
mod bench;
mod completions;
mod config;
mod deadlocks;
mod demo;
mod doctor;
mod elect;
mod evict;
mod fence;
mod guide;
mod help;
mod leader;
mod ls;
mod man;
mod queue;
mod release;
mod resize;
mod run;
mod schema;
mod serve;
mod show;
mod top;

pub(crate) use self::show::look;
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
            /// The definition of the verb `word` alone, if it is one.
            pub(crate) fn definition(word: &str) -> Option<clap::Command> {
                use clap::Args as _;
                match word {
                    $(stringify!($fork_module) => {
                        Some($fork_module::$fork::augment_args(clap::Command::new(stringify!($fork_module))))
                    })*
                    $(stringify!($module) => {
                        Some($module::$verb::augment_args(clap::Command::new(stringify!($module))))
                    })*
                    _ => None,
                }
            }

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
    forking { Run => run, Acquire => acquire, Release => release, Elect => elect, Queue => queue }
    Leader => leader,
    Ls => ls,
    Show => show,
    Top => top,
    Deadlocks => deadlocks,
    Evict => evict,
    Resize => resize,
    Fence => fence,
    Doctor => doctor,
    Bench => bench,
    Demo => demo,
    Guide => guide,
    Config => config,
    Completions => completions,
    Man => man,
    Schema => schema,
    Serve => serve,
    Help => help,
}
