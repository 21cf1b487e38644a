//! Owner records, for people, written without delaying anyone.
//!
//! A lock that is released soon is never recorded. One that is kept is recorded shortly after its
//! grant, on its own session. No decision depends on the record.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use super::super::error::failed;
use super::super::micros;
use super::claim::LocalClaim;
use super::registry::Registry;
use super::session::NAMELESS;
use palisade_core::Result;
use palisade_core::engine::Place;

/// Long enough that a short lock is released by then even on a busy server, because a release has
/// to wait while the record is written. Short enough that nobody misses the record.
const DELAY: Duration = Duration::from_millis(50);

/// Holders that are not recorded yet.
#[derive(Default)]
pub(super) struct Fresh {
    pub(super) claims: Mutex<Vec<Weak<LocalClaim>>>,
    /// Whether a task records them.
    pub(super) recording: AtomicBool,
}

/// Records the claims that still hold after [`DELAY`], until there are no fresh ones.
pub(super) async fn record_fresh(registry: Weak<Registry>) {
    loop {
        tokio::time::sleep(DELAY / 5).await;
        let Some(registry) = registry.upgrade() else {
            return;
        };
        let fresh = &registry.fresh;
        let noted = std::mem::take(&mut *fresh.claims.lock());
        let claims = noted.iter().filter_map(Weak::upgrade);
        for claim in claims.filter(|claim| registry.claim(claim.claim.id).is_some()) {
            // Writing the record occupies the session, so a short lock and unlock is spared.
            let due = claim.state.lock().since + DELAY;
            if !due.has_passed() {
                fresh.claims.lock().push(Arc::downgrade(&claim));
                continue;
            }
            // An error is ignored: no decision depends on the record, and the next heartbeat
            // finds out.
            let _ = record(&registry, &claim).await;
        }
        if noted.is_empty() {
            fresh.recording.store(false, Ordering::SeqCst);
            let rest = fresh.claims.lock().is_empty();
            // A claim that was noted in between saw `recording` set and started no task.
            if rest || fresh.recording.swap(true, Ordering::SeqCst) {
                return;
            }
        }
    }
}

/// Writes the owner record, unless the claim has left.
pub(super) async fn record(registry: &Registry, local: &LocalClaim) -> Result<()> {
    let claim = &local.claim;
    let Some(session) = local.session() else {
        return Ok(());
    };
    let _naming = session.naming.lock().await;
    let Place::Held { sequence } = local.place() else {
        return Ok(());
    };
    if registry.claim(claim.id).is_none() {
        return Ok(());
    }
    let value = local.state.lock().value.clone();
    let recorded = session
        .record(&[
            &claim.id.to_string(),
            &registry.namespace,
            &claim.name.as_str(),
            &micros(claim.ttl),
            &claim.owner.to_json(),
            &value,
            &format!("{NAMELESS} {} {sequence}", claim.id),
        ])
        .await;
    recorded.map_err(|error| failed("record", &error))
}
