//! Who may connect, messages for those who may not, and rotated secrets.

use palisade::ErrorKind;
use palisade_testkit::lab::launch::{self, Running};
use palisade_testkit::lab::trial::says_no_secret;

use super::{SOON, connect, refusal, server, soon, sql};

const SCHEMES: [&str; 2] = ["postgres", "postgres+advisory"];

/// Requires a password from everyone except the owner.
fn with_passwords() -> Option<Running> {
    let server = server()?;
    let hba = server.nodes()[0].folder().join("data/pg_hba.conf");
    let rules = "host all palisade all trust\nhost all barred all reject\n\
        host all trusted all trust\nhost all all all scram-sha-256\n";
    std::fs::write(&hba, rules).unwrap();
    sql(
        &server,
        "CREATE ROLE app LOGIN PASSWORD 'first' IN ROLE palisade",
    );
    sql(&server, "SELECT pg_reload_conf()");
    Some(server)
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_that_is_logged_has_a_secret() {
    let Some(server) = with_passwords() else {
        return;
    };
    sql(&server, "ALTER ROLE app PASSWORD 'hunter-2-is-it'");
    let address = server.nodes()[0].address();
    for scheme in SCHEMES {
        let url = |word| format!("{scheme}://app:{word}@{address}/postgres");
        let (right, wrong) = (url("hunter-2-is-it"), url("hunter-3-is-not"));
        says_no_secret(&right, &wrong, &["hunter-2", "hunter-3"]).await;
    }
}

#[tokio::test]
async fn an_existing_configuration_leads_to_the_same_locks() {
    let Some(server) = with_passwords() else {
        return;
    };
    let address = server.nodes()[0].address();
    let existing = format!("postgres://app:first@{address}/postgres")
        .parse()
        .unwrap();
    for advisory in [false, true] {
        let typed = || {
            let typed = palisade::config::Postgres::from_config(&existing)
                .unwrap()
                .plain();
            if advisory { typed.advisory() } else { typed }
        };
        let one = palisade::connect(typed()).await.unwrap();
        let two = palisade::connect(typed()).await.unwrap();
        let hold = one.mutex("shared").lock().await.unwrap();
        assert!(two.mutex("shared").try_lock().await.unwrap().is_none());
        hold.release().await.unwrap();
        assert!(two.mutex("shared").try_lock().await.unwrap().is_some());
    }
}

#[tokio::test]
async fn each_refusal_says_what_to_do() {
    let server = need!(with_passwords());
    let address = server.nodes()[0].address();
    let folder = server.folder().to_owned();
    std::fs::write(folder.join("empty"), "\n").unwrap();
    let empty = folder.join("empty").display().to_string();
    let closed = format!("127.0.0.1:{}", launch::free_port());
    let cases = [
        (
            format!("palisade@{closed}/postgres"),
            ErrorKind::Unreachable,
            closed.as_str(),
        ),
        (
            "palisade@no-such-host.invalid/postgres?tls=disable".to_owned(),
            ErrorKind::Unreachable,
            "no-such-host.invalid",
        ),
        (
            format!("app:wrong@{address}/postgres"),
            ErrorKind::Denied,
            "password_file",
        ),
        (
            format!("app@{address}/postgres"),
            ErrorKind::Denied,
            "asks for a password",
        ),
        (
            format!("trusted@{address}/postgres"),
            ErrorKind::Denied,
            "no such user",
        ),
        (
            format!("barred@{address}/postgres"),
            ErrorKind::Denied,
            "pg_hba.conf",
        ),
        (
            format!("palisade@{address}/nowhere"),
            ErrorKind::Config,
            "no such database",
        ),
        (
            format!("app@{address}/postgres?password_file={empty}"),
            ErrorKind::Config,
            "empty",
        ),
        (
            format!("palisade@{address}/postgres?tls=require"),
            ErrorKind::Config,
            "tls=disable",
        ),
    ];
    // The server takes a moment to reload its rules.
    let url = format!("postgres://app:wrong@{address}/postgres");
    tokio::time::timeout(SOON, async {
        while refusal(&url).await.kind() != ErrorKind::Denied {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("the rules are not read");
    for scheme in SCHEMES {
        for (rest, kind, text) in &cases {
            let refused = refusal(&format!("{scheme}://{rest}")).await;
            let said = refused.to_string();
            assert_eq!(refused.kind(), *kind, "{scheme}: {said}");
            assert!(said.contains(text), "{scheme}: {said}");
            assert!(!said.contains("wrong"), "{scheme}: {said}");
            if *kind != ErrorKind::Config {
                assert!(said.contains(':'), "{scheme} names no port: {said}");
            }
        }
    }
}

#[tokio::test]
async fn a_password_is_read_at_each_connect() {
    let server = need!(with_passwords());
    let file = server.folder().join("password");
    std::fs::write(&file, "first\n").unwrap();
    for (round, scheme) in SCHEMES.into_iter().enumerate() {
        let url = format!(
            "{scheme}://app@{}/postgres?password_file={}",
            server.nodes()[0].address(),
            file.display()
        );
        let client = connect(&url).await;
        let lock = client.mutex("x");
        let hold = soon(lock.lock()).await;
        hold.unwrap().release().await.unwrap();
        let password = format!("changed-{round}");
        sql(&server, &format!("ALTER ROLE app PASSWORD '{password}'"));
        std::fs::write(&file, &password).unwrap();
        sql(
            &server,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'app'",
        );
        let hold = tokio::time::timeout(SOON, lock.lock()).await;
        let hold = hold.expect("no lock with the new password").unwrap();
        hold.release().await.unwrap();
    }
}
