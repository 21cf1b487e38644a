//! `palisade schema`: prints the SQL of an engine that keeps its locks in tables, for databases
//! whose users may not make tables themselves.

use palisade::engines::postgres::Schema as Tables;
use serde::Serialize;

use crate::args::Global;
use crate::exit::{Outcome, Verdict};

/// Print the SQL that an engine's tables and functions are made with
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  palisade schema postgres | psql shop\n  \
    palisade schema postgres --user app | psql shop")]
pub(crate) struct Schema {
    /// The engine
    #[arg(value_enum)]
    engine: Which,
    /// The schema to make them in, as in the URL's schema=
    #[arg(long, default_value = "palisade")]
    schema: String,
    /// Also the grants for this user, who need not own anything
    #[arg(long)]
    user: Option<String>,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Which {
    Postgres,
}

/// What is printed with `--json`.
#[derive(Serialize)]
struct Printed {
    sql: String,
}

impl Schema {
    // All verbs are asked in the same way.
    #[allow(clippy::unused_async)]
    pub(crate) async fn run(self, global: &Global) -> Verdict {
        let Which::Postgres = self.engine;
        let tables = Tables::new(&self.schema)?;
        let grants = match &self.user {
            Some(user) => tables.grants(user),
            None => tables
                .grants("app")
                .lines()
                .map(|line| format!("-- {line}\n"))
                .collect(),
        };
        let about = match self.user {
            Some(_) => "\n",
            None => "\n-- For a user who does not own it (--user NAME prints them for yours):\n",
        };
        let printed = Printed {
            sql: format!("{}{about}{grants}", tables.sql()),
        };
        global
            .printer()
            .answer(&printed, |printed| printed.sql.clone())?;
        Ok(Outcome::Done)
    }
}
