//! Sets of Redis servers that know each other: Sentinel and Cluster.

use std::path::Path;

use super::super::find::REDIS;
use super::super::node::{Node, START, Spec};
use super::super::running::{Parts, addresses, alive};
use super::super::{ports, until, wire};
use super::most;
use super::redis::{encrypted, ping, server, spec};

/// The sentinels' name of the master.
const MASTER: &str = "main";

/// The index of the first sentinel among the nodes: after the master and its replica.
const SENTINELS: usize = 2;

/// Master, replica, three sentinels.
pub(in super::super) fn sentinel(folder: &Path, settings: &[&str]) -> Result<Parts, String> {
    let master = server(&REDIS, folder, "n0", settings)?;
    let to = master.tls_port().unwrap_or(master.port());
    let follow = format!("replicaof 127.0.0.1 {to}");
    let tls = settings.iter().position(|word| *word == "--tls");
    let tls = tls.and_then(|at| settings.get(at + 1));
    let replica = server(&REDIS, folder, "n1", &[settings, &[&follow]].concat())?;
    // A sentinel discovers replicas when it starts, and then every ten seconds.
    until(START, || linked(replica.port()))?;
    let mut nodes = vec![master, replica];
    for index in 0..3 {
        let port = ports::free()?;
        let tls_port = tls.map(|_| ports::free()).transpose()?;
        let encrypted = tls
            .zip(tls_port)
            .map(|(folder, port)| encrypted(folder, port));
        let encrypted = encrypted.unwrap_or_default();
        let configuration = format!(
            "{encrypted}port {port}\nbind 127.0.0.1\nprotected-mode no\nsentinel monitor {MASTER} 127.0.0.1 {to} 2\n\
             sentinel down-after-milliseconds {MASTER} 1000\nsentinel failover-timeout {MASTER} 3000\n"
        );
        let spec = Spec {
            arguments: ["sentinel.conf", "--sentinel"].map(str::to_owned).to_vec(),
            prepare: Box::new(move |folder| {
                std::fs::write(folder.join("sentinel.conf"), &configuration)
                    .map_err(|error| format!("sentinel.conf: {error}"))
            }),
            tls_port,
            ..Spec::new(&REDIS.get()?, Box::new(move || ping(port)))
        };
        nodes.push(Node::started(folder, &format!("s{index}"), port, spec)?);
    }
    Ok(Parts {
        url: format!(
            "{}+sentinel://{}/{MASTER}",
            scheme(&nodes),
            addresses(&nodes[SENTINELS..])
        ),
        nodes,
        ready: Box::new(|nodes| {
            let master = named_master(nodes).ok_or("the sentinels know no master")?;
            for (index, node) in alive(nodes) {
                match index {
                    _ if index == master => is_master(node.port())?,
                    0 | 1 => linked(node.port())?,
                    _ => sees_all(node.port())?,
                }
            }
            Ok(())
        }),
        leader: Some(Box::new(named_master)),
    })
}

fn scheme(nodes: &[Node]) -> &'static str {
    match nodes[0].tls_port() {
        Some(_) => "rediss",
        None => "redis",
    }
}

/// The master that most sentinels name.
fn named_master(nodes: &[Node]) -> Option<usize> {
    most(
        alive(nodes)
            .filter(|(index, _)| *index >= SENTINELS)
            .filter_map(|(_, sentinel)| {
                let ask = ["SENTINEL", "get-master-addr-by-name", MASTER];
                let answer = wire::redis(sentinel.port(), &ask).ok()?;
                let port: u16 = answer.lines().nth(1)?.parse().ok()?;
                let is_it = |node: &Node| node.port() == port || node.tls_port() == Some(port);
                nodes.iter().position(is_it)
            }),
    )
}

fn is_master(port: u16) -> Result<(), String> {
    expect(port, &["INFO", "replication"], "role:master")
}

fn linked(port: u16) -> Result<(), String> {
    expect(port, &["INFO", "replication"], "master_link_status:up")
}

/// Whether a sentinel knows the others and the replica.
fn sees_all(port: u16) -> Result<(), String> {
    let answer = wire::redis(port, &["SENTINEL", "master", MASTER])?;
    let lines: Vec<&str> = answer.lines().collect();
    let field = |name| {
        lines
            .iter()
            .position(|line| *line == name)
            .and_then(|at| lines.get(at + 1))
    };
    let (others, replicas) = (field("num-other-sentinels"), field("num-slaves"));
    match (others, replicas) {
        (Some(&"2"), Some(&"1")) => Ok(()),
        seen => Err(format!("a sentinel sees {seen:?} others and replicas")),
    }
}

fn expect(port: u16, command: &[&str], line: &str) -> Result<(), String> {
    let answer = wire::redis(port, command)?;
    if answer.lines().any(|found| found.trim_end() == line) {
        Ok(())
    } else {
        Err(format!("port {port}: no {line}"))
    }
}

/// How many masters a cluster has.
const MASTERS: usize = 3;

/// A cluster of three masters, each with a third of the slots; further nodes are replicas of the
/// first.
pub(in super::super) fn cluster(
    replicas: usize,
    folder: &Path,
    settings: &[&str],
) -> Result<Parts, String> {
    let (mut nodes, count) = (Vec::new(), MASTERS + replicas);
    let (clients, buses) = (ports::several(count)?, ports::several(count)?);
    for (index, bus) in buses.iter().enumerate() {
        let line = format!("cluster-port {bus}");
        let clustered = [
            "cluster-enabled yes",
            "cluster-node-timeout 2000",
            "cluster-replica-validity-factor 0",
            &line,
        ];
        let settings = [settings, &clustered[..]].concat();
        let (port, all) = (clients[index], clients.clone());
        let spec = Spec {
            rejoin: Some(Box::new(move || forget(&all, port))),
            ..spec(&REDIS, port, &settings)?
        };
        nodes.push(Node::new(folder, &format!("n{index}"), port, spec)?);
    }
    for node in &nodes {
        node.spawn()?;
    }
    Ok(Parts {
        url: format!("{}+cluster://{}", scheme(&nodes), addresses(&nodes)),
        ready: Box::new(move |nodes| {
            // New and wiped nodes know no others; commands that repeat known facts fail and are
            // ignored.
            for (index, node) in alive(nodes) {
                introduce(index, node.port(), nodes, &buses);
            }
            alive(nodes).try_for_each(|(index, node)| {
                let ask = ["CLUSTER", "INFO"];
                expect(node.port(), &ask, "cluster_state:ok")?;
                let known = format!("cluster_known_nodes:{}", nodes.len());
                expect(node.port(), &ask, &known)?;
                match index {
                    ..MASTERS => Ok(()),
                    _ => follow(node.port(), nodes[0].port()),
                }
            })
        }),
        nodes,
        leader: None,
    })
}

/// Makes the others forget the node that had this port: it comes back with another id.
fn forget(all: &[u16], gone: u16) -> Result<Vec<String>, String> {
    for &port in all.iter().filter(|port| **port != gone) {
        let known = wire::redis(port, &["CLUSTER", "NODES"])?;
        let old = known
            .lines()
            .find(|line| line.contains(&format!(":{gone}@")));
        if let Some(id) = old.and_then(|line| line.split(' ').next()) {
            wire::redis(port, &["CLUSTER", "FORGET", id])?;
        }
    }
    Ok(Vec::new())
}

/// Makes a node a replica of the master, and waits until it has caught up.
fn follow(port: u16, master: u16) -> Result<(), String> {
    if is_master(port).is_ok() {
        let id = wire::redis(master, &["CLUSTER", "MYID"])?;
        wire::redis(port, &["CLUSTER", "REPLICATE", &id])?;
    }
    linked(port)
}

fn introduce(index: usize, port: u16, nodes: &[Node], buses: &[u16]) {
    // A node that was not up before may know the others by now, and still have no slots.
    let is = |line: &str| expect(port, &["CLUSTER", "INFO"], line).is_ok();
    let all = format!("cluster_known_nodes:{}", nodes.len());
    if is(&all) && is("cluster_slots_assigned:16384") {
        return;
    }
    let epoch = (index + 1).to_string();
    let _ = wire::redis(port, &["CLUSTER", "SET-CONFIG-EPOCH", &epoch]);
    if index < MASTERS {
        let share = |index| index * 16_384 / MASTERS;
        let (from, to) = (share(index).to_string(), (share(index + 1) - 1).to_string());
        let _ = wire::redis(port, &["CLUSTER", "ADDSLOTSRANGE", &from, &to]);
    }
    for (other, bus) in nodes.iter().zip(buses) {
        if other.port() != port {
            let (there, bus) = (other.port().to_string(), bus.to_string());
            let _ = wire::redis(port, &["CLUSTER", "MEET", "127.0.0.1", &there, &bus]);
        }
    }
}
