//! `Asked`: whether somebody still waits for the work of a blocking thread.
//!
//! A future that is dropped doesn't stop its thread. Work that waits for its turn asks here when the
//! turn has come: whatever the caller did after the drop waits for the same turn, so that work which
//! is not started then can't overtake it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The thread's side.
#[derive(Debug, Clone, Default)]
pub struct Asked(Arc<AtomicBool>);

/// The caller's side, which lives as long as the future.
pub struct Asking(Asked);

impl Asked {
    /// Both sides.
    pub fn new() -> (Asking, Self) {
        let asked = Self::default();
        (Asking(asked.clone()), asked)
    }

    /// Whether the future was dropped.
    pub fn is_dropped(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        self.0.0.store(true, Ordering::SeqCst);
    }
}
