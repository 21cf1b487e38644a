//! The directory of a store: where it is, whether it can be used, and its writer lock.
//!
//! The `flock` on the file `lock` is the one writer lock of all processes. The kernel frees it
//! when its holder dies, and everything in the directory is read and changed only under it.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use super::liveness::{self, Liveness};
use crate::core::clock::BootTime;
use crate::core::error::{Error, Kind, Result};
use crate::core::url::Url;

pub(super) const LOCK: &str = "lock";
pub(super) const LINES: &str = "lines";
pub(super) const PROCS: &str = "procs";

const RW: Mode = Mode::RUSR.union(Mode::WUSR);

/// An existing directory on a file system that locks, FIFOs and memory maps work on.
pub(super) struct Dir {
    pub(super) path: PathBuf,
    pub(super) fd: OwnedFd,
    /// Device and inode: the same directory under another name is the same store.
    pub(super) identity: (u64, u64),
}

/// Where the URL says that the store is.
///
/// # Errors
/// [`Kind::Config`] when it names a host, or when there is no default.
pub(super) fn locate(url: &Url) -> Result<PathBuf> {
    if !url.hosts.is_empty() {
        return Err(config(
            "file: takes a directory, not a host; write file:/var/lib/locks",
        ));
    }
    if !url.path.is_empty() {
        return Ok(PathBuf::from(&url.path));
    }
    let absolute = |variable| {
        std::env::var_os(variable)
            .map(PathBuf::from)
            .filter(|path: &PathBuf| path.is_absolute())
    };
    absolute("XDG_STATE_HOME")
        .or_else(|| absolute("HOME").map(|home| home.join(".local/state")))
        .map(|state| state.join("palisade"))
        .ok_or_else(|| {
            config("no directory given, and neither XDG_STATE_HOME nor HOME is set; write file:/var/lib/locks")
        })
}

fn config(message: impl Into<String>) -> Error {
    Error::new(Kind::Config, "connect", message)
}

/// The error for a directory that can't be made or used.
pub(super) fn unusable_dir(path: &Path, cause: impl Into<std::io::Error>) -> Error {
    let cause = cause.into();
    let errno = cause.raw_os_error().map(Errno::from_raw_os_error);
    let full = matches!(errno, Some(Errno::NOSPC | Errno::DQUOT));
    let short = matches!(errno, Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM));
    let (kind, what) = match cause.kind() {
        _ if full => (Kind::Unusable, "its disk is full; free some space"),
        _ if short => (Kind::Unreachable, "out of file descriptors or memory"),
        std::io::ErrorKind::PermissionDenied => (
            Kind::Config,
            "permission denied; use a directory of your own, as in file:/path/to/dir",
        ),
        std::io::ErrorKind::ReadOnlyFilesystem => (
            Kind::Config,
            "it is read-only; use another directory, as in file:/path/to/dir",
        ),
        std::io::ErrorKind::NotADirectory | std::io::ErrorKind::AlreadyExists => (
            Kind::Config,
            "something else than a directory is in the way; use another directory",
        ),
        _ => (Kind::Config, "it can't be created or opened"),
    };
    Error::new(
        kind,
        "connect",
        format!("directory {}: {what}", path.display()),
    )
    .because(cause)
}

impl Dir {
    /// Makes the directory and its two folders, with mode 0700, where they are missing.
    ///
    /// # Errors
    /// [`Kind::Config`] when that is not possible or the file system is not a local one.
    pub(super) fn create(path: &Path, allow_network_fs: bool) -> Result<Self> {
        let path = std::path::absolute(path).map_err(|error| unusable_dir(path, error))?;
        let fail = |error: std::io::Error| unusable_dir(&path, error);
        for folder in [&path, &path.join(LINES), &path.join(PROCS)] {
            std::fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(folder)
                .map_err(fail)?;
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::open(&path, flags, Mode::empty()).map_err(|e| fail(e.into()))?;
        if let (Some(kind), false) = (remote_fs(&fd), allow_network_fs) {
            return Err(config(format!(
                "directory {} is on {kind}, where locks and memory maps can't be relied on; \
                 use a local directory, or allow_network_fs=true at your own risk",
                path.display()
            )));
        }
        let stat = rustix::fs::fstat(&fd).map_err(|e| fail(e.into()))?;
        Ok(Self {
            identity: (stat.st_dev, stat.st_ino),
            path,
            fd,
        })
    }

    /// Opens the writer lock and takes it, waiting `timeout` at the longest. Closing the file lets
    /// go of it.
    ///
    /// # Errors
    /// [`Kind::Unreachable`] when it can't be had in time.
    pub(super) fn lock(&self, timeout: Duration) -> Result<OwnedFd> {
        let fail = |errno: Errno| unusable_dir(&self.path, errno);
        let deadline = BootTime::now() + timeout;
        let mut pause = Duration::from_micros(50);
        loop {
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
            let file = rustix::fs::openat(&self.fd, LOCK, flags, RW).map_err(fail)?;
            // Polled, so that a thread is never stuck behind a stopped process.
            while let Err(errno) =
                rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)
            {
                if !matches!(errno, Errno::WOULDBLOCK | Errno::INTR) {
                    return Err(fail(errno));
                }
                if deadline.has_passed() {
                    return Err(busy("connect", timeout).with("dir", self.path.display()));
                }
                std::thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_millis(5));
            }
            // The file that was locked may have been replaced before the lock was had.
            let mine = rustix::fs::fstat(&file).map_err(fail)?;
            match rustix::fs::statat(&self.fd, LOCK, rustix::fs::AtFlags::empty()) {
                Ok(named) if named.st_ino == mine.st_ino => return Ok(file),
                _ if deadline.has_passed() => return Err(busy("connect", timeout)),
                _ => {}
            }
        }
    }

    /// Removes signs of life of the dead; says whether any process but this one lives. The caller
    /// holds the writer lock.
    pub(super) fn sweep(&self, mine: Option<&Liveness>) -> Result<bool> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let mine = mine.map(Liveness::process);
        rustix::fs::openat(&self.fd, PROCS, flags, Mode::empty())
            .and_then(|procs| liveness::sweep(procs.as_fd(), mine))
            .map_err(|errno| unusable_dir(&self.path, errno))
    }

    /// Makes this process's sign of life. The caller holds the writer lock.
    pub(super) fn sign_of_life(&self) -> Result<Liveness> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::openat(&self.fd, PROCS, flags, Mode::empty())
            .and_then(Liveness::create)
            .map_err(|errno| unusable_dir(&self.path, errno))
    }
}

/// The error for a writer lock that can't be had.
pub(super) fn busy(operation: &'static str, timeout: Duration) -> Error {
    Error::new(
        Kind::Unreachable,
        operation,
        format!(
            "the store did not answer within {timeout:?}: another process is stopped or hangs \
             in it; `fuser` on its file `lock` shows which"
        ),
    )
}

/// What the file system is, if it is not one of this machine alone.
fn remote_fs(fd: &OwnedFd) -> Option<&'static str> {
    let found = rustix::fs::fstatfs(fd).ok()?.f_type as u64 & 0xffff_ffff;
    REMOTE
        .iter()
        .find(|(magic, _)| *magic == found)
        .map(|(_, name)| *name)
}

/// Overlay is not among them: files made at run time live in its upper layer, where locks, FIFOs
/// and maps work as on any local file system; only other containers don't see them.
const REMOTE: &[(u64, &str)] = &[
    (0x6969, "NFS"),
    (0x517b, "SMB"),
    (0xff53_4d42, "CIFS"),
    (0xfe53_4d42, "SMB"),
    (0x6573_5546, "FUSE"),
    (0x0102_1997, "9p"),
    (0x00c3_6400, "Ceph"),
    (0x5346_414f, "AFS"),
    (0x7375_7245, "Coda"),
    (0x0116_1970, "GFS2"),
    (0x7461_636f, "OCFS2"),
    (0x0bd0_0bd0, "Lustre"),
    (0x786f_4256, "a VirtualBox share"),
];

/// Findings about the directory, for `doctor`.
pub(super) fn findings(dir: &Dir) -> Vec<crate::core::report::Finding> {
    use crate::core::report::{Finding, Severity};
    let mut findings = Vec::new();
    let mut add = |severity, code, message: &str, remedy: &str| {
        findings.push(Finding {
            severity,
            code,
            message: message.to_owned(),
            remedy: remedy.to_owned(),
        });
    };
    if let Some(kind) = remote_fs(&dir.fd) {
        add(
            Severity::Danger,
            "network_fs",
            &format!("the store is on {kind}: locks may not exclude"),
            "move it to a local directory",
        );
    }
    if let Ok(stat) = rustix::fs::fstatfs(&dir.fd) {
        match stat.f_type as u64 & 0xffff_ffff {
            0x0102_1994 | 0x8584_58f6 => add(
                Severity::Warning,
                "memory_fs",
                "the store is in memory: after a reboot tokens rest on the clock alone",
                "use a directory on disk if tokens must never go back",
            ),
            0x794c_7630 => add(
                Severity::Info,
                "overlay_fs",
                "the store is inside a container's own layer: other containers don't see it",
                "mount a volume to share it",
            ),
            _ => {}
        }
        if stat.f_bavail.saturating_mul(stat.f_bsize as u64) < 16 << 20 {
            add(
                Severity::Warning,
                "disk_almost_full",
                "less than 16 MiB are free where the store is",
                "free some space",
            );
        }
    }
    if let Ok(stat) = rustix::fs::fstat(&dir.fd)
        && stat.st_mode & 0o022 != 0
    {
        add(
            Severity::Danger,
            "writable_by_others",
            "others may write to the store's directory",
            "chmod 700 on it",
        );
    }
    findings
}
