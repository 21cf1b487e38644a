//! TLS: a client with the authority's certificate is served; one without it, or with plain HTTP, is
//! not.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use palisade::BootTime;
use palisade_gateway::{Audit, Config, Gateway, Limits, Metrics};
use palisade_testkit::lab::trial::certificates;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::support::*;

fn connector(authority: &Path) -> TlsConnector {
    let mut roots = RootCertStore::empty();
    let certificate = CertificateDer::from_pem_file(authority).unwrap();
    roots.add(certificate).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    TlsConnector::from(Arc::new(config))
}

#[tokio::test]
async fn only_tls_is_spoken_and_the_certificate_counts() {
    let site = Site::file();
    let folder = tempfile::tempdir().unwrap();
    if let Err(why) = certificates(folder.path(), "DNS:localhost,IP:127.0.0.1") {
        palisade_testkit::lab::launch::skip("openssl", &why);
        return;
    }
    let file = |name: &str| folder.path().join(name);
    let client = palisade::connect(&site.url).await.unwrap();
    let config = |key: &str| Config {
        listen: Some("127.0.0.1:0".parse().unwrap()),
        socket: None,
        access: None,
        token: Some(TOKEN.into()),
        tls: Some((file("server.pem"), file(key))),
        insecure: false,
        public_urls: Vec::new(),
        drain: LIMIT,
        limits: Limits::default(),
        audit: Audit::to(std::io::sink()),
        metrics: Metrics::default(),
        tracer: None,
    };
    // A key that does not match the certificate is detected at the start.
    Gateway::bind(client.clone(), config("client.key"))
        .await
        .unwrap_err();
    let gateway = Gateway::bind(client, config("server.key")).await.unwrap();
    let addr = gateway.local_addr().unwrap();
    assert_eq!(gateway.url(), format!("https://{addr}"));
    let serving = tokio::spawn(gateway.serve(std::future::pending()));
    let host = format!("localhost:{}", addr.port());
    let bytes = request(&host, "POST", "/v1/claims", None, &json!({"name": "x"}));
    let name = ServerName::try_from("localhost").unwrap();
    let trusting = connector(&file("ca.pem"));
    let stream = TcpStream::connect(addr).await.unwrap();
    let mut stream = trusting.connect(name.clone(), stream).await.unwrap();
    stream.write_all(&bytes).await.unwrap();
    let mut answer = Vec::new();
    // The server may close without a TLS close_notify.
    let _ = stream.read_to_end(&mut answer).await;
    let held = parse(BootTime::now(), &answer).unwrap().is(200);
    assert_eq!(held.json["url"], format!("https://{addr}"));
    let stream = TcpStream::connect(addr).await.unwrap();
    let wary = connector(&file("other.pem"));
    wary.connect(name, stream).await.unwrap_err();
    // Plain HTTP gets no HTTP answer, and a missing handshake times out.
    let mut plain = TcpStream::connect(addr).await.unwrap();
    plain.write_all(&bytes).await.unwrap();
    let mut answer = Vec::new();
    let _ = plain.read_to_end(&mut answer).await;
    assert!(!answer.starts_with(b"HTTP"), "{answer:?}");
    // A renewed certificate is used without a restart. Its two files change one after the other.
    let renewed = tempfile::tempdir().unwrap();
    certificates(renewed.path(), "DNS:localhost,IP:127.0.0.1").unwrap();
    let connect = async |authority: &Path| {
        let name = ServerName::try_from("localhost").unwrap();
        let stream = TcpStream::connect(addr).await.unwrap();
        connector(authority).connect(name, stream).await.is_ok()
    };
    std::fs::copy(renewed.path().join("server.pem"), file("server.pem")).unwrap();
    let until = BootTime::now() + LIMIT;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(connect(&file("ca.pem")).await, "the pair before stays");
    std::fs::copy(renewed.path().join("server.key"), file("server.key")).unwrap();
    while !connect(&renewed.path().join("ca.pem")).await {
        assert!(!until.has_passed(), "it has the first certificate still");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    serving.abort();
}

#[tokio::test]
async fn a_key_that_others_may_read_is_told_and_one_that_they_may_write_is_refused() {
    let site = Site::file();
    let folder = tempfile::tempdir().unwrap();
    if let Err(why) = certificates(folder.path(), "DNS:localhost,IP:127.0.0.1") {
        palisade_testkit::lab::launch::skip("openssl", &why);
        return;
    }
    let file = |name: &str| folder.path().join(name);
    let client = palisade::connect(&site.url).await.unwrap();
    let bind = async |mode: u32| {
        let rights = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(file("server.key"), rights).unwrap();
        let config = Config {
            listen: Some("127.0.0.1:0".parse().unwrap()),
            socket: None,
            access: None,
            token: Some(TOKEN.into()),
            tls: Some((file("server.pem"), file("server.key"))),
            insecure: false,
            public_urls: Vec::new(),
            drain: LIMIT,
            limits: Limits::default(),
            audit: Audit::to(std::io::sink()),
            metrics: Metrics::default(),
            tracer: None,
        };
        Gateway::bind(client.clone(), config).await
    };
    assert!(bind(0o640).await.unwrap().findings().is_empty());
    let gateway = bind(0o644).await.unwrap();
    assert_eq!(gateway.findings()[0].code, "key_readable");
    let error = bind(0o646).await.unwrap_err();
    assert!(
        error.message().contains("server.key") && error.message().contains("chmod o-w"),
        "{error}"
    );
    // The finding is told to those who ask the gateway, too.
    let addr = gateway.local_addr().unwrap();
    let serving = tokio::spawn(gateway.serve(std::future::pending()));
    let host = format!("localhost:{}", addr.port());
    let name = ServerName::try_from("localhost").unwrap();
    let stream = TcpStream::connect(addr).await.unwrap();
    let mut stream = connector(&file("ca.pem"))
        .connect(name, stream)
        .await
        .unwrap();
    let bytes = request(&host, "GET", "/v1/engine", None, &json!({}));
    stream.write_all(&bytes).await.unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    assert!(String::from_utf8_lossy(&answer).contains("key_readable"));
    serving.abort();
}
