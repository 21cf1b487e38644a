//! The directory of a store: whether it can be used, by whom, and how files in it are opened.
//!
//! Anyone who can write to the directory can remove locks. So it must belong to the user (or root)
//! alone, or be shared by its group on purpose. Nothing in it is opened through a symbolic link,
//! and only plain files are read or written.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{AtFlags, FileType, FlockOperation, Mode, OFlags, Stat};
use rustix::io::Errno;

use super::config::{Audience, Config};
use super::error::{busy, no_current_dir, unusable_dir};
use palisade_core::engine::config_error;
use palisade_core::{BootTime, Result};

const LOCK: &str = "lock";

impl Audience {
    fn dir_mode(self) -> Mode {
        match self {
            Self::User => Mode::from_raw_mode(0o700),
            Self::Group => Mode::from_raw_mode(0o2770),
        }
    }

    pub(super) fn file_mode(self) -> Mode {
        match self {
            Self::User => Mode::from_raw_mode(0o600),
            Self::Group => Mode::from_raw_mode(0o660),
        }
    }

    /// Whether nobody outside of the audience can have created or changed it.
    pub(super) fn trusts(self, stat: &Stat) -> bool {
        match self {
            Self::User => {
                let ours = [0, rustix::process::geteuid().as_raw()].contains(&stat.st_uid);
                ours && stat.st_mode & 0o022 == 0
            }
            Self::Group => stat.st_mode & 0o002 == 0,
        }
    }
}

/// Device and inode.
pub(super) type Identity = (u64, u64);

pub(super) fn identity(stat: &Stat) -> Identity {
    (stat.st_dev, stat.st_ino)
}

/// An existing directory that can contain a store.
#[derive(Debug)]
pub(super) struct Dir {
    pub(super) path: PathBuf,
    pub(super) fd: OwnedFd,
    pub(super) audience: Audience,
    /// The same directory under another path is the same store.
    pub(super) identity: Identity,
}

impl Dir {
    /// Creates the directory if it does not exist, and checks its owner, mode and file system.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](palisade_core::ErrorKind::Config) when it can't be used.
    pub(super) fn open(with: &Config) -> Result<Self> {
        let path = &with.path;
        let path = std::path::absolute(path).map_err(|error| no_current_dir(path, error))?;
        let fail = |error: std::io::Error| unusable_dir(&path, error);
        make(&path, with.audience).map_err(fail)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::open(&path, flags, Mode::empty()).map_err(|e| fail(e.into()))?;
        let found = not_local(&fd).map_err(|e| fail(e.into()))?;
        if let (Some(kind), false) = (found, with.allow_network_fs) {
            return Err(config_error(format!(
                "directory {} is on {kind}, where locks can't be relied on; use a directory on a \
                 local disk, or allow_network_fs=true at your own risk",
                path.display()
            )));
        }
        let stat = rustix::fs::fstat(&fd).map_err(|e| fail(e.into()))?;
        check_audience(&path, &stat, with.audience)?;
        Ok(Self {
            identity: identity(&stat),
            path,
            fd,
            audience: with.audience,
        })
    }

    /// Takes the lock under which the store is created and joined, within `timeout`. Closing the
    /// file releases it.
    ///
    /// # Errors
    /// [`ErrorKind::Unreachable`](palisade_core::ErrorKind::Unreachable) when the lock can't be acquired in
    /// time.
    pub(super) fn lock(&self, timeout: Duration) -> Result<OwnedFd> {
        let fail = |errno: Errno| unusable_dir(&self.path, errno);
        let deadline = BootTime::now() + timeout;
        let mut pause = Duration::from_micros(50);
        loop {
            let flags = OFlags::RDWR | OFlags::CREATE;
            let file = self.open_file(&self.fd, LOCK, flags).map_err(fail)?;
            // Polled, so that a stopped process never blocks this thread.
            while let Err(errno) =
                rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)
            {
                if !matches!(errno, Errno::WOULDBLOCK | Errno::INTR) {
                    return Err(fail(errno));
                }
                if deadline.has_passed() {
                    return Err(busy("connect", timeout, &self.path.join(LOCK)));
                }
                std::thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_millis(5));
            }
            // The locked file may have been replaced before the lock was acquired.
            let mine = rustix::fs::fstat(&file).map_err(fail)?;
            match rustix::fs::statat(&self.fd, LOCK, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(named) if named.st_ino == mine.st_ino => return Ok(file),
                Err(errno) if errno != Errno::NOENT => return Err(fail(errno)),
                _ if deadline.has_passed() => {
                    return Err(busy("connect", timeout, &self.path.join(LOCK)));
                }
                _ => std::thread::sleep(pause),
            }
        }
    }

    /// Opens a plain file of the store's audience, and creates it if the flags say so. It neither
    /// follows a link nor blocks on a FIFO.
    pub(super) fn open_file(
        &self,
        folder: impl AsFd,
        name: &str,
        flags: OFlags,
    ) -> std::result::Result<OwnedFd, Errno> {
        let mode = self.audience.file_mode();
        let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = rustix::fs::openat(folder, name, flags, mode)?;
        let stat = rustix::fs::fstat(&file)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(Errno::NXIO);
        }
        if !self.audience.trusts(&stat) {
            return Err(Errno::PERM);
        }
        let created = flags.contains(OFlags::CREATE) && stat.st_size == 0;
        if created && stat.st_mode & 0o777 != mode.as_raw_mode() {
            // The umask removed permissions that the group needs.
            let _ = rustix::fs::fchmod(&file, mode);
        }
        Ok(file)
    }

    /// Opens a directory of the store, and creates it if it does not exist.
    pub(super) fn folder(&self, name: &str) -> Result<OwnedFd> {
        let fail = |errno: Errno| unusable_dir(&self.path.join(name), errno);
        let mode = self.audience.dir_mode();
        let made = match rustix::fs::mkdirat(&self.fd, name, mode) {
            Ok(()) => true,
            Err(Errno::EXIST) => false,
            Err(errno) => return Err(fail(errno)),
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let folder = rustix::fs::openat(&self.fd, name, flags, Mode::empty()).map_err(fail)?;
        if made {
            rustix::fs::fchmod(&folder, mode).map_err(fail)?;
        }
        let stat = rustix::fs::fstat(&folder).map_err(fail)?;
        check_audience(&self.path.join(name), &stat, self.audience)?;
        Ok(folder)
    }

    /// The names in the directory.
    pub(super) fn entries(&self) -> Result<Vec<String>> {
        names(&self.fd).map_err(|errno| unusable_dir(&self.path, errno))
    }

    /// Whether its path still leads to it.
    pub(super) fn is_in_place(&self) -> rustix::io::Result<bool> {
        is(rustix::fs::stat(&self.path), self.identity)
    }
}

/// Whether the path leads to this file or directory. An error is no answer.
pub(super) fn leads_to(path: &Path, identity: Identity) -> rustix::io::Result<bool> {
    is(rustix::fs::lstat(path), identity)
}

fn is(found: rustix::io::Result<Stat>, known: Identity) -> rustix::io::Result<bool> {
    match found {
        Ok(stat) => Ok(identity(&stat) == known),
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// The names in a directory, without `.` and `..`.
pub(super) fn names(folder: impl AsFd) -> std::result::Result<Vec<String>, Errno> {
    let mut names = Vec::new();
    for entry in rustix::fs::Dir::read_from(folder)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name != "." && name != ".." {
            names.push(name);
        }
    }
    Ok(names)
}

/// Creates a directory and its parents.
fn make(path: &Path, audience: Audience) -> std::io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    if audience == Audience::User {
        return std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(path);
    }
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent)?;
    }
    match std::fs::DirBuilder::new().mode(0o700).create(path) {
        // The umask removed permissions that the group needs; restore them before it is opened.
        Ok(()) => {
            use std::os::unix::fs::PermissionsExt;
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o2770))
        }
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    }
}

fn check_audience(path: &Path, stat: &Stat, audience: Audience) -> Result<()> {
    let (mode, shown) = (stat.st_mode, path.display());
    let ours = [0, rustix::process::geteuid().as_raw()].contains(&stat.st_uid);
    let message = match audience {
        _ if mode & 0o002 != 0 => {
            format!("directory {shown} can be written to by everyone; chmod o-w on it")
        }
        Audience::User if mode & 0o2020 == 0o2020 => format!(
            "directory {shown} can be written to by its group; add shared=group to the URL if its \
             locks are to be shared with that group, else chmod 700 on it"
        ),
        Audience::User if mode & 0o020 != 0 => {
            format!("directory {shown} can be written to by its group; chmod 700 on it")
        }
        Audience::User if !ours => format!(
            "directory {shown} belongs to another user (uid {}), who could take locks away; use \
             one of your own, or share one with shared=group",
            stat.st_uid
        ),
        Audience::Group if mode & 0o2070 != 0o2070 => format!(
            "directory {shown} is not shared with its group; chgrp it to the group that shares \
             it and chmod 2770, or leave shared=group out"
        ),
        _ => return Ok(()),
    };
    Err(config_error(message))
}

/// The kind of file system, unless it is known to be a local one, where `flock`, FIFOs and syncs do
/// what palisade relies on.
pub(super) fn not_local(fd: &OwnedFd) -> rustix::io::Result<Option<String>> {
    let found = rustix::fs::fstatfs(fd)?.f_type as u64 & 0xffff_ffff;
    if LOCAL.contains(&found) {
        return Ok(None);
    }
    let known = KNOWN.iter().find(|(magic, _)| *magic == found);
    let name = known.map_or("a file system that palisade does not know", |(_, name)| {
        name
    });
    Ok(Some(format!("{name} (type {found:#x})")))
}

/// Overlay is among them: files created at run time are in its upper layer, where locks and FIFOs
/// work as on any local file system. Other containers just don't see them.
const LOCAL: &[u64] = &[
    0xef53,      // ext2, ext3, ext4
    0x5846_5342, // XFS
    0x9123_683e, // Btrfs
    0x2fc1_2fc1, // ZFS
    0xca45_1a4e, // bcachefs
    0xf2f5_2010, // F2FS
    0x0102_1994, // tmpfs
    0x8584_58f6, // ramfs
    0x794c_7630, // overlay
    0x3153_464a, // JFS
    0xf15f,      // eCryptfs
];

/// Names for messages.
const KNOWN: &[(u64, &str)] = &[
    (0x6969, "NFS"),
    (0x517b, "SMB"),
    (0xff53_4d42, "CIFS"),
    (0xfe53_4d42, "SMB"),
    (0x6573_5546, "FUSE"),
    (0x0102_1997, "9p"),
    (0x00c3_6400, "Ceph"),
    (0x5346_414f, "AFS"),
    (0x6b41_4653, "AFS"),
    (0x7375_7245, "Coda"),
    (0x0116_1970, "GFS2"),
    (0x7461_636f, "OCFS2"),
    (0x0bd0_0bd0, "Lustre"),
    (0x786f_4256, "a VirtualBox share"),
    (0xbacb_acbc, "a VMware share"),
    (0x4750_4653, "GPFS"),
    (0x1983_0326, "BeeGFS"),
    (0x2003_0528, "OrangeFS"),
    (0xaad7_aaea, "PanFS"),
    (0x4d44, "FAT"),
    (0x2011_bab0, "exFAT"),
];
