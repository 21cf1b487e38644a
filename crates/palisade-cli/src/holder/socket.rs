//! The socket through which `palisade release` reaches the process that holds a lock for a shell.
//! It is in a directory that only the user can access, named after the shell, the lock and the
//! engine.
//!
//! The directory is opened once, and the open descriptor is checked; everything in it is accessed
//! through that descriptor, so that nobody can replace the directory in between.

use std::cell::Cell;
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use palisade::{Error, ErrorKind, Name};
use rustix::fs::{FileType, FlockOperation, Mode, OFlags, flock, fstat, open};
use serde::{Deserialize, Serialize};

use super::shell::Shell;
use crate::exit::Failure;
use crate::view::shown;

/// A process that does not confirm the question within this time is stopped or hangs.
const HEARING: Duration = Duration::from_secs(10);

/// The same, for a question that only improves a message.
const GLANCE: Duration = Duration::from_millis(500);

/// The directory of the user's sockets.
#[derive(Clone)]
pub(crate) struct Directory(Arc<OwnedFd>);

impl Directory {
    /// Opens it, and creates it if it does not exist.
    pub(crate) fn open() -> Result<Self, Failure> {
        let path = place()?;
        let made = std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&path);
        made.map_err(|error| bad(&path, &error))?;
        Self::existing(&path)
    }

    fn existing(path: &Path) -> Result<Self, Failure> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = open(path, flags, Mode::empty()).map_err(|errno| bad(path, &errno))?;
        let stat = fstat(&opened).map_err(|errno| bad(path, &errno))?;
        let ours = stat.st_uid == rustix::process::geteuid().as_raw();
        let open_to_others = Mode::from_raw_mode(stat.st_mode).intersects(Mode::RWXG | Mode::RWXO);
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory if ours && !open_to_others => Ok(Self(Arc::new(opened))),
            _ => Err(bad(path, &"it must belong to you, with mode 0700")),
        }
    }

    fn path(&self, file: &str) -> PathBuf {
        format!("/proc/self/fd/{}/{file}", self.0.as_raw_fd()).into()
    }

    /// Listens for requests about this hold; `None` if another process does.
    pub(crate) fn listen(&self, key: &Key) -> io::Result<Option<Listening>> {
        flock(&*self.0, FlockOperation::LockExclusive)?;
        let listening = self.listen_alone(key);
        flock(&*self.0, FlockOperation::Unlock)?;
        listening
    }

    fn listen_alone(&self, key: &Key) -> io::Result<Option<Listening>> {
        self.sweep();
        let file = key.file();
        let path = self.path(&file);
        match UnixStream::connect(&path) {
            Ok(_) => return Ok(None),
            // The process that listened there was killed.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                std::fs::remove_file(&path)?;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        let socket = UnixListener::bind(&path)?;
        socket.set_nonblocking(true)?;
        let directory = self.clone();
        Ok(Some(Listening {
            socket,
            directory,
            file,
            removed: Cell::new(false),
        }))
    }

    /// Removes stale sockets of shells that have ended.
    fn sweep(&self) {
        for file in self.files() {
            if shell_of(&file).is_some_and(|shell| !shell.lives()) {
                let _ = std::fs::remove_file(self.path(&file));
            }
        }
    }

    fn files(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.path(".")).into_iter().flatten();
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        names.collect()
    }

    /// The sockets for this shell and name, on any engine.
    pub(crate) fn find(&self, shell: Shell, name: &Name) -> Vec<String> {
        let start = format!("{}-", of_name(shell, name));
        let mut files = self.files();
        files.retain(|file| file.starts_with(&start));
        files
    }

    /// The owner of the lock that the process listening at `file` holds or waits for.
    fn owner(&self, file: &str) -> Option<String> {
        let mut socket = UnixStream::connect(self.path(file)).ok()?;
        socket.set_read_timeout(Some(GLANCE)).ok()?;
        socket.write_all(WHO).ok()?;
        let line = BufReader::new(&socket).lines().next()?.ok()?;
        match serde_json::from_str(&line) {
            Ok(Answer::Owner(owner)) => Some(owner),
            _ => None,
        }
    }

    /// Asks the process that listens at `file` to release its lock; `None` if it is gone.
    pub(crate) fn ask(&self, file: &str) -> io::Result<Option<Answer>> {
        let path = self.path(file);
        let mut socket = match UnixStream::connect(&path) {
            Ok(socket) => socket,
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                // The holder was killed. Nothing else removes its socket while the shell lives.
                std::fs::remove_file(&path)?;
                return Ok(None);
            }
            // It was released just now.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(Some(Answer::NotHeld));
            }
            Err(error) => return Err(error),
        };
        socket.write_all(RELEASE)?;
        socket.set_read_timeout(Some(HEARING))?;
        let mut answers = BufReader::new(&socket).lines();
        loop {
            let Some(line) = answers.next() else {
                return Ok(None);
            };
            let line = line.map_err(|error| match error.kind() {
                io::ErrorKind::WouldBlock => io::ErrorKind::TimedOut.into(),
                _ => error,
            });
            match serde_json::from_str(&line?)? {
                // It may take as long as `--at-least` says.
                Answer::Heard => socket.set_read_timeout(None)?,
                answer => return Ok(Some(answer)),
            }
        }
    }
}

/// The owners of locks that were acquired for ancestors of this process.
pub(super) fn owners_above() -> Vec<String> {
    let Some(directory) = place().and_then(|path| Directory::existing(&path)).ok() else {
        return Vec::new();
    };
    let above = Shell::above();
    let mut files = directory.files();
    files.retain(|file| shell_of(file).is_some_and(|shell| above.contains(&shell)));
    let owners = files.iter().filter_map(|file| directory.owner(file));
    owners.collect()
}

/// The requests to a holder, one byte each.
pub(super) const RELEASE: &[u8; 8] = b"release\n";
pub(super) const WHO: &[u8; 8] = b"whoisit\n";

/// Its answers, one line each.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    /// The owner of the lock, held or waited for.
    Owner(String),
    /// The request to release was received; another answer follows.
    Heard,
    /// The lock is still waited for.
    NotHeld,
    /// The lock is released, and was held all the time.
    Released,
    /// The lock was lost, with a message.
    Lost(String),
    /// The engine did not confirm the release, with a message.
    NotReleased(String),
}

/// A listening socket. Its file remains when this is dropped, because a fork uses it too.
pub(crate) struct Listening {
    socket: UnixListener,
    directory: Directory,
    file: String,
    removed: Cell<bool>,
}

impl Listening {
    /// A clone of the socket.
    pub(super) fn socket(&self) -> io::Result<UnixListener> {
        self.socket.try_clone()
    }

    /// Removes the file, once: another process may then listen there.
    pub(super) fn remove(&self) {
        if self.removed.replace(true) {
            return;
        }
        // A leftover is harmless: the next `acquire` removes it.
        let _ = std::fs::remove_file(self.directory.path(&self.file));
    }
}

/// Identifies a hold.
pub(crate) struct Key<'a> {
    pub(crate) shell: Shell,
    pub(crate) name: &'a Name,
    pub(crate) url: &'a str,
}

impl Key<'_> {
    /// The name of its socket. Neither the name of the lock nor the URL, which may hold a secret,
    /// can be read from it.
    pub(crate) fn file(&self) -> String {
        let name = of_name(self.shell, self.name);
        format!("{name}-{:016x}", digest(self.url))
    }
}

fn of_name(shell: Shell, name: &Name) -> String {
    let Shell { pid, born } = shell;
    format!("{}-{born}-{:016x}", pid.as_raw_pid(), digest(name.as_str()))
}

fn shell_of(file: &str) -> Option<Shell> {
    let mut parts = file.split('-');
    let pid = parts.next()?.parse().ok()?;
    let born = parts.next()?.parse().ok()?;
    let pid = rustix::process::Pid::from_raw(pid)?;
    Some(Shell { pid, born })
}

/// FNV-1a, which gives the same value in every build.
fn digest(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

fn place() -> Result<PathBuf, Failure> {
    let folder = |name: &str| {
        let path = PathBuf::from(std::env::var_os(name)?);
        path.is_absolute().then_some(path)
    };
    if let Some(runtime) = folder("XDG_RUNTIME_DIR") {
        return Ok(runtime.join("palisade"));
    }
    let state = folder("XDG_STATE_HOME").or_else(|| Some(folder("HOME")?.join(".local/state")));
    let state = state.ok_or_else(|| refusal("there is no XDG_RUNTIME_DIR and no HOME"))?;
    Ok(state.join("palisade-acquired"))
}

fn bad(path: &Path, why: &dyn std::fmt::Display) -> Failure {
    refusal(&format!("{}: {why}", shown(&path.to_string_lossy())))
}

fn refusal(why: &str) -> Failure {
    let message = format!("can't keep the sockets of acquired locks: {why}; set XDG_RUNTIME_DIR");
    Error::new(ErrorKind::Config, "acquire", message).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_is_named_after_its_shell() {
        let shell = Shell::find(Some(std::process::id() as i32)).unwrap();
        let name = Name::new("x").unwrap();
        let key = |url| Key {
            shell,
            name: &name,
            url,
        };
        let file = key("redis://me:hunter2@h").file();
        assert_eq!(shell_of(&file), Some(shell));
        assert!(!file.contains("hunter2"));
        assert_ne!(file, key("redis://h").file());
        assert_eq!(shell_of("what else"), None);
        assert_eq!(digest("a"), 0xaf63_dc4c_8601_ec8c);
    }
}
