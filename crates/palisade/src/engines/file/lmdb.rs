//! LMDB, behind the few calls that the store needs; the only unsafe code of the engine.
//!
//! Invariant: every call is made by one thread of one process at a time, namely whoever holds the
//! store's writer lock (an in-process mutex and a `flock`). LMDB's own lock file is therefore not
//! used: its mutexes would outlive a killed owner in ways that a `flock` does not, and there are
//! no readers beside the one writer that its reader table could protect.
#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use heed::types::Bytes;
use heed::{CommitOrAbort, Database, Env, EnvFlags, EnvOpenOptions, MdbError, RwTxn, WithoutTls};
use rustix::io::FdFlags;

use super::pages;

/// Room for about 50 000 tickets; the file itself is only as long as what was ever used.
const FIRST_MAP: usize = 16 << 20;

/// The name of LMDB's file in its folder.
pub(super) const FILE: &str = "data.mdb";

/// An open LMDB environment with its one database.
pub(super) struct Data {
    env: Env<WithoutTls>,
    /// The one database.
    pub(super) db: Database<'static, Bytes, Bytes>,
    /// The file of the environment, to look at its length.
    file: File,
    page: u64,
}

/// Why a transaction can't begin.
pub(super) enum Refusal {
    /// The file is shorter than it says, or its pages can't be read without a crash.
    Damaged,
    /// The file was deleted.
    Deleted,
    /// LMDB's own.
    Lmdb(heed::Error),
}

impl From<heed::Error> for Refusal {
    fn from(error: heed::Error) -> Self {
        Self::Lmdb(error)
    }
}

impl Data {
    /// Opens, and creates where it is missing, the environment in `folder`. The caller holds the
    /// writer lock.
    pub(super) fn open(folder: &Path) -> Result<Self, Refusal> {
        let page = rustix::param::page_size() as u64;
        match std::fs::read(folder.join(FILE)) {
            Ok(file) if file.is_empty() => {}
            Ok(file) => pages::check(&file, page as usize).map_err(|_| Refusal::Damaged)?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(heed::Error::Io(error).into()),
        }
        let mut options = EnvOpenOptions::new().read_txn_without_tls();
        options.map_size(FIRST_MAP).max_dbs(0);
        // SAFETY: NO_LOCK asks that writers exclude each other and that no reader runs beside a
        // writer: all access is under the writer lock (see the module's text). NO_SYNC and
        // NO_META_SYNC may leave a corrupt file after a crash of the system: the file is thrown
        // away when the boot id differs, so no such file is ever opened.
        unsafe {
            options.flags(EnvFlags::NO_LOCK | EnvFlags::NO_SYNC | EnvFlags::NO_META_SYNC);
        }
        // SAFETY: the file is on a local file system (others are refused), in a folder of ours
        // with mode 0700, changed only through LMDB under the writer lock, and opened once per
        // process (heed refuses a second time); its length is looked at before each transaction.
        let env = unsafe { options.open(folder)? };
        let file = env.try_clone_inner_file()?;
        keep_from_children(&file).map_err(heed::Error::Io)?;
        check_length(&file, &env, page)?;
        let txn = env.write_txn()?;
        let db = env
            .create_databases_and_commit::<_, _, (), heed::Error>(txn, |opener, txn| {
                opener.create_database(txn, None).map(CommitOrAbort::Commit)
            })?
            .commit();
        let Some(db) = db else {
            // The closure above never aborts.
            return Err(Refusal::Lmdb(heed::Error::Mdb(MdbError::Invalid)));
        };
        Ok(Self {
            env,
            db,
            file,
            page,
        })
    }

    /// Begins the one transaction. The caller holds the writer lock.
    pub(super) fn begin(&mut self) -> Result<RwTxn<'_>, Refusal> {
        check_length(&self.file, &self.env, self.page)?;
        let last = self.env.info().last_page_number as u64;
        if (last + 1) * self.page > self.env.info().map_size as u64 {
            // Another process made the map larger: take its size.
            self.resize(0)?;
        }
        Ok(self.env.write_txn()?)
    }

    /// Doubles the map. The caller holds the writer lock; there is no transaction.
    pub(super) fn grow(&mut self) -> Result<(), heed::Error> {
        self.resize(self.env.info().map_size.saturating_mul(2))
    }

    fn resize(&mut self, size: usize) -> Result<(), heed::Error> {
        // SAFETY: there is no transaction of this process: transactions borrow `self`, and this
        // borrows it mutably; other processes map the file on their own.
        unsafe { self.env.resize(size) }
    }
}

/// Looks whether the file is as long as its meta pages say, before anything else is read from
/// the map.
fn check_length(file: &File, env: &Env<WithoutTls>, page: u64) -> Result<(), Refusal> {
    let stat = rustix::fs::fstat(file).map_err(|error| heed::Error::Io(error.into()))?;
    let length = stat.st_size as u64;
    if stat.st_nlink == 0 {
        return Err(Refusal::Deleted);
    }
    if length < 2 * page || length < (env.info().last_page_number as u64 + 1) * page {
        return Err(Refusal::Damaged);
    }
    Ok(())
}

/// LMDB opens its file without O_CLOEXEC, so that child programs would inherit it: marks every
/// descriptor of this process for that file.
fn keep_from_children(file: &File) -> std::io::Result<()> {
    let data = file.metadata()?;
    for entry in std::fs::read_dir("/proc/self/fd")? {
        let entry = entry?;
        let Some(number) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
        else {
            continue;
        };
        let same = std::fs::metadata(entry.path())
            .is_ok_and(|found| (found.dev(), found.ino()) == (data.dev(), data.ino()));
        if same {
            // SAFETY: it is open: only LMDB and `Data` have descriptors for this file, and both
            // keep them while this runs.
            let descriptor = unsafe { BorrowedFd::borrow_raw(number) };
            rustix::io::fcntl_setfd(descriptor, FdFlags::CLOEXEC)?;
        }
    }
    Ok(())
}
