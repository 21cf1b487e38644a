//! The verbs: one file each, with its arguments and its `run`. A new verb is a file, its `mod`
//! line, and its line in the list below.

mod evict;
mod ls;
mod run;
mod show;

use crate::args::Global;
use crate::exit::Verdict;

/// Makes the enum that clap reads and the dispatch from the list of verbs.
macro_rules! verbs {
    ($($verb:ident => $module:ident),* $(,)?) => {
        /// A verb with its arguments.
        #[derive(Debug, clap::Subcommand)]
        pub(crate) enum Verb {
            $(#[allow(missing_docs)] $verb($module::$verb),)*
        }

        impl Verb {
            /// Does what it says.
            pub(crate) async fn run(self, global: &Global) -> Verdict {
                match self {
                    $(Self::$verb(verb) => verb.run(global).await,)*
                }
            }
        }
    };
}

verbs! {
    Run => run,
    Ls => ls,
    Show => show,
    Evict => evict,
}
