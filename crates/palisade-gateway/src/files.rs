//! The files that a gateway trusts: the access file, the certificate and its key.
//!
//! They are read through one open file, so that what was checked is what was read.

use std::fs::{File, Metadata};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// What distinguishes one version of a file from another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Seen(Option<(u64, u64, i64, i64, u32, u32)>);

impl Seen {
    pub(crate) fn look(path: &Path) -> Self {
        let seen = std::fs::metadata(path).ok().map(|file| {
            let (changed, rights) = ((file.mtime(), file.mtime_nsec()), (file.mode(), file.uid()));
            let (size, inode) = (file.size(), file.ino());
            (inode, size, changed.0, changed.1, rights.0, rights.1)
        });
        Self(seen)
    }
}

/// Why a file can't be trusted, since others could have written it; `None` if it can. What is not a
/// regular file, such as `/dev/null`, has no content of its own.
pub fn distrusted(file: &Metadata) -> Option<String> {
    let own = rustix::process::geteuid().as_raw();
    let owner = file.uid();
    if !file.is_file() {
        return None;
    }
    if file.mode() & 0o002 != 0 {
        return Some("every user may write it; use chmod o-w".into());
    }
    // A file of root is trusted like root itself.
    (owner != own && owner != 0).then(|| {
        format!("it belongs to another user (uid {owner}); it must belong to this one or to root")
    })
}

/// The content of a file that is trusted, and its metadata.
///
/// # Errors
/// When it can't be read or trusted, in words.
pub(crate) fn read_trusted(path: &Path) -> Result<(Vec<u8>, Metadata), String> {
    let text = |error: std::io::Error| error.to_string();
    let mut file = File::open(path).map_err(text)?;
    let found = file.metadata().map_err(text)?;
    if let Some(why) = distrusted(&found) {
        return Err(why);
    }
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(text)?;
    Ok((bytes, found))
}
