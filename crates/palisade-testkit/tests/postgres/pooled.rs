//! Behind pgbouncer in transaction mode.

use std::time::Duration;

use palisade::{Kind, Severity};
use palisade_testkit::launch;

use super::{SOON, advisory};

async fn codes(url: &str) -> Vec<(&'static str, Severity)> {
    let client = palisade::connect(url).await.unwrap();
    let checkup = client.check().await.unwrap();
    checkup
        .findings
        .iter()
        .map(|f| (f.code, f.severity))
        .collect()
}

#[tokio::test]
async fn a_pooler_is_found_out_and_waiters_are_served_without_a_push() {
    let Some(pooler) = launch::need("pgbouncer") else {
        return;
    };
    let found = codes(pooler.url()).await;
    assert!(
        found.contains(&("pooler_without_push", Severity::Warning)),
        "{found:?}"
    );
    let listen = pooler.nodes()[1].address();
    let listening = format!(
        "{}?listen_url=postgres://palisade@{listen}/postgres",
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

    let client = palisade::connect(pooler.url()).await.unwrap();
    let lock = client.mutex("polled").unwrap();
    let hold = lock.lock().await.unwrap();
    let token = hold.token();
    let waiter = tokio::spawn(async move { lock.lock().await });
    tokio::time::sleep(Duration::from_millis(300)).await;
    hold.release().await.unwrap();
    let next = tokio::time::timeout(SOON, waiter)
        .await
        .unwrap()
        .unwrap()
        .unwrap();
    assert!(next.token() > token);
}

#[tokio::test]
async fn session_locks_are_refused() {
    let Some(pooler) = launch::need("pgbouncer") else {
        return;
    };
    for options in ["", "?pooler=transaction"] {
        let url = format!("{}{options}", advisory(&pooler));
        let refused = match palisade::connect(&url).await {
            Err(error) => error,
            Ok(client) => client.mutex("x").unwrap().try_lock().await.unwrap_err(),
        };
        assert_eq!(refused.kind(), Kind::Unsupported);
        assert!(refused.to_string().contains("postgres://"), "{refused}");
    }
}

/// Where we can't choose the isolation, statements are rolled back (40001) and asked again.
#[tokio::test(flavor = "multi_thread")]
async fn stricter_isolation_costs_nobody_a_lock() {
    let strict = ["-c", "default_transaction_isolation=repeatable read"];
    let pooler = match launch::start_with("pgbouncer", &strict) {
        Ok(pooler) => pooler,
        Err(launch::Error::Missing(why)) => return launch::skip("pgbouncer", &why),
        Err(error) => panic!("{error}"),
    };
    let client = palisade::connect(pooler.url()).await.unwrap();
    let (inside, most) = (std::sync::Arc::new(std::sync::atomic::AtomicU32::new(0)), 8);
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..most {
        let lock = client.mutex("strict").unwrap();
        let inside = std::sync::Arc::clone(&inside);
        tasks.spawn(async move {
            for _ in 0..10 {
                let hold = lock.lock().await.unwrap();
                assert_eq!(inside.fetch_add(1, std::sync::atomic::Ordering::SeqCst), 0);
                tokio::task::yield_now().await;
                inside.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                hold.release().await.unwrap();
            }
        });
    }
    let all = tokio::time::timeout(Duration::from_secs(60), tasks.join_all()).await;
    assert!(all.is_ok(), "not all were served");
}
