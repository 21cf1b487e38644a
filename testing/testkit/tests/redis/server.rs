//! States of the server: flushed scripts, keys of other types, no memory, no permissions.

use std::sync::Arc;
use std::time::Duration;

use palisade::config::rustls::pki_types::CertificateDer;
use palisade::config::rustls::pki_types::pem::PemObject;
use palisade::config::{self, rustls};
use palisade::engine::{Lease, Renewal, Ticket};
use palisade::{ErrorKind, Hold, LossReason};
use palisade_testkit::lab::launch::{self, wire};
use palisade_testkit::lab::trial::{certificates, says_no_secret};

use super::support::{Server, cycle, fails, line, mutex, soon, until, until_one_waits};

const TTL: Duration = Duration::from_millis(900);

#[tokio::test]
async fn forgotten_scripts_are_sent_again() {
    let server = need!(Server::start());
    let client = server.direct_client("").await;
    for _ in 0..3 {
        server.ask(&["SCRIPT", "FLUSH"]);
        let hold = mutex(&client, "scripts", TTL).lock().await.unwrap();
        server.ask(&["SCRIPT", "FLUSH"]);
        hold.release().await.unwrap();
    }
}

#[tokio::test]
async fn a_key_of_another_type_is_never_free() {
    let server = need!(Server::start());
    let client = server.direct_client("").await;
    server.ask(&["RPUSH", "palisade:list", "x"]);
    let lock = mutex(&client, "list", TTL);
    for _ in 0..2 {
        fails(lock.try_lock().await, ErrorKind::Unusable);
        fails(
            lock.lock_timeout(Duration::from_millis(50)).await,
            ErrorKind::Unusable,
        );
    }
    assert_eq!(server.ask(&["LLEN", "palisade:list"]), "1");
    // Replaced while held: lost.
    let hold = mutex(&client, "replaced", TTL).lock().await.unwrap();
    server.ask(&["DEL", "palisade:replaced"]);
    server.ask(&["RPUSH", "palisade:replaced", "x"]);
    assert_eq!(
        soon("the loss", hold.lost()).await.reason,
        LossReason::Taken
    );
}

fn lease(hold: &Hold) -> Lease {
    let ticket = Ticket {
        sequence: hold.token().0,
        ..Ticket::own(hold.name().clone(), hold.claim())
    };
    Lease::in_a_test(&ticket)
}

/// After another tool has taken the key, our renewals are lost, and the foreign lock is not
/// changed.
#[tokio::test]
async fn a_foreign_value_is_never_renewed_or_released() {
    let server = need!(Server::start());
    let client = server.direct_client("").await;
    let hold = mutex(&client, "stolen", Duration::from_secs(60))
        .lock()
        .await
        .unwrap();
    // In one step, because a renewal of the keeper could find the key gone in between.
    server.ask(&["SET", "palisade:stolen", "theirs", "PX", "5000"]);
    let renewals = client
        .engine()
        .renew(vec![lease(&hold)], Duration::from_secs(2))
        .await;
    assert!(matches!(renewals[..], [Renewal::Lost]), "{renewals:?}");
    let left: i64 = server.ask(&["PTTL", "palisade:stolen"]).parse().unwrap();
    assert!(left <= 5000, "extended to {left} ms");
    let _ = hold.release().await;
    assert_eq!(server.ask(&["GET", "palisade:stolen"]), "theirs");
    let shown = line(&client, "stolen").await.unwrap();
    assert_eq!(shown.holders[0].id, "theirs");
    assert_eq!(shown.holders[0].owner, None);
    // The same if the release is the first to notice.
    let hold = mutex(&client, "robbed", Duration::from_secs(60))
        .lock()
        .await
        .unwrap();
    server.ask(&["SET", "palisade:robbed", "theirs", "PX", "60000"]);
    fails(hold.release().await, ErrorKind::Lost);
    assert_eq!(server.ask(&["GET", "palisade:robbed"]), "theirs");
}

#[tokio::test]
async fn a_full_server_says_so_and_lets_go_all_the_same() {
    let server = need!(Server::start());
    let client = server.direct_client("").await;
    let hold = mutex(&client, "full", Duration::from_secs(30))
        .lock()
        .await
        .unwrap();
    let other = server.direct_client("").await;
    let next = mutex(&other, "full", Duration::from_secs(30));
    let waiter = tokio::spawn(async move { next.lock().await });
    until_one_waits(&client, "full").await;
    server.ask(&["CONFIG", "SET", "maxmemory", "1"]);
    fails(
        mutex(&client, "another", TTL).try_lock().await,
        ErrorKind::Unusable,
    );
    let ours = hold.claim().to_string();
    hold.release().await.unwrap();
    assert_ne!(server.ask(&["GET", "palisade:full"]), ours);
    server.ask(&["CONFIG", "SET", "maxmemory", "0"]);
    soon("the next", waiter)
        .await
        .unwrap()
        .unwrap()
        .release()
        .await
        .unwrap();
}

#[tokio::test]
async fn a_busy_server_and_a_replica_are_unreachable() {
    let server = need!(Server::with(&["--busy-reply-threshold", "50"]));
    let client = server.direct_client("").await;
    let port = server.port();
    let script = "local t = redis.call('TIME')[1] while redis.call('TIME')[1] - t < 60 do end";
    let busy = std::thread::spawn(move || wire::redis(port, &["EVAL", script, "0"]));
    until("a busy server", async || {
        server.ask(&["PING"]).contains("BUSY")
    })
    .await;
    fails(
        mutex(&client, "busy", TTL).try_lock().await,
        ErrorKind::Unreachable,
    );
    server.ask(&["SCRIPT", "KILL"]);
    let _ = busy.join();
    cycle(&mutex(&client, "busy", TTL)).await;

    server.ask(&["REPLICAOF", "127.0.0.1", "1"]);
    let error = fails(
        mutex(&client, "replica", TTL).try_lock().await,
        ErrorKind::Unreachable,
    );
    assert!(
        error.message().contains("primary") || error.message().contains("replica"),
        "{error}"
    );
}

#[tokio::test]
async fn logins_are_checked_and_a_user_without_channels_still_waits() {
    let server = need!(Server::start());
    server.user(&["resetchannels", "~*", "+@all"]);
    let url = |login: &str| {
        server
            .direct("")
            .replace("redis://", &format!("redis://{login}@"))
    };
    let error = fails(
        palisade::connect(&url("locks:hunter3")).await,
        ErrorKind::Denied,
    );
    assert!(!format!("{error:?}").contains("hunter3"));
    let one = palisade::connect(&url("locks:hunter2")).await.unwrap();
    let two = palisade::connect(&url("locks:hunter2")).await.unwrap();
    let hold = mutex(&one, "acl", TTL).lock().await.unwrap();
    let next = mutex(&two, "acl", TTL);
    let waiter = tokio::spawn(async move { next.lock().await });
    hold.release().await.unwrap();
    soon("the next", waiter)
        .await
        .unwrap()
        .unwrap()
        .release()
        .await
        .unwrap();
    let codes: Vec<_> = one
        .check()
        .await
        .unwrap()
        .findings
        .iter()
        .map(|f| f.code)
        .collect();
    assert!(codes.contains(&"no_channels"), "{codes:?}");
}

/// A grant that must be on replicas, but is on none, fails and is not left behind.
#[tokio::test]
async fn a_grant_that_no_replica_has_is_given_back() {
    let server = need!(Server::start());
    let client = server.direct_client("replicas=1&timeout=400ms").await;
    let error = fails(
        mutex(&client, "alone", TTL).try_lock().await,
        ErrorKind::Unreachable,
    );
    assert!(error.message().contains("0 of 1"), "{error}");
    assert_eq!(server.ask(&["EXISTS", "palisade:alone"]), "0");

    let replica = need!(Server::start());
    replica.ask(&["REPLICAOF", "127.0.0.1", &server.port().to_string()]);
    until("the replica", async || {
        server.ask(&["WAIT", "1", "100"]) == "1"
            && replica
                .ask(&["INFO", "replication"])
                .contains("master_link_status:up")
    })
    .await;
    let hold = mutex(&client, "copied", TTL).lock().await.unwrap();
    assert_eq!(
        replica.ask(&["GET", "palisade:copied"]),
        hold.claim().to_string()
    );
    hold.release().await.unwrap();
}

#[tokio::test]
async fn unsafe_settings_are_found() {
    let settings = [
        "--maxmemory",
        "100mb",
        "--maxmemory-policy",
        "volatile-lru",
        "--appendonly",
        "no",
    ];
    let server = need!(Server::with(&settings));
    let client = server.direct_client("").await;
    let found = client.check().await.unwrap();
    let codes: Vec<_> = found.findings.iter().map(|f| f.code).collect();
    assert!(
        codes.contains(&"eviction") && codes.contains(&"no_persistence"),
        "{codes:?}"
    );
    assert!(found.version.unwrap().contains("Redis"));
    assert!(found.clock_ahead_us.unwrap().abs() < 1_000_000);

    let safe = need!(Server::start());
    let findings = safe.direct_client("").await.check().await.unwrap().findings;
    assert!(findings.is_empty(), "{findings:?}");
    let replica = need!(Server::start());
    replica.ask(&["REPLICAOF", "127.0.0.1", &safe.port().to_string()]);
    let client = safe.direct_client("").await;
    until("the replica", async || {
        let findings = client.check().await.unwrap().findings;
        findings
            .iter()
            .any(|finding| finding.code == "unsafe_failover")
    })
    .await;
}

/// A node of its own cluster, with all slots or none.
fn cluster_node() -> Option<Server> {
    let bus = launch::free_port().to_string();
    Server::with(&["--cluster-enabled", "yes", "--cluster-port", &bus])
}

/// In cluster mode no call may touch two slots: locks of one client still work, wait, are renewed
/// and released.
#[tokio::test]
async fn one_node_in_cluster_mode_is_a_server_like_any_other() {
    let server = need!(cluster_node());
    let error = fails(
        palisade::connect(&server.direct("")).await,
        ErrorKind::Config,
    );
    assert!(error.message().contains("slots"), "{error}");
    server.ask(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
    until("a cluster", async || {
        server
            .ask(&["CLUSTER", "INFO"])
            .contains("cluster_state:ok")
    })
    .await;
    let client = server.direct_client("").await;
    let mut holds = Vec::new();
    for at in 0..20 {
        let lock = mutex(&client, &format!("slot-{at}"), TTL);
        holds.push(lock.lock().await.unwrap());
    }
    let permits = client.semaphore("permits", 2).ttl(TTL);
    let permit = permits.acquire().await.unwrap();
    let other = server.direct_client("").await;
    let next = mutex(&other, "slot-0", TTL);
    let waiter = tokio::spawn(async move { next.lock().await });
    tokio::time::sleep(TTL * 2).await;
    assert!(permit.is_valid() && holds.iter().all(Hold::is_valid));
    for hold in holds {
        hold.release().await.unwrap();
    }
    let next = soon("the next", waiter).await.unwrap().unwrap();
    next.release().await.unwrap();
    assert_eq!(client.check().await.unwrap().findings, []);
}

#[tokio::test]
async fn a_node_of_a_larger_cluster_is_refused() {
    let cluster = need!("redis-cluster");
    let url = format!("redis://127.0.0.1:{}", cluster.nodes()[0].port());
    let error = fails(palisade::connect(&url).await, ErrorKind::Config);
    assert!(error.message().contains("Cluster"), "{error}");
}

/// The URL's user, also without a password, and its database are used.
#[tokio::test]
async fn who_asks_and_what_for_is_told_apart() {
    let server = need!(Server::start());
    let grants = ["allchannels", "allkeys", "+@all"];
    for user in [&["app", "on", "nopass"][..], &["locks", "on", ">hunter2"]] {
        server.ask(&[&["ACL", "SETUSER"][..], user, &grants[..]].concat());
    }
    let at = format!("127.0.0.1:{}", server.port());
    let client = palisade::connect(&format!("redis://app@{at}"))
        .await
        .unwrap();
    assert!(server.ask(&["CLIENT", "LIST"]).contains("user=app"));
    drop(client);
    let folder = tempfile::tempdir().unwrap();
    let empty = folder.path().join("empty");
    std::fs::write(&empty, "\n").unwrap();
    let mut texts = std::collections::BTreeSet::new();
    for (url, kind, word) in [
        (
            format!("redis://locks@{at}"),
            ErrorKind::Denied,
            "without a password",
        ),
        (
            format!("redis://locks:hunter3@{at}"),
            ErrorKind::Denied,
            "unknown",
        ),
        (
            format!("redis://:hunter3@{at}"),
            ErrorKind::Denied,
            "default user",
        ),
        (
            format!("redis://{at}?user=locks&password_file={}", empty.display()),
            ErrorKind::Config,
            "empty",
        ),
        (format!("redis://{at}/99"), ErrorKind::Config, "database 99"),
        (
            "redis://127.0.0.1:1".to_owned(),
            ErrorKind::Unreachable,
            "127.0.0.1:1",
        ),
        (
            "redis://nowhere.invalid".to_owned(),
            ErrorKind::Unreachable,
            "nowhere.invalid:6379",
        ),
    ] {
        // The default user's password is only required if it has one.
        let password = if word == "default user" {
            ">right"
        } else {
            "nopass"
        };
        server.ask(&["ACL", "SETUSER", "default", "resetpass", password]);
        let error = palisade::connect(&url).await.err().unwrap();
        assert_eq!(error.kind(), kind, "{url}: {error:?}");
        assert!(error.message().contains(word), "{url}: {error}");
        assert!(!format!("{error:?}").contains("hunter"), "{error:?}");
        texts.insert(error.message().to_owned());
        if word == "default user" {
            let error = fails(
                palisade::connect(&format!("redis://{at}")).await,
                ErrorKind::Denied,
            );
            assert!(error.message().contains("asks for a password"), "{error}");
            let mut login = wire_login(server.port(), "right");
            assert_eq!(login(&["ACL", "SETUSER", "default", "nopass"]), "+OK");
        }
    }
    assert_eq!(texts.len(), 7, "{texts:#?}");
}

/// Sends commands on the test's own connection, after logging in as the default user.
fn wire_login(port: u16, password: &str) -> impl FnMut(&[&str]) -> String + use<> {
    use std::io::{BufRead, BufReader, Write};
    let stream = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
    let mut answers = BufReader::new(stream.try_clone().unwrap());
    let mut ask = move |words: &[&str]| {
        writeln!(&stream, "{}\r", words.join(" ")).unwrap();
        let mut answer = String::new();
        answers.read_line(&mut answer).unwrap();
        answer.trim().to_owned()
    };
    assert_eq!(ask(&["AUTH", password]), "+OK");
    ask
}

/// Passwords are rotated: a new connection reads the file again.
#[tokio::test]
async fn a_new_password_is_read_at_the_next_connect() {
    let server = need!(Server::start());
    let set = |password: &str| {
        let password = format!(">{password}");
        let rules = ["ACL", "SETUSER", "locks", "reset", "on", &password];
        server.ask(&[&rules[..], &["allchannels", "allkeys", "+@all"]].concat());
    };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("password");
    set("first");
    std::fs::write(&file, "first").unwrap();
    let login = format!("user=locks&password_file={}", file.display());
    let client = server.client(&login).await;
    let hold = mutex(&client, "rotated", Duration::from_secs(6))
        .lock()
        .await;
    let hold = hold.unwrap();
    set("second");
    std::fs::write(&file, "second").unwrap();
    server.proxy.cut_all();
    let other = mutex(&client, "rotated too", TTL).lock().await.unwrap();
    other.release().await.unwrap();
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert!(hold.is_valid(), "renewed with the new password");
}

#[tokio::test]
async fn bad_urls_are_refused_before_any_connection() {
    for (url, kind) in [
        ("redis://127.0.0.1:1", ErrorKind::Unreachable),
        ("redis://", ErrorKind::Config),
        ("redis://a,b", ErrorKind::Config),
        ("redis://h/x", ErrorKind::Config),
        ("redis://h?replicas=-1", ErrorKind::Config),
        ("redis://h?replica=1", ErrorKind::Config),
        ("redis://h?tls_ca=/nowhere", ErrorKind::Config),
        ("rediss://h?tls_ca=/nowhere", ErrorKind::Config),
        ("redis://h?namespace=a%7Db", ErrorKind::Config),
    ] {
        let error = palisade::connect(url).await.err().unwrap();
        assert_eq!(error.kind(), kind, "{url}: {error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_that_is_logged_has_a_secret() {
    let Some(server) = Server::start() else {
        return;
    };
    server.ask(&["CONFIG", "SET", "requirepass", "hunter-2-is-it"]);
    let host = format!("127.0.0.1:{}", server.port());
    let url = format!("redis://:hunter-2-is-it@{host}");
    let wrong = format!("redis://:hunter-3-is-not@{host}");
    says_no_secret(&url, &wrong, &["hunter-2", "hunter-3"]).await;
}

#[tokio::test]
async fn an_existing_client_leads_to_the_same_locks() {
    let Some(server) = Server::start() else {
        return;
    };
    let url = format!("redis://127.0.0.1:{}", server.port());
    let existing = config::redis::Client::open(url.as_str()).unwrap();
    let ours = config::Redis::from_client(&existing).unwrap();
    let ours = palisade::connect(ours.ttl(TTL)).await.unwrap();
    let hold = ours.mutex("shared").lock().await.unwrap();
    let others = palisade::connect(&url).await.unwrap();
    assert!(others.mutex("shared").try_lock().await.unwrap().is_none());
    hold.release().await.unwrap();
    assert!(others.mutex("shared").try_lock().await.unwrap().is_some());
}

#[tokio::test]
async fn locks_go_through_tls_and_strangers_are_not_trusted() {
    let folder = tempfile::tempdir().unwrap();
    if let Err(why) = certificates(folder.path(), "IP:127.0.0.1") {
        return launch::skip("redis", &why);
    }
    let file = |name: &str| folder.path().join(name).display().to_string();
    let port = launch::free_port();
    let (tls_port, cert, key) = (port.to_string(), file("server.pem"), file("server.key"));
    let settings = [
        "--tls-port",
        tls_port.as_str(),
        "--tls-cert-file",
        &cert,
        "--tls-key-file",
        &key,
        "--tls-auth-clients",
        "no",
    ];
    let server = need!(Server::with(&settings));
    let url = format!("rediss://127.0.0.1:{port}?tls_ca={}", file("ca.pem"));
    let client = palisade::connect(&url).await.unwrap();
    cycle(&mutex(&client, "tls", TTL)).await;
    // The program's own TLS configuration: the same authority, without a file.
    let mut roots = rustls::RootCertStore::empty();
    let pem = std::fs::read(file("ca.pem")).unwrap();
    roots
        .add(CertificateDer::from_pem_slice(&pem).unwrap())
        .unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let own = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let host = format!("127.0.0.1:{port}");
    let typed = config::Redis::new(&host).tls_config(own.clone());
    let client = palisade::connect(typed).await.unwrap();
    assert!(client.mutex("tls").try_lock().await.unwrap().is_some());
    let both = config::Redis::new(&host)
        .tls_ca(file("ca.pem"))
        .tls_config(own);
    let refused = palisade::connect(both).await.err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::Config, "{refused}");
    // Another authority than the server's, the system's, another name than in its certificate, a
    // port without TLS, and a TLS port without TLS.
    let plain = server.port();
    for (url, words) in [
        (url.replace("ca.pem", "other.pem"), "tls_ca"),
        (format!("rediss://127.0.0.1:{port}"), "tls_ca"),
        (url.replace("127.0.0.1", "localhost"), "name this host"),
        (
            url.replace(&port.to_string(), &plain.to_string()),
            "does not speak TLS",
        ),
    ] {
        let error = soon("a refusal", palisade::connect(&url)).await;
        let error = error.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Config, "{url}: {error:?}");
        assert!(error.to_string().contains(words), "{url}: {error}");
    }
    let error = palisade::connect(&format!("redis://127.0.0.1:{port}")).await;
    let error = fails(error, ErrorKind::Unreachable);
    assert!(error.to_string().contains("rediss:"), "{error}");

    // The server requires a client certificate: we have none, a valid one, a foreign one.
    server.ask(&["CONFIG", "SET", "tls-ca-cert-file", &file("ca.pem")]);
    server.ask(&["CONFIG", "SET", "tls-auth-clients", "yes"]);
    let known = format!(
        "{url}&tls_cert={}&tls_key={}",
        file("client.pem"),
        file("client.key")
    );
    palisade::connect(&known).await.unwrap();
    let stranger = known.replace("client.", "other.");
    for url in [&url, &stranger] {
        let error = soon("a refusal", palisade::connect(url)).await.err();
        let error = error.unwrap();
        assert_eq!(error.kind(), ErrorKind::Config, "{url}: {error:?}");
        assert!(error.to_string().contains("tls_cert"), "{url}: {error}");
    }

    // The server's certificate expires.
    server.ask(&["CONFIG", "SET", "tls-auth-clients", "no"]);
    let days = "x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days -1 -extfile names -out expired.pem";
    let made = std::process::Command::new("openssl")
        .args(days.split(' '))
        .current_dir(folder.path())
        .output()
        .unwrap();
    assert!(made.status.success(), "{made:?}");
    assert_eq!(
        server.ask(&["CONFIG", "SET", "tls-cert-file", &file("expired.pem")]),
        "OK"
    );
    let error = fails(palisade::connect(&url).await, ErrorKind::Config);
    assert!(error.to_string().contains("expired"), "{error}");
}
