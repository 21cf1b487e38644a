//! `Gateway`: a palisade gateway in a separate process, `palisade serve` in front of an engine.
//!
//! It uses the command that was built with the tests.

use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use super::folder::Folder;
use super::node::{Node, Spec};
use super::{ports, wire};
use crate::engine::CutOff;

/// How clients reach a gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Door {
    /// Through its socket, without a token.
    Socket,
    /// Through its port, with its token.
    Port,
}

/// A running gateway. Dropping it ends it.
pub struct Gateway {
    // Declared before the folder, so that it ends before its socket is removed.
    node: Node,
    folder: Folder,
}

impl Gateway {
    /// Starts one in front of the engine at `url`, with further arguments of `serve`.
    ///
    /// # Errors
    /// A message if the command was not built, or does not start.
    pub fn start(url: &str, arguments: &[&str]) -> Result<Self, String> {
        Self::start_at(ports::free()?, url, arguments)
    }

    /// The same on a given free port.
    ///
    /// # Errors
    /// As [`Gateway::start`].
    pub fn start_at(port: u16, url: &str, arguments: &[&str]) -> Result<Self, String> {
        let folder = Folder::new("gateway")?;
        let door = Path::new("door").join("gateway.sock");
        let mut spec = Spec::new(&command()?, Box::new(move || answers(port)));
        spec.prepare = Box::new(|folder| {
            let mut door = std::fs::DirBuilder::new();
            let made = door.mode(0o700).create(folder.join("door"));
            made.map_err(|error| format!("the socket's folder: {error}"))
        });
        spec.arguments = ["serve", "--url", url, "--socket"]
            .map(str::to_owned)
            .into();
        let folder_of_node = folder.path().join(NODE);
        let socket = folder_of_node.join(door).display().to_string();
        spec.arguments.push(socket);
        spec.arguments
            .extend(["--listen".to_owned(), format!("127.0.0.1:{port}")]);
        spec.arguments
            .extend(arguments.iter().map(|&word| word.to_owned()));
        let node = Node::started(folder.path(), NODE, port, spec)?;
        let gateway = Self { node, folder };
        let started = gateway.node.answers();
        started.map_err(|why| format!("{why}{}", gateway.folder.tails()))?;
        Ok(gateway)
    }

    /// Its URL for clients.
    pub fn url(&self, door: Door) -> String {
        let folder = self.node.folder().join("door");
        match door {
            Door::Socket => format!("http+unix:{}/gateway.sock", folder.display()),
            Door::Port => {
                let (address, folder) = (self.node.address(), folder.display());
                format!("http://{address}?token_file={folder}/gateway.token")
            }
        }
    }

    /// Its process.
    pub fn node(&self) -> &Node {
        &self.node
    }
}

/// The name of its process in its folder.
const NODE: &str = "gateway";

/// Stops the process: connections stay open, and nothing is answered.
impl CutOff for Gateway {
    fn begin(&self) {
        let _ = self.node.stop();
    }

    fn end(&self) {
        let _ = self.node.cont();
    }
}

impl std::fmt::Debug for Gateway {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.node.fmt(f)
    }
}

/// The command of this build: `target/debug/palisade` for tests in `target/debug/deps`.
///
/// # Errors
/// A message if it was not built.
pub fn command() -> Result<PathBuf, String> {
    let own = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut folders = own.ancestors().skip(1).take(2);
    let found = folders.find_map(|folder| {
        let command = folder.join("palisade");
        command.is_file().then_some(command)
    });
    found.ok_or_else(|| "the command is not built; run cargo build --bins first".to_owned())
}

fn answers(port: u16) -> Result<(), String> {
    // It may refuse the request because of its `Host`, but then it is up.
    match wire::http(port, "GET", "/readyz", "")? {
        (503, answer) => Err(format!("/readyz: {answer}")),
        _ => Ok(()),
    }
}
