//! PostgreSQL, alone, with a standby, or behind pgbouncer in transaction mode. These programs
//! refuse to run as root: then they run as the user `postgres`, which the packages create, or as
//! `nobody`.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use super::super::find::{PGBOUNCER, POSTGRES};
use super::super::node::{Node, Spec, User};
use super::super::running::{Parts, alive};
use super::super::{ports, wire};
use super::owned;

/// The owner of the databases; no password is required.
const OWNER: &str = "palisade";

/// One server.
pub(in super::super) fn one(folder: &Path, settings: &[&str]) -> Result<Parts, String> {
    Ok(parts(vec![server(folder, "n0", settings)?]))
}

/// A primary, and a standby that follows it asynchronously.
pub(in super::super) fn pair(folder: &Path, settings: &[&str]) -> Result<Parts, String> {
    let primary = server(folder, "n0", settings)?;
    primary.answers()?;
    let from = primary.port();
    let prepare = move |bin: &Path, user, folder: &Path| {
        let mut copy = Command::new(bin.join("pg_basebackup"));
        copy.args([
            "-D",
            "data",
            "-h",
            "127.0.0.1",
            "-U",
            OWNER,
            "-R",
            "--no-sync",
        ])
        .args(["-c", "fast", "-p", &from.to_string()]);
        run(copy, user, folder)
    };
    let standby = started(folder, "n1", settings, Box::new(prepare))?;
    Ok(parts(vec![primary, standby]))
}

/// The prefix of settings for the pooler, as in `pooler.pool_mode = session`; all others are for
/// the server behind it.
const FOR_THE_POOLER: &str = "pooler.";

/// A pooler, and the server behind it.
pub(in super::super) fn pooled(folder: &Path, settings: &[&str]) -> Result<Parts, String> {
    let (ours, theirs): (Vec<&str>, Vec<&str>) = settings
        .iter()
        .partition(|setting| setting.starts_with(FOR_THE_POOLER));
    let ours = ours.concat().replace(FOR_THE_POOLER, "\n");
    let server = server(folder, "n1", &theirs)?;
    let port = ports::free()?;
    let configuration = format!(
        "[databases]\n* = host=127.0.0.1 port={}\n[pgbouncer]\nlisten_addr = 127.0.0.1\n\
         listen_port = {port}\nunix_socket_dir =\nauth_type = trust\nauth_file = users\n\
         pool_mode = transaction\nmax_client_conn = 1000\ndefault_pool_size = 20\n\
         server_login_retry = 1\nignore_startup_parameters = extra_float_digits{ours}\n",
        server.port()
    );
    let spec = Spec {
        arguments: owned(&["pgbouncer.ini"]),
        user: other_user()?,
        prepare: Box::new(move |folder| {
            std::fs::write(folder.join("pgbouncer.ini"), &configuration)
                .and_then(|()| std::fs::write(folder.join("users"), format!("\"{OWNER}\" \"\"\n")))
                .map_err(|error| format!("pgbouncer.ini: {error}"))
        }),
        ..Spec::new(&PGBOUNCER.get()?, Box::new(move || selects(port)))
    };
    let pooler = Node::new(folder, "n0", port, spec)?;
    // The pooler does not reconnect at once if it finds no server at its start.
    server.answers()?;
    pooler.spawn()?;
    Ok(parts(vec![pooler, server]))
}

fn parts(nodes: Vec<Node>) -> Parts {
    Parts {
        url: format!("postgres://{OWNER}@{}/postgres", nodes[0].address()),
        nodes,
        ready: Box::new(|nodes| alive(nodes).try_for_each(|(_, node)| selects(node.port()))),
        leader: None,
    }
}

fn server(folder: &Path, name: &str, settings: &[&str]) -> Result<Node, String> {
    started(folder, name, settings, Box::new(make_databases))
}

/// Creates a server's data: from its programs' directory, the user, and the node's directory.
type Make = Box<dyn Fn(&Path, Option<User>, &Path) -> Result<(), String> + Send + Sync>;

fn started(folder: &Path, name: &str, settings: &[&str], make: Make) -> Result<Node, String> {
    let bin = POSTGRES.get()?;
    let port = ports::free()?;
    let user = other_user()?;
    let programs = bin.clone();
    let mut arguments = owned(&["-D", "data", "-p", &port.to_string()]);
    for setting in [
        "listen_addresses=127.0.0.1",
        "unix_socket_directories=",
        // Uses files in its own directory, so that those of a killed server are removed as well.
        "dynamic_shared_memory_type=mmap",
        "max_connections=200",
        "shared_buffers=32MB",
    ] {
        arguments.extend(owned(&["-c", setting]));
    }
    arguments.extend(owned(settings));
    let spec = Spec {
        arguments,
        user,
        prepare: Box::new(move |folder| make(&programs, user, folder)),
        // An immediate shutdown, because a killed server leaves a shared memory segment behind.
        end: "QUIT",
        after_kill: Some(remove_segment),
        ..Spec::new(&bin.join("postgres"), Box::new(move || selects(port)))
    };
    Node::started(folder, name, port, spec)
}

fn make_databases(bin: &Path, user: Option<User>, folder: &Path) -> Result<(), String> {
    let mut command = Command::new(bin.join("initdb"));
    command
        .args(["-D", "data", "-U", OWNER, "-A", "trust", "-E", "UTF8"])
        .args([
            "--locale=C",
            "--no-sync",
            "--no-instructions",
            "--wal-segsize=4",
        ]);
    run(command, user, folder)
}

fn run(mut command: Command, user: Option<User>, folder: &Path) -> Result<(), String> {
    command
        .current_dir(folder)
        .stdin(std::process::Stdio::null());
    if let Some((user, group)) = user {
        command.uid(user).gid(group);
    }
    let program = command.get_program().to_string_lossy().into_owned();
    let failed = |why: String| format!("{program}: {why}");
    let output = command
        .output()
        .map_err(|error| failed(error.to_string()))?;
    if output.status.success() {
        Ok(())
    } else {
        Err(failed(String::from_utf8_lossy(&output.stderr).into_owned()))
    }
}

/// Removes the segment that marks the data as in use: its id is in the seventh line.
fn remove_segment(folder: &Path) {
    let file = std::fs::read_to_string(folder.join("data/postmaster.pid")).unwrap_or_default();
    let line = file.lines().nth(6).unwrap_or_default();
    if let Some(id) = line.split_whitespace().nth(1) {
        let _ = Command::new("ipcrm").args(["-m", id]).output();
    }
}

fn selects(port: u16) -> Result<(), String> {
    match wire::postgres(port, OWNER, "SELECT 1")?.as_slice() {
        [one] if one == "1" => Ok(()),
        rows => Err(format!("port {port}: SELECT 1 gives {rows:?}")),
    }
}

/// The user to run as instead of root; `None` if we are not root.
fn other_user() -> Result<Option<User>, String> {
    if !rustix::process::geteuid().is_root() {
        return Ok(None);
    }
    let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    let find = |name| {
        let mut fields = users
            .lines()
            .map(|line| line.split(':').collect::<Vec<_>>())
            .find(|fields| fields.first() == Some(&name))?
            .into_iter()
            .skip(2);
        Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
    };
    let user: Option<User> = find("postgres").or_else(|| find("nobody"));
    user.map(Some)
        .ok_or("no user to be instead of root".to_owned())
}
