//! The statements of the lease table, and a connection that prepares them.
//!
//! Statements are prepared once per connection. Behind a transaction pooler they are sent unnamed
//! with their types, which also takes one round trip; a named one would exist on one server
//! connection only.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OnceCell;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Error, Row, Statement};

use super::connection::Connection;
use super::pooler::Between;

/// The parameters of a statement.
pub(super) type Parameters<'a> = &'a [&'a (dyn ToSql + Sync)];

/// The statements of one connection, prepared on first use.
pub(super) struct Prepared<const N: usize>([OnceCell<Statement>; N]);

impl<const N: usize> Default for Prepared<N> {
    fn default() -> Self {
        Self(std::array::from_fn(|_| OnceCell::new()))
    }
}

impl<const N: usize> Prepared<N> {
    /// Statement `at`, once it is prepared.
    pub(super) fn get(&self, at: usize) -> Option<&Statement> {
        self.0[at].get()
    }

    /// Prepares statement `at`.
    pub(super) async fn prepare(
        &self,
        client: &Client,
        at: usize,
        sql: &str,
        types: &[Type],
    ) -> Result<&Statement, Error> {
        let prepare = || client.prepare_typed(sql, types);
        self.0[at].get_or_try_init(prepare).await
    }
}

/// The requests of the engine.
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
    FenceWrite,
    FenceAccept,
    FenceTake,
    FenceRead,
    FenceForget,
    QueuePush,
    QueueClaim,
    QueueRenew,
    QueueDone,
    QueueReturn,
    QueueLeave,
    QueueExtend,
    QueueSleep,
    QueueSurveyPrefix,
    QueueSurveyLine,
    QueueList,
    QueueRead,
    QueueRetry,
    QueueDiscard,
}

const VERBS: usize = Verb::QueueDiscard as usize + 1;

/// The columns of a survey; `@which@` selects the lines.
const SURVEY: &str = "SELECT l.name, replace(s.claim::text, '-', ''), s.weight, s.capacity, \
     s.sequence, (extract(epoch FROM s.expires - clock_timestamp()) * 1000000)::bigint, \
     s.evicted, s.owner, s.value \
     FROM @schema@.line l, unnest(l.seats) WITH ORDINALITY AS s \
     (claim, weight, capacity, sequence, expires, ttl, evicted, mailbox, owner, value, place) \
     WHERE l.namespace = $1 AND @which@ AND s.expires > clock_timestamp() \
     ORDER BY l.name COLLATE \"C\", s.place";

/// A fingerprint that changes with every row that is written.
const PRINT: &str = "SELECT count(*), coalesce(sum(hashtextextended(xmin::text || l.name, 0)\
     ::numeric), 0)::text FROM @schema@.line l WHERE l.namespace = $1 AND @which@";

/// Lines whose name matches the pattern `$2`; see [`like`].
const BY_PREFIX: &str = "l.name LIKE $2";
const BY_NAME: &str = "l.name = $2";

const SHED_SURVEY: &str = "SELECT name, locked_by, (extract(epoch FROM lock_until \
     - timezone('utc', clock_timestamp())) * 1000000)::bigint FROM shedlock \
     WHERE CASE WHEN $2 THEN name = $1 ELSE starts_with(name, $1) END \
     AND lock_until > timezone('utc', clock_timestamp()) ORDER BY name COLLATE \"C\"";
const SHED_MARK: &str = "UPDATE shedlock SET locked_by = left('evicting ' || \
     substr(locked_by, 10), 255) WHERE name = $1 AND starts_with(locked_by, \
     'palisade ' || $2 || ' ') AND lock_until > timezone('utc', clock_timestamp()) RETURNING 1";
const SHED_REMOVE: &str = "UPDATE shedlock SET lock_until = timezone('utc', clock_timestamp()) \
     WHERE name = $1 AND (locked_by = $2 OR split_part(locked_by, ' ', 2) = $2) \
     AND lock_until > timezone('utc', clock_timestamp()) RETURNING 1";

/// Writes to a fenced row, or inserts it; the triggers check the token. With `$5` each token may
/// write only once. `durable()` applies to the whole statement.
const FENCE_WRITE: &str = "INSERT INTO @schema@.fenced AS f (namespace, resource, data, fence) \
     SELECT $1, $2, $3, $4 FROM @schema@.durable() ON CONFLICT (namespace, resource) \
     DO UPDATE SET data = excluded.data, fence = $4 \
     WHERE NOT $5 OR coalesce(f.fence_token, 0) < $4 RETURNING 1";
const FENCE_ACCEPT: &str = "INSERT INTO @schema@.fenced AS f (namespace, resource, fence) \
     SELECT $1, $2, $3 FROM @schema@.durable() ON CONFLICT (namespace, resource) \
     DO UPDATE SET fence = $3 WHERE NOT $4 OR coalesce(f.fence_token, 0) < $3 RETURNING 1";
/// As an accept, and answers with the data as it is under the raised mark. `$4` is the token, of
/// which `$3` is the mark; a strict fence refuses it once it has written.
const FENCE_TAKE: &str = "INSERT INTO @schema@.fenced AS f (namespace, resource, fence) \
     SELECT $1, $2, $3 FROM @schema@.durable() ON CONFLICT (namespace, resource) \
     DO UPDATE SET fence = $3 WHERE NOT $5 OR coalesce(f.fence_token, 0) < $4 RETURNING data";
const FENCE_READ: &str = "SELECT fence_token, CASE WHEN $3 THEN data END FROM @schema@.fenced \
     WHERE namespace = $1 AND resource = $2";

/// The state of a message, as in [`MessageState::code`](palisade_core::queue::MessageState::code).
const MESSAGE_STATE: &str = "CASE WHEN m.dead THEN 'dead' WHEN m.behind THEN 'blocked' \
     WHEN m.due <= clock_timestamp() THEN 'ready' WHEN m.token > 0 THEN 'claimed' \
     ELSE 'delayed' END";

/// How many messages of each queue are in each state; `@which@` selects the queues.
const QUEUE_SURVEY: &str = "SELECT l.name, @state@ AS state, count(m.number), \
     (extract(epoch FROM clock_timestamp() - min(m.after)) * 1000000)::bigint FROM @schema@.queue l LEFT JOIN @schema@.message m ON m.queue = l.id \
     WHERE l.namespace = $1 AND @which@ GROUP BY l.name, state ORDER BY l.name COLLATE \"C\"";

/// The first messages of a queue, or one message; `@which@` selects them.
const QUEUE_LIST: &str = "SELECT m.number, m.id, m.key, @state@, m.attempts, \
     (extract(epoch FROM m.pushed) * 1000)::bigint, \
     CASE WHEN m.due < 'infinity' AND m.due > clock_timestamp() \
     THEN (extract(epoch FROM m.due - clock_timestamp()) * 1000000)::bigint END, \
     m.token, m.owner, m.why, length(m.body)::bigint, CASE WHEN @body@ THEN m.body END \
     FROM @schema@.message m JOIN @schema@.queue q ON q.id = m.queue \
     WHERE q.namespace = $1 AND q.name = $2 AND @which@ ORDER BY m.number LIMIT @limit@";

/// A LIKE pattern for names that begin with `prefix`. If the pattern is known when the statement is
/// planned, the server scans only the matching part of the index, whatever the database's
/// collation.
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
    /// The SQL, with blanks for the schema and the settings, and the types of its parameters.
    fn parts(self) -> (String, &'static [Type]) {
        const T: Type = Type::TEXT;
        const TS: Type = Type::TEXT_ARRAY;
        const N: Type = Type::INT8;
        const NS: Type = Type::INT8_ARRAY;
        const I: Type = Type::INT4;
        const B: Type = Type::BOOL;
        let survey = |which| SURVEY.replace("@which@", which);
        let print = |which| PRINT.replace("@which@", which);
        // A statement waits for a row no longer than the client does. `lock_timeout` is set in the
        // statement and for it alone, because behind a pooler others share the session.
        let call = |function: &str| format!("SELECT @settings@, @schema@.{function}");
        // The same for a function that returns rows.
        let rows = |function: &str| {
            format!(
                "WITH settings AS MATERIALIZED (SELECT @settings@) \
                 SELECT f.* FROM settings, LATERAL @schema@.{function} AS f"
            )
        };
        let queues = |which| {
            let survey = QUEUE_SURVEY.replace("@which@", which);
            survey.replace("@state@", MESSAGE_STATE)
        };
        let messages = |which, body, limit| {
            let list = QUEUE_LIST.replace("@which@", which).replace("@body@", body);
            list.replace("@limit@", limit)
                .replace("@state@", MESSAGE_STATE)
        };
        match self {
            Self::Enter => (
                call("enter($1, $2, $3::text::uuid, $4, $5, $6, $7, $8, $9, $10)"),
                &[T, T, T, N, N, N, B, T, T, T],
            ),
            Self::Place => (call("place($1, $2, $3::text::uuid)"), &[T, T, T]),
            Self::Renew => {
                let renew = call("renew($1, $2, $3::text[]::uuid[], $4, $5)");
                (renew, &[T, TS, TS, NS, I])
            }
            Self::Amend => {
                let amend = call("amend($1, $2, $3::text::uuid, $4, $5, $6, $7)");
                (amend, &[T, T, T, N, N, N, T])
            }
            Self::Leave => {
                let leave = call("leave($1, $2, $3::text::uuid, $4, $5)");
                (leave, &[T, T, T, N, B])
            }
            Self::Evict => (call("evict($1, $2, $3::text::uuid, $4)"), &[T, T, T, B]),
            Self::Resize => (call("resize($1, $2, $3, $4)"), &[T, T, N, N]),
            Self::SurveyPrefix => (survey(BY_PREFIX), &[T, T]),
            Self::SurveyLine => (survey(BY_NAME), &[T, T]),
            Self::PrintPrefix => (print(BY_PREFIX), &[T, T]),
            Self::PrintLine => (print(BY_NAME), &[T, T]),
            Self::ShedEnter => (call("shed_enter($1, $2, $3, $4, $5)"), &[T, T, N, T, N]),
            Self::ShedRenew => (call("shed_renew($1, $2, $3, $4)"), &[TS, TS, NS, I]),
            Self::ShedLeave => (call("shed_leave($1, $2, $3, $4)"), &[T, T, N, B]),
            Self::ShedSurvey => (SHED_SURVEY.into(), &[T, B]),
            Self::ShedMark => (SHED_MARK.into(), &[T, T]),
            Self::ShedRemove => (SHED_REMOVE.into(), &[T, T]),
            Self::FenceWrite => (FENCE_WRITE.into(), &[T, T, Type::BYTEA, N, B]),
            Self::FenceAccept => (FENCE_ACCEPT.into(), &[T, T, N, B]),
            Self::FenceTake => (FENCE_TAKE.into(), &[T, T, N, N, B]),
            Self::FenceRead => (FENCE_READ.into(), &[T, T, B]),
            Self::FenceForget => ("SELECT @schema@.fence_forget($1, $2)".into(), &[T, T]),
            Self::QueuePush => (
                rows("queue_push($1, $2, $3, $4, $5, $6, $7)"),
                &[T, T, TS, TS, NS, Type::BYTEA_ARRAY, N],
            ),
            Self::QueueClaim => (
                rows("queue_claim($1, $2, $3::text::uuid, $4, $5, $6, $7, $8)"),
                &[T, T, T, B, I, N, I, T],
            ),
            Self::QueueRenew => (call("queue_renew($1, $2)"), &[NS, NS]),
            Self::QueueDone => (call("queue_done($1, $2, $3)"), &[NS, NS, B]),
            Self::QueueReturn => (call("queue_return($1, $2, $3, $4, $5)"), &[NS, NS, N, B, T]),
            Self::QueueLeave => (call("queue_leave($1, $2, $3::text::uuid)"), &[T, T, T]),
            Self::QueueExtend => (call("queue_extend($1, $2, $3)"), &[N, N, N]),
            Self::QueueSleep => (
                call("queue_sleep($1, $2, $3::text::uuid, $4::text::uuid, $5)"),
                &[T, T, T, T, T],
            ),
            Self::QueueSurveyPrefix => (queues(BY_PREFIX), &[T, T]),
            Self::QueueSurveyLine => (queues(BY_NAME), &[T, T]),
            Self::QueueList => (messages("(m.dead OR NOT $3)", "false", "$4"), &[T, T, B, N]),
            Self::QueueRead => (
                messages(
                    "m.number = (SELECT @schema@.queue_pick(q.id, 'id', $3, $4) LIMIT 1)",
                    "true",
                    "1",
                ),
                &[T, T, N, T],
            ),
            Self::QueueRetry => (call("queue_retry($1, $2, $3, $4, $5)"), &[T, T, T, N, T]),
            Self::QueueDiscard => (
                call("queue_discard($1, $2, $3, $4, $5, $6)"),
                &[T, T, T, N, T, B],
            ),
        }
    }
}

/// How the server is to plan our statements. It keeps plans, also those that it made while a table
/// was small: then it would go on to read all of it. So each statement goes by an index, and one
/// without costs more by the planner's reckoning than any worth being compiled, so that none is.
/// Functions of schemas since revision 7 set the same where a session has not.
const PLANS: [&str; 2] = ["enable_seqscan", "jit"];

/// Sets [`PLANS`] in a session that is ours alone.
pub(super) fn plan_by_index() -> String {
    PLANS.map(|name| format!("SET {name} = off;")).concat()
}

/// The values for the blanks in the statements of one engine.
pub(super) struct Blanks {
    schema: String,
    patience: String,
}

impl Blanks {
    /// A statement waits for a row for up to three quarters of `timeout`.
    pub(super) fn new(schema: String, timeout: Duration) -> Self {
        let patience = (timeout.as_millis() * 3 / 4).clamp(10, 60_000).to_string();
        Self { schema, patience }
    }

    fn fill(&self, verb: Verb, between: Between) -> (String, &'static [Type]) {
        let (sql, types) = verb.parts();
        let set = |name, value| format!("set_config('{name}', '{value}', true)");
        let mut settings = vec![set("lock_timeout", self.patience.as_str())];
        if between == Between::Pooler {
            settings.extend(PLANS.map(|name| set(name, "off")));
        }
        let sql = sql.replace("@schema@", &self.schema);
        (sql.replace("@settings@", &settings.join(", ")), types)
    }
}

/// One connection and its prepared statements.
pub(super) struct Session {
    pub(super) connection: Connection,
    blanks: Arc<Blanks>,
    prepared: Prepared<VERBS>,
    listening: OnceCell<()>,
}

impl Session {
    pub(super) fn new(connection: Connection, blanks: Arc<Blanks>) -> Self {
        Self {
            connection,
            blanks,
            prepared: Prepared::default(),
            listening: OnceCell::new(),
        }
    }

    pub(super) fn client(&self) -> &Client {
        &self.connection.client
    }

    /// Makes the settings of a session that is ours alone.
    pub(super) async fn set_up(&self, between: Between) -> Result<(), Error> {
        match between {
            Between::Nothing => self.client().batch_execute(&plan_by_index()).await,
            Between::Pooler => Ok(()),
        }
    }

    /// Runs a verb, in one round trip once it is prepared.
    pub(super) async fn ask(
        &self,
        verb: Verb,
        between: Between,
        parameters: Parameters<'_>,
    ) -> Result<Vec<Row>, Error> {
        let planned_anew = matches!(
            verb,
            Verb::SurveyPrefix | Verb::PrintPrefix | Verb::QueueSurveyPrefix
        );
        if between == Between::Pooler || planned_anew {
            let (sql, types) = self.blanks.fill(verb, between);
            let typed: Vec<_> = parameters
                .iter()
                .copied()
                .zip(types.iter().cloned())
                .collect();
            return self.client().query_typed(&sql, &typed).await;
        }
        let (client, at) = (self.client(), verb as usize);
        let statement = match self.prepared.get(at) {
            Some(statement) => statement,
            None => {
                let (sql, types) = self.blanks.fill(verb, between);
                self.prepared.prepare(client, at, &sql, types).await?
            }
        };
        client.query(statement, parameters).await
    }

    /// Runs LISTEN on `channel`, once.
    pub(super) async fn listen(&self, channel: &str) -> Result<(), Error> {
        let sql = format!("LISTEN {channel}");
        let listen = || self.client().batch_execute(&sql);
        self.listening.get_or_try_init(listen).await.map(drop)
    }
}
