//! The room of the verbs that an engine does not have.

use palisade_core::engine::{Audited, LeaseId, cannot_resize};
use palisade_core::queue::SharedQueueStore;
use palisade_core::{Name, Result};

/// Every ticket has a lease of its own.
pub async fn audit<E>(_: &E, _: LeaseId) -> Result<Vec<Audited>> {
    Ok(Vec::new())
}

/// The capacity of a line in use stays.
pub async fn resize<E>(_: &E, _: &Name, _: u32) -> Result<bool> {
    cannot_resize().await
}

/// It has no work queues.
pub fn queues<E>(_: &E) -> Option<SharedQueueStore> {
    None
}
