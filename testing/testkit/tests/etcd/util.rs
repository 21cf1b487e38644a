//! Shared by the tests: servers, clients, etcd's JSON gateway, and etcdctl.

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use palisade::engine::Claim;
use palisade::report::Scope;
use palisade::{Client, Name};
use palisade_testkit::lab::launch::{self, Running, wire};
use palisade_testkit::lab::trial::{self, Tool};
pub(crate) use palisade_testkit::lab::trial::{cycle, fails, soon, until, until_one_waits};
use serde_json::{Value, json};
use tempfile::NamedTempFile;

/// A server and its client; `None`, with the reason reported, if there is no server.
pub(crate) async fn served() -> Option<(Running, Client)> {
    let running = launch::need("etcd")?;
    let client = palisade::connect(running.url()).await.unwrap();
    Some((running, client))
}

/// A server that requires a login, after these calls of etcdctl; `root` has `top-secret`.
pub(crate) fn guarded(calls: &[&str]) -> Option<(Running, String)> {
    let running = launch::need("etcd")?;
    let root = ["user add root:top-secret", "user grant-role root root"];
    for call in root.iter().chain(calls).chain(&["auth enable"]) {
        let call: Vec<&str> = call.split(' ').collect();
        run_ctl(&running, &call)?;
    }
    let host = running.nodes()[0].address();
    Some((running, host))
}

/// A file with a password.
pub(crate) fn password(word: &str) -> NamedTempFile {
    let file = NamedTempFile::new().unwrap();
    std::fs::write(file.path(), format!("{word}\n")).unwrap();
    file
}

/// Whether the line is empty, as another client sees it.
pub(crate) async fn is_empty(client: &Client, name: &str) -> bool {
    let name = Name::new(name).unwrap();
    client.survey(Scope::Line(name)).await.unwrap().is_empty()
}

/// A claim of the whole line, for direct calls to an engine.
pub(crate) fn claim(name: &str, renewed: bool) -> Arc<Claim> {
    let claim = trial::claim(name, Duration::from_secs(60));
    Arc::new(Claim { renewed, ..claim })
}

/// A server, and a client of the names that other tools use.
pub(crate) async fn beside_others() -> Option<(Running, Client)> {
    let running = launch::need("etcd")?;
    let url = format!("{}?namespace=", running.url());
    let client = palisade::connect(&url).await.unwrap();
    Some((running, client))
}

/// A call of etcd's JSON gateway.
pub(crate) fn call(running: &Running, path: &str, body: Value) -> Value {
    let port = running.nodes()[0].port();
    let (status, answer) = wire::http(port, "POST", path, &body.to_string()).unwrap();
    assert_eq!(status, 200, "{path}: {answer}");
    serde_json::from_str(&answer).unwrap()
}

/// Whether a transaction with this condition is applied.
pub(crate) fn applies(running: &Running, key: &[u8], create_revision: i64) -> bool {
    let compare = json!({
        "key": base64(key), "target": "CREATE", "result": "EQUAL",
        "create_revision": create_revision.to_string(),
    });
    let put = json!({ "request_put": { "key": base64(b"user/data"), "value": base64(b"x") } });
    let txn = json!({ "compare": [compare], "success": [put] });
    call(running, "/v3/kv/txn", txn)["succeeded"] == json!(true)
}

pub(crate) fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let get = |at: usize| u32::from(chunk.get(at).copied().unwrap_or(0));
        let bits = get(0) << 16 | get(1) << 8 | get(2);
        for digit in 0..4 {
            let at = (bits >> (18 - 6 * digit)) & 63;
            let shown = digit <= chunk.len() as u32;
            text.push(if shown {
                DIGITS[at as usize] as char
            } else {
                '='
            });
        }
    }
    text
}

/// A call of etcdctl; `None` if it is not available here.
pub(crate) fn etcdctl(running: &Running, arguments: &[&str]) -> Option<Command> {
    let mut command = Command::new(launch::need_tool("etcdctl")?);
    command
        .env("ETCDCTL_API", "3")
        .arg(format!("--endpoints={}", running.nodes()[0].address()))
        .args(arguments);
    Some(command)
}

/// A running call of etcdctl.
pub(crate) fn start_ctl(running: &Running, arguments: &[&str]) -> Option<Tool> {
    etcdctl(running, arguments).map(|mut command| Tool::start(&mut command))
}

/// Runs etcdctl to its end.
pub(crate) fn run_ctl(running: &Running, arguments: &[&str]) -> Option<()> {
    let ended = start_ctl(running, arguments)?.ended();
    assert!(ended, "etcdctl {arguments:?}");
    Some(())
}
