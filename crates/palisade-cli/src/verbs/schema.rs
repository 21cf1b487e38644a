//! `palisade schema`: prints the SQL that creates an engine's tables, for databases whose users
//! may not create tables themselves, and the SQL that fences the rows of any table.

use std::hash::{BuildHasher, Hasher, RandomState};

use palisade::engines::postgres::Schema as Tables;
use palisade::fence::sql::Table;
use serde_json::json;

use crate::args::Global;
use crate::exit::{Failure, Verdict};
use crate::view::shown;

/// Print the SQL that creates an engine's tables, or that fences a table of yours
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  palisade schema postgres | psql shop\n  \
    palisade schema postgres --user app | psql shop\n  \
    palisade schema postgres --fence shop.stock --key sku | psql shop\n  \
    palisade schema sqlite --fence stock | sqlite3 shop.db\n\n\
    What --fence prints can be applied again. With --json, SQLite's is plain SQL, to be run once.")]
pub(crate) struct Schema {
    /// The database
    #[arg(value_enum)]
    engine: Which,
    /// The schema for the tables of locks, as in the URL's schema= [default: palisade]
    #[arg(long, value_name = "SCHEMA", conflicts_with = "fence")]
    schema: Option<String>,
    /// Also print the grants for this user, who need not own the tables
    #[arg(long)]
    user: Option<String>,
    /// Fence the rows of this table instead: a write without the newest token is refused
    #[arg(long, value_name = "TABLE")]
    fence: Option<String>,
    /// The columns of its primary key
    #[arg(
        long,
        value_name = "COLUMNS",
        value_delimiter = ',',
        default_value = "id",
        requires = "fence"
    )]
    key: Vec<String>,
    /// Accept each token once for each row
    #[arg(long, requires = "fence")]
    strict: bool,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Which {
    Postgres,
    Sqlite,
}

impl Schema {
    pub(crate) async fn run(self, global: &Global) -> Verdict {
        if global.url.is_some() {
            let message = "schema connects to nothing; omit --url, and pass its output to psql or \
                           sqlite3 (--schema NAME is the URL's schema=)";
            return Err(Failure::Usage(message.into()));
        }
        if let (Which::Sqlite, Some(_)) = (self.engine, self.user.as_ref().or(self.schema.as_ref()))
        {
            let message = "SQLite has neither users nor schemas; omit --user and --schema";
            return Err(Failure::Usage(message.into()));
        }
        if self.user.as_deref() == Some("") {
            return Err(Failure::Usage("--user: give the name of the user".into()));
        }
        if let Some(twice) = (1..self.key.len()).find(|at| self.key[..*at].contains(&self.key[*at]))
        {
            let message = format!("--key: {} is there twice", shown(&self.key[twice]));
            return Err(Failure::Usage(message));
        }
        let (sql, script) = match (&self.fence, self.engine) {
            (Some(table), engine) => self.fencing(table, engine)?,
            (None, Which::Postgres) => (self.tables()?, None),
            (None, Which::Sqlite) => {
                let message = "SQLite keeps no locks; name a table to fence with --fence TABLE";
                return Err(Failure::Usage(message.into()));
            }
        };
        global.printer().reply(
            &json!({"sql": sql}),
            |_| script.clone().unwrap_or_else(|| sql.clone()),
            true,
        )
    }

    /// The tables of locks.
    fn tables(&self) -> Result<String, Failure> {
        let tables = Tables::new(self.schema.as_deref().unwrap_or("palisade"))?;
        let grants = self.grants(|user| tables.grants(user));
        Ok(format!("{}{grants}", tables.sql()))
    }

    /// The SQL that fences a table, and the script for a shell if that is another one.
    fn fencing(&self, table: &str, engine: Which) -> Result<(String, Option<String>), Failure> {
        let mut table = Table::new(table)?.keyed_by(&self.key)?;
        if self.strict {
            table = table.strict();
        }
        let whole = |sql: &str, grants: &str| format!("BEGIN;\n\n{sql}\nCOMMIT;\n{grants}");
        Ok(match engine {
            Which::Postgres => {
                let grants = self.grants(|user| table.postgres_grants(user));
                (whole(&table.postgres(), &grants), None)
            }
            Which::Sqlite => {
                // Nobody can guess the name.
                let random = RandomState::new().build_hasher().finish();
                let file = std::env::temp_dir().join(format!("palisade-fence-{random:016x}.sql"));
                let script = table.sqlite_script(&file.to_string_lossy())?;
                (whole(&table.sqlite()?, ""), Some(script))
            }
        })
    }

    /// The grants for the user, or an example of them in a comment.
    fn grants(&self, grants: impl Fn(&str) -> String) -> String {
        if let Some(user) = &self.user {
            return format!("\n{}", grants(user));
        }
        let example = grants("app");
        let example = example.lines().map(|line| format!("-- {line}\n"));
        let about = "\n-- For a user who does not own it (--user NAME prints them for yours):\n";
        std::iter::once(about.to_owned()).chain(example).collect()
    }
}
