//! The statements of a session lock.
//!
//! Invariant: a token is taken after the lock, in the same statement. What is asked again and
//! again asks for nothing else: a setting, or one more parameter, costs more than the lock does.

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
    fn sql(self, idle: &str) -> String {
        // CASE looks at its condition first.
        let taking = |condition: &str| {
            format!("SELECT CASE WHEN {condition} THEN nextval('@schema@.token') END")
        };
        let setting = |taking: String| format!("{taking}, set_config('{idle}', $2, false)");
        let blocking = |lock: &str| {
            let taken = setting(taking(&format!("{lock}(@key@)::text = ''")));
            format!("{taken}, {TIMELINE}")
        };
        let unnaming = |unlock: &str| {
            format!("SELECT {unlock}(@key@), set_config('application_name', '{NAMELESS}', false)")
        };
        match self {
            Self::Try => taking("pg_try_advisory_lock(@key@)"),
            Self::TryShared => taking("pg_try_advisory_lock_shared(@key@)"),
            Self::TrySetting => setting(Self::Try.sql(idle)),
            Self::TrySharedSetting => setting(Self::TryShared.sql(idle)),
            Self::Block => blocking("pg_advisory_lock"),
            Self::BlockShared => blocking("pg_advisory_lock_shared"),
            Self::Unlock => "SELECT pg_advisory_unlock(@key@)".into(),
            Self::UnlockShared => "SELECT pg_advisory_unlock_shared(@key@)".into(),
            Self::UnlockSetting => unnaming("pg_advisory_unlock"),
            Self::UnlockSharedSetting => unnaming("pg_advisory_unlock_shared"),
            // Whoever holds the lock is let past those who wait for it.
            Self::Downgrade => "SELECT CASE WHEN pg_advisory_lock_shared(@key@)::text = '' \
                THEN pg_advisory_unlock(@key@) END"
                .into(),
            Self::Upgrade => "SELECT CASE WHEN pg_try_advisory_lock(@key@) \
                THEN pg_advisory_unlock_shared(@key@) ELSE false END"
                .into(),
            Self::Beat => format!("SELECT {TIMELINE}"),
            Self::Record => {
                "INSERT INTO @schema@.session (pid, claim, namespace, name, ttl, owner, value) \
                VALUES (pg_backend_pid(), $1, $2, $3, $4, $5, $6) ON CONFLICT (pid) DO UPDATE SET \
                claim = $1, namespace = $2, name = $3, ttl = $4, owner = $5, value = $6 \
                RETURNING set_config('application_name', $7, false)"
                    .into()
            }
            Self::Rest => format!("SELECT set_config('{idle}', '0', false)"),
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

    /// The text of one, and the types of its parameters.
    pub(super) fn of(&self, verb: Verb, idle: &str) -> (String, Vec<Type>) {
        let (key, kind) = &self.key;
        let sql = verb.sql(idle);
        let sql = sql.replace("@schema@", &self.schema).replace("@key@", key);
        (sql, verb.types(kind.clone()))
    }
}
