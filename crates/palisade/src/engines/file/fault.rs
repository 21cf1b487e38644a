//! `Fault`: why a transaction failed, before it becomes an `Error`.
//!
//! Some faults are repaired where the transaction runs (a full map grows); the rest become errors
//! that say what to do.

use heed::MdbError;
use rustix::io::Errno;

use super::lmdb::Refusal;
use crate::core::error::{Error, Kind};

/// See the module's text.
#[derive(Debug)]
pub(super) enum Fault {
    /// The map is too small for what is to be written.
    Full,
    /// The store was deleted under us.
    Deleted,
    /// The file is damaged.
    Damaged,
    /// A record that was just there is missing.
    Missing,
    /// LMDB's own.
    Lmdb(heed::Error),
    /// The commit failed.
    Commit(heed::Error),
    /// What the caller is to see as it is.
    Error(Error),
}

impl From<heed::Error> for Fault {
    fn from(error: heed::Error) -> Self {
        match error {
            heed::Error::Mdb(MdbError::MapFull) => Self::Full,
            other => Self::Lmdb(other),
        }
    }
}

impl From<Refusal> for Fault {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Deleted => Self::Deleted,
            Refusal::Damaged => Self::Damaged,
            Refusal::Lmdb(error) => error.into(),
        }
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Self::Error(error)
    }
}

impl Fault {
    /// Whether the map must grow and the transaction be run again.
    pub(super) fn wants_room(&self) -> bool {
        matches!(
            self,
            Self::Full | Self::Commit(heed::Error::Mdb(MdbError::MapFull))
        )
    }

    /// Whether LMDB refuses all further work until it is opened again.
    pub(super) fn wants_reopening(&self) -> bool {
        matches!(self, Self::Lmdb(heed::Error::Mdb(MdbError::Panic)))
    }

    /// What was a matter of configuration on opening is a refusal in a store that was open.
    pub(super) fn while_open(error: Error) -> Self {
        Self::Error(match error.kind() {
            Kind::Config => Error::new(Kind::Denied, error.operation(), error.message()),
            _ => error,
        })
    }

    /// The error that the caller sees.
    pub(super) fn into_error(self, operation: &'static str) -> Error {
        let unusable = |message: &str| Error::new(Kind::Unusable, operation, message);
        match self {
            Self::Error(error) => error,
            Self::Deleted => unusable(
                "the store's directory was deleted or replaced while in use; connect again",
            ),
            Self::Full => unusable("the store is full and can't grow"),
            Self::Damaged | Self::Missing => unusable(CORRUPT),
            Self::Lmdb(cause) => from_lmdb(operation, cause),
            Self::Commit(cause) => from_lmdb(operation, cause).maybe_applied(),
        }
    }
}

const CORRUPT: &str = "the store's data file is damaged; stop its users and remove its folder \
                       `lines`: lines start empty then, tokens go on above the ceiling";

fn from_lmdb(operation: &'static str, cause: heed::Error) -> Error {
    let (kind, message) = match &cause {
        heed::Error::EnvAlreadyOpened => (
            Kind::Unreachable,
            "this process has the directory open already, as one that was replaced or is still \
             closing",
        ),
        heed::Error::Io(io) => match io.raw_os_error().map(Errno::from_raw_os_error) {
            Some(Errno::ACCESS | Errno::PERM | Errno::ROFS) => {
                (Kind::Denied, "the store can't be written to any more")
            }
            Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::AGAIN) => {
                (Kind::Unreachable, "out of file descriptors or memory")
            }
            // LMDB reports a short write, as on a full disk, as EIO.
            Some(Errno::NOSPC | Errno::DQUOT | Errno::IO) => (
                Kind::Unusable,
                "the store can't be written: its disk is full or fails; free some space",
            ),
            _ => (Kind::Unusable, "the store can't be read or written"),
        },
        _ => (Kind::Unusable, CORRUPT),
    };
    Error::new(kind, operation, message).because(cause)
}
