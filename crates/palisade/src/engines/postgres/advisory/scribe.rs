//! `Scribe`: writes down who holds, for people, without delaying anyone.
//!
//! A lock that is given back soon is never written down; one that is kept is, a moment after its
//! grant, on its own connection. Nothing is decided by the record.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use super::chair::Chair;
use super::hall::{Hall, failed};
use super::statement::NAMELESS;
use crate::core::engine::Place;
use crate::core::error::Result;

/// Long enough that a quick lock and unlock is over, also on a busy server: whoever unlocks waits
/// until the record is written. Short enough that nobody misses it.
const DELAY: Duration = Duration::from_millis(50);

#[derive(Default)]
pub(super) struct Scribe {
    fresh: Mutex<Vec<Weak<Chair>>>,
    writing: AtomicBool,
}

impl Scribe {
    /// Writes down that `chair` holds, if it still does in a moment.
    pub(super) fn note(self: &Arc<Self>, chair: &Arc<Chair>, hall: &Arc<Hall>) {
        self.fresh.lock().push(Arc::downgrade(chair));
        if self.writing.swap(true, Ordering::SeqCst) {
            return;
        }
        let (scribe, hall_of) = (Arc::clone(self), Arc::downgrade(hall));
        hall.home().spawn(async move {
            loop {
                tokio::time::sleep(DELAY / 5).await;
                let fresh = std::mem::take(&mut *scribe.fresh.lock());
                let Some(hall) = hall_of.upgrade() else {
                    return;
                };
                let chairs = fresh.iter().filter_map(Weak::upgrade);
                for chair in chairs.filter(|chair| hall.chair(chair.claim.id).is_some()) {
                    // Writing takes the connection's time: not in the middle of a quick lock
                    // and unlock.
                    if !(chair.since() + DELAY).has_passed() {
                        scribe.fresh.lock().push(Arc::downgrade(&chair));
                        continue;
                    }
                    // For people: the next heartbeat finds out what is wrong, if anything is.
                    let _ = scribe.record(&chair, &hall).await;
                }
                if fresh.is_empty() {
                    scribe.writing.store(false, Ordering::SeqCst);
                    let rest = scribe.fresh.lock().is_empty();
                    // Whoever came in between saw that we were writing.
                    if rest || scribe.writing.swap(true, Ordering::SeqCst) {
                        return;
                    }
                }
            }
        });
    }

    /// Writes it down, unless it has left.
    pub(super) async fn record(&self, chair: &Chair, hall: &Hall) -> Result<()> {
        let claim = &chair.claim;
        let Some(own) = chair.own() else {
            return Ok(());
        };
        let _turn = own.turn.lock().await;
        let Place::Held { sequence } = chair.stands() else {
            return Ok(());
        };
        if hall.chair(claim.id).is_none() {
            return Ok(());
        }
        let ttl = i64::try_from(claim.ttl.as_micros()).unwrap_or(i64::MAX);
        let value = chair.value.lock().clone();
        let written = own
            .record(&[
                &claim.id.to_string(),
                &hall.namespace,
                &claim.name.as_str(),
                &ttl,
                &claim.owner.to_json(),
                &value,
                &format!("{NAMELESS} {} {sequence}", claim.id),
            ])
            .await;
        written.map_err(|error| failed("record", &error))
    }
}
