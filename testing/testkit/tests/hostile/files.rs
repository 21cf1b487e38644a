//! Files that options name, which are not what they should be.

use std::fs::File;
use std::process::Command;
use std::time::{Duration, Instant};

use palisade::ErrorKind;

/// Every option of an engine that names a file, and every variable.
#[tokio::test]
async fn a_huge_file_is_refused_at_once_wherever_one_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let huge = folder.path().join("huge");
    // Sparse: a gigabyte that takes no room.
    File::create(&huge).unwrap().set_len(1 << 30).unwrap();
    let huge = huge.display();
    let tls = ["tls_ca", "tls_cert", "tls_key"];
    let mut urls = Vec::new();
    for (scheme, more) in [
        ("rediss", "password_file"),
        ("etcds", "password_file"),
        ("zookeepers", "password_file"),
        ("postgres", "password_file"),
        ("redlock", "password_file"),
        ("https", "token_file"),
        ("consuls", "token_file"),
        ("kubernetes", "kubeconfig"),
    ] {
        let named = tls
            .iter()
            .filter(|_| scheme.ends_with('s') && scheme != "kubernetes" && scheme != "postgres");
        for option in named.chain([&more]) {
            let pair = if *option == "tls_key" {
                format!("&tls_cert={huge}")
            } else {
                String::new()
            };
            urls.push((
                *option,
                format!("{scheme}://127.0.0.1:1?{option}={huge}{pair}&connect_timeout=1s"),
            ));
        }
    }
    for (option, url) in urls {
        let begun = Instant::now();
        let error = palisade::connect(&url).await.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Config, "{url}: {error}");
        let message = error.message();
        assert!(message.contains("has more than"), "{url}: {message}");
        let named = if option == "tls_key" {
            "tls_cert"
        } else {
            option
        };
        assert!(message.contains(named), "{url}: {message}");
        assert!(
            begun.elapsed() < Duration::from_secs(1),
            "{url}: {:?}",
            begun.elapsed()
        );
    }
}

/// In a process of its own, for its environment.
#[test]
fn a_huge_file_that_a_variable_names_is_refused_too() {
    let folder = tempfile::tempdir().unwrap();
    let huge = folder.path().join("token");
    File::create(&huge).unwrap().set_len(1 << 30).unwrap();
    File::create(folder.path().join("namespace")).unwrap();
    let folder = folder.path().display().to_string();
    for (name, url) in [
        ("CONSUL_HTTP_TOKEN_FILE", "consul://127.0.0.1:1".to_owned()),
        ("KUBECONFIG", "kubernetes://x".to_owned()),
        ("OTHER", format!("kubernetes://x?service_account={folder}")),
    ] {
        let tried = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "files::refuses_in_its_environment", "--ignored"])
            .env("PALISADE_TEST_URL", &url)
            .env("KUBERNETES_SERVICE_HOST", "127.0.0.1")
            .env("KUBERNETES_SERVICE_PORT", "1")
            .env(name, &huge)
            .output()
            .unwrap();
        let out = String::from_utf8_lossy(&tried.stdout);
        assert!(out.contains("1 passed"), "{name}: {out}");
    }
}

#[tokio::test]
#[ignore = "run by another test, with an environment of its own"]
async fn refuses_in_its_environment() {
    let url = std::env::var("PALISADE_TEST_URL").unwrap();
    let begun = Instant::now();
    let error = palisade::connect(&url).await.err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.message().contains("has more than"), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(2));
}
