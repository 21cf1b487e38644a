//! `ZooKeeperHold`: a hold as a condition for the user's own transactions.
//!
//! A `multi` that carries the check is applied only while the hold's node is there: checked by
//! ZooKeeper in the same step, so that no pause of the writer can come in between.

use super::keys::Child;
use crate::core::hold::Hold;

/// True in a `multi` exactly while the hold has its place.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Check {
    /// The node of the place, the chroot included. No other node is ever called so.
    pub path: String,
    /// The version to check for: -1, any. A candidate's new value is no other place.
    pub version: i32,
}

/// What holds of this engine can do beside the rest.
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
