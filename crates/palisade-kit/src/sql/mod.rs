//! Fenced rows of your own tables, in PostgreSQL and SQLite: SQL that adds two columns, a table of
//! tokens and the triggers that refuse stale writes, including those of code that omits the token.
//! `palisade schema postgres|sqlite --fence TABLE` prints it.
//!
//! Invariant: the tokens that the triggers accept for a row never decrease, even if the row was
//! deleted in between. So the tokens of deleted rows are kept by the key itself, with its types and
//! collations: two texts may be one key.

use palisade_core::{Error, ErrorKind, Result, Token};

use palisade_core::fence::{Rule, Verdict};

/// The SQLSTATE of a stale token.
pub const STALE: &str = "PFT01";

/// The SQLSTATE of a missing or invalid token.
pub const MISSING: &str = "PFT02";

/// The SQLSTATE of a table that can't be fenced as it is.
pub const UNFIT: &str = "PFT04";

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
    /// [`ErrorKind::Config`] for none, for the fence's own columns, and for a name as in
    /// [`Table::new`].
    pub fn keyed_by<S: AsRef<str>>(self, columns: &[S]) -> Result<Self> {
        if columns.is_empty() {
            let message = "a fenced table needs a key; name its columns";
            return Err(Error::new(ErrorKind::Config, "fence", message));
        }
        let key: Vec<String> = columns
            .iter()
            .map(|column| identifier(column.as_ref()))
            .collect::<Result<_>>()?;
        let is_ours = |column: &String| ["fence", "fence_token", "fence_old"].contains(&&**column);
        if let Some(column) = key.iter().find(|column| is_ours(column)) {
            let message =
                format!("the fence has a column {column} of its own: it can't be the key");
            return Err(Error::new(ErrorKind::Config, "fence", message));
        }
        Ok(Self { key, ..self })
    }

    /// Accepts each token only once for each row.
    #[must_use]
    pub fn strict(self) -> Self {
        Self {
            rule: Rule::Strict,
            ..self
        }
    }

    /// The SQL that fences it in PostgreSQL 12 or newer, to be run in one transaction. It can be
    /// run again, also over that of an earlier version, and changes no data. What it can't fence (a
    /// view, children by INHERITS) it refuses, with SQLSTATE PFT04.
    pub fn postgres(&self) -> String {
        let schema = self.schema.as_deref().unwrap_or("public");
        let named = |suffix: &str| format!("\"{schema}\".\"{}{suffix}\"", self.name);
        let same = |one: &str, other: &str| {
            self.each(" AND ", |c| format!("{one}.\"{c}\" = {other}.\"{c}\""))
        };
        filled(
            include_str!("postgres.sql"),
            &[
                ("@table@", named("")),
                ("@marks@", named("_fence")),
                ("@refuse@", named("_fence_refuse")),
                ("@on_update@", named("_fence_update")),
                ("@on_key@", named("_fence_key")),
                ("@on_insert@", named("_fence_insert")),
                ("@after_insert@", named("_fence_inserted")),
                ("@on_delete@", named("_fence_delete")),
                ("@on_truncate@", named("_fence_truncate")),
                ("@on_take@", named("_fence_take")),
                ("@names@", self.each(", ", |c| format!("'{c}'"))),
                ("@columns@", self.each(", ", |c| format!("\"{c}\""))),
                ("@old_columns@", self.columns("OLD")),
                ("@new_columns@", self.columns("NEW")),
                ("@r_columns@", self.columns("r")),
                ("@is_old@", same("m", "OLD")),
                ("@is_new@", same("m", "NEW")),
                ("@is_r@", same("m", "r")),
                ("@new_key_missing@", self.missing()),
                (
                    "@key_changed@",
                    self.each(" OR ", |c| {
                        format!("NEW.\"{c}\" IS DISTINCT FROM OLD.\"{c}\"")
                    }),
                ),
                ("@older@", self.older().to_owned()),
                ("@spare@", self.spare().to_owned()),
            ],
        )
    }

    /// The grants on the table of tokens that a user of the table needs in PostgreSQL.
    pub fn postgres_grants(&self, user: &str) -> String {
        let schema = self.schema.as_deref().unwrap_or("public");
        let (table, user) = (&self.name, user.replace('"', "\"\""));
        format!("GRANT SELECT, INSERT, UPDATE ON \"{schema}\".\"{table}_fence\" TO \"{user}\";\n")
    }

    /// The SQL that fences it in SQLite 3.38 or newer, to be run in one transaction. It changes no
    /// data. It can be run once, because SQLite can't add a column only if it is missing: for a
    /// table that may be fenced already, from code, there is
    /// `palisade::fence::sqlite::fence` (feature `sqlite`).
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for a table in a database other than `main`: a trigger can't refer to
    /// it.
    pub fn sqlite(&self) -> Result<String> {
        let columns = self.sqlite_columns()?.map(|(_, add)| add).concat();
        Ok(format!("{columns}\n{}", self.sqlite_rest()))
    }

    /// The same as a script for the `sqlite3` shell, which can be run again.
    ///
    /// The statements for columns that are missing go through a file at `temporary`, which is
    /// removed.
    ///
    /// # Errors
    /// As [`Table::sqlite`]; [`ErrorKind::Config`] for a path that can't be quoted.
    pub fn sqlite_script(&self, temporary: &str) -> Result<String> {
        if temporary.contains(['\'', '"', '\\', '\n']) {
            let message = "the path of the temporary file can't be quoted for the sqlite3 shell";
            return Err(Error::new(ErrorKind::Config, "fence", message));
        }
        let table = &self.name;
        let missing = self.sqlite_columns()?.map(|(column, add)| {
            format!(
                "SELECT '{add}' WHERE NOT EXISTS\n  (SELECT 1 FROM pragma_table_info('{table}') \
                 WHERE name = '{column}')",
                add = add.trim_end()
            )
        });
        Ok(format!(
            ".bail on\n.headers off\n.mode list\nBEGIN IMMEDIATE;\n\n.once '{temporary}'\n{};\n.read '{temporary}'\n\
             .shell rm -f '{temporary}'\n\n{}\nCOMMIT;\n",
            missing.join(" UNION ALL\n"),
            self.sqlite_rest()
        ))
    }

    /// The columns of a fenced table, and the statements that add them.
    pub fn sqlite_columns(&self) -> Result<[(&'static str, String); 2]> {
        if self.schema.as_deref().is_some_and(|it| it != "main") {
            let message = "SQLite triggers can't use another database: name the table alone";
            return Err(Error::new(ErrorKind::Config, "fence", message));
        }
        let add = |column: &'static str| {
            let add = format!(
                "ALTER TABLE \"{}\" ADD COLUMN {column} INTEGER;\n",
                self.name
            );
            (column, add)
        };
        Ok([add("fence"), add("fence_token")])
    }

    /// Everything but the columns; it can be run again.
    pub fn sqlite_rest(&self) -> String {
        let named = |suffix: &str| format!("\"{}{suffix}\"", self.name);
        let is = |one: &str, other: &str| {
            self.each(" AND ", |c| format!("{one}\"{c}\" = {other}\"{c}\""))
        };
        let collated = |by: &str| self.each(", ", |c| format!("\"{c}\" COLLATE {by}"));
        let table = format!("\"{}\"", self.name);
        filled(
            include_str!("sqlite.sql"),
            &[
                ("@carry_over@", self.carry_over()),
                ("@table@", named("")),
                ("@marks@", named("_fence_marks")),
                ("@marks_binary@", named("_fence_binary")),
                ("@marks_nocase@", named("_fence_nocase")),
                ("@marks_rtrim@", named("_fence_rtrim")),
                ("@old_marks@", named("_fence")),
                ("@take@", named("_fence_take")),
                ("@on_update@", named("_fence_update")),
                ("@after_update@", named("_fence_updated")),
                ("@on_insert@", named("_fence_insert")),
                ("@after_insert@", named("_fence_inserted")),
                ("@on_delete@", named("_fence_delete")),
                ("@on_take@", named("_fence_taken")),
                ("@columns@", self.each(", ", |c| format!("\"{c}\""))),
                ("@columns_binary@", collated("BINARY")),
                ("@columns_nocase@", collated("NOCASE")),
                ("@columns_rtrim@", collated("RTRIM")),
                // An unknown name in quotes would be a text.
                ("@table_columns@", self.columns(&table)),
                ("@old_columns@", self.columns("OLD")),
                ("@new_columns@", self.columns("NEW")),
                // The collation is that of the left side: a column of the table.
                ("@is_new@", is("", "NEW.")),
                ("@is_new_r@", is("r.", "NEW.")),
                ("@new_is@", is("NEW.", "")),
                ("@new_is_m@", is("NEW.", "m.")),
                ("@old_is@", is("OLD.", "")),
                ("@old_is_m@", is("OLD.", "m.")),
                (
                    "@key_changed@",
                    self.each(" OR ", |c| format!("NEW.\"{c}\" IS NOT OLD.\"{c}\"")),
                ),
                ("@new_key_missing@", self.missing()),
                ("@older@", self.older().to_owned()),
                ("@spare@", self.spare().to_owned()),
            ],
        )
    }

    /// The statements that read the marks of an earlier version, which were keyed by text. What a
    /// text was before is not known: each possibility gets a mark.
    fn carry_over(&self) -> String {
        let readings: Vec<String> = match &self.key[..] {
            [_] => [
                "resource",
                "CAST(resource AS BLOB)",
                "CAST(resource AS NUMERIC)",
            ]
            .map(str::to_owned)
            .to_vec(),
            many => {
                let each = (0..many.len()).map(|at| format!("json_extract(resource, '$[{at}]')"));
                vec![each.collect::<Vec<_>>().join(", ")]
            }
        };
        let carry = readings.iter().map(|reading| {
            let exact = match reading.as_str() {
                "CAST(resource AS NUMERIC)" => {
                    "\n    AND CAST(CAST(resource AS NUMERIC) AS TEXT) = resource"
                }
                _ => "",
            };
            format!(
                "INSERT INTO @marks@ (@columns@, fence_token)\n  SELECT {reading}, fence_token FROM \
                 @old_marks@\n  WHERE fence_token IS NOT NULL{exact};\n"
            )
        });
        carry.collect()
    }

    /// The name of the table, without its schema.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The operator that compares a stale token with the highest one.
    fn older(&self) -> &'static str {
        match self.rule {
            Rule::NotOlder => "<",
            Rule::Strict => "<=",
        }
    }

    /// What a take leaves below its token, for the write.
    fn spare(&self) -> &'static str {
        match self.rule {
            Rule::NotOlder => "0",
            Rule::Strict => "1",
        }
    }

    fn missing(&self) -> String {
        self.each(" OR ", |column| format!("NEW.\"{column}\" IS NULL"))
    }

    fn each(&self, joint: &str, one: impl Fn(&str) -> String) -> String {
        let all: Vec<String> = self.key.iter().map(|column| one(column)).collect();
        all.join(joint)
    }

    fn columns(&self, row: &str) -> String {
        self.each(", ", |column| format!("{row}.\"{column}\""))
    }
}

/// Fills the blanks of a template.
fn filled(template: &str, blanks: &[(&str, String)]) -> String {
    let fill = |sql: String, (blank, text): &(&str, String)| sql.replace(blank, text);
    blanks.iter().fold(template.to_owned(), fill)
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
            // The operators of containment, not a blank.
            let blanks = sql.replace(" @> ", "").replace(" <@ ", "");
            assert!(!blanks.contains('@'), "{sql}");
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
        assert!(Table::new("a").unwrap().keyed_by(&["id", "fence"]).is_err());
        let odd = Table::new("a").unwrap().sqlite_script("/tmp/it's");
        assert_eq!(odd.unwrap_err().kind(), ErrorKind::Config);
    }
}
