//! Redis and Valkey: independent servers. Every write is in the append-only file before it is
//! answered, so a killed server restarts with its data.

use std::path::Path;

use super::super::find::{Part, REDIS};
use super::super::node::{Node, Spec};
use super::super::running::{Parts, addresses, alive};
use super::super::{ports, wire};

/// One server.
pub(in super::super) fn one(
    part: &Part,
    folder: &Path,
    settings: &[&str],
) -> Result<Parts, String> {
    let nodes = vec![server(part, folder, "n0", settings)?];
    let url = format!("redis://{}", addresses(&nodes));
    Ok(independent(url, nodes))
}

/// Five independent servers.
pub(in super::super) fn five(folder: &Path, settings: &[&str]) -> Result<Parts, String> {
    let names = ["n0", "n1", "n2", "n3", "n4"];
    let nodes = names.map(|name| server(&REDIS, folder, name, settings));
    let nodes: Vec<Node> = nodes.into_iter().collect::<Result<_, _>>()?;
    let scheme = if nodes[0].tls_port().is_some() {
        "rediss+redlock"
    } else {
        "redlock"
    };
    let url = format!("{scheme}://{}", addresses(&nodes));
    Ok(independent(url, nodes))
}

fn independent(url: String, nodes: Vec<Node>) -> Parts {
    Parts {
        url,
        nodes,
        ready: Box::new(|nodes| alive(nodes).try_for_each(|(_, node)| ping(node.port()))),
        leader: None,
    }
}

/// Starts one server with these settings.
pub(super) fn server(
    part: &Part,
    folder: &Path,
    name: &str,
    settings: &[&str],
) -> Result<Node, String> {
    let port = ports::free()?;
    Node::started(folder, name, port, spec(part, port, settings)?)
}

/// A server that keeps its configuration in a file, so that Sentinel's changes to it survive.
pub(super) fn spec(part: &Part, port: u16, settings: &[&str]) -> Result<Spec, String> {
    let mut configuration = format!(
        "port {port}\nbind 127.0.0.1\nprotected-mode no\nsave \"\"\nappendonly yes\n\
         appendfsync no\nrepl-diskless-sync-delay 0\n"
    );
    let (mut words, mut tls_port) = (settings.iter(), None);
    // The same form as on the command line: `--maxmemory 3mb`.
    while let Some(word) = words.next() {
        configuration += &match word.strip_prefix("--") {
            Some("tls") => encrypted(
                words.next().unwrap_or(&""),
                *tls_port.insert(ports::free()?),
            ),
            Some(name) if !name.contains(' ') => {
                format!("{name} {}\n", words.next().copied().unwrap_or_default())
            }
            _ => format!("{word}\n"),
        };
    }
    Ok(Spec {
        arguments: vec!["redis.conf".to_owned()],
        prepare: Box::new(move |folder| {
            let file = folder.join("redis.conf");
            std::fs::write(file, &configuration).map_err(|error| format!("redis.conf: {error}"))
        }),
        tls_port,
        ..Spec::new(&part.get()?, Box::new(move || ping(port)))
    })
}

/// The meaning of `--tls FOLDER`: TLS on a second port, and among the servers themselves, with the
/// files that `trial::certificates` has created in that directory.
pub(super) fn encrypted(folder: &str, port: u16) -> String {
    format!(
        "tls-port {port}\ntls-cert-file {folder}/server.pem\ntls-key-file {folder}/server.key\n\
         tls-ca-cert-file {folder}/ca.pem\ntls-auth-clients no\ntls-replication yes\n\
         tls-cluster yes\n"
    )
}

pub(super) fn ping(port: u16) -> Result<(), String> {
    match wire::redis(port, &["PING"])?.as_str() {
        "PONG" => Ok(()),
        other => Err(format!("PING: {other}")),
    }
}
