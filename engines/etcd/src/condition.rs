//! `EtcdHold`: a hold as a condition in the user's own etcd transactions.
//!
//! A write with the condition is applied only while the hold's key exists. etcd checks it
//! atomically with the write, so a pause of the writer can't come in between.

use super::keys;
use super::leases::number;
use palisade_core::Hold;

/// A condition that is true in an etcd transaction exactly while the hold has its place.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Condition {
    /// The key of the place.
    pub key: Vec<u8>,
    /// The create revision that the key must have.
    pub create_revision: i64,
}

/// Extensions for holds of `etcd:`.
pub trait EtcdHold {
    /// The condition to put into the user's own transaction, with any client of etcd:
    /// *create revision of `key` equals `create_revision`* (in Go
    /// `clientv3.Compare(clientv3.CreateRevision(key), "=", rev)`, with the crate etcd-client
    /// `Compare::create_revision(key, CompareOp::Equal, rev)`). `None` for a hold of another
    /// engine.
    fn etcd_compare(&self) -> Option<Condition>;
}

impl EtcdHold for Hold {
    fn etcd_compare(&self) -> Option<Condition> {
        let ticket = self.ticket();
        let key = ticket.native.as_deref()?;
        (keys::lease_of(key)? == number(ticket.lease)).then(|| Condition {
            key: key.as_bytes().to_vec(),
            // Revisions of etcd are positive.
            create_revision: i64::try_from(ticket.sequence).unwrap_or(-1),
        })
    }
}
