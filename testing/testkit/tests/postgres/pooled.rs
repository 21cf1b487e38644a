//! Behind pgbouncer in transaction mode.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use palisade::ErrorKind;
use palisade::report::Severity;
use palisade_testkit::lab::launch::{Running, wire};

use super::{Psql, SOON, advisory, connect, refusal, soon, sql, started};

async fn codes(url: &str) -> Vec<(&'static str, Severity)> {
    let client = connect(url).await;
    let checkup = client.check().await.unwrap();
    checkup
        .findings
        .iter()
        .map(|f| (f.code, f.severity))
        .collect()
}

#[tokio::test]
async fn a_pooler_is_found_out_and_waiters_are_served_without_a_push() {
    let pooler = need!("pgbouncer");
    let _traffic = Traffic::through(&pooler, 2);
    for _ in 0..20 {
        let found = codes(pooler.url()).await;
        assert!(
            found.contains(&("pooler_without_push", Severity::Warning)),
            "{found:?}"
        );
    }
    let listen = pooler.nodes()[1].address();
    let listening = format!(
        "{}?listen_url=postgres://palisade%40{listen}/postgres",
        pooler.url()
    );
    let found = codes(&listening).await;
    assert!(found.contains(&("pooler", Severity::Info)), "{found:?}");
    let direct = format!("postgres://palisade@{listen}/postgres");
    let found = codes(&direct).await;
    assert!(
        !found.iter().any(|(code, _)| code.starts_with("pooler")),
        "{found:?}"
    );

    let client = connect(pooler.url()).await;
    let lock = client.mutex("polled");
    let hold = lock.lock().await.unwrap();
    let token = hold.token();
    let waiter = tokio::spawn(async move { lock.lock().await });
    tokio::time::sleep(Duration::from_millis(300)).await;
    hold.release().await.unwrap();
    let next = soon(waiter).await.unwrap().unwrap();
    assert!(next.token() > token);
}

/// Ignores the startup packet's options, as poolers are configured to do for some drivers.
const LENIENT: &str = "pooler.ignore_startup_parameters = extra_float_digits,options";

fn pooler_with(settings: &[&str]) -> Option<Running> {
    started("pgbouncer", settings)
}

/// Other clients of a pooler, so that its server connections are constantly reassigned.
struct Traffic {
    over: Arc<AtomicBool>,
    clients: Vec<JoinHandle<()>>,
}

impl Traffic {
    fn through(pooler: &Running, clients: usize) -> Self {
        let (over, port) = (Arc::new(AtomicBool::new(false)), pooler.nodes()[0].port());
        let client = |over: Arc<AtomicBool>| {
            std::thread::spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    let asked = wire::postgres(port, "palisade", "SELECT pg_sleep(0.001)");
                    asked.unwrap();
                }
            })
        };
        Self {
            clients: (0..clients).map(|_| client(Arc::clone(&over))).collect(),
            over,
        }
    }
}

impl Drop for Traffic {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        for client in self.clients.drain(..) {
            // A client that panicked has reported it; a panic here would hide it.
            let _ = client.join();
        }
    }
}

/// State that we must not leave in a pooler's session: one row per server connection. The pooler
/// itself sets the parameters that it tracks for its clients.
const LEFT: &str = "SELECT concat_ws(',', current_setting('palisade.session', true), \
    (SELECT string_agg(name, ',') FROM pg_settings WHERE source = 'session' AND name NOT IN \
    ('application_name', 'client_encoding', 'DateStyle', 'TimeZone', \
    'standard_conforming_strings')), (SELECT string_agg(c, ',') FROM pg_listening_channels() c));";

/// Inspects `count` server connections at once, each kept busy until all were seen.
fn left(pooler: &Running, count: usize) -> Option<Vec<String>> {
    let mut sessions = Vec::new();
    for _ in 0..count {
        let mut psql = Psql::open(pooler)?;
        psql.ask("BEGIN;");
        sessions.push(psql);
    }
    let rows = sessions.iter_mut().flat_map(|psql| psql.ask(LEFT));
    Some(rows.filter(|row| !row.is_empty()).collect())
}

#[tokio::test(flavor = "multi_thread")]
async fn session_locks_are_refused_beside_other_traffic() {
    const CONNECTS: usize = 2000;
    let pooler = need!(pooler_with(&[LENIENT]));
    let traffic = Traffic::through(&pooler, 2);
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..8 {
        let url = advisory(&pooler);
        tasks.spawn(async move {
            for _ in (task..CONNECTS).step_by(8) {
                let refused = refusal(&url).await;
                assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused}");
                assert!(refused.to_string().contains("postgres://"), "{refused}");
            }
        });
    }
    tasks.join_all().await;
    drop(traffic);
    let locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'";
    assert_eq!(sql(&pooler, locks), ["0"], "a session lock was left");
    if let Some(left) = left(&pooler, 20) {
        assert_eq!(
            left,
            Vec::<String>::new(),
            "something was left in a session"
        );
    }
    // A pooler that checks all options refuses by itself, and our message explains it.
    let strict = need!(pooler_with(&[]));
    for options in ["", "?pooler=transaction"] {
        let refused = refusal(&format!("{}{options}", advisory(&strict))).await;
        assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused}");
        assert!(refused.to_string().contains("postgres://"), "{refused}");
    }
}

#[tokio::test]
async fn a_pool_of_one_connection_is_enough() {
    let one = ["pooler.default_pool_size = 1", LENIENT];
    let pooler = need!(pooler_with(&one));
    let client = connect(pooler.url()).await;
    let lock = client.mutex("x");
    let hold = tokio::time::timeout(SOON, lock.lock()).await;
    hold.expect("no lock").unwrap().release().await.unwrap();
    let refused = tokio::time::timeout(SOON, refusal(&advisory(&pooler))).await;
    assert_eq!(refused.expect("no answer").kind(), ErrorKind::Unsupported);
}

#[tokio::test]
async fn a_pooler_in_session_mode_is_believed_only_when_it_is_said_so() {
    let pooler = need!(pooler_with(&["pooler.pool_mode = session", LENIENT]));
    let refused = refusal(&advisory(&pooler)).await;
    assert_eq!(refused.kind(), ErrorKind::Unsupported);
    assert!(refused.to_string().contains("pooler=session"), "{refused}");
    let url = format!("{}?pooler=session", advisory(&pooler));
    let client = connect(&url).await;
    let lock = client.mutex("x");
    let hold = lock.lock().await.unwrap();
    assert!(lock.try_lock().await.unwrap().is_none(), "held by two");
    hold.release().await.unwrap();
}

/// If a pooler passes the check, a statement that arrives in another session does nothing there.
#[tokio::test]
async fn a_statement_in_another_session_takes_no_lock() {
    let two = ["pooler.default_pool_size = 2", LENIENT];
    let pooler = need!(pooler_with(&two));
    // This is wrong on purpose, and makes the client trust the first session that it sees.
    let url = format!("{}?pooler=session", advisory(&pooler));
    let client = connect(&url).await;
    let first = client.mutex("first");
    first.lock().await.unwrap().release().await.unwrap();
    // The pooler assigns this one the session that was used last.
    let mut psql = need!(Psql::open(&pooler));
    psql.ask("BEGIN;");
    let readers = client.rwlock("second");
    let refused = readers.try_read().await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused}");
    let locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'";
    assert_eq!(sql(&pooler, locks), ["0"], "a session lock was left");
}

/// Where we can't set the isolation level, statements are rolled back (40001) and retried.
#[tokio::test(flavor = "multi_thread")]
async fn stricter_isolation_costs_nobody_a_lock() {
    let strict = ["-c", "default_transaction_isolation=repeatable read"];
    let pooler = need!(pooler_with(&strict));
    let _traffic = Traffic::through(&pooler, 2);
    let client = connect(pooler.url()).await;
    let (inside, most) = (Arc::new(std::sync::atomic::AtomicU32::new(0)), 8);
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..most {
        let lock = client.mutex("strict");
        let inside = Arc::clone(&inside);
        tasks.spawn(async move {
            for _ in 0..10 {
                let hold = lock.lock().await.unwrap();
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                tokio::task::yield_now().await;
                inside.fetch_sub(1, Ordering::SeqCst);
                hold.release().await.unwrap();
            }
        });
    }
    let all = tokio::time::timeout(Duration::from_secs(60), tasks.join_all()).await;
    assert!(all.is_ok(), "not all were served");
}
