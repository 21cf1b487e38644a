//! Shared by the tests: Consul's HTTP API, and `consul lock`.

use std::process::{Command, Stdio};

use palisade::Client;
use palisade_testkit::lab::launch::{Running, table, wire};
use palisade_testkit::lab::trial::Tool;
pub(crate) use palisade_testkit::lab::trial::{
    beside_others, connected, fails, soon, started, until,
};
use serde_json::Value;

/// A client whose sessions, and the times between its audits, are longer than any test waits.
pub(crate) async fn lasting(url: &str) -> Client {
    palisade::connect(&format!("{url}?ttl=120s")).await.unwrap()
}

/// Reads from Consul's HTTP API.
pub(crate) fn get(running: &Running, path: &str) -> Value {
    let (status, answer) = wire::http(running.nodes()[0].port(), "GET", path, "").unwrap();
    match status {
        404 => Value::Null,
        200 => serde_json::from_str(&answer).unwrap(),
        _ => panic!("{path}: {status} {answer}"),
    }
}

/// The session that holds a key.
pub(crate) fn holder(running: &Running, key: &str) -> Option<String> {
    let pair = get(running, &format!("/v1/kv/{key}?consistent"));
    Some(pair[0]["Session"].as_str()?.to_owned())
}

/// The keys of locks: all of the namespace except the one that eviction watches block on.
pub(crate) fn keys(running: &Running) -> Vec<String> {
    let all = get(running, "/v1/kv/palisade/?keys");
    let keys = all.as_array().into_iter().flatten();
    let keys = keys.filter_map(|key| Some(key.as_str()?.to_owned()));
    keys.filter(|key| key != "palisade/.evict/last").collect()
}

/// Destroys a session, as an operator does.
pub(crate) fn destroy(running: &Running, session: &str) {
    let path = format!("/v1/session/destroy/{session}");
    let (status, _) = wire::http(running.nodes()[0].port(), "PUT", &path, "").unwrap();
    assert_eq!(status, 200, "{path}");
}

/// Runs one of Consul's own commands to its end.
pub(crate) fn consul(running: &Running, arguments: &[&str]) {
    let program = table::recipe_of("consul").unwrap().installed().unwrap();
    let ended = Command::new(program)
        .env("CONSUL_HTTP_ADDR", running.nodes()[0].address())
        .args(arguments)
        .stdout(Stdio::null())
        .status();
    assert!(ended.unwrap().success(), "consul {arguments:?}");
}

/// A running `consul lock`.
pub(crate) fn consul_lock(running: &Running, arguments: &[&str]) -> Tool {
    let program = table::recipe_of("consul").unwrap().installed().unwrap();
    let agent = format!("-http-addr=http://{}", running.nodes()[0].address());
    let mut command = Command::new(program);
    command.arg("lock").arg(agent).args(arguments);
    Tool::start(command.stderr(Stdio::null()))
}

/// Holds `prefix` until it is told to end; returns once it holds.
pub(crate) fn consul_holds(running: &Running, arguments: &[&str], prefix: &str) -> Tool {
    let command = ["-child-exit-code", prefix, "echo held; exec sleep 600"];
    let lock = consul_lock(running, &[arguments, &command].concat());
    assert_eq!(lock.line(), "held");
    lock
}
