//! The tables and functions: their SQL, the rights that a less privileged user needs, and the check
//! that they exist in the right version.

use tokio_postgres::{Client, SimpleQueryMessage};

use super::error;
use palisade_core::engine::{Url, config_error};
use palisade_core::{Error, ErrorKind, Result};
use palisade_kit::sql::Table;

/// The meaning of the tables. A client refuses any other version than its own.
const VERSION: i32 = 3;

/// The revision of `schema.sql`: raise it with every change there. Changes only add, so that
/// clients of an earlier revision keep working.
const REVISION: i32 = 7;

/// The lowest revision that locks need. Fenced storage and guards came with 5, queues with 6; on an
/// older schema the server reports them as missing.
const LEAST: i32 = 4;

/// The versions come last, so that they exist only if everything else does.
const SQL: &str = concat!(
    include_str!("schema.sql"),
    "\n",
    include_str!("shedlock.sql"),
    "\n",
    include_str!("fence.sql"),
    "\n",
    include_str!("guard.sql"),
    "\n",
    include_str!("queue.sql"),
    "\nCREATE OR REPLACE FUNCTION @schema@.version() RETURNS int LANGUAGE sql IMMUTABLE ",
    "AS 'SELECT @version@';\n",
    "CREATE OR REPLACE FUNCTION @schema@.revision() RETURNS int LANGUAGE sql IMMUTABLE ",
    "AS 'SELECT @revision@';\n\nCOMMIT;\n",
);

/// The name of the schema, safe to be put into SQL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schema(String);

impl Default for Schema {
    fn default() -> Self {
        Self("palisade".to_owned())
    }
}

impl Schema {
    /// Validates a name.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for anything but lower-case letters, digits and `_`.
    pub fn new(name: &str) -> Result<Self> {
        let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        let good = (1..=60).contains(&name.len())
            && name.chars().all(fits)
            && !name.starts_with(|c: char| c.is_ascii_digit())
            && !name.starts_with("pg_");
        if !good {
            return Err(config_error(
                "a schema name has at most 60 lower-case letters, digits and _, as in palisade",
            ));
        }
        Ok(Self(name.to_owned()))
    }

    /// Takes the option `schema` out of the URL.
    pub(super) fn take(url: &mut Url) -> Result<Self> {
        url.take("schema")
            .map_or_else(|| Ok(Self::default()), |name| Self::new(&name))
    }

    pub(super) fn name(&self) -> &str {
        &self.0
    }

    /// The name, quoted for SQL.
    pub(super) fn quoted(&self) -> String {
        format!("\"{}\"", self.0)
    }

    /// The command that prints what an owner must run; for a user who is no owner with the grants.
    pub(super) fn command(&self, grants: bool) -> String {
        let schema = if *self == Self::default() {
            String::new()
        } else {
            format!(" --schema {}", self.0)
        };
        let user = if grants { " --user USER" } else { "" };
        format!("`palisade schema postgres{schema}{user}`")
    }

    /// The SQL that creates the schema or upgrades it to this version.
    pub fn sql(&self) -> String {
        self.fill(SQL)
    }

    /// The rights that a user needs who does not own the schema.
    pub fn grants(&self, user: &str) -> String {
        let user = format!("\"{}\"", user.replace('"', "\"\""));
        self.fill(
            "GRANT USAGE ON SCHEMA @schema@ TO @user@;\n\
             GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA @schema@ TO @user@;\n\
             GRANT SELECT, USAGE ON ALL SEQUENCES IN SCHEMA @schema@ TO @user@;\n\
             GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA @schema@ TO @user@;\n",
        )
        .replace("@user@", &user)
    }

    fn fill(&self, sql: &str) -> String {
        sql.replace("@triggers@", &self.triggers())
            .replace("@schema@", &self.quoted())
            .replace("@version@", &VERSION.to_string())
            .replace("@revision@", &REVISION.to_string())
    }

    /// The triggers that fence the rows of the store.
    fn triggers(&self) -> String {
        // Can't fail: the schema's name and the columns are valid parts of a table definition.
        Table::new(&format!("{}.fenced", self.0))
            .and_then(|table| table.keyed_by(&["namespace", "resource"]))
            .map_or_else(|_| String::new(), |table| table.postgres())
    }

    /// Makes sure that the schema exists in a version that fits. It is created if it is missing. An
    /// existing one is never changed, because others use it.
    ///
    /// # Errors
    /// [`ErrorKind::Denied`] when it is missing and this user may not create it;
    /// [`ErrorKind::Config`] when its version does not fit.
    pub(super) async fn ensure(&self, client: &Client) -> Result<()> {
        let misfit = |message| Err(config_error(message));
        let mut version = self.found(client, "version").await?;
        if version.is_none() && !self.is_ours_to_make(client).await? {
            version = self.found(client, "version").await?;
        }
        match version {
            None => {}
            Some(VERSION) => {
                return match self.found(client, "revision").await? {
                    Some(LEAST..) => Ok(()),
                    _ => misfit(format!(
                        "the schema is of an earlier palisade; let its owner run what {} prints; clients of the earlier one keep working",
                        self.command(false)
                    )),
                };
            }
            Some(version) if version < VERSION => {
                return misfit(format!(
                    "the schema is version {version}, which this palisade can't use; stop its clients, then let its owner run what {} prints",
                    self.command(false)
                ));
            }
            Some(version) => {
                return misfit(format!(
                    "the schema is version {version} and this palisade knows {VERSION}; use a newer palisade or another schema="
                ));
            }
        }
        let made = client.batch_execute(&self.sql()).await;
        let Err(error) = made else { return Ok(()) };
        // The transaction is still open.
        let _ = client.batch_execute("ROLLBACK").await;
        match error.code().map(tokio_postgres::error::SqlState::code) {
            Some("42501") => Err(Error::new(
                ErrorKind::Denied,
                "connect",
                format!(
                    "palisade's tables are not there and this user may not make them; let an owner of the database run what {} prints, with this user's name",
                    self.command(true)
                ),
            )),
            _ => Err(error::failed("connect", &error)),
        }
    }

    /// Begins the transaction that creates the schema, alone, and returns whether it is still
    /// missing. Of many clients that start at once only one creates it, because the script locks
    /// tables that the others use by then.
    async fn is_ours_to_make(&self, client: &Client) -> Result<bool> {
        let begin = self.fill(
            "BEGIN; SELECT pg_advisory_xact_lock(hashtextextended('palisade schema @schema@', 0)); \
             SELECT to_regprocedure('@schema@.version()') IS NULL",
        );
        let failed = |error: tokio_postgres::Error| error::failed("connect", &error);
        let rows = client.simple_query(&begin).await.map_err(failed)?;
        let missing = rows.iter().rev().find_map(|message| match message {
            SimpleQueryMessage::Row(row) => row.get(0),
            _ => None,
        });
        if missing == Some("t") {
            return Ok(true);
        }
        client.batch_execute("ROLLBACK").await.map_err(failed)?;
        Ok(false)
    }

    /// The installed `what` (version, revision).
    async fn found(&self, client: &Client, what: &str) -> Result<Option<i32>> {
        let asked = format!("SELECT {}.{what}()", self.quoted());
        match client.simple_query(&asked).await {
            Ok(rows) => Ok(first_cell(&rows).and_then(|cell| cell.parse().ok())),
            Err(error) => match error.code().map(tokio_postgres::error::SqlState::code) {
                Some("3F000" | "42883") => Ok(None),
                _ => Err(error::failed("connect", &error)),
            },
        }
    }
}

/// The first cell of a reply.
pub(super) fn first_cell(rows: &[SimpleQueryMessage]) -> Option<&str> {
    rows.iter().find_map(|message| match message {
        SimpleQueryMessage::Row(row) => row.get(0),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_schemas_are_refused() {
        for bad in ["", "a b", "A", "1a", "a\"b", "pg_x", "a;b", &"x".repeat(61)] {
            assert_eq!(
                Schema::new(bad).unwrap_err().kind(),
                ErrorKind::Config,
                "{bad}"
            );
        }
        let sql = Schema::new("locks_2").unwrap().sql();
        assert!(sql.contains("CREATE TABLE IF NOT EXISTS \"locks_2\".line"));
        // The operators of containment, not a blank.
        let blanks = sql.replace(" @> ", "").replace(" <@ ", "");
        assert!(!blanks.contains('@'), "{sql}");
        let grants = Schema::default().grants("o'\"x");
        assert!(grants.contains("TO \"o'\"\"x\";"), "{grants}");
        let other = Schema::new("locks_2").unwrap().command(true);
        assert_eq!(
            other,
            "`palisade schema postgres --schema locks_2 --user USER`"
        );
    }
}
