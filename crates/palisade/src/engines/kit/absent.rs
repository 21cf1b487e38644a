//! The room of the verbs that an engine does not have.

use crate::core::engine::{Audited, cannot_resize};
use crate::core::error::Result;
use crate::core::name::Name;
use crate::core::queue::SharedQueueStore;
use crate::core::ticket::LeaseId;

/// Every ticket has a lease of its own.
pub(crate) async fn audit<E>(_: &E, _: LeaseId) -> Result<Vec<Audited>> {
    Ok(Vec::new())
}

/// The capacity of a line in use stays.
pub(crate) async fn resize<E>(_: &E, _: &Name, _: u32) -> Result<bool> {
    cannot_resize().await
}

/// It has no work queues.
pub(crate) fn queues<E>(_: &E) -> Option<SharedQueueStore> {
    None
}
