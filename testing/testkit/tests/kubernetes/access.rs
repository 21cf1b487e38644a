//! Credentials: rotated tokens, plugins, certificates, pods; and messages about permissions.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use palisade::report::{Scope, Severity};
use palisade::{Error, ErrorKind};
use palisade_testkit::lab::launch::apiserver::{ApiServer, CERTIFICATE, Grant};
use palisade_testkit::lab::trial::{self, certificates, lock_once as lock, says_no_secret};

use crate::util::{cycle, seconds, server, soon, until};

const SECRET: &str = "5ec2e7-one";
const OTHER: &str = "5ec2e7-two";

fn says(error: &Error, kind: ErrorKind, words: &str) {
    trial::says(error, kind, words, "5ec2e7");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_missing_is_said() {
    let server = server();
    server.grant(vec![
        Grant::all(SECRET),
        Grant::of(OTHER, &["get", "list", "watch"]),
    ]);
    let with = |user: &str| server.url_with(&server.write_kubeconfig("other", user));
    lock(&with(&format!("{{token: {SECRET}}}"))).await.unwrap();
    let error = lock(&with("{token: 5ec2e7-nobody}")).await.unwrap_err();
    says(&error, ErrorKind::Denied, "credentials");
    let error = lock(&with("{}")).await.unwrap_err();
    says(&error, ErrorKind::Denied, "Role");
    let looks = with(&format!("{{token: {OTHER}}}"));
    let error = lock(&looks).await.unwrap_err();
    says(&error, ErrorKind::Denied, "Role");
    // `check` names the missing verbs.
    let client = palisade::connect(&looks).await.unwrap();
    let check = client.check().await.unwrap();
    assert_eq!(check.version.as_deref(), Some("v1.36.4-standin"));
    let missing = |verb: &str| {
        let says = format!("may not {verb} ");
        let mut findings = check.findings.iter();
        findings
            .find(|finding| finding.message.contains(&says))
            .map(|finding| finding.severity)
    };
    assert_eq!(missing("get"), None);
    assert_eq!(missing("update"), Some(Severity::Warning));
    assert_eq!(missing("delete"), Some(Severity::Info));
    let elsewhere = with(&format!("{{token: {SECRET}}}")).replace("//default", "//nosuch");
    says(
        &lock(&elsewhere).await.unwrap_err(),
        ErrorKind::Config,
        "nosuch",
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_that_is_logged_has_a_secret() {
    let server = server();
    server.grant(vec![Grant::all(SECRET)]);
    let url = |name, word: &str| {
        let user = format!("{{token: {word}}}");
        server.url_with(&server.write_kubeconfig(name, &user))
    };
    let (right, wrong) = (url("right", SECRET), url("wrong", OTHER));
    says_no_secret(&right, &wrong, &["5ec2e7"]).await;
}

/// The Role of the manifest has all permissions that palisade needs, and no others.
#[tokio::test(flavor = "multi_thread")]
async fn the_manifests_role_is_enough() {
    let manifest = include_str!("../../../../deploy/kubernetes/elect.yaml");
    let verbs = manifest
        .lines()
        .find_map(|line| line.trim().strip_prefix("verbs: ["));
    let verbs: Vec<&str> = verbs.unwrap().trim_end_matches(']').split(", ").collect();
    let server = server();
    server.grant(vec![Grant::of(SECRET, &verbs)]);
    let config = server.write_kubeconfig("role", &format!("{{token: {SECRET}}}"));
    let client = palisade::connect(&server.url_with(&config)).await.unwrap();
    let hold = client.mutex("a").lock().await.unwrap();
    let all = Scope::Prefix(String::new());
    assert_eq!(client.survey(all).await.unwrap().len(), 1);
    hold.release().await.unwrap();
    assert_eq!(client.check().await.unwrap().findings, []);
    for verb in &verbs {
        let others: Vec<&str> = verbs
            .iter()
            .filter(|other| *other != verb)
            .copied()
            .collect();
        server.grant(vec![Grant::of(SECRET, &others)]);
        let findings = client.check().await.unwrap().findings;
        assert_eq!(findings.len(), 1, "{verb} is not asked for");
    }
}

/// The kubelet replaces the file, and the old token is refused some time later.
#[tokio::test(flavor = "multi_thread")]
async fn a_token_that_is_rotated_costs_no_hold() {
    let server = server();
    server.grant(vec![Grant::all(SECRET)]);
    let file = server.folder().join("token");
    std::fs::write(&file, format!("{SECRET}\n")).unwrap();
    let config = server.write_kubeconfig("rotated", "{tokenFile: token}");
    let client = palisade::connect(&server.url_with(&config)).await.unwrap();
    let hold = client.mutex("a").ttl(seconds(3)).lock().await.unwrap();
    std::fs::write(&file, OTHER).unwrap();
    server.grant(vec![Grant::all(OTHER)]);
    for _ in 0..2 {
        let first = hold.deadline();
        until("a renewal", async || hold.deadline() > first).await;
    }
    assert!(hold.is_valid());
    hold.release().await.unwrap();
}

/// A plugin that counts its runs.
fn plugin(folder: &Path, body: &str) -> PathBuf {
    let path = folder.join("plugin");
    let script = format!("#!/bin/sh\necho run >> \"$(dirname \"$0\")/runs\"\n{body}\n");
    std::fs::write(&path, script).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

fn runs(folder: &Path) -> usize {
    let runs = std::fs::read_to_string(folder.join("runs")).unwrap_or_default();
    runs.lines().count()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plugin_gives_tokens_and_is_run_again_when_they_are_refused() {
    let server = server();
    server.grant(vec![Grant::all(SECRET)]);
    let folder = server.folder();
    std::fs::write(folder.join("current"), SECRET).unwrap();
    // It checks its environment and arguments, and returns the content of a file.
    plugin(
        folder,
        "case $KUBERNETES_EXEC_INFO in *ExecCredential*) ;; *) exit 3;; esac\n\
         [ \"$1 $REGION\" = 'token north' ] || exit 4\n\
         printf '{\"apiVersion\":\"client.authentication.k8s.io/v1\",\"kind\":\"ExecCredential\",\"status\":{\"token\":\"%s\"}}' \"$(cat \"$(dirname \"$0\")/current\")\"",
    );
    let user = "{exec: {apiVersion: client.authentication.k8s.io/v1, command: ./plugin, args: [token], env: [{name: REGION, value: north}], interactiveMode: Never}}";
    let config = server.write_kubeconfig("exec", user);
    let client = palisade::connect(&server.url_with(&config)).await.unwrap();
    let hold = client.mutex("a").ttl(seconds(3)).lock().await.unwrap();
    assert_eq!(runs(folder), 1, "it is not run for every request");
    std::fs::write(folder.join("current"), OTHER).unwrap();
    server.grant(vec![Grant::all(OTHER)]);
    let first = hold.deadline();
    until("a renewal", async || hold.deadline() > first).await;
    assert_eq!(runs(folder), 2);
    hold.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plugin_is_run_again_before_its_token_expires() {
    let server = server();
    server.grant(vec![Grant::all(SECRET)]);
    let folder = server.folder();
    // It expires within the minute in which it is renewed early.
    plugin(
        folder,
        &format!(
            "printf '{{\"status\":{{\"token\":\"{SECRET}\",\"expirationTimestamp\":\"%s\"}}}}' \"$(date -u -d '+30 seconds' +%Y-%m-%dT%H:%M:%SZ)\""
        ),
    );
    let user = "{exec: {apiVersion: client.authentication.k8s.io/v1beta1, command: ./plugin}}";
    let config = server.write_kubeconfig("exec", user);
    let client = palisade::connect(&server.url_with(&config)).await.unwrap();
    cycle(&client.mutex("a")).await;
    until("another run", async || runs(folder) > 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plugin_that_fails_says_what_to_do() {
    let server = server();
    for (body, words) in [
        ("exit 1", "failed"),
        ("echo 5ec2e7", "ExecCredential"),
        ("echo '{\"status\":{}}'", "neither"),
    ] {
        plugin(server.folder(), body);
        let user = "{exec: {command: ./plugin, installHint: install the tool}}";
        let config = server.write_kubeconfig("exec", user);
        let error = lock(&server.url_with(&config)).await.unwrap_err();
        says(&error, ErrorKind::Config, words);
        assert!(error.to_string().contains("install the tool"), "{error}");
    }
    let user = "{exec: {command: nosuch-plugin}}";
    let config = server.write_kubeconfig("exec", user);
    let error = lock(&server.url_with(&config)).await.unwrap_err();
    says(&error, ErrorKind::Config, "can't be run");
}

/// A server with our own certificates; `None` if openssl is missing.
fn secure() -> Option<(tempfile::TempDir, ApiServer)> {
    let folder = tempfile::tempdir().unwrap();
    if let Err(why) = certificates(folder.path(), "DNS:cluster.internal,IP:127.0.0.1") {
        palisade_testkit::lab::launch::skip("openssl", &why);
        return None;
    }
    let server = ApiServer::start_tls(folder.path()).unwrap();
    Some((folder, server))
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_identify_both_sides() {
    let Some((folder, server)) = secure() else {
        return;
    };
    server.grant(vec![Grant::all(CERTIFICATE)]);
    let config = std::fs::read_to_string(server.kubeconfig()).unwrap();
    let with = |name: &str, from: &str, to: &str| {
        let path = server.folder().join(name);
        std::fs::write(&path, config.replace(from, to)).unwrap();
        server.url_with(&path)
    };
    let says_no = lock(&server.url()).await.unwrap_err();
    says(&says_no, ErrorKind::Denied, "Role");
    let show = |file: &str| folder.path().join(file).display().to_string();
    let ours = format!(
        "user: {{client-certificate: {}, client-key: {}}}",
        show("client.pem"),
        show("client.key")
    );
    lock(&with("ours", "user: {}", &ours)).await.unwrap();
    let strange = with("strange", "ca.pem", "other.pem");
    says(
        &lock(&strange).await.unwrap_err(),
        ErrorKind::Config,
        "certificate-authority",
    );
    // A server name in place of the address, as behind a tunnel.
    let named = format!("https://127.0.0.1:{}", server.address().port());
    let tunnel = format!("{named}\n    tls-server-name: cluster.internal");
    let error = lock(&with("tunnel", &named, &tunnel)).await.unwrap_err();
    says(&error, ErrorKind::Denied, "Role");
    let wrong = format!("{named}\n    tls-server-name: elsewhere.internal");
    let error = lock(&with("wrong", &named, &wrong)).await.unwrap_err();
    says(&error, ErrorKind::Config, "tls-server-name");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_uses_its_service_account() {
    let Some((folder, server)) = secure() else {
        return;
    };
    server.grant(vec![Grant::all(SECRET)]);
    let account = folder.path().join("account");
    std::fs::create_dir(&account).unwrap();
    std::fs::copy(folder.path().join("ca.pem"), account.join("ca.crt")).unwrap();
    std::fs::write(account.join("token"), SECRET).unwrap();
    std::fs::write(account.join("namespace"), "default").unwrap();
    // A separate process, because all tests share the environment of this one.
    let url = format!("kubernetes://?service_account={}", account.display());
    let run = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "access::locks_with_its_environment", "--ignored"])
        .env("PALISADE_TEST_KUBERNETES_URL", url)
        .env("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        .env(
            "KUBERNETES_SERVICE_PORT",
            server.address().port().to_string(),
        )
        .env_remove("KUBECONFIG")
        .output()
        .unwrap();
    let out = String::from_utf8_lossy(&run.stdout);
    assert!(out.contains("1 passed"), "{out}");
    assert_eq!(server.leases(), ["palisade.guarded"]);
    // Outside of a pod, KUBECONFIG names the file.
    let plain = crate::util::server();
    let run = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "access::locks_with_its_environment", "--ignored"])
        .env("PALISADE_TEST_KUBERNETES_URL", "kubernetes://")
        .env(
            "KUBECONFIG",
            format!("/nosuch/config:{}", plain.kubeconfig().display()),
        )
        .output()
        .unwrap();
    let out = String::from_utf8_lossy(&run.stdout);
    assert!(out.contains("1 passed"), "{out}");
    assert_eq!(plain.leases(), ["palisade.guarded"]);
}

/// Run by the test above, in a separate process.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs the environment of its caller"]
async fn locks_with_its_environment() {
    let url = std::env::var("PALISADE_TEST_KUBERNETES_URL").unwrap();
    soon("the lock", lock(&url)).await.unwrap();
}
