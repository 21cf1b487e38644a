//! `Folder`: where an engine keeps its data and logs while it runs, and the janitor that cleans up
//! after it.
//!
//! Each server process writes its pid and start time into `pids` before it executes the server. A
//! janitor, a shell in its own process group, reads from a pipe that only the starter holds open.
//! The pipe closes when the folder is dropped or the starter dies in any way. Then the janitor ends
//! the processes that still run and removes the folder.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// With less free memory than this, data goes to the disk: an etcd member alone reserves 64 MB.
const ROOM: u64 = 1 << 30;

/// Runs the two scripts below, even if `PATH` is empty.
pub(super) const SHELL: &str = "/bin/sh";

/// Ends the processes in `$0/pids` that are still the same, each with its signal and after two
/// seconds with KILL, and removes the folder.
const JANITOR: &str = r#"
trap '' INT TERM HUP QUIT
read -r _
fields() { state=$1 began=${20}; }
same() {
  { read -r line <"/proc/$1/stat"; } 2>/dev/null || return 1
  fields ${line##*) }
  [ "$began" = "$2" ] && [ "$state" != Z ] && [ "$state" != X ]
}
each() {
  alive=0
  while read -r pid started signal; do
    same "$pid" "$started" || continue
    alive=1
    [ "$1" = look ] || kill -s "${1:-$signal}" "$pid"
    [ "$1" = look ] || kill -s CONT "$pid"
  done <"$0/pids"
  return 0
}
gone() {
  turns=0
  while each look && [ $alive = 1 ] && [ $turns -lt 40 ]; do
    turns=$((turns + 1)) && sleep 0.05
  done
  [ $alive = 0 ]
}
if [ -s "$0/pids" ]; then
  each ''
  gone || { each KILL; gone; }
fi
rm -rf "$0"
"#;

/// Records the process that is about to execute a server: `$0` is the list, `$1` the signal that
/// ends it.
pub(super) const RECORD: &str = r#"
fields() { began=${20}; }
read -r line <"/proc/$$/stat" && fields ${line##*) }
echo "$$ $began $1" >>"$0" || exit 1
shift
exec "$@"
"#;

/// A temporary directory, in memory if there is room.
#[derive(Debug)]
pub(in crate::lab) struct Folder {
    path: PathBuf,
    janitor: Child,
}

impl Folder {
    /// A new directory for the engine `name`.
    pub(in crate::lab) fn new(name: &str) -> Result<Self, String> {
        let say = |what: &str, error: std::io::Error| format!("{what}: {error}");
        let base = base();
        let path = tempfile::Builder::new()
            .prefix(&format!("palisade-{name}-"))
            .tempdir_in(&base)
            .map_err(|error| say(&format!("no folder in {}", base.display()), error))?;
        // Servers that refuse root run as another user, which must reach its own directory in it.
        std::fs::set_permissions(path.path(), PermissionsExt::from_mode(0o755))
            .and_then(|()| std::fs::write(path.path().join("pids"), ""))
            .and_then(|()| {
                let anyone = PermissionsExt::from_mode(0o666);
                std::fs::set_permissions(path.path().join("pids"), anyone)
            })
            .map_err(|error| say("no list of pids", error))?;
        let janitor = Command::new(SHELL)
            .args(["-c", JANITOR])
            .arg(path.path())
            .current_dir("/")
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| say("no shell to clean up with", error))?;
        Ok(Self {
            path: path.keep(),
            janitor,
        })
    }

    pub(in crate::lab) fn path(&self) -> &Path {
        &self.path
    }

    /// The ends of all logs in it.
    pub(super) fn tails(&self) -> String {
        let mut logs: Vec<PathBuf> = std::fs::read_dir(&self.path)
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.path())
            .filter(|path| path.extension().is_some_and(|end| end == "log"))
            .collect();
        logs.sort();
        let mut text = String::new();
        for path in logs {
            let log =
                String::from_utf8_lossy(&std::fs::read(&path).unwrap_or_default()).into_owned();
            let lines: Vec<&str> = log.lines().collect();
            let tail = &lines[lines.len().saturating_sub(15)..];
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            text += &format!("\n--- {name}\n{}", tail.join("\n"));
        }
        text
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        drop(self.janitor.stdin.take());
        let _ = self.janitor.wait();
        // Something is left only if the janitor was killed.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

fn base() -> PathBuf {
    let shm = Path::new("/dev/shm");
    let room = rustix::fs::statvfs(shm).map_or(0, |fs| fs.f_bavail.saturating_mul(fs.f_frsize));
    let writable = rustix::fs::access(shm, rustix::fs::Access::WRITE_OK).is_ok();
    if room >= ROOM && writable {
        shm.to_owned()
    } else {
        std::env::temp_dir()
    }
}
