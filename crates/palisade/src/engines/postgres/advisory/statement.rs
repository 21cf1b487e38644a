//! The statements of a session lock.
//!
//! Invariant: a token is taken after the lock, in the same statement. Every statement names the
//! process that it is for, and does nothing in another one: if something in between gave us
//! another session, no lock, setting or record of ours would be left there. What is asked again
//! and again asks for nothing else: a setting, or one more parameter, costs more than the lock.

use tokio_postgres::types::Type;

/// What is asked on a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verb {
    Try,
    TryShared,
    /// The same, and sets how long the session may be idle.
    TrySetting,
    TrySharedSetting,
    Block,
    BlockShared,
    Unlock,
    UnlockShared,
    /// The same, and takes the session's name away.
    UnlockSetting,
    UnlockSharedSetting,
    Downgrade,
    Upgrade,
    Beat,
    Record,
    Rest,
    Waits,
}

/// How many there are.
pub(super) const VERBS: usize = Verb::Waits as usize + 1;

/// Where the server's history is; empty on a standby.
pub(super) const TIMELINE: &str = "CASE WHEN pg_is_in_recovery() THEN '' \
     ELSE left(pg_walfile_name(pg_current_wal_lsn()), 8) END";

/// Whether this is the process that the statement is for.
const HERE: &str = "(pg_backend_pid() = @pid@)";

/// The token that another process answers; real ones are positive.
pub(super) const AWAY: i64 = -1;

/// What a session is called that has nothing, or has had it for a moment only.
pub(super) const NAMELESS: &str = "palisade";

impl Verb {
    /// Whether it waits for the lock; then it also sets the idle time, and tells the timeline:
    /// whoever has waited may have slept through a failover.
    pub(super) fn waits(self) -> bool {
        matches!(self, Self::Block | Self::BlockShared)
    }

    /// The same, and changes what is to be changed in the session.
    pub(super) fn setting(self) -> Self {
        match self {
            Self::Try => Self::TrySetting,
            Self::TryShared => Self::TrySharedSetting,
            Self::Unlock => Self::UnlockSetting,
            Self::UnlockShared => Self::UnlockSharedSetting,
            other => other,
        }
    }

    /// `idle` is the setting that ends idle sessions, or one of no effect where there is none.
    ///
    /// `CASE` looks at its conditions in order and no further than it must, so what is behind one
    /// is not done. An answer is null in another process; a token, which may be null, is [`AWAY`].
    fn sql(self, idle: &str) -> String {
        let here = |then: &str| format!("CASE WHEN {HERE} THEN {then} END");
        let set = |name: &str, value: &str| here(&format!("set_config('{name}', {value}, false)"));
        let taking = |lock: &str| {
            format!(
                "SELECT CASE WHEN NOT {HERE} THEN {AWAY} \
                 WHEN {lock} THEN nextval('@schema@.token') END"
            )
        };
        let setting = |taking: String| format!("{taking}, {}", set(idle, "$2"));
        let blocking = |lock: &str| {
            let taken = setting(taking(&format!("{lock}(@key@)::text = ''")));
            format!("{taken}, {TIMELINE}")
        };
        let unlocking = |unlock: &str| format!("SELECT {}", here(&format!("{unlock}(@key@)")));
        let unnaming = |unlock: &str| {
            let nameless = set("application_name", &format!("'{NAMELESS}'"));
            format!("{}, {nameless}", unlocking(unlock))
        };
        match self {
            Self::Try => taking("pg_try_advisory_lock(@key@)"),
            Self::TryShared => taking("pg_try_advisory_lock_shared(@key@)"),
            Self::TrySetting => setting(Self::Try.sql(idle)),
            Self::TrySharedSetting => setting(Self::TryShared.sql(idle)),
            Self::Block => blocking("pg_advisory_lock"),
            Self::BlockShared => blocking("pg_advisory_lock_shared"),
            Self::Unlock => unlocking("pg_advisory_unlock"),
            Self::UnlockShared => unlocking("pg_advisory_unlock_shared"),
            Self::UnlockSetting => unnaming("pg_advisory_unlock"),
            Self::UnlockSharedSetting => unnaming("pg_advisory_unlock_shared"),
            // Whoever holds the lock is let past those who wait for it.
            Self::Downgrade => format!(
                "SELECT CASE WHEN NOT {HERE} THEN NULL \
                 WHEN pg_advisory_lock_shared(@key@)::text = '' \
                 THEN pg_advisory_unlock(@key@) END"
            ),
            Self::Upgrade => format!(
                "SELECT CASE WHEN NOT {HERE} THEN NULL WHEN pg_try_advisory_lock(@key@) \
                 THEN pg_advisory_unlock_shared(@key@) ELSE false END"
            ),
            Self::Beat => format!("SELECT {}", here(TIMELINE)),
            // Nothing is decided by it: nobody waits until it is on the disk.
            Self::Record => format!(
                "INSERT INTO @schema@.session (pid, claim, namespace, name, ttl, owner, value) \
                 SELECT pg_backend_pid(), $1, $2, $3, $4, $5, $6 WHERE {HERE} \
                 ON CONFLICT (pid) DO UPDATE SET \
                 claim = $1, namespace = $2, name = $3, ttl = $4, owner = $5, value = $6 \
                 RETURNING set_config('application_name', $7, false), \
                 set_config('synchronous_commit', 'off', true)"
            ),
            Self::Rest => format!("SELECT {}", set(idle, "'0'")),
            Self::Waits => "SELECT pid FROM pg_locks \
                WHERE pid = ANY ($1) AND locktype = 'advisory' AND NOT granted"
                .into(),
        }
    }

    fn types(self, key: Type) -> Vec<Type> {
        const T: Type = Type::TEXT;
        match self {
            Self::TrySetting | Self::TrySharedSetting | Self::Block | Self::BlockShared => {
                vec![key, T]
            }
            Self::Try
            | Self::TryShared
            | Self::Unlock
            | Self::UnlockShared
            | Self::UnlockSetting
            | Self::UnlockSharedSetting
            | Self::Downgrade
            | Self::Upgrade => vec![key],
            Self::Beat | Self::Rest => vec![],
            Self::Record => vec![T, T, T, Type::INT8, T, T, T],
            Self::Waits => vec![Type::INT4_ARRAY],
        }
    }
}

/// The SQL of all verbs.
pub(super) struct Statements {
    schema: String,
    /// The expression that makes a bigint of a key, and the key's type.
    key: (&'static str, Type),
}

impl Statements {
    pub(super) fn new(schema: String, key: (&'static str, Type)) -> Self {
        Self { schema, key }
    }

    /// The text of one for the process `pid`, and the types of its parameters.
    pub(super) fn of(&self, verb: Verb, idle: &str, pid: i32) -> (String, Vec<Type>) {
        let (key, kind) = &self.key;
        let sql = verb.sql(idle).replace("@pid@", &pid.to_string());
        let sql = sql.replace("@schema@", &self.schema).replace("@key@", key);
        (sql, verb.types(kind.clone()))
    }
}
