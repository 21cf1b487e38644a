//! `palisade schema`: prints the SQL of an engine that keeps its locks in tables, for databases
//! whose users may not make tables themselves.

use palisade::engines::postgres::Schema as Tables;
use serde_json::json;

use crate::args::Global;
use crate::exit::Verdict;

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

impl Schema {
    pub(crate) async fn run(self, global: &Global) -> Verdict {
        let Which::Postgres = self.engine;
        let tables = Tables::new(&self.schema)?;
        let grants = match &self.user {
            Some(user) => format!("\n{}", tables.grants(user)),
            None => {
                let grants = tables.grants("app");
                let grants = grants.lines().map(|line| format!("-- {line}\n"));
                let about =
                    "\n-- For a user who does not own it (--user NAME prints them for yours):\n";
                std::iter::once(about.to_owned()).chain(grants).collect()
            }
        };
        let sql = format!("{}{grants}", tables.sql());
        global
            .printer()
            .reply(&json!({"sql": sql}), |_| sql.clone(), true)
    }
}
