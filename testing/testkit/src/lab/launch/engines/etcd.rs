//! etcd, one member or three.

use std::path::Path;

use serde_json::{Value, json};

use super::super::find::Part;
use super::super::node::{Node, Rejoin, START, Spec};
use super::super::running::{Parts, addresses, alive};
use super::super::{ports, until, wire};
use super::owned;

/// Starts `count` members.
pub(in super::super) fn start(
    part: &Part,
    count: usize,
    folder: &Path,
    settings: &[&str],
) -> Result<Parts, String> {
    let (clients, peers) = (ports::several(count)?, ports::several(count)?);
    let members: Vec<String> = peers
        .iter()
        .enumerate()
        .map(|(index, peer)| format!("n{index}=http://127.0.0.1:{peer}"))
        .collect();
    let mut nodes = Vec::new();
    for (index, (&client, peer)) in clients.iter().zip(&peers).enumerate() {
        let name = format!("n{index}");
        let (client_url, peer_url) = (
            format!("http://127.0.0.1:{client}"),
            format!("http://127.0.0.1:{peer}"),
        );
        let members = members.join(",");
        let mut arguments = owned(&[
            "--name",
            &name,
            "--data-dir",
            "data",
            "--listen-client-urls",
            &client_url,
            "--advertise-client-urls",
            &client_url,
            "--listen-peer-urls",
            &peer_url,
            "--initial-advertise-peer-urls",
            &peer_url,
            "--initial-cluster",
            &members,
            "--initial-cluster-state",
            "new",
        ]);
        arguments.extend(owned(settings));
        // Without a majority a member accepts connections but answers nothing.
        let answers = Box::new(move || wire::connect(client).map(drop));
        let others: Vec<u16> = clients
            .iter()
            .copied()
            .filter(|&port| port != client)
            .collect();
        let rejoin = move || replace_member(&others, &peer_url);
        let spec = Spec {
            arguments,
            rejoin: (count > 1).then(|| Box::new(rejoin) as Rejoin),
            ..Spec::new(&part.get()?, answers)
        };
        nodes.push(Node::started(folder, &name, client, spec)?);
    }
    Ok(Parts {
        url: format!("etcd://{}", addresses(&nodes)),
        nodes,
        ready: Box::new(|nodes| alive(nodes).try_for_each(|(_, node)| healthy(node.port()))),
        leader: Some(Box::new(leader)),
    })
}

fn healthy(port: u16) -> Result<(), String> {
    match wire::http(port, "GET", "/health", "")? {
        (200, body) if body.contains("\"true\"") => Ok(()),
        (status, body) => Err(format!("port {port}: health {status} {body}")),
    }
}

/// The member that considers itself the leader, in the latest term: a member that was stopped may
/// do so for a while after it is continued.
fn leader(nodes: &[Node]) -> Option<usize> {
    let claims = alive(nodes).filter_map(|(index, node)| {
        let (_, body) = wire::http(node.port(), "POST", "/v3/maintenance/status", "{}").ok()?;
        let status: Value = serde_json::from_str(&body).ok()?;
        let leads = status["header"]["member_id"] == status["leader"];
        let term: u64 = status["raftTerm"].as_str()?.parse().ok()?;
        leads.then_some((term, index))
    });
    claims.max().map(|(_, index)| index)
}

/// Removes the member with this peer URL and adds it again, through one of the others.
fn replace_member(others: &[u16], peer: &str) -> Result<Vec<String>, String> {
    let call = |port: u16, verb: &str, body: String| match wire::http(
        port,
        "POST",
        &format!("/v3/cluster/member/{verb}"),
        &body,
    )? {
        (200, body) => serde_json::from_str(&body).map_err(|error| error.to_string()),
        (status, body) => Err(format!("member {verb}: {status} {body}")),
    };
    // A member can be added only when the others have been connected for five seconds.
    until(START, || {
        let mut refused = "no other member runs".to_owned();
        for &port in others {
            let replace = || {
                let list: Value = call(port, "list", "{}".to_owned())?;
                let members = list["members"].as_array().cloned().unwrap_or_default();
                let old = members.iter().find(|member| member["peerURLs"][0] == peer);
                if let Some(old) = old {
                    call(port, "remove", json!({ "ID": old["ID"] }).to_string())?;
                }
                call(port, "add", json!({ "peerURLs": [peer] }).to_string())
            };
            match replace() {
                Ok(_) => return Ok(owned(&["--initial-cluster-state", "existing"])),
                Err(why) => refused = why,
            }
        }
        Err(refused)
    })
}
