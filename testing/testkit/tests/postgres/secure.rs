//! TLS to a server with our own certificate, and what is refused.

use std::os::unix::fs::{MetadataExt, PermissionsExt};

use palisade::ErrorKind;
use palisade_testkit::lab::launch;
use palisade_testkit::lab::trial::{certificates, expired};

use super::{connect, server_with, sql};

#[tokio::test]
async fn a_server_s_certificate_is_checked_by_both_engines() {
    let server = need!(server_with(&["-c", "listen_addresses=127.0.0.1,127.0.0.2"]));
    let data = server.nodes()[0].folder().join("data");
    if let Err(why) = certificates(&data, "IP:127.0.0.1") {
        return launch::skip("openssl", &why);
    }
    // The server runs as another user, and requires that it owns its key.
    let owner = std::fs::metadata(&data).unwrap();
    let (user, group) = (owner.uid(), owner.gid());
    std::os::unix::fs::chown(data.join("server.key"), Some(user), Some(group)).unwrap();
    let own = PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(data.join("server.key"), own).unwrap();
    let url = |scheme: &str, rest: &str| {
        let port = server.nodes()[0].port();
        format!("{scheme}://palisade@{rest}").replace("PORT", &port.to_string())
    };
    let schemes = ["postgres", "postgres+advisory"];
    let ca = |name: &str| format!("tls_ca={}", data.join(format!("{name}.pem")).display());

    // The server has no TLS yet.
    for scheme in schemes {
        let rest = format!("127.0.0.1:PORT/postgres?{}", ca("ca"));
        let client = connect(&url(scheme, &rest)).await;
        let refused = client.mutex("x").try_lock().await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Config, "{refused}");
        assert!(refused.to_string().contains("tls=disable"), "{refused}");
    }
    for setting in [
        "ssl_cert_file = 'server.pem'",
        "ssl_key_file = 'server.key'",
        "ssl = on",
    ] {
        sql(&server, &format!("ALTER SYSTEM SET {setting}"));
    }
    sql(&server, "SELECT pg_reload_conf()");
    let spoken = "SELECT count(*) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) \
        WHERE ssl AND application_name LIKE 'palisade%'";
    for scheme in schemes {
        let rest = format!("127.0.0.1:PORT/postgres?{}", ca("ca"));
        let client = connect(&url(scheme, &rest)).await;
        let lock = client.mutex("x");
        // The server takes a moment to reload its settings.
        let hold = tokio::time::timeout(super::SOON * 2, async {
            loop {
                match lock.try_lock().await {
                    Ok(hold) => break hold.unwrap(),
                    Err(error) => assert_eq!(error.kind(), ErrorKind::Config, "{error}"),
                }
                tokio::task::yield_now().await;
            }
        });
        let hold = hold.await.expect("TLS can't be agreed on");
        assert_ne!(sql(&server, spoken), ["0"], "{scheme} is not encrypted");
        // A waiter's statement is also cancelled over TLS.
        let waits = client.line("x", palisade::engine::Ask::Whole);
        let patience = palisade::Patience::For(std::time::Duration::from_millis(200));
        assert!(waits.acquire(patience).await.unwrap().is_none());
        hold.release().await.unwrap();

        // Another authority, and another name than in the certificate.
        for (rest, text) in [
            (format!("127.0.0.1:PORT/postgres?{}", ca("other")), "tls_ca"),
            (
                format!("127.0.0.2:PORT/postgres?{}", ca("ca")),
                "does not name this host",
            ),
        ] {
            let client = connect(&url(scheme, &rest)).await;
            let refused = client.mutex("x").try_lock().await.unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Config, "{refused}");
            assert!(refused.to_string().contains(text), "{refused}");
        }
    }
    // An expired certificate, which the server and, as the authority, the client read at each
    // connect.
    let client = data.join("renewed.pem");
    std::fs::copy(data.join("other.pem"), &client).unwrap();
    let url = |scheme: &str| {
        url(
            scheme,
            &format!("127.0.0.1:PORT/postgres?tls_ca={}", client.display()),
        )
    };
    for scheme in schemes {
        std::fs::copy(data.join("other.pem"), &client).unwrap();
        let patient = connect(&url(scheme)).await;
        let lock = patient.mutex("x");
        let refused = lock.try_lock().await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Config, "{refused}");
        std::fs::copy(data.join("ca.pem"), &client).unwrap();
        let hold = lock.try_lock().await.unwrap().unwrap();
        hold.release().await.unwrap();
    }
    if let Err(why) = expired(&data, "server") {
        return launch::skip("openssl", &why);
    }
    sql(&server, "SELECT pg_reload_conf()");
    for scheme in schemes {
        let expired = tokio::time::timeout(super::SOON * 2, async {
            loop {
                let client = connect(&url(scheme)).await;
                match client.mutex("y").try_lock().await {
                    Err(error) => break error,
                    Ok(_) => tokio::task::yield_now().await,
                }
            }
        });
        let expired = expired.await.expect("an old certificate is taken");
        assert_eq!(expired.kind(), ErrorKind::Config, "{expired}");
        assert!(expired.to_string().contains("expired"), "{expired}");
    }
}
