//! The statements of a session lock.
//!
//! Invariant: a token is taken after the lock, in the same statement. Every statement names the
//! process that it is for and does nothing in another one, so that no lock, setting or record is
//! left in a session that something in between assigned to us by mistake. Frequent statements do
//! nothing extra, because one more setting or parameter costs more than the lock itself.

use tokio_postgres::types::Type;

/// The requests on a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verb {
    Try,
    /// Waits for the lock. It also sets the idle timeout, and returns the timeline, because there
    /// may have been a failover during the wait.
    Block,
    Unlock,
    Downgrade,
    Upgrade,
    Beat,
    Record,
    Rest,
    Waits,
}

/// A statement: its verb, whether the lock is shared or exclusive, and whether it also changes a
/// setting of the session (the idle timeout when taking a lock, the name when releasing it).
#[derive(Debug, Clone, Copy)]
pub(super) struct Statement {
    pub(super) verb: Verb,
    pub(super) shared: bool,
    pub(super) setting: bool,
}

/// The number of statements: each verb with every combination of the two flags.
pub(super) const STATEMENTS: usize = (Verb::Waits as usize + 1) * 4;

/// The server's timeline; empty on a standby.
pub(super) const TIMELINE: &str = "CASE WHEN pg_is_in_recovery() THEN '' \
     ELSE left(pg_walfile_name(pg_current_wal_lsn()), 8) END";

/// Whether this is the process that the statement is for.
const HERE: &str = "(pg_backend_pid() = @pid@)";

/// The token that any other process returns; real ones are positive.
pub(super) const AWAY: i64 = -1;

/// The name of a session without a recorded claim.
pub(super) const NAMELESS: &str = "palisade";

impl From<Verb> for Statement {
    fn from(verb: Verb) -> Self {
        Self {
            verb,
            shared: false,
            setting: false,
        }
    }
}

impl Statement {
    pub(super) fn index(self) -> usize {
        self.verb as usize * 4 + usize::from(self.shared) * 2 + usize::from(self.setting)
    }

    /// `idle` is the setting that ends idle sessions, or one without effect where there is none.
    ///
    /// `CASE` evaluates its conditions in order and stops at the first match, so that nothing after
    /// it is executed. In another process the result is null; for a token, which may be null, it is
    /// [`AWAY`].
    fn sql(self, idle: &str) -> String {
        let mode = if self.shared { "_shared" } else { "" };
        let here = |then: &str| format!("CASE WHEN {HERE} THEN {then} END");
        let set = |name: &str, value: &str| here(&format!("set_config('{name}', {value}, false)"));
        let idling = format!(", {}", set(idle, "$2"));
        let taking = |lock: &str| {
            format!(
                "SELECT CASE WHEN NOT {HERE} THEN {AWAY} \
                 WHEN {lock} THEN nextval('@schema@.token') END"
            )
        };
        match self.verb {
            Verb::Try => {
                let taken = taking(&format!("pg_try_advisory_lock{mode}(@key@)"));
                if self.setting { taken + &idling } else { taken }
            }
            Verb::Block => {
                let taken = taking(&format!("pg_advisory_lock{mode}(@key@)::text = ''"));
                format!("{taken}{idling}, {TIMELINE}")
            }
            Verb::Unlock => {
                let unlocked = here(&format!("pg_advisory_unlock{mode}(@key@)"));
                let nameless = set("application_name", &format!("'{NAMELESS}'"));
                let nameless = format!(", {nameless}");
                let rest = if self.setting {
                    nameless
                } else {
                    String::new()
                };
                format!("SELECT {unlocked}{rest}")
            }
            // The server grants a lock to its holder again without queueing behind waiters.
            Verb::Downgrade => format!(
                "SELECT CASE WHEN NOT {HERE} THEN NULL \
                 WHEN pg_advisory_lock_shared(@key@)::text = '' \
                 THEN pg_advisory_unlock(@key@) END"
            ),
            Verb::Upgrade => format!(
                "SELECT CASE WHEN NOT {HERE} THEN NULL WHEN pg_try_advisory_lock(@key@) \
                 THEN pg_advisory_unlock_shared(@key@) ELSE false END"
            ),
            Verb::Beat => format!("SELECT {}", here(TIMELINE)),
            // No decision depends on it, so nobody waits until it is on disk.
            Verb::Record => format!(
                "INSERT INTO @schema@.session (pid, claim, namespace, name, ttl, owner, value) \
                 SELECT pg_backend_pid(), $1, $2, $3, $4, $5, $6 WHERE {HERE} \
                 ON CONFLICT (pid) DO UPDATE SET \
                 claim = $1, namespace = $2, name = $3, ttl = $4, owner = $5, value = $6 \
                 RETURNING set_config('application_name', $7, false), \
                 set_config('synchronous_commit', 'off', true)"
            ),
            Verb::Rest => format!("SELECT {}", set(idle, "'0'")),
            Verb::Waits => "SELECT pid FROM pg_locks \
                WHERE pid = ANY ($1) AND locktype = 'advisory' AND NOT granted"
                .into(),
        }
    }

    fn types(self, key: Type) -> Vec<Type> {
        const T: Type = Type::TEXT;
        match self.verb {
            Verb::Block => vec![key, T],
            Verb::Try if self.setting => vec![key, T],
            Verb::Try | Verb::Unlock | Verb::Downgrade | Verb::Upgrade => vec![key],
            Verb::Beat | Verb::Rest => vec![],
            Verb::Record => vec![T, T, T, Type::INT8, T, T, T],
            Verb::Waits => vec![Type::INT4_ARRAY],
        }
    }
}

/// The values for the blanks in the statements of one engine.
pub(super) struct Blanks {
    pub(super) schema: String,
    /// The expression that turns a key into a bigint, and the key's type.
    pub(super) key: (&'static str, Type),
}

impl Blanks {
    /// The text of a statement for the process `pid`, and the types of its parameters.
    pub(super) fn fill(&self, statement: Statement, idle: &str, pid: i32) -> (String, Vec<Type>) {
        let (key, kind) = &self.key;
        let sql = statement.sql(idle).replace("@pid@", &pid.to_string());
        let sql = sql.replace("@schema@", &self.schema).replace("@key@", key);
        (sql, statement.types(kind.clone()))
    }
}
