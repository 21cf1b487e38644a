//! Logins, TLS, and the findings of `check`.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use palisade::report::Severity;
use palisade::{ErrorKind, Eviction, LossReason};
use palisade_testkit::lab::launch;
use palisade_testkit::lab::trial::{certificates, says_no_secret};
use serde_json::json;

use crate::util::{
    base64, call, cycle, etcdctl, fails, guarded, password, run_ctl, soon, until, until_one_waits,
};

/// A role with the keys of the namespace, and a user who has it.
const WORKER: [&str; 4] = [
    "role add locks",
    "role grant-permission --prefix locks readwrite palisade/",
    "user add worker:pass-word",
    "user grant-role worker locks",
];

/// The permission for the engine's own records.
const OWN_PREFIX: &str = "role grant-permission --prefix locks readwrite .palisade/";

#[tokio::test(flavor = "multi_thread")]
async fn a_login_is_asked_for_and_outlives_a_restart() {
    let (running, host) = need!(guarded(&[]));
    let refused = |url: String| async move {
        let client = match palisade::connect(&url).await {
            Err(error) => return error,
            Ok(client) => client,
        };
        client.mutex("x").try_lock().await.err().unwrap()
    };
    for (login, words) in [
        ("", "asks for a login"),
        ("root:wrong@", "password is wrong"),
        ("nobody:top-secret@", "not known"),
        ("root@", "password_file"),
    ] {
        let error = refused(format!("etcd://{login}{host}")).await;
        assert_eq!(error.kind(), ErrorKind::Denied, "{error:?}");
        assert!(error.message().contains(words), "{error}");
        let names_it = login.is_empty() || error.message().contains(&host);
        assert!(names_it, "{error}");
        assert!(!format!("{error:?}").contains("secret"), "{error:?}");
    }
    let client = palisade::connect(&format!("etcd://root:top-secret@{host}"))
        .await
        .unwrap();
    let mutex = client.mutex("mine");
    let hold = mutex.ttl(Duration::from_secs(20)).lock().await.unwrap();
    // The member forgets all logins, so the client logs in again.
    tokio::task::block_in_place(|| running.nodes()[0].restart()).unwrap();
    cycle(&client.mutex("after")).await;
    assert!(hold.is_valid());
    hold.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_needs_the_namespace_and_no_more() {
    let (_running, host) = need!(guarded(&[&WORKER[..], &[OWN_PREFIX]].concat()));
    let password = password("pass-word");
    let file = password.path().display();
    let url = format!("etcd://{host}?user=worker&password_file={file}");
    let client = palisade::connect(&url).await.unwrap();
    // Every operation: a wait and its watch, a renewal and its audit, a survey, an eviction.
    let ttl = Duration::from_secs(3);
    let mutex = client.mutex("shared").ttl(ttl);
    let hold = mutex.lock().await.unwrap();
    let first = hold.deadline();
    let waiting = mutex.clone();
    let next = tokio::spawn(async move { waiting.lock().await });
    until("a renewal", || async { hold.deadline() > first }).await;
    until_one_waits(&client, "shared").await;
    hold.release().await.unwrap();
    let next = soon("the next", next).await.unwrap().unwrap();
    let id = next.claim().to_string();
    let evicted = client
        .engine()
        .evict(next.name().clone(), id, Eviction::Mark);
    assert!(evicted.await.unwrap());
    let loss = soon("the loss", next.lost()).await;
    assert_eq!(loss.reason, LossReason::Evicted);
    drop(next);
    // In another namespace it may do nothing, and the error says what it needs.
    let elsewhere = palisade::connect(&format!("{url}&namespace=elsewhere"))
        .await
        .unwrap();
    let error = fails(elsewhere.mutex("x").lock().await, ErrorKind::Denied);
    assert!(error.to_string().contains("readwrite"), "{error}");
}

/// With a role that lacks the engine's own prefix, a client could lock but neither renew nor
/// release.
#[tokio::test(flavor = "multi_thread")]
async fn a_user_without_the_engines_own_prefix_is_refused_at_once() {
    let (running, host) = need!(guarded(&WORKER));
    let url = format!("etcd://worker:pass-word@{host}");
    let client = palisade::connect(&url).await.unwrap();
    let refused = client.mutex("x").lock().await.err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::Denied, "{refused:?}");
    assert!(refused.message().contains(".palisade/"), "{refused}");
    // Nothing is left behind, and with the permission it works at once.
    let grant = format!("--user=root:top-secret {OWN_PREFIX}");
    let grant: Vec<&str> = grant.split(' ').collect();
    run_ctl(&running, &grant).unwrap();
    let hold = client.mutex("x").try_lock().await.unwrap();
    hold.expect("free").release().await.unwrap();
}

/// A password is rotated while a client is connected.
#[tokio::test(flavor = "multi_thread")]
async fn a_password_file_is_read_at_each_connect() {
    let (running, host) = need!(guarded(&[]));
    let password = password("top-secret");
    let file = password.path().display();
    let url = format!("etcd://{host}?user=root&password_file={file}&ttl=20s");
    let client = palisade::connect(&url).await.unwrap();
    let hold = client.mutex("kept").lock().await.unwrap();
    let rotate = "--user=root:top-secret user passwd root --interactive=false";
    let rotate: Vec<&str> = rotate.split(' ').collect();
    let mut passwd = etcdctl(&running, &rotate).unwrap();
    let mut passwd = passwd.stdin(Stdio::piped()).spawn().unwrap();
    let mut said = passwd.stdin.take().unwrap();
    std::io::Write::write_all(&mut said, b"new-secret\n").unwrap();
    drop(said);
    assert!(passwd.wait().unwrap().success(), "etcdctl user passwd");
    std::fs::write(password.path(), "new-secret\n").unwrap();
    // Every connection is new, and so is every login.
    tokio::task::block_in_place(|| running.nodes()[0].restart()).unwrap();
    let first = hold.deadline();
    until("a renewal", || async { hold.deadline() > first }).await;
    drop(hold);
}

/// An etcd with TLS and client certificates; ends when it is dropped.
struct Secured(Child);

impl Drop for Secured {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_of_both_sides_are_checked() {
    let etcd = need!(launch::need_tool("etcd"));
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    if let Err(why) = certificates(dir.path(), "DNS:localhost,IP:127.0.0.1") {
        return launch::skip("etcd", &why);
    }
    let (client_port, peer_port) = (launch::free_port(), launch::free_port());
    let (clients, peers) = (
        format!("https://127.0.0.1:{client_port}"),
        format!("http://127.0.0.1:{peer_port}"),
    );
    let (ca, cert, key) = (at("ca.pem"), at("server.pem"), at("server.key"));
    let child = Command::new(etcd)
        .args(["--data-dir", &at("data"), "--listen-client-urls"])
        .arg(format!("{clients},https://127.0.0.2:{client_port}"))
        .args([
            "--advertise-client-urls",
            &clients,
            "--listen-peer-urls",
            &peers,
        ])
        .args(["--initial-advertise-peer-urls", &peers])
        .args(["--initial-cluster", &format!("default={peers}")])
        .args(["--client-cert-auth", "--trusted-ca-file", &ca])
        .args(["--cert-file", &cert, "--key-file", &key])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let _server = Secured(child.unwrap());
    let url = format!("etcds://127.0.0.1:{client_port}?tls_ca={ca}");
    let whole = format!(
        "{url}&tls_cert={}&tls_key={}",
        at("client.pem"),
        at("client.key")
    );
    until("the server", || async {
        palisade::connect(&whole).await.is_ok()
    })
    .await;
    let client = palisade::connect(&whole).await.unwrap();
    cycle(&client.mutex("x")).await;
    // No client certificate; no TLS at all; an authority that did not sign the server's
    // certificate; and a file that does not exist.
    let plain = format!("etcd://127.0.0.1:{client_port}");
    let stranger = whole.replace(&ca, &at("other.pem"));
    let nowhere = whole.replace("tls_ca=", "tls_ca=/nowhere");
    let other_name = whole.replace("127.0.0.1", "127.0.0.2");
    // The member's alert is lost now and then, when its close overtakes it; our message is the
    // same.
    let bare = vec![(url.clone(), ErrorKind::Config, "tls_cert"); 50];
    let mut unanswered = 0;
    for (url, kind, words) in bare.into_iter().chain([
        (plain, ErrorKind::Unreachable, "etcds:"),
        (stranger, ErrorKind::Config, "tls_ca"),
        (other_name, ErrorKind::Config, "name this host"),
        (nowhere, ErrorKind::Config, "tls_ca"),
    ]) {
        let error = soon("a refusal", palisade::connect(&url))
            .await
            .err()
            .unwrap();
        // Very rarely one without a certificate gets no answer at all; why is not known.
        if words == "tls_cert" && error.message().contains("no answer") && unanswered == 0 {
            unanswered += 1;
            continue;
        }
        assert_eq!(error.kind(), kind, "{error:?}");
        assert!(error.to_string().contains(words), "{url}: {error}");
    }
    // A login in addition to the certificate.
    let etcdctl = need!(launch::need_tool("etcdctl"));
    for call in [
        "user add root:top-secret",
        "user grant-role root root",
        "auth enable",
    ] {
        let status = Command::new(&etcdctl)
            .env("ETCDCTL_API", "3")
            .args(["--endpoints", &clients, "--cacert", &ca])
            .args(["--cert", &at("client.pem"), "--key", &at("client.key")])
            .args(call.split(' '))
            .stdout(Stdio::null())
            .status();
        assert!(status.unwrap().success(), "etcdctl {call}");
    }
    let login = |password: &str| whole.replace("etcds://", &format!("etcds://root:{password}@"));
    let refused = palisade::connect(&login("wrong")).await.err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::Denied, "{refused:?}");
    let client = palisade::connect(&login("top-secret")).await.unwrap();
    cycle(&client.mutex("x")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_wrong_with_a_cluster_is_found() {
    let settings = [
        "--quota-backend-bytes",
        "65536",
        "--election-timeout",
        "5000",
        "--heartbeat-interval",
        "500",
    ];
    let running = match launch::start_with("etcd", &settings) {
        Ok(running) => running,
        Err(launch::Error::Missing(why)) => return launch::skip("etcd", &why),
        Err(error) => panic!("{error}"),
    };
    let client = palisade::connect(running.url()).await.unwrap();
    let check = client.check().await.unwrap();
    let codes = |check: &palisade::report::Checkup| -> Vec<&str> {
        check.findings.iter().map(|finding| finding.code).collect()
    };
    assert!(
        check
            .version
            .as_deref()
            .is_some_and(|version| version.starts_with("3."))
    );
    assert!(codes(&check).contains(&"ttl_floor"), "{check:?}");
    assert!(!codes(&check).contains(&"quota_alarm"), "{check:?}");
    // The server grants a longer ttl than requested, and that one counts.
    let mutex = client.mutex("short").ttl(Duration::from_secs(2));
    let hold = mutex.lock().await.unwrap();
    assert!(
        hold.remaining() > Duration::from_secs(4),
        "{:?}",
        hold.remaining()
    );
    hold.release().await.unwrap();
    let port = running.nodes()[0].port();
    let big = json!({ "key": base64(b"big"), "value": base64(&[0; 30_000]) }).to_string();
    for _ in 0..20 {
        let put = launch::wire::http(port, "POST", "/v3/kv/put", &big).unwrap();
        if put.0 != 200 {
            break;
        }
    }
    // The alarm is raised after the put that did not fit has been answered. It is a danger: nothing
    // can be locked.
    until("the alarm", || async {
        let findings = client.check().await.unwrap().findings;
        let mut alarms = findings.iter().filter(|found| found.code == "quota_alarm");
        alarms.any(|alarm| alarm.severity == Severity::Danger)
    })
    .await;
    let full = client.mutex("full").lock().await.err().unwrap();
    assert_eq!(full.kind(), ErrorKind::Unusable, "{full:?}");
    call(&running, "/v3/maintenance/status", json!({}));
}

/// Every lock makes history, and etcd compacts none by itself.
#[tokio::test(flavor = "multi_thread")]
async fn a_history_that_was_never_compacted_is_told() {
    let running = need!("etcd");
    let client = palisade::connect(running.url()).await.unwrap();
    let told = async || {
        let findings = client.check().await.unwrap().findings;
        findings.iter().any(|found| found.code == "never_compacted")
    };
    assert!(!told().await, "it is young");
    // Ten thousand revisions, each a transaction.
    let port = running.nodes()[0].port();
    let put = json!({ "key": base64(b"history"), "value": base64(b"x") }).to_string();
    let writers: Vec<_> = (0..8)
        .map(|_| {
            let put = put.clone();
            std::thread::spawn(move || {
                for _ in 0..1_251 {
                    launch::wire::http(port, "POST", "/v3/kv/put", &put).unwrap();
                }
            })
        })
        .collect();
    tokio::task::block_in_place(|| {
        writers
            .into_iter()
            .for_each(|writer| writer.join().unwrap())
    });
    assert!(told().await);
    call(&running, "/v3/kv/compaction", json!({ "revision": "5000" }));
    assert!(!told().await, "it is compacted");
}

#[tokio::test]
async fn urls_that_can_not_be_used_are_refused() {
    for (url, word) in [
        ("etcd:", "host"),
        ("etcd://localhost/db", "namespace"),
        ("etcd://localhost?tls_ca=/x", "tls_ca"),
        ("etcd://localhost?namespace=.palisade", "namespace"),
        ("etcd://localhost:99999", "host"),
        ("etcd://localhost?pasword_file=/x", "password_file"),
    ] {
        let error = palisade::connect(url).await.err().unwrap();
        let told = error.to_string();
        assert!(told.contains(word), "{url}: {told}");
    }
    let nobody = palisade::connect("etcd://127.0.0.1:1,127.0.0.1:2")
        .await
        .err()
        .unwrap();
    assert_eq!(nobody.kind(), ErrorKind::Unreachable);
    assert!(nobody.message().contains("127.0.0.1:"), "{nobody}");
    assert!(nobody.message().contains("refused"), "{nobody}");
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let host = silent.local_addr().unwrap().to_string();
    for url in [
        format!("etcd://{host}?connect_timeout=300ms"),
        format!("etcds://{host}?connect_timeout=300ms"),
    ] {
        let error = soon("an error", palisade::connect(&url)).await;
        let error = fails(error, ErrorKind::Unreachable);
        assert!(error.message().contains(&host), "{error}");
    }
    let unknown = palisade::connect("etcd://no.such.host.invalid").await;
    let unknown = unknown.err().unwrap().to_string();
    assert!(unknown.contains("no.such.host.invalid:2379"), "{unknown}");
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_that_is_logged_has_a_secret() {
    let Some((_running, host)) = guarded(&[]) else {
        return;
    };
    let url = |word| format!("etcd://root:{word}@{host}");
    says_no_secret(&url("top-secret"), &url("low-secret"), &["-secret"]).await;
}
