//! A look at the server: settings that weaken locks kept in it, and what to do about them.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio_postgres::{Client, SimpleQueryMessage, SimpleQueryRow};

use super::fault;
use super::pooler::Between;
use super::schema::Schema;
use super::server::Server;
use crate::core::error::Result;
use crate::core::report::{Checkup, Finding, Severity};
use crate::engines::remote::{clock_off, plain_text};

/// `reset_val` is what a session has before we set anything in ours.
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

/// What is looked at.
pub(super) struct Subject<'a> {
    pub(super) server: &'a Server,
    pub(super) schema: &'a Schema,
    pub(super) between: Between,
    /// Whether lines are rows of our table, whose grants say themselves how they are committed.
    pub(super) table: bool,
    /// Whether pushes can be had.
    pub(super) pushes: bool,
    /// The oldest version on which everything works, as PostgreSQL numbers it, and what does not
    /// work before.
    pub(super) oldest: (u32, &'static str),
    pub(super) timeout: Duration,
}

/// Looks.
///
/// # Errors
/// As asking.
pub(super) async fn examine(client: &Client, subject: &Subject<'_>) -> Result<Checkup> {
    let before = unix_micros();
    let sql = LOOK.replace("@schema@", &subject.schema.quoted());
    let rows = client.simple_query(&sql).await;
    let after = unix_micros();
    let rows = rows.map_err(|error| fault::reading("check", &error))?;
    let row = rows.iter().find_map(|message| match message {
        SimpleQueryMessage::Row(row) => Some(row),
        _ => None,
    });
    let Some(row) = row else {
        return fault::unreadable("check");
    };
    let ahead = number(row, "micros") - (before + after) / 2;
    let mut findings = judged(row, subject);
    findings.extend(plain_text(
        &subject.server.hosts,
        subject.server.is_encrypted(),
    ));
    findings.extend(clock_off(ahead));
    Ok(Checkup {
        version: Some(text(row, "version").to_owned()),
        clock_ahead_us: Some(ahead),
        findings,
    })
}

fn text<'a>(row: &'a SimpleQueryRow, column: &str) -> &'a str {
    row.try_get(column).ok().flatten().unwrap_or_default()
}

fn number(row: &SimpleQueryRow, column: &str) -> i64 {
    text(row, column).parse().unwrap_or(0)
}

fn judged(row: &SimpleQueryRow, subject: &Subject<'_>) -> Vec<Finding> {
    let mut found = Vec::new();
    let mut find = |severity, code, message: &str, remedy: &str| {
        found.push(Finding {
            severity,
            code,
            message: message.to_owned(),
            remedy: remedy.to_owned(),
        });
    };
    let pooled = subject.between == Between::Pooler;
    if pooled && subject.pushes {
        find(
            Severity::Info,
            "pooler",
            "a transaction pooler stands in between",
            "nothing: whoever waits listens at listen_url",
        );
    } else if pooled {
        find(
            Severity::Warning,
            "pooler_without_push",
            "a transaction pooler stands in between, so that waiters can't be told and look ten times a second",
            "name the server itself with listen_url=postgres%3A%2F%2F…",
        );
    }
    if text(row, "standby") == "t" {
        find(
            Severity::Danger,
            "standby",
            "this server is a standby and takes no writes",
            "name the primary, or all servers separated by commas",
        );
    }
    if number(row, "asynchronous") > 0 {
        find(
            Severity::Danger,
            "async_standby",
            "a standby is asynchronous: a failover to it can lose the newest grants and send tokens back",
            "set synchronous_standby_names, or raise era= after every failover",
        );
    }
    if text(row, "fsync") == "off" || (text(row, "synchronous_commit") == "off" && !subject.table) {
        find(
            Severity::Danger,
            "not_durable",
            "the server answers before its disk has the change: a crash can lose grants and send tokens back",
            "set fsync and synchronous_commit to on",
        );
    }
    if text(row, "full_pages") == "off" {
        find(
            Severity::Warning,
            "full_page_writes",
            "full_page_writes is off: after a crash the tables can be damaged, unless the file system writes whole pages",
            "set full_page_writes to on",
        );
    }
    if subject.table && text(row, "kept") == "u" {
        find(
            Severity::Danger,
            "unlogged",
            "the table of the lines is unlogged: a crash empties it, and a standby never has it",
            "ALTER TABLE palisade.line SET LOGGED",
        );
    }
    timeouts(row, subject, &mut find);
    let (oldest, lost) = subject.oldest;
    if number(row, "number") < i64::from(oldest) {
        let message = format!("the server is older than {}: {lost}", oldest / 10_000);
        find(
            Severity::Warning,
            "old_version",
            &message,
            "upgrade the server",
        );
    }
    if text(row, "encoding") != "UTF8" {
        find(
            Severity::Warning,
            "encoding",
            "the database is not encoded in UTF8, and some names can't be stored",
            "use a database with ENCODING 'UTF8'",
        );
    }
    if text(row, "rights") != "t" {
        find(
            Severity::Warning,
            "rights",
            "this user lacks rights on palisade's tables",
            "run the grants that `palisade schema postgres` prints",
        );
    }
    let limit = match number(row, "role_limit") {
        limit if limit >= 0 => limit.min(number(row, "connections")),
        _ => number(row, "connections"),
    };
    let used = number(row, "used");
    if used * 5 > limit * 4 {
        let message = format!("{used} of {limit} connections are in use");
        find(
            Severity::Warning,
            "connections",
            &message,
            "raise max_connections, or put a pooler in front",
        );
    }
    found
}

/// Timeouts of the server end statements that wait.
fn timeouts(
    row: &SimpleQueryRow,
    subject: &Subject<'_>,
    find: &mut impl FnMut(Severity, &'static str, &str, &str),
) {
    let severity = match subject.between {
        Between::Pooler => Severity::Warning,
        Between::Nothing => Severity::Info,
    };
    let ours = i64::try_from(subject.timeout.as_millis()).unwrap_or(i64::MAX);
    for name in ["statement_timeout", "lock_timeout"] {
        let theirs = number(row, name);
        if theirs > 0 && theirs < ours {
            let message = format!("{name} is {theirs} ms, shorter than palisade's timeout");
            find(
                severity,
                "timeout",
                &message,
                "raise it for this user: ALTER ROLE … SET …",
            );
        }
    }
    if subject.table && text(row, "isolation") != "read committed" {
        find(
            Severity::Warning,
            "isolation",
            "transactions are not READ COMMITTED by default, so that statements are rolled back often",
            "ALTER ROLE … SET default_transaction_isolation = 'read committed'",
        );
    }
}

fn unix_micros() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| {
        i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
    })
}
