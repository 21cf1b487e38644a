//! Stopping, killing and wiping, on real engines.

use std::time::Instant;

use palisade_testkit::engine::CutOff;
use palisade_testkit::lab::launch::proc::{self, State};
use palisade_testkit::lab::launch::{self, Node, wire};

use super::ask;

#[test]
fn a_node_is_stopped_continued_killed_restarted_and_wiped() {
    let engine = need!("redis");
    let node = &engine.nodes()[0];
    let port = node.port();
    let get = || wire::redis(port, &["GET", "key"]);
    wire::redis(port, &["SET", "key", "value"]).unwrap();

    node.stop().unwrap();
    assert_eq!(node.state(), State::Stopped);
    // The kernel still accepts connections for it.
    assert!(wire::connect(port).is_ok() && get().is_err());
    node.cont().unwrap();
    assert_eq!(
        (node.state(), get().unwrap().as_str()),
        (State::Running, "value")
    );

    let pid = node.pid().unwrap();
    node.kill().unwrap();
    assert_eq!(
        (node.state(), node.pid(), proc::state(pid)),
        (State::Dead, None, State::Dead)
    );
    assert!(node.stop().is_err() && get().is_err());
    node.restart().unwrap();
    assert_eq!(get().unwrap(), "value", "what was answered is kept");
    assert_ne!(node.pid().unwrap(), pid);

    node.wipe().unwrap();
    assert_eq!(get().unwrap(), "", "what is wiped is gone");
}

#[test]
fn an_outage_stops_every_node_and_ends() {
    let engine = need!("redis5");
    let answering = || {
        let answers = |node: &&Node| wire::redis(node.port(), &["PING"]).is_ok();
        engine.nodes().iter().filter(answers).count()
    };
    engine.nodes()[1].kill().unwrap();
    assert_eq!(answering(), 4);
    engine.begin();
    assert!(
        engine
            .nodes()
            .iter()
            .all(|node| node.state() != State::Running)
    );
    engine.end();
    assert_eq!(answering(), 4);
}

#[test]
fn postgres_stands_still_with_all_its_processes_and_keeps_its_rows() {
    let engine = need!("postgres");
    let node = &engine.nodes()[0];
    let query = |sql| wire::postgres(node.port(), "palisade", sql);
    query("CREATE TABLE t AS SELECT 7 AS n").unwrap();
    node.stop().unwrap();
    // The server process of the query above may have ended meanwhile.
    let mut tree = proc::tree(node.pid().unwrap());
    tree.retain(|pid| proc::state(*pid) != State::Dead);
    let all = |state| tree.iter().all(|pid| proc::state(*pid) == state);
    assert!(tree.len() > 3 && all(State::Stopped), "{tree:?}");
    node.cont().unwrap();
    // It may end now, too.
    let is_stopped = |pid: &u32| proc::state(*pid) == State::Stopped;
    assert!(!tree.iter().any(is_stopped), "{tree:?}");
    node.restart().unwrap();
    assert_eq!(query("SELECT n FROM t").unwrap(), ["7"]);
    node.wipe().unwrap();
    assert!(query("SELECT n FROM t").is_err());
}

/// Kills the leader, waits for another, and the first comes back as a follower.
fn leader_changes(name: &str) {
    let engine = need!(launch::need(name));
    let first = engine.kill_leader().unwrap();
    let begun = Instant::now();
    let second = engine.leader_where(|leader| leader != first).unwrap();
    println!(
        "{name}: {first} was killed, {second} leads after {:.1?}",
        begun.elapsed()
    );
    engine.ready().unwrap();
    engine.nodes()[first].restart().unwrap();
    engine.ready().unwrap();
    engine.leader_where(|_| true).unwrap();
    ask(&engine, engine.nodes()[first].port());
}

#[test]
fn etcd_has_another_leader_after_a_kill() {
    leader_changes("etcd3");
}

#[test]
fn zookeeper_has_another_leader_after_a_kill() {
    leader_changes("zookeeper3");
}

#[test]
fn consul_has_another_leader_after_a_kill() {
    leader_changes("consul3");
}

#[test]
fn sentinels_have_another_master_after_a_kill() {
    leader_changes("redis-sentinel");
}

/// Wipes one node that does not lead; the others keep the data, and accept it again.
fn wiped_member_joins_again(name: &str) {
    let engine = need!(launch::need(name));
    let other = engine.leader().map_or(1, |leader| (leader + 1) % 3);
    let node = &engine.nodes()[other];
    let pid = node.pid();
    node.wipe().unwrap();
    engine.ready().unwrap();
    assert_ne!(node.pid(), pid);
    ask(&engine, node.port());
    // Its vote counts again: without another one there is still a majority.
    if engine.leader().is_some() {
        engine.nodes()[(other + 1) % 3].kill().unwrap();
        engine.ready().unwrap();
    }
}

#[test]
fn a_wiped_member_of_etcd_joins_again() {
    wiped_member_joins_again("etcd3");
}

#[test]
fn a_wiped_member_of_etcd35_joins_again() {
    wiped_member_joins_again("etcd35x3");
}

#[test]
fn a_wiped_server_of_zookeeper_joins_again() {
    wiped_member_joins_again("zookeeper3");
}

#[test]
fn a_wiped_server_of_consul_joins_again() {
    wiped_member_joins_again("consul3");
}

#[test]
fn a_wiped_master_of_a_redis_cluster_joins_again() {
    wiped_member_joins_again("redis-cluster");
}

#[test]
fn a_whole_engine_comes_back_empty() {
    let engine = need!("etcd3");
    let port = engine.nodes()[0].port();
    let call = |verb: &str, body: &str| {
        wire::http(port, "POST", &format!("/v3/kv/{verb}"), body)
            .unwrap()
            .1
    };
    // "key" and "value" in base 64.
    call("put", r#"{"key":"a2V5","value":"dmFsdWU="}"#);
    assert!(call("range", r#"{"key":"a2V5"}"#).contains("dmFsdWU="));
    engine.wipe().unwrap();
    assert!(!call("range", r#"{"key":"a2V5"}"#).contains("dmFsdWU="));
}
