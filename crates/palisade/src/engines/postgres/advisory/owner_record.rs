//! Records of who holds, for people, written without delaying anyone.
//!
//! A lock that is given back soon is never recorded; one that is kept is, a moment after its
//! grant, on its own session. Nothing is decided by the record.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use super::super::error::failed;
use super::super::micros;
use super::claim::LocalClaim;
use super::registry::Registry;
use super::statements::NAMELESS;
use crate::core::engine::Place;
use crate::core::error::Result;

/// Long enough that a quick lock and unlock is over, also on a busy server: whoever unlocks waits
/// until the record is written. Short enough that nobody misses it.
const DELAY: Duration = Duration::from_millis(50);

/// Claims that hold and are not recorded yet.
#[derive(Default)]
pub(super) struct Fresh {
    claims: Mutex<Vec<Weak<LocalClaim>>>,
    /// A task records them.
    recording: AtomicBool,
}

/// Records that `claim` holds, if it still does in a moment.
pub(super) fn note(registry: &Arc<Registry>, claim: &Arc<LocalClaim>) {
    let fresh = &registry.fresh;
    fresh.claims.lock().push(Arc::downgrade(claim));
    if fresh.recording.swap(true, Ordering::SeqCst) {
        return;
    }
    let weak = Arc::downgrade(registry);
    registry.home().spawn(async move {
        loop {
            tokio::time::sleep(DELAY / 5).await;
            let Some(registry) = weak.upgrade() else {
                return;
            };
            let fresh = &registry.fresh;
            let noted = std::mem::take(&mut *fresh.claims.lock());
            let claims = noted.iter().filter_map(Weak::upgrade);
            for claim in claims.filter(|claim| registry.claim(claim.claim.id).is_some()) {
                // Recording takes the session's time: not in the middle of a quick lock and
                // unlock.
                let due = claim.state.lock().since + DELAY;
                if !due.has_passed() {
                    fresh.claims.lock().push(Arc::downgrade(&claim));
                    continue;
                }
                // For people: the next heartbeat finds out what is wrong, if anything is.
                let _ = record(&registry, &claim).await;
            }
            if noted.is_empty() {
                fresh.recording.store(false, Ordering::SeqCst);
                let rest = fresh.claims.lock().is_empty();
                // Whoever came in between saw that we were recording.
                if rest || fresh.recording.swap(true, Ordering::SeqCst) {
                    return;
                }
            }
        }
    });
}

/// Records it, unless it has left.
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
