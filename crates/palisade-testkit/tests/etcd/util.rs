//! What the tests share: etcd's JSON gateway, and etcdctl.

use std::process::Command;

use palisade::Client;
use palisade_testkit::lab::launch::{self, Running, wire};
use palisade_testkit::lab::trial::Tool;
pub(crate) use palisade_testkit::lab::trial::{soon, until};
use serde_json::{Value, json};

/// A client of the names that other tools use.
pub(crate) async fn beside_others(running: &Running) -> Client {
    palisade::connect(&format!("{}?namespace=", running.url()))
        .await
        .unwrap()
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

/// A call of etcdctl; `None` when it can't be had here.
pub(crate) fn etcdctl(running: &Running, arguments: &[&str]) -> Option<Command> {
    let mut command = Command::new(launch::need_tool("etcdctl")?);
    command
        .env("ETCDCTL_API", "3")
        .arg(format!("--endpoints={}", running.nodes()[0].address()))
        .args(arguments);
    Some(command)
}

/// A call of etcdctl that is under way.
pub(crate) fn start_ctl(running: &Running, arguments: &[&str]) -> Option<Tool> {
    etcdctl(running, arguments).map(|mut command| Tool::start(&mut command))
}

/// Runs etcdctl to its end.
pub(crate) fn run_ctl(running: &Running, arguments: &[&str]) -> Option<()> {
    let ended = start_ctl(running, arguments)?.ended();
    assert!(ended, "etcdctl {arguments:?}");
    Some(())
}
