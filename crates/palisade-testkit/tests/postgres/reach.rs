//! Connections that go silent, servers that can't be reached or refuse, and what is said of them.

use std::time::Duration;

use palisade::{BootTime, Kind};
use palisade_testkit::proxy::Proxies;

use super::{SOON, server, sql};

/// The connections that there are go silent, new ones are fine: holds live on, waiters are served.
#[tokio::test]
async fn a_silent_connection_costs_no_lock() {
    let Some(server) = server() else { return };
    let proxies = Proxies::before(server.url()).unwrap();
    let client = palisade::connect(&format!("{}?ttl=3s", proxies.url()))
        .await
        .unwrap();
    let near = palisade::connect(server.url()).await.unwrap();
    let busy = near.mutex("busy").unwrap().lock().await.unwrap();
    let hold = client.mutex("x").unwrap().lock().await.unwrap();
    let lock = client.mutex("busy").unwrap();
    let waiter = tokio::spawn(async move { lock.lock().await });
    for _ in 0..3 {
        proxies.silence();
        let end = BootTime::now() + Duration::from_secs(4);
        while !end.has_passed() {
            assert!(hold.is_valid(), "lost with one connection");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    busy.release().await.unwrap();
    let next = tokio::time::timeout(SOON * 2, waiter).await.unwrap();
    assert!(next.unwrap().unwrap().is_valid());
}

#[tokio::test]
async fn a_server_that_can_t_be_reached_is_named() {
    let client = palisade::connect("postgres://palisade@127.0.0.1:1/postgres")
        .await
        .unwrap();
    let refused = client.mutex("x").unwrap().try_lock().await.unwrap_err();
    assert_eq!(refused.kind(), Kind::Unreachable);
    assert!(refused.to_string().contains("127.0.0.1:1"), "{refused}");
}

/// Each mistake in a login is told apart, as far as the server does.
#[tokio::test]
async fn refused_logins_say_what_to_look_at() {
    let Some(server) = server() else { return };
    sql(&server, "CREATE ROLE app LOGIN PASSWORD 'right'");
    let hba = server.nodes()[0].folder().join("data/pg_hba.conf");
    let rules = std::fs::read_to_string(&hba).unwrap();
    let rule = "host all app,nobody_here 127.0.0.1/32 scram-sha-256\n";
    std::fs::write(&hba, format!("{rule}{rules}")).unwrap();
    sql(&server, "SELECT pg_reload_conf()");
    let empty = server.folder().join("empty");
    std::fs::write(&empty, "\n").unwrap();
    let file = server.folder().join("password");
    std::fs::write(&file, "right\n").unwrap();
    let address = server.nodes()[0].address();
    let refused = async |login: &str, options: &str| {
        let url = format!("postgres://{login}@{address}/postgres{options}");
        let client = match palisade::connect(&url).await {
            Ok(client) => client,
            Err(error) => return error,
        };
        let refused = client.mutex("x").unwrap().try_lock().await;
        refused.err().expect("it was let in")
    };
    let wrong = refused("app:wrong", "").await;
    assert_eq!(wrong.kind(), Kind::Denied, "{wrong}");
    assert!(wrong.to_string().contains("password"), "{wrong}");
    assert!(!wrong.to_string().contains("wrong"), "a secret is shown");
    let missing = refused("app", "").await;
    assert!(missing.to_string().contains("password_file"), "{missing}");
    let unknown = refused("stranger", "").await;
    assert_eq!(unknown.kind(), Kind::Denied, "{unknown}");
    assert!(unknown.to_string().contains("no such user"), "{unknown}");
    let nothing = refused("app", &format!("?password_file={}", empty.display())).await;
    assert_eq!(nothing.kind(), Kind::Config, "{nothing}");
    assert!(nothing.to_string().contains("empty"), "{nothing}");
    let right = format!(
        "postgres://app@{address}/postgres?password_file={}",
        file.display()
    );
    let client = palisade::connect(&right).await.unwrap();
    let rights = client.mutex("x").unwrap().try_lock().await.unwrap_err();
    // It is let in, and may not make the tables.
    assert!(rights.to_string().contains("palisade schema"), "{rights}");
}
