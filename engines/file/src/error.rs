//! The errors of a store of files, each with a remedy.

use std::path::Path;
use std::time::Duration;

use rustix::io::Errno;

use palisade_core::engine::{config_error, rounded};
use palisade_core::{Error, ErrorKind};

/// The error for a directory that can't be created or used.
pub(super) fn unusable_dir(path: &Path, cause: impl Into<std::io::Error>) -> Error {
    let cause = cause.into();
    let (kind, what) = short_of(&cause).unwrap_or((
        ErrorKind::Config,
        match Errno::from_io_error(&cause) {
            Some(Errno::ACCESS | Errno::PERM) => {
                "permission denied; use a directory of your own, as in file:/path/to/dir"
            }
            Some(Errno::ROFS) => "it is read-only; use another directory, as in file:/path/to/dir",
            Some(Errno::NOTDIR | Errno::EXIST | Errno::LOOP | Errno::NXIO) => {
                "it contains something other than palisade's files; use another directory"
            }
            _ => "it can't be created or opened",
        },
    ));
    Error::new(
        kind,
        "connect",
        format!("directory {}: {what}", path.display()),
    )
    .because(cause)
}

/// The error for a relative path when the current directory does not exist any more.
pub(super) fn no_current_dir(path: &Path, cause: std::io::Error) -> Error {
    let message = format!(
        "directory {}: the current directory was removed or can't be read; change to another one, \
         or use an absolute path, as in file:/path/to/dir",
        path.display()
    );
    config_error(message).because(cause)
}

/// The error for a file of an open store that can't be read or written. Nothing was changed.
pub(super) fn file_failed(
    operation: &'static str,
    path: &Path,
    cause: impl Into<std::io::Error>,
) -> Error {
    let cause = cause.into();
    let (kind, what) = short_of(&cause).unwrap_or(match Errno::from_io_error(&cause) {
        Some(Errno::ACCESS | Errno::PERM | Errno::ROFS) => {
            (ErrorKind::Denied, "the store can't be written to any more")
        }
        Some(Errno::LOOP | Errno::NXIO | Errno::ISDIR) => (
            ErrorKind::Unusable,
            "something other than a plain file is in its place",
        ),
        _ => (ErrorKind::Unusable, "it can't be read or written"),
    });
    Error::new(kind, operation, what)
        .with("file", path.display())
        .because(cause)
}

/// Describes an exhausted resource of the machine or the process.
fn short_of(cause: &std::io::Error) -> Option<(ErrorKind, &'static str)> {
    Some(match Errno::from_io_error(cause)? {
        Errno::NOSPC | Errno::DQUOT => (ErrorKind::Unusable, "its disk is full; free some space"),
        Errno::FBIG => (
            ErrorKind::Unusable,
            "the limit on the size of files (ulimit -f) is too small",
        ),
        Errno::MFILE | Errno::NFILE | Errno::NOMEM => (
            ErrorKind::Unreachable,
            "out of file descriptors or memory (ulimit -n)",
        ),
        _ => return None,
    })
}

/// The error for a process whose renewals can't be read: nobody knows whether its claims have ended,
/// so they have not.
pub(super) fn unseen(operation: &'static str, path: &Path, cause: Errno) -> Error {
    let cause = std::io::Error::from(cause);
    let remedy = match short_of(&cause) {
        Some((_, what)) => format!("; {what}"),
        None => String::new(),
    };
    let message = format!(
        "a claim ahead counts as alive, because its owner's renewals can't be read: {cause}{remedy}"
    );
    Error::new(ErrorKind::Unreachable, operation, message)
        .with("file", path.display())
        .because(cause)
}

/// The error for a sign of life that can't be looked at when a store is taken over.
pub(super) fn unseen_sign(path: &Path, cause: Errno) -> Error {
    let cause = std::io::Error::from(cause);
    let (kind, remedy) = short_of(&cause).unwrap_or((
        ErrorKind::Unusable,
        "make the file accessible, or remove it if nobody uses the store",
    ));
    let message = format!(
        "whether a process of another boot id uses the store can't be seen: {cause}; {remedy}"
    );
    Error::new(kind, "connect", message)
        .with("file", path.display())
        .because(cause)
}

/// The error for a claim that another process has taken out of its line.
pub(super) fn taken_out(operation: &'static str, path: &Path) -> Error {
    let message = "the claim is no longer in its line, though its lease has not ended: another \
                   process has taken this one for dead, or the file was changed by something other \
                   than palisade; another claim may have been granted";
    Error::new(ErrorKind::Unusable, operation, message).with("file", path.display())
}

/// The error for a lock inside the store that can't be acquired, because a stopped process has it.
pub(super) fn busy(operation: &'static str, timeout: Duration, path: &Path) -> Error {
    let message = format!(
        "the store did not answer within {}: another process is stopped or hangs in it; \
         `fuser` on this file shows which",
        rounded(timeout)
    );
    Error::new(ErrorKind::Unreachable, operation, message).with("file", path.display())
}

/// The error for a file whose content palisade did not write.
pub(super) fn damaged(operation: &'static str, path: &Path) -> Error {
    let message = "the file of this lock is damaged and nobody can be granted; stop its \
                   users, then remove the file: tokens continue above the earlier ones";
    Error::new(ErrorKind::Unusable, operation, message).with("file", path.display())
}

/// The error for a directory that was replaced since it was opened.
pub(super) fn moved(operation: &'static str, path: &Path) -> Error {
    let message = "the store's directory was moved, deleted or replaced while in use, so that its \
                   locks exclude nobody any more; connect again";
    Error::new(ErrorKind::Unusable, operation, message).with("dir", path.display())
}

/// The error for a store in a forked child, which would share locks with its parent.
pub(super) fn forked(operation: &'static str) -> Error {
    let message = "the store was opened before a fork; connect again in the child";
    Error::new(ErrorKind::Config, operation, message)
}

/// The error for a lock whose file was replaced since it was granted.
pub(super) fn file_gone(operation: &'static str, path: &Path) -> Error {
    let message = "the file of this lock was deleted, replaced or emptied by something other \
                   than palisade; another claim may have been granted";
    Error::new(ErrorKind::Unusable, operation, message).with("file", path.display())
}
