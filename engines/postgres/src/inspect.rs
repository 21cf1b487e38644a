//! `survey`, `watch` and `check`: who is in the lines, whether they have changed, and which
//! settings of the server weaken its locks.

use std::sync::Arc;
use std::time::Duration;

use tokio_postgres::{Row, SimpleQueryMessage, SimpleQueryRow};

use super::client::Client;
use super::connect::Server;
use super::pooler::Between;
use super::schema::Schema;
use super::statements::{Verb, like};
use super::{error, from_micros, micros, to_ask};
use palisade_core::Result;
use palisade_core::engine::{Ask, BoxStream, unix_time};
use palisade_core::report::{Checkup, ClaimReport, Finding, LineReport, Owner, Scope, Severity};
use palisade_kit::poll_watch::poll_watch;
use palisade_kit::{clock_off, plain_text, timed};

/// How often a watch polls its row, or the rows with its prefix. NOTIFY would have to be sent for
/// every change, even when nobody watches.
const POLL: Duration = Duration::from_millis(200);

pub(super) async fn survey(client: &Client, scope: &Scope) -> Result<Vec<LineReport>> {
    let (verb, name) = match scope {
        Scope::Prefix(prefix) => (Verb::SurveyPrefix, like(prefix)),
        Scope::Line(name) => (Verb::SurveyLine, name.to_string()),
    };
    let rows = client
        .ask("survey", verb, &[&client.namespace, &name])
        .await?;
    lines(&rows).or_else(|_| error::unreadable("survey"))
}

/// The lines of a survey. The rows are ordered by name, then by place in the line.
fn lines(rows: &[Row]) -> Result<Vec<LineReport>, tokio_postgres::Error> {
    let mut lines: Vec<LineReport> = Vec::new();
    for row in rows {
        let name: &str = row.try_get(0)?;
        if lines.last().is_none_or(|line| line.name != name) {
            lines.push(LineReport::empty(name));
        }
        let claim = claim(row)?;
        if let Some(line) = lines.last_mut() {
            if let Ask::Part { capacity, .. } = claim.ask {
                line.capacity.get_or_insert(capacity);
            }
            match claim.sequence {
                Some(_) => line.holders.push(claim),
                None => line.waiters.push(claim),
            }
        }
    }
    Ok(lines)
}

fn claim(row: &Row) -> Result<ClaimReport, tokio_postgres::Error> {
    let sequence: i64 = row.try_get(4)?;
    let owner: Option<&str> = row.try_get(7)?;
    Ok({
        let mut claim = ClaimReport::new(
            row.try_get::<_, String>(1)?,
            to_ask(row.try_get(2)?, row.try_get(3)?),
        );
        claim.owner = owner.and_then(|owner| Owner::from_json(owner.as_bytes()));
        claim.value = row.try_get(8)?;
        claim.sequence = u64::try_from(sequence)
            .ok()
            .filter(|sequence| *sequence > 0);
        claim.expires_in = Some(from_micros(row.try_get(5)?));
        claim.evicted = row.try_get(6)?;
        claim
    })
}

pub(super) fn watch(client: &Arc<Client>, scope: &Scope) -> BoxStream<Result<()>> {
    let (client, scope) = (Arc::clone(client), scope.clone());
    poll_watch(POLL, move || {
        let (client, scope) = (Arc::clone(&client), scope.clone());
        async move { fingerprint(&client, &scope).await }
    })
}

/// A value that changes with every change in the scope.
async fn fingerprint(client: &Client, scope: &Scope) -> Result<(i64, String)> {
    let (verb, name) = match scope {
        Scope::Prefix(prefix) => (Verb::PrintPrefix, like(prefix)),
        Scope::Line(name) => (Verb::PrintLine, name.to_string()),
    };
    let rows = client
        .ask("watch", verb, &[&client.namespace, &name])
        .await?;
    let print = rows.first().map(|row| (row.try_get(0), row.try_get(1)));
    match print {
        Some((Ok(count), Ok(sum))) => Ok((count, sum)),
        _ => error::unreadable("watch"),
    }
}

pub(super) async fn check(client: &Client) -> Result<Checkup> {
    let session = client.session().await?;
    let subject = Subject {
        server: &client.server,
        schema: &client.schema,
        between: client.between(),
        table: true,
        pushes: client.can_listen(),
        oldest: (120_000, "the functions are not tested there"),
        timeout: client.timeout,
    };
    examine(session.connection.client(), &subject).await
}

/// `reset_val` is the setting before this session changed it.
const LOOK: &str = "SELECT current_setting('server_version') AS version, \
    current_setting('server_version_num') AS number, \
    (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS micros, \
    (SELECT reset_val FROM pg_settings WHERE name = 'statement_timeout') AS statement_timeout, \
    (SELECT reset_val FROM pg_settings WHERE name = 'lock_timeout') AS lock_timeout, \
    (SELECT reset_val FROM pg_settings WHERE name = 'default_transaction_isolation') AS isolation, \
    (SELECT reset_val FROM pg_settings WHERE name = 'synchronous_commit') AS synchronous_commit, \
    current_setting('fsync') AS fsync, current_setting('full_page_writes') AS full_pages, \
    (SELECT relpersistence FROM pg_class WHERE oid = to_regclass('@schema@.line')) AS kept, \
    current_setting('server_encoding') AS encoding, \
    current_setting('max_connections')::int \
      - current_setting('superuser_reserved_connections')::int AS connections, \
    (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend') AS used, \
    (SELECT rolconnlimit FROM pg_roles WHERE rolname = current_user) AS role_limit, \
    pg_is_in_recovery() AS standby, \
    (SELECT count(*) FROM pg_stat_replication \
      WHERE coalesce(sync_state, 'async') IN ('async', 'potential')) AS asynchronous, \
    has_schema_privilege(to_regnamespace('@schema@'), 'USAGE') \
      AND has_table_privilege('@schema@.line', 'SELECT') \
      AND has_table_privilege('@schema@.line', 'INSERT') \
      AND has_table_privilege('@schema@.line', 'UPDATE') \
      AND has_table_privilege('@schema@.departed', 'DELETE') \
      AND has_sequence_privilege('@schema@.token', 'USAGE') AS rights";

/// What `examine` looks at.
pub(super) struct Subject<'a> {
    pub(super) server: &'a Server,
    pub(super) schema: &'a Schema,
    pub(super) between: Between,
    /// Whether the lines are rows of our table, whose functions set `synchronous_commit`
    /// themselves.
    pub(super) table: bool,
    /// Whether NOTIFY is available.
    pub(super) pushes: bool,
    /// The oldest version on which everything works, as `server_version_num`, and what fails on
    /// older ones.
    pub(super) oldest: (u32, &'static str),
    pub(super) timeout: Duration,
}

/// Checks the server that `client` is connected to.
pub(super) async fn examine(
    client: &tokio_postgres::Client,
    subject: &Subject<'_>,
) -> Result<Checkup> {
    let sql = LOOK.replace("@schema@", &subject.schema.quoted());
    let before = micros(unix_time());
    let rows = timed("check", subject.timeout, client.simple_query(&sql)).await?;
    let after = micros(unix_time());
    let rows = rows.map_err(|error| error::failed("check", &error))?;
    let row = rows.iter().find_map(|message| match message {
        SimpleQueryMessage::Row(row) => Some(row),
        _ => None,
    });
    let Some(row) = row else {
        return error::unreadable("check");
    };
    let ahead = number(row, "micros") - (before + after) / 2;
    let mut findings = judge(row, subject);
    let encrypted = subject.server.is_encrypted();
    findings.extend(plain_text(&subject.server.hosts, encrypted));
    findings.extend(clock_off(ahead));
    Ok({
        let mut checkup = Checkup::default();
        checkup.version = Some(text(row, "version").to_owned());
        checkup.clock_ahead_us = Some(ahead);
        checkup.findings = findings;
        checkup
    })
}

fn text<'a>(row: &'a SimpleQueryRow, column: &str) -> &'a str {
    row.try_get(column).ok().flatten().unwrap_or_default()
}

fn number(row: &SimpleQueryRow, column: &str) -> i64 {
    text(row, column).parse().unwrap_or(0)
}

fn judge(row: &SimpleQueryRow, subject: &Subject<'_>) -> Vec<Finding> {
    use Severity::{Danger, Info, Warning};
    let mut found = Vec::new();
    let mut find = |severity, code, message: &str, remedy: &str| {
        found.push(Finding::new(severity, code, message, remedy));
    };
    let says = |column, value| text(row, column) == value;
    let pooled = subject.between == Between::Pooler;
    if pooled && subject.pushes {
        let message = "there is a transaction pooler in front of the server";
        let remedy = "nothing: waiters listen at listen_url";
        find(Info, "pooler", message, remedy);
    } else if pooled {
        let message = "there is a transaction pooler in front of the server, so waiters can't be notified and poll ten times a second";
        let remedy = "name the server itself with listen_url=postgres%3A%2F%2F…";
        find(Warning, "pooler_without_push", message, remedy);
    }
    if says("standby", "t") {
        let message = "this server is a standby and takes no writes";
        let remedy = "name the primary, or all servers separated by commas";
        find(Danger, "standby", message, remedy);
    }
    if number(row, "asynchronous") > 0 {
        let message = "a standby is asynchronous: a failover to it can lose the newest grants and send tokens back";
        let remedy = "set synchronous_standby_names, or raise era= after every failover";
        find(Danger, "async_standby", message, remedy);
    }
    if says("fsync", "off") || (says("synchronous_commit", "off") && !subject.table) {
        let message = "the server answers before its disk has the change: a crash can lose grants and send tokens back";
        let remedy = "set fsync and synchronous_commit to on";
        find(Danger, "not_durable", message, remedy);
    }
    if says("full_pages", "off") {
        let message = "full_page_writes is off: after a crash the tables can be damaged, unless the file system writes whole pages";
        find(
            Warning,
            "full_page_writes",
            message,
            "set full_page_writes to on",
        );
    }
    if subject.table && says("kept", "u") {
        let message =
            "the table of the lines is unlogged: a crash empties it, and a standby never has it";
        let remedy = "ALTER TABLE palisade.line SET LOGGED";
        find(Danger, "unlogged", message, remedy);
    }
    // The server's timeouts abort statements that wait. Behind a pooler the session can't override
    // them.
    let severity = if pooled { Warning } else { Info };
    let ours = i64::try_from(subject.timeout.as_millis()).unwrap_or(i64::MAX);
    for name in ["statement_timeout", "lock_timeout"] {
        let theirs = number(row, name);
        if theirs > 0 && theirs < ours {
            let message = format!("{name} is {theirs} ms, shorter than palisade's timeout");
            let remedy = "raise it for this user: ALTER ROLE … SET …";
            find(severity, "timeout", &message, remedy);
        }
    }
    if subject.table && !says("isolation", "read committed") {
        let message = "transactions are not READ COMMITTED by default, so that statements are rolled back often";
        let remedy = "ALTER ROLE … SET default_transaction_isolation = 'read committed'";
        find(Warning, "isolation", message, remedy);
    }
    let (oldest, lost) = subject.oldest;
    if number(row, "number") < i64::from(oldest) {
        let message = format!("the server is older than {}: {lost}", oldest / 10_000);
        find(Warning, "old_version", &message, "upgrade the server");
    }
    if !says("encoding", "UTF8") {
        let message = "the database is not encoded in UTF8, and some names can't be stored";
        find(
            Warning,
            "encoding",
            message,
            "use a database with ENCODING 'UTF8'",
        );
    }
    if !says("rights", "t") {
        let message = "this user lacks rights on palisade's tables";
        let command = subject.schema.command(true);
        let remedy = format!("let an owner run what {command} prints, with this user's name");
        find(Warning, "rights", message, &remedy);
    }
    let connections = number(row, "connections");
    let limit = match number(row, "role_limit") {
        limit if limit >= 0 => limit.min(connections),
        _ => connections,
    };
    let used = number(row, "used");
    if used * 5 > limit * 4 {
        let message = format!("{used} of {limit} connections are in use");
        let remedy = "raise max_connections, or put a pooler in front";
        find(Warning, "connections", &message, remedy);
    }
    found
}
