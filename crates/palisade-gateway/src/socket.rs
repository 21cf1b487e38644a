//! `Socket`: the socket for this user's own programs, in a folder that only this user can access.

use std::fs::DirBuilder;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use palisade::{Error, ErrorKind, Result};
use tokio::net::UnixListener;

fn refuse(path: &Path, why: impl std::fmt::Display) -> Error {
    let message = format!("{}: {why}", path.display());
    Error::new(ErrorKind::Config, "serve", message)
}

/// Creates a folder that only this user can enter, or checks that an existing one is: secrets may
/// not be stored anywhere else.
///
/// # Errors
/// [`ErrorKind::Config`] when it can't be created, or others can access it.
pub fn private_folder(folder: &Path) -> Result<()> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
    made.map_err(|error| refuse(folder, error))?;
    let found = std::fs::symlink_metadata(folder).map_err(|error| refuse(folder, error))?;
    let own = found.uid() == rustix::process::getuid().as_raw();
    if !found.is_dir() || !own || found.permissions().mode() & 0o077 != 0 {
        let why = "the folder of a gateway must be this user's alone (mode 0700)";
        return Err(refuse(folder, why));
    }
    Ok(())
}

/// See the module's documentation. Removed at the end.
pub(crate) struct Socket {
    pub(crate) path: PathBuf,
    pub(crate) listener: UnixListener,
}

impl Socket {
    pub(crate) fn bind(path: PathBuf) -> Result<Self> {
        let folder = path
            .parent()
            .filter(|folder| !folder.as_os_str().is_empty());
        let Some(folder) = folder else {
            return Err(refuse(&path, "give the socket a folder of its own"));
        };
        private_folder(folder)?;
        // A socket without a listener is left from a gateway that was killed.
        if std::os::unix::net::UnixStream::connect(&path).is_ok() {
            return Err(refuse(&path, "another gateway listens there"));
        }
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).map_err(|error| refuse(&path, error))?;
        Ok(Self { path, listener })
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}
