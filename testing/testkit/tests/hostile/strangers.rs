//! Servers that speak something else, send elsewhere, or hang up halfway: the error says what to do.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use palisade::{Error, ErrorKind, Outcome};
use palisade_testkit::lab::launch;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_rustls::TlsAcceptor;

use crate::server::{answering, serving};

/// A kubeconfig for this server.
pub(crate) fn kubeconfig(server: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
         clusters:\n- name: c\n  cluster:\n    server: {server}\n\
         users:\n- name: u\n  user:\n    token: secret-2\n\
         contexts:\n- name: c\n  context: {{ cluster: c, user: u }}\n"
    )
}

/// What each engine over HTTP says when it connects to `server` (`http://host:port`, with what the
/// kubeconfig needs).
async fn said_of(server: &str, cluster: &str) -> Vec<(&'static str, Error)> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config");
    std::fs::write(&file, kubeconfig(&format!("{server}{cluster}"))).unwrap();
    let mut said = Vec::new();
    for (engine, url) in [
        ("http", server.to_owned()),
        ("consul", server.replacen("http", "consul", 1)),
        (
            "kubernetes",
            format!("kubernetes://x?kubeconfig={}", file.display()),
        ),
    ] {
        // A password file has nothing to do with it, a token has.
        let begun = Instant::now();
        let error = palisade::connect(&url).await.err().unwrap();
        println!("{engine}: {error}");
        assert!(
            begun.elapsed() < Duration::from_secs(2),
            "{engine}: {:?}",
            begun.elapsed()
        );
        assert!(!format!("{error:?}").contains("secret"), "{error:?}");
        assert_eq!(error.outcome(), Outcome::NotApplied, "{engine}: {error}");
        said.push((engine, error));
    }
    said
}

#[tokio::test]
async fn a_port_for_tls_is_recognized() {
    // The alert of a TLS server that reads HTTP, and what servers in Go and nginx answer.
    for answer in [
        &b"\x15\x03\x03\x00\x02\x02\x46"[..],
        b"HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n",
        b"HTTP/1.1 400 Bad Request\r\nContent-Length: 46\r\nConnection: close\r\n\r\nThe plain HTTP request was sent to HTTPS port.\n",
    ] {
        let server = format!("http://{}", answering(answer).await);
        for (engine, error) in said_of(&server, "").await {
            let scheme = if engine == "consul" { "consuls:" } else { "https:" };
            assert!(error.message().contains(scheme), "{engine}: {error}");
        }
    }
}

#[tokio::test]
async fn a_redirect_is_not_followed_and_told() {
    let elsewhere = b"HTTP/1.1 301 Moved\r\nLocation: https://me:secret@elsewhere:7/x?t=secret\r\nContent-Length: 0\r\n\r\n";
    let server = format!("http://{}", answering(elsewhere).await);
    for (engine, error) in said_of(&server, "").await {
        assert_eq!(error.kind(), ErrorKind::Unusable, "{engine}: {error}");
        for words in ["301", "redirects to https://elsewhere:7"] {
            assert!(error.message().contains(words), "{engine}: {error}");
        }
    }
    let login = b"HTTP/1.1 302 Found\r\nLocation: /login\r\nContent-Length: 0\r\n\r\n";
    let server = format!("http://{}", answering(login).await);
    for (engine, error) in said_of(&server, "").await {
        assert_eq!(error.kind(), ErrorKind::Unusable, "{engine}: {error}");
        assert!(error.message().contains("redirects"), "{engine}: {error}");
    }
}

/// It reads the request, ends its side without an answer, and keeps the connection open.
#[tokio::test]
async fn a_server_that_hangs_up_halfway_costs_no_timeout() {
    let address = serving(|mut client| async move {
        let mut asked = [0; 4096];
        let _ = client.read(&mut asked).await;
        let _ = client.shutdown().await;
        while client.read(&mut asked).await.is_ok_and(|read| read > 0) {}
        std::future::pending::<()>().await;
    });
    let server = format!("http://{}", address.await);
    for (engine, error) in said_of(&server, "").await {
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{engine}: {error}");
    }
}

/// What `openssl req -x509` makes by default: an authority, not a server.
#[tokio::test]
async fn an_authority_as_a_server_is_explained() {
    let folder = tempfile::tempdir().unwrap();
    let made = Command::new("openssl")
        .args("req -x509 -nodes -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost,IP:127.0.0.1 -keyout key.pem -out own.pem".split(' '))
        .current_dir(folder.path())
        .output();
    if !made.is_ok_and(|made| made.status.success()) {
        return launch::skip("openssl", "it makes no certificate");
    }
    let acceptor = acceptor(
        &folder.path().join("own.pem"),
        &folder.path().join("key.pem"),
    );
    let address = serving(move |client| {
        let accepted = acceptor.accept(client);
        async move {
            if let Ok(mut client) = accepted.await {
                let _ = client.shutdown().await;
            }
        }
    });
    let address = address.await;
    let own = folder.path().join("own.pem");
    let trusted = format!("?tls_ca={}", own.display());
    let file = folder.path().join("config");
    let server = format!(
        "https://{address}\n    certificate-authority: {}",
        own.display()
    );
    std::fs::write(&file, kubeconfig(&server)).unwrap();
    for url in [
        format!("https://{address}{trusted}"),
        format!("consuls://{address}{trusted}"),
        format!("rediss://{address}{trusted}"),
        format!("etcds://{address}{trusted}"),
        format!("zookeepers://{address}{trusted}"),
        format!("kubernetes://x?kubeconfig={}", file.display()),
    ] {
        let error = palisade::connect(&url).await.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Config, "{url}: {error:?}");
        let message = error.message();
        assert!(message.contains("CA:FALSE"), "{url}: {message}");
        assert!(!message.contains("CaUsed"), "{url}: {message}");
    }
}

fn acceptor(certificate: &Path, key: &Path) -> TlsAcceptor {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(
            vec![CertificateDer::from_pem_file(certificate).unwrap()],
            PrivateKeyDer::from_pem_file(key).unwrap(),
        );
    TlsAcceptor::from(Arc::new(config.unwrap()))
}
