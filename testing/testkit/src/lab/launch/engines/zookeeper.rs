//! ZooKeeper, one server or three, with short ticks: sessions may last from one second.

use std::path::Path;

use super::super::find::{ZOOKEEPER, on_path};
use super::super::node::{Node, Spec};
use super::super::running::{Parts, addresses, alive};
use super::super::{ports, wire};
use super::owned;

/// Starts `count` servers. Settings are lines of `zoo.cfg`.
pub(in super::super) fn start(
    count: usize,
    folder: &Path,
    settings: &[&str],
) -> Result<Parts, String> {
    let java = on_path("java").ok_or("there is no java")?;
    let classpath = format!(".:{}", ZOOKEEPER.get()?.display());
    let (clients, peers, votes) = (
        ports::several(count)?,
        ports::several(count)?,
        ports::several(count)?,
    );
    let servers: String = match count {
        1 => String::new(),
        _ => (0..count)
            .map(|n| format!("server.{n}=127.0.0.1:{}:{}\n", peers[n], votes[n]))
            .collect(),
    };
    let mut nodes = Vec::new();
    for (index, &client) in clients.iter().enumerate() {
        let configuration = format!(
            "tickTime=500\ninitLimit=20\nsyncLimit=10\nminSessionTimeout=1000\n\
             maxSessionTimeout=120000\nmaxClientCnxns=0\nclientPort={client}\n\
             clientPortAddress=127.0.0.1\ndataDir=data\nadmin.enableServer=false\n\
             extendedTypesEnabled=true\n4lw.commands.whitelist=*\n{servers}{}\n",
            settings.join("\n")
        );
        let spec = Spec {
            arguments: owned(&[
                "-Xmx128m",
                "-XX:+UseSerialGC",
                "-XX:TieredStopAtLevel=1",
                "-XX:-UsePerfData",
                "-Dznode.container.checkIntervalMs=1000",
                // In kilobytes; the default of 64 MB would take that much memory here.
                "-Dzookeeper.preAllocSize=1024",
                "-cp",
                &classpath,
                "org.apache.zookeeper.server.quorum.QuorumPeerMain",
                "zoo.cfg",
            ]),
            prepare: Box::new(move |folder| {
                std::fs::create_dir_all(folder.join("data"))
                    .and_then(|()| std::fs::write(folder.join("data/myid"), index.to_string()))
                    .and_then(|()| std::fs::write(folder.join("zoo.cfg"), &configuration))
                    .map_err(|error| format!("zoo.cfg: {error}"))
            }),
            ..Spec::new(&java, Box::new(move || alone(client)))
        };
        nodes.push(Node::started(folder, &format!("n{index}"), client, spec)?);
    }
    Ok(Parts {
        url: format!("zookeeper://{}", addresses(&nodes)),
        nodes,
        ready: Box::new(|nodes| alive(nodes).try_for_each(|(_, node)| mode(node.port()).map(drop))),
        leader: Some(Box::new(|nodes| {
            let leads = |mode: &str| matches!(mode, "leader" | "standalone");
            let mut leaders =
                alive(nodes).filter(|(_, node)| mode(node.port()).is_ok_and(|mode| leads(&mode)));
            leaders.next().map(|(index, _)| index)
        })),
    })
}

/// Whether the server answers, with or without a majority.
fn alone(port: u16) -> Result<(), String> {
    match wire::four_letters(port, "ruok")?.as_str() {
        "imok" => Ok(()),
        other => Err(format!("ruok: {other}")),
    }
}

fn mode(port: u16) -> Result<String, String> {
    let answer = wire::four_letters(port, "srvr")?;
    let mode = answer.lines().find_map(|line| line.strip_prefix("Mode: "));
    mode.map(str::to_owned)
        .ok_or_else(|| format!("port {port}: {}", answer.trim_end()))
}
