//! Consul, one server or three, with the quickest elections and short sessions.

use std::path::Path;

use serde_json::json;

use super::super::find::CONSUL;
use super::super::node::{Node, Spec};
use super::super::running::{Parts, addresses, alive};
use super::super::{ports, wire};
use super::{most, owned};

/// Starts `count` servers.
pub(in super::super) fn start(
    count: usize,
    folder: &Path,
    settings: &[&str],
) -> Result<Parts, String> {
    let (clients, servers, gossip) = (
        ports::several(count)?,
        ports::several(count)?,
        ports::several(count)?,
    );
    let join: Vec<String> = gossip
        .iter()
        .map(|port| format!("127.0.0.1:{port}"))
        .collect();
    let mut nodes = Vec::new();
    for (index, &client) in clients.iter().enumerate() {
        let configuration = json!({
            "server": true,
            "bootstrap_expect": count,
            "node_name": format!("n{index}"),
            // The id is the same after a wipe, because a node name is bound to its id.
            "node_id": format!("00000000-0000-4000-8000-{index:012}"),
            "data_dir": "data",
            "bind_addr": "127.0.0.1",
            "client_addr": "127.0.0.1",
            "retry_join": join,
            "retry_interval": "1s",
            "ports": {
                "http": client, "server": servers[index], "serf_lan": gossip[index],
                "serf_wan": -1, "dns": -1, "grpc": -1, "https": -1,
            },
            "performance": { "raft_multiplier": 1 },
            "session_ttl_min": "1s",
            "limits": { "http_max_conns_per_client": 2000 },
            "disable_update_check": true,
            "leave_on_terminate": false,
        });
        let mut arguments = owned(&["agent", "-config-file=consul.json"]);
        arguments.extend(owned(settings));
        let spec = Spec {
            arguments,
            prepare: Box::new(move |folder| {
                std::fs::write(folder.join("consul.json"), configuration.to_string())
                    .map_err(|error| format!("consul.json: {error}"))
            }),
            ..Spec::new(
                &CONSUL.get()?,
                Box::new(move || leader_of(client).map(drop)),
            )
        };
        nodes.push(Node::started(folder, &format!("n{index}"), client, spec)?);
    }
    Ok(Parts {
        url: format!("consul://{}", addresses(&nodes)),
        nodes,
        ready: Box::new(|nodes| alive(nodes).try_for_each(|(_, node)| writes(node.port()))),
        leader: Some(Box::new(move |nodes| {
            most(alive(nodes).filter_map(|(_, node)| {
                let port = leader_of(node.port()).ok()??;
                servers.iter().position(|server| *server == port)
            }))
        })),
    })
}

/// The port for servers of the leader that one server reports.
fn leader_of(port: u16) -> Result<Option<u16>, String> {
    match wire::http(port, "GET", "/v1/status/leader", "")? {
        (200, body) => Ok(body
            .trim()
            .trim_matches('"')
            .rsplit(':')
            .next()
            .and_then(|p| p.parse().ok())),
        (status, body) => Err(format!("port {port}: leader {status} {body}")),
    }
}

/// Whether a write through this server is accepted, and sessions will be.
fn writes(port: u16) -> Result<(), String> {
    match wire::http(port, "PUT", "/v1/kv/palisade-testkit-ready", "1")? {
        (200, body) if body.trim() == "true" => registered(port),
        // This server enforces ACLs, and we may not write.
        (403, body) if body.contains("Permission denied") => Ok(()),
        (status, body) => Err(format!("port {port}: write {status} {body}")),
    }
}

/// Whether the agent has registered its node, which it does some time after a leader accepts
/// writes. Until then it creates no session.
fn registered(port: u16) -> Result<(), String> {
    match wire::http(port, "GET", "/v1/catalog/nodes", "")? {
        (200, body) if body.contains("\"Node\"") => Ok(()),
        (status, body) => Err(format!("port {port}: nodes {status} {body}")),
    }
}
