//! `ZooKeeperHold`: a hold as a condition in the user's own transactions.
//!
//! A `multi` with the check is applied only while the hold's znode exists. ZooKeeper checks it
//! atomically with the writes, so a pause of the writer can't come in between.

use super::keys::Child;
use palisade_core::Hold;

/// A check that passes in a `multi` exactly while the hold has its place.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Check {
    /// The znode of the place, chroot included. No other znode ever has this name.
    pub path: String,
    /// The version to check for: -1, any, because a candidate's new value changes the version.
    pub version: i32,
}

/// Extensions for holds of `zookeeper:`.
pub trait ZooKeeperHold {
    /// The check to put into the user's own `multi`, with any client of ZooKeeper (in Java
    /// `Op.check(path, version)`, with kazoo `transaction.check(path, version)`). `None` for a
    /// hold of another engine.
    fn zookeeper_check(&self) -> Option<Check>;
}

impl ZooKeeperHold for Hold {
    fn zookeeper_check(&self) -> Option<Check> {
        let path = self.key().filter(|path| path.starts_with('/'))?;
        Child::read(path.rsplit('/').next()?)?.claim?;
        Some(Check { path, version: -1 })
    }
}
