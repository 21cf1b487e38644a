//! Fenced rows of your own tables, in PostgreSQL and SQLite: SQL that adds two columns, a table of
//! tokens and the triggers that refuse stale writes, including those of code that omits the token.
//! `palisade schema postgres|sqlite --fence TABLE` prints it.
//!
//! Invariant: the tokens that the triggers accept for a row never decrease, even if the row was
//! deleted in between.

use palisade_core::{Error, ErrorKind, Result};

use palisade_core::Token;
use palisade_core::fence::{Rule, Verdict};

/// The SQLSTATE of a stale token.
pub const STALE: &str = "PFT01";

/// The SQLSTATE of a missing or invalid token.
pub const MISSING: &str = "PFT02";

/// The statement that presents a token for a whole transaction of PostgreSQL. DELETE and
/// TRUNCATE have no other way.
pub const PRESENT: &str = "SELECT set_config('palisade.fence', $1, true)";

/// Decodes the server's refusal: stale, with the highest token from the details.
pub fn refused(state: &str, detail: Option<&str>) -> Option<Verdict> {
    let number = |text: &str| {
        let digits: String = text.chars().filter(char::is_ascii_digit).collect();
        digits.parse().ok().map(Token)
    };
    (state == STALE).then(|| Verdict::Stale {
        highest: detail.and_then(number).unwrap_or(Token(0)),
    })
}

/// A table whose rows are to be fenced.
///
/// ```
/// # fn main() -> palisade::Result<()> {
/// let sql = palisade::fence::sql::Table::new("shop.stock")?.keyed_by(&["sku"])?.postgres();
/// assert!(sql.contains("BEFORE UPDATE ON \"shop\".\"stock\""));
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    schema: Option<String>,
    name: String,
    key: Vec<String>,
    rule: Rule,
}

impl Table {
    /// A table, as the database spells it, with its schema if it is not the default one (`public`,
    /// `main`). Its key is the column `id`.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for a name that is not made of letters, digits and `_`.
    pub fn new(name: &str) -> Result<Self> {
        let (schema, name) = match name.split_once('.') {
            Some((schema, name)) => (Some(identifier(schema)?), name),
            None => (None, name),
        };
        Ok(Self {
            schema,
            name: identifier(name)?,
            key: vec!["id".to_owned()],
            rule: Rule::default(),
        })
    }

    /// Sets the columns of its primary key.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for none, and for a name as in [`Table::new`].
    pub fn keyed_by<S: AsRef<str>>(self, columns: &[S]) -> Result<Self> {
        if columns.is_empty() {
            let message = "a fenced table needs a key; name its columns";
            return Err(Error::new(ErrorKind::Config, "fence", message));
        }
        let columns = columns.iter().map(|column| identifier(column.as_ref()));
        Ok(Self {
            key: columns.collect::<Result<_>>()?,
            ..self
        })
    }

    /// Accepts each token only once for each row.
    #[must_use]
    pub fn strict(self) -> Self {
        Self {
            rule: Rule::Strict,
            ..self
        }
    }

    /// The SQL that fences it in PostgreSQL 12 or newer. It can be run again, and changes no data.
    pub fn postgres(&self) -> String {
        let schema = self.schema.as_deref().unwrap_or("public");
        let named = |suffix: &str| format!("\"{schema}\".\"{}{suffix}\"", self.name);
        let key = |row: &str| match &self.key[..] {
            [column] => format!("{row}.\"{column}\"::text"),
            _ => format!("jsonb_build_array({})::text", self.columns(row)),
        };
        let mut sql = include_str!("postgres.sql").to_owned();
        for (blank, text) in [
            ("@table@", named("")),
            ("@marks@", named("_fence")),
            ("@refuse@", named("_fence_refuse")),
            ("@on_update@", named("_fence_update")),
            ("@on_insert@", named("_fence_insert")),
            ("@on_delete@", named("_fence_delete")),
            ("@on_truncate@", named("_fence_truncate")),
            ("@old_key@", key("OLD")),
            ("@new_key@", key("NEW")),
            ("@row_key@", key("r")),
            ("@key_changed@", self.changed("IS DISTINCT FROM")),
            ("@older@", self.older().to_owned()),
        ] {
            sql = sql.replace(blank, &text);
        }
        sql
    }

    /// The grants on the table of tokens that a user of the table needs in PostgreSQL.
    pub fn postgres_grants(&self, user: &str) -> String {
        let schema = self.schema.as_deref().unwrap_or("public");
        let (table, user) = (&self.name, user.replace('"', "\"\""));
        format!("GRANT SELECT, INSERT, UPDATE ON \"{schema}\".\"{table}_fence\" TO \"{user}\";\n")
    }

    /// The SQL that fences it in SQLite 3.38 or newer. Run it once; it changes no data.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for a table in a database other than `main`: a trigger can't refer to
    /// it.
    pub fn sqlite(&self) -> Result<String> {
        if self.schema.as_deref().is_some_and(|it| it != "main") {
            let message = "SQLite triggers can't use another database: name the table alone";
            return Err(Error::new(ErrorKind::Config, "fence", message));
        }
        let named = |suffix: &str| format!("\"{}{suffix}\"", self.name);
        let key = |row: &str| match &self.key[..] {
            [column] => format!("CAST({row}.\"{column}\" AS TEXT)"),
            _ => format!("json_array({})", self.columns(row)),
        };
        let is_new = |row: &str| self.each(" AND ", |c| format!("{row}\"{c}\" = NEW.\"{c}\""));
        let mut sql = include_str!("sqlite.sql").to_owned();
        for (blank, text) in [
            ("@table@", named("")),
            ("@marks@", named("_fence")),
            ("@on_update@", named("_fence_update")),
            ("@after_update@", named("_fence_updated")),
            ("@on_insert@", named("_fence_insert")),
            ("@after_insert@", named("_fence_inserted")),
            ("@on_delete@", named("_fence_delete")),
            ("@old_key@", key("OLD")),
            ("@new_key@", key("NEW")),
            ("@key_changed@", self.changed("IS NOT")),
            ("@is_new@", is_new("")),
            ("@is_new_r@", is_new("r.")),
            (
                "@new_key_missing@",
                self.each(" OR ", |c| format!("NEW.\"{c}\" IS NULL")),
            ),
            ("@older@", self.older().to_owned()),
        ] {
            sql = sql.replace(blank, &text);
        }
        Ok(sql)
    }

    /// The operator that compares a stale token with the highest one.
    fn older(&self) -> &'static str {
        match self.rule {
            Rule::NotOlder => "<",
            Rule::Strict => "<=",
        }
    }

    fn each(&self, joint: &str, one: impl Fn(&str) -> String) -> String {
        let all: Vec<String> = self.key.iter().map(|column| one(column)).collect();
        all.join(joint)
    }

    fn columns(&self, row: &str) -> String {
        self.each(", ", |column| format!("{row}.\"{column}\""))
    }

    fn changed(&self, differs: &str) -> String {
        self.each(" OR ", |column| {
            format!("NEW.\"{column}\" {differs} OLD.\"{column}\"")
        })
    }
}

/// A name that is safe in quotes, and short enough for the suffixes of derived names.
fn identifier(name: &str) -> Result<String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || c == '_';
    if (1..=45).contains(&name.len()) && name.chars().all(fits) {
        return Ok(name.to_owned());
    }
    let message = "tables and columns are named with at most 45 letters, digits and _, with a \
                   schema as in shop.stock";
    Err(Error::new(ErrorKind::Config, "fence", message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_blank_is_filled_and_odd_names_are_refused() {
        for keys in [&["id"][..], &["tenant", "id"]] {
            let table = Table::new("shop.stock").unwrap().keyed_by(keys).unwrap();
            let sql = table.strict().postgres();
            assert!(!sql.contains('@'), "{sql}");
            assert!(sql.contains("NEW.fence <= OLD.fence_token"), "{sql}");
            let table = Table::new("stock").unwrap().keyed_by(keys).unwrap();
            let sql = table.sqlite().unwrap();
            assert!(!sql.contains('@'), "{sql}");
        }
        for bad in ["", "a b", "a\"b", "a;b", "a.b.c", ".a", &"x".repeat(46)] {
            let error = Table::new(bad).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{bad}");
        }
        assert!(Table::new("shop.stock").unwrap().sqlite().is_err());
        assert!(Table::new("a").unwrap().keyed_by::<&str>(&[]).is_err());
    }
}
