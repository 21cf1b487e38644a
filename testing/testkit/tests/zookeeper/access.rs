//! Logins, ACLs, certificates, chroots, findings, and messages about wrong URLs.

use std::sync::Arc;
use std::time::Duration;

use palisade::engine::Ticket;
use palisade::{ErrorKind, Outcome};
use palisade_testkit::lab::launch;
use palisade_testkit::lab::trial::{certificates, says_no_secret};

use crate::util::{Raw, claim, connected, cycle, soon, until};

async fn refused(url: &str) -> palisade::Error {
    palisade::connect(url).await.err().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_login_keeps_others_out() {
    let running = need!("zookeeper");
    let address = running.nodes()[0].address();
    let mine = format!("zookeeper://me:secret@{address}/mine");
    let mine = palisade::connect(&mine).await.unwrap();
    let hold = mine.mutex("x").lock().await.unwrap();
    let codes = async |client: &palisade::Client| {
        let check = client.check().await.unwrap();
        let codes = check.findings.into_iter().map(|finding| finding.code);
        codes.collect::<Vec<_>>()
    };
    assert!(!codes(&mine).await.contains(&"open_acl"));
    let stranger = format!("zookeeper://{address}/mine");
    let stranger = palisade::connect(&stranger).await.unwrap();
    let denied = stranger.mutex("x").try_lock().await.err().unwrap();
    assert_eq!(denied.kind(), ErrorKind::Denied, "{denied}");
    let denied = stranger.mutex("y").lock().await.err().unwrap();
    assert_eq!(denied.kind(), ErrorKind::Denied, "{denied}");
    // The same user, with the password from a file.
    let file = running.folder().join("password");
    std::fs::write(&file, "secret\n").unwrap();
    let file = file.display();
    let again = format!("zookeeper://{address}/mine?user=me&password_file={file}");
    let again = palisade::connect(&again).await.unwrap();
    assert!(again.mutex("x").try_lock().await.unwrap().is_none());
    hold.release().await.unwrap();
    cycle(&again.mutex("x")).await;
    // Open to everyone on purpose.
    let open = format!("zookeeper://me:secret@{address}/open?acl=open");
    let open = palisade::connect(&open).await.unwrap();
    let _hold = open.mutex("x").lock().await.unwrap();
    assert!(codes(&open).await.contains(&"open_acl"));
    let stranger = format!("zookeeper://{address}/open");
    let stranger = palisade::connect(&stranger).await.unwrap();
    assert!(stranger.mutex("x").try_lock().await.unwrap().is_none());
}

/// It has a place before it learns that it may not read the line.
#[tokio::test(flavor = "multi_thread")]
async fn a_line_that_can_not_be_read_keeps_no_place() {
    let running = need!("zookeeper");
    let client = connected(&running).await;
    // They are no containers, which the server would remove and the client create anew.
    let mut raw = Raw::connect(running.nodes()[0].port());
    raw.create("/palisade", 0).unwrap();
    raw.create("/palisade/x", 0).unwrap();
    raw.allow("/palisade/x", 31 - 1).unwrap();
    let denied = client.mutex("x").lock().await.err().unwrap();
    assert_eq!(denied.kind(), ErrorKind::Denied, "{denied}");
    soon("the leave", client.flush()).await;
    assert_eq!(raw.count("/palisade/x"), 0);
    // A caller that has asked twice leaves in doubt.
    let claim = claim("x", Duration::from_secs(20));
    let ticket = Ticket {
        in_doubt: true,
        ..Ticket::own(claim.name.clone(), claim.id)
    };
    let engine = client.engine();
    let denied = engine.enter(Arc::new(claim)).await.err().unwrap();
    assert_eq!(denied.outcome(), Outcome::MaybeApplied, "{denied}");
    assert_eq!(raw.count("/palisade/x"), 1);
    let denied = engine.leave(ticket).await.err().unwrap();
    assert_eq!(denied.kind(), ErrorKind::Denied, "{denied}");
    assert_eq!(raw.count("/palisade/x"), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_that_is_logged_has_a_secret() {
    let running = need!("zookeeper");
    let address = running.nodes()[0].address();
    let url = |word| format!("zookeeper://me:{word}@{address}/said");
    // While it is held, its parent nodes exist and belong to this user alone.
    let mine = palisade::connect(&url("hunter-2")).await.unwrap();
    let _hold = mine.mutex("held").lock().await.unwrap();
    says_no_secret(&url("hunter-2"), &url("hunter-3"), &["hunter-"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn findings_tell_of_the_ensemble() {
    let running = need!("zookeeper");
    let client = connected(&running).await;
    let check = client.check().await.unwrap();
    let codes: Vec<&str> = check.findings.iter().map(|finding| finding.code).collect();
    assert!(codes.contains(&"one_server"), "{codes:?}");
    assert!(codes.contains(&"open_acl"), "{codes:?}");
    assert!(check.version.unwrap().starts_with("3."));
    let range = client.capability().ttl;
    let ms = Duration::from_millis;
    assert!(range.min < ms(700) && range.max == ms(80_000), "{range:?}");
    let long = client.mutex("x").ttl(Duration::from_secs(90)).lock().await;
    assert_eq!(long.err().unwrap().kind(), ErrorKind::InvalidArgument);
}

/// The servers notice a leader that hangs after syncLimit x tickTime: 5 s here.
#[tokio::test(flavor = "multi_thread")]
async fn a_ttl_that_no_hold_survives_a_hanging_leader_with_is_told() {
    let running = need!("zookeeper3");
    let finding = async |options: &str| {
        let client = palisade::connect(&format!("{}{options}", running.url())).await;
        let check = client.unwrap().check().await.unwrap();
        let mut findings = check.findings.into_iter();
        findings.find(|finding| finding.code == "leader_hangs")
    };
    let short = finding("?ttl=9s").await.unwrap();
    assert!(short.message.contains("= 5.0s"), "{}", short.message);
    assert!(short.remedy.contains("9.3s"), "{}", short.remedy);
    assert!(finding("?ttl=10s").await.is_none());
    assert!(finding("").await.is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_room_for_another_connection_is_named_as_such() {
    let running = need!("zookeeper", "maxClientCnxns=3");
    let _holder = connected(&running).await;
    let mut kept = Vec::new();
    let refused = loop {
        match palisade::connect(running.url()).await {
            Ok(client) if kept.len() < 4 => kept.push(client),
            Ok(_) => panic!("more connections than the server takes"),
            Err(refused) => break refused,
        }
    };
    assert_eq!(refused.kind(), ErrorKind::Unreachable);
    assert!(refused.message().contains("maxClientCnxns"), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chroot_is_made_and_names_are_below_it() {
    let running = need!("zookeeper");
    let url = format!("{}/a/b?namespace=locks", running.url());
    let client = palisade::connect(&url).await.unwrap();
    let hold = client.mutex("n/m").lock().await.unwrap();
    let mut raw = Raw::connect(running.nodes()[0].port());
    assert_eq!(raw.children("/a/b/locks"), ["n%2Fm"]);
    hold.release().await.unwrap();
    // Containers: nothing is left of them.
    until("an empty root", async || raw.children("/") == ["zookeeper"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_urls_are_refused_with_what_to_do() {
    for (url, says) in [
        ("zookeeper://", "needs a host"),
        ("zookeeper://h/a//b", "single slashes"),
        ("zookeeper://h/zookeeper", "records of their own"),
        ("zookeeper://h?namespace=.palisade", "records of their own"),
        ("zookeeper://h?layout=curator", "mutex or readwrite"),
        ("zookeeper://h?acl=creator", "user="),
        ("zookeeper://h?tls_ca=/x", "not encrypted"),
        ("zookeeper://h?lay=mutex", "layout"),
    ] {
        let error = refused(url).await;
        assert_eq!(error.kind(), ErrorKind::Config, "{url}: {error}");
        assert!(error.to_string().contains(says), "{url}: {error}");
    }
    let nobody = format!("zookeeper://127.0.0.1:{}", launch::free_port());
    let error = refused(&nobody).await;
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    assert!(error.to_string().contains("refused"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_are_checked() {
    let folder = tempfile::tempdir().unwrap();
    if let Err(why) = certificates(folder.path(), "DNS:localhost") {
        return launch::skip("zookeeper", &why);
    }
    let port = launch::free_port();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let pair = std::fs::read_to_string(path("server.key")).unwrap()
        + &std::fs::read_to_string(path("server.pem")).unwrap();
    std::fs::write(path("pair.pem"), pair).unwrap();
    let settings = [
        format!("secureClientPort={port}"),
        "secureClientPortAddress=127.0.0.1".to_owned(),
        "serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory".to_owned(),
        "ssl.keyStore.type=PEM".to_owned(),
        format!("ssl.keyStore.location={}", path("pair.pem")),
        "ssl.trustStore.type=PEM".to_owned(),
        format!("ssl.trustStore.location={}", path("ca.pem")),
        "ssl.clientAuth=need".to_owned(),
    ];
    let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
    let running = match launch::start_with("zookeeper", &settings) {
        Ok(running) => running,
        Err(launch::Error::Missing(why)) => return launch::skip("zookeeper", &why),
        Err(error) => panic!("{error}"),
    };
    let (ca, cert, key) = (path("ca.pem"), path("client.pem"), path("client.key"));
    // A server's first handshake takes long on a busy machine.
    let patient = "connect_timeout=10s";
    let url = format!(
        "zookeepers://localhost:{port}?{patient}&tls_ca={ca}&tls_cert={cert}&tls_key={key}"
    );
    // The server's readiness was checked on the plain port, which may open first.
    until("the port", async || {
        std::net::TcpStream::connect(("127.0.0.1", port)).is_ok()
    })
    .await;
    let client = palisade::connect(&url).await.unwrap();
    let hold = client.mutex("secure").lock().await.unwrap();
    let plain = connected(&running).await;
    assert!(plain.mutex("secure").try_lock().await.unwrap().is_none());
    hold.release().await.unwrap();
    let without = refused(&format!(
        "zookeepers://localhost:{port}?{patient}&tls_ca={ca}"
    ))
    .await;
    assert_eq!(without.kind(), ErrorKind::Config, "{without}");
    assert!(without.to_string().contains("tls_cert"), "{without}");
    let stranger = refused(&format!("zookeepers://localhost:{port}?{patient}")).await;
    assert_eq!(stranger.kind(), ErrorKind::Config, "{stranger}");
    assert!(stranger.to_string().contains("tls_ca"), "{stranger}");
    let not_plain = refused(&format!("zookeeper://localhost:{port}?{patient}")).await;
    assert!(not_plain.to_string().contains("zookeepers:"), "{not_plain}");
}
