//! `Session`: one connection of the lease table's engine, and the statements it knows.
//!
//! Statements are prepared once per connection. Behind a transaction pooler they are sent
//! unnamed, with their types, which takes one round trip as well: a named one would be known to
//! another server connection only.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OnceCell;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Row, Statement};

use super::mail::Mail;
use super::pooler::Between;

/// What the engine asks of the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verb {
    Enter,
    Place,
    Renew,
    Amend,
    Leave,
    Evict,
    Resize,
    SurveyPrefix,
    SurveyLine,
    PrintPrefix,
    PrintLine,
    ShedEnter,
    ShedRenew,
    ShedLeave,
    ShedSurvey,
    ShedMark,
    ShedRemove,
}

const VERBS: [Verb; 17] = [
    Verb::Enter,
    Verb::Place,
    Verb::Renew,
    Verb::Amend,
    Verb::Leave,
    Verb::Evict,
    Verb::Resize,
    Verb::SurveyPrefix,
    Verb::SurveyLine,
    Verb::PrintPrefix,
    Verb::PrintLine,
    Verb::ShedEnter,
    Verb::ShedRenew,
    Verb::ShedLeave,
    Verb::ShedSurvey,
    Verb::ShedMark,
    Verb::ShedRemove,
];

/// The columns of a survey; `@which@` chooses the lines.
const SURVEY: &str = "SELECT l.name, replace(s.claim::text, '-', ''), s.weight, s.capacity, \
     s.sequence, (extract(epoch FROM s.expires - clock_timestamp()) * 1000000)::bigint, \
     s.evicted, s.owner, s.value \
     FROM @schema@.line l, unnest(l.seats) WITH ORDINALITY AS s \
     (claim, weight, capacity, sequence, expires, ttl, evicted, mailbox, owner, value, place) \
     WHERE l.namespace = $1 AND @which@ AND s.expires > clock_timestamp() \
     ORDER BY l.name COLLATE \"C\", s.place";

/// Changes with every row that is written.
const PRINT: &str = "SELECT count(*), coalesce(sum(hashtextextended(xmin::text || l.name, 0)\
     ::numeric), 0)::text FROM @schema@.line l WHERE l.namespace = $1 AND @which@";

/// Lines whose name is like `$2`; see [`like`].
const BY_PREFIX: &str = "l.name LIKE $2";
const BY_NAME: &str = "l.name = $2";

/// A pattern for the names that begin with `prefix`. With the pattern known when the statement is
/// planned, the server reads the part of an index that fits, whatever the database's collation.
pub(super) fn like(prefix: &str) -> String {
    let mut pattern = String::with_capacity(prefix.len() + 1);
    for c in prefix.chars() {
        if matches!(c, '%' | '_' | '\\') {
            pattern.push('\\');
        }
        pattern.push(c);
    }
    pattern.push('%');
    pattern
}

impl Verb {
    fn sql(self) -> String {
        let survey = |which| SURVEY.replace("@which@", which);
        let print = |which| PRINT.replace("@which@", which);
        // A statement of ours waits for no row longer than we do. Said in the statement and for
        // it alone: behind a pooler others use the same session.
        let call = |function: &str| {
            format!("SELECT set_config('lock_timeout', '@patience@', true), @schema@.{function}")
        };
        match self {
            Self::Enter => call("enter($1, $2, $3::text::uuid, $4, $5, $6, $7, $8, $9, $10)"),
            Self::Place => call("place($1, $2, $3::text::uuid)"),
            Self::Renew => call("renew($1, $2, $3::text[]::uuid[], $4, $5)"),
            Self::Amend => call("amend($1, $2, $3::text::uuid, $4, $5, $6, $7)"),
            Self::Leave => call("leave($1, $2, $3::text::uuid, $4, $5)"),
            Self::Evict => call("evict($1, $2, $3::text::uuid, $4)"),
            Self::Resize => call("resize($1, $2, $3, $4)"),
            Self::SurveyPrefix => survey(BY_PREFIX),
            Self::SurveyLine => survey(BY_NAME),
            Self::PrintPrefix => print(BY_PREFIX),
            Self::PrintLine => print(BY_NAME),
            Self::ShedEnter => call("shed_enter($1, $2, $3, $4, $5)"),
            Self::ShedRenew => call("shed_renew($1, $2, $3, $4)"),
            Self::ShedLeave => call("shed_leave($1, $2, $3, $4)"),
            Self::ShedSurvey => "SELECT name, locked_by, (extract(epoch FROM lock_until \
                - timezone('utc', clock_timestamp())) * 1000000)::bigint FROM shedlock \
                WHERE CASE WHEN $2 THEN name = $1 ELSE starts_with(name, $1) END \
                AND lock_until > timezone('utc', clock_timestamp()) ORDER BY name COLLATE \"C\""
                .into(),
            Self::ShedMark => "UPDATE shedlock SET locked_by = left('evicting ' || \
                substr(locked_by, 10), 255) WHERE name = $1 AND starts_with(locked_by, \
                'palisade ' || $2 || ' ') AND lock_until > timezone('utc', clock_timestamp()) \
                RETURNING 1"
                .into(),
            Self::ShedRemove => {
                "UPDATE shedlock SET lock_until = timezone('utc', clock_timestamp()) \
                WHERE name = $1 AND (locked_by = $2 OR split_part(locked_by, ' ', 2) = $2) \
                AND lock_until > timezone('utc', clock_timestamp()) RETURNING 1"
                    .into()
            }
        }
    }

    const fn types(self) -> &'static [Type] {
        const T: Type = Type::TEXT;
        const N: Type = Type::INT8;
        const B: Type = Type::BOOL;
        match self {
            Self::Enter => &[T, T, T, N, N, N, B, T, T, T],
            Self::Place => &[T, T, T],
            Self::Renew => &[
                T,
                Type::TEXT_ARRAY,
                Type::TEXT_ARRAY,
                Type::INT8_ARRAY,
                Type::INT4,
            ],
            Self::Amend => &[T, T, T, N, N, N, T],
            Self::Leave => &[T, T, T, N, B],
            Self::Evict => &[T, T, T, B],
            Self::Resize => &[T, T, N, N],
            Self::SurveyPrefix | Self::SurveyLine | Self::PrintPrefix | Self::PrintLine => &[T, T],
            Self::ShedEnter => &[T, T, N, T, N],
            Self::ShedRenew => &[
                Type::TEXT_ARRAY,
                Type::TEXT_ARRAY,
                Type::INT8_ARRAY,
                Type::INT4,
            ],
            Self::ShedLeave => &[T, T, N, B],
            Self::ShedSurvey => &[T, B],
            Self::ShedMark | Self::ShedRemove => &[T, T],
        }
    }
}

/// The SQL of all verbs, for one schema.
pub(super) struct Statements([String; VERBS.len()]);

impl Statements {
    /// The SQL for a schema; statements wait for a row for three quarters of `timeout`.
    pub(super) fn of(schema: &str, timeout: Duration) -> Self {
        let patience = (timeout.as_millis() * 3 / 4).clamp(10, 60_000).to_string();
        let fill = |sql: String| {
            sql.replace("@schema@", schema)
                .replace("@patience@", &patience)
        };
        Self(VERBS.map(|verb| fill(verb.sql())))
    }
}

/// One connection.
pub(super) struct Session {
    pub(super) client: Client,
    pub(super) mail: Arc<Mail>,
    statements: Arc<Statements>,
    prepared: [OnceCell<Statement>; VERBS.len()],
    listening: OnceCell<()>,
}

impl Session {
    pub(super) fn new(client: Client, mail: Arc<Mail>, statements: Arc<Statements>) -> Self {
        Self {
            client,
            mail,
            statements,
            prepared: Default::default(),
            listening: OnceCell::new(),
        }
    }

    /// Asks, in one round trip once the statement is known.
    pub(super) async fn ask(
        &self,
        verb: Verb,
        between: Between,
        parameters: &[&(dyn ToSql + Sync)],
    ) -> Result<Vec<Row>, tokio_postgres::Error> {
        let sql = &self.statements.0[verb as usize];
        let planned_anew = matches!(verb, Verb::SurveyPrefix | Verb::PrintPrefix);
        if between == Between::Pooler || planned_anew {
            let typed: Vec<_> = parameters
                .iter()
                .copied()
                .zip(verb.types().iter().cloned())
                .collect();
            return self.client.query_typed(sql, &typed).await;
        }
        let cell = &self.prepared[verb as usize];
        let statement = match cell.get() {
            Some(statement) => statement,
            None => {
                let prepare = || self.client.prepare_typed(sql, verb.types());
                cell.get_or_try_init(prepare).await?
            }
        };
        self.client.query(statement, parameters).await
    }

    /// Listens on `mailbox`, from the first call on.
    pub(super) async fn listen(&self, mailbox: &str) -> Result<(), tokio_postgres::Error> {
        let sql = format!("LISTEN {mailbox}");
        let listen = || async { self.client.batch_execute(&sql).await };
        self.listening.get_or_try_init(listen).await.map(drop)
    }
}
