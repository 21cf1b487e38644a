//! What the keeper asks: `renew`, `audit`, and the alarms that make it ask earlier.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use futures_util::{StreamExt, stream};

use super::ConsulEngine;
use super::api::Read;
use super::book::Stage;
use super::wire::{Pair, session_text};
use crate::core::claim::Ask;
use crate::core::clock::BootTime;
use crate::core::engine::{Alarm, Audited, BoxStream, Renewal};
use crate::core::error::Result;
use crate::core::report::Scope;
use crate::core::ticket::{Lease, LeaseId, Ticket};

/// How long a query for marks or changes sleeps. Its connection is noticed to be dead by then.
const NAP: Duration = Duration::from_secs(10);

/// The pause after a query that failed.
const PAUSE: Duration = Duration::from_millis(250);

/// The pause after a query that woke for nothing: for marks, which are rare and for people, and
/// for those who watch lines.
const MARKS_PAUSE: Duration = Duration::from_millis(100);
const WATCH_PAUSE: Duration = Duration::from_millis(10);

/// What says that an operator takes a claim away.
pub(super) struct Mark {
    pub(super) claim: String,
    /// The lock's key of the line that it was in.
    pub(super) line: String,
    pub(super) index: u64,
}

impl ConsulEngine {
    pub(super) async fn do_renew(self: Arc<Self>, leases: Vec<Lease>) -> Vec<Renewal> {
        join_all(leases.into_iter().map(|lease| self.renew_one(lease.id))).await
    }

    async fn renew_one(&self, lease: LeaseId) -> Renewal {
        let session = session_text(lease.0);
        if self.book.retire(lease.0) {
            // Nothing hangs on it, and another one is there.
            let _ = self.api.destroy_session(&session).await;
            return Renewal::Lost;
        }
        let sent = BootTime::now();
        match self.api.renew_session(&session).await {
            Ok(true) => match self.book.renewed(lease.0, sent) {
                Some(armed) => Renewal::Held(armed),
                None => Renewal::Lost,
            },
            Ok(false) => {
                self.book.ended(lease.0);
                Renewal::Lost
            }
            Err(error) => Renewal::Unknown(error),
        }
    }

    /// What hangs on a session: claims that wait or try, as the book says; claims that hold and
    /// writes in doubt, as the store says.
    pub(super) async fn do_audit(self: Arc<Self>, lease: LeaseId) -> Result<Vec<Audited>> {
        let session = session_text(lease.0);
        let marked = self.marked().await?;
        let (seats, doubts) = self.book.on(lease.0);
        let (mut found, mut held) = (Vec::new(), Vec::new());
        for seat in seats {
            match seat.stage {
                Stage::Waiting | Stage::Trying | Stage::Unknown => found.push(Audited {
                    ticket: seat.ticket(),
                    evicted: seat.evicted,
                }),
                Stage::Held(_) => held.push(seat),
            }
        }
        let mut keys = Vec::new();
        for seat in &held {
            let line = self.keys.line(&seat.claim.name)?;
            keys.push(match seat.claim.ask {
                Ask::Whole => line.lock,
                Ask::READ => line.reader(seat.claim.id),
                Ask::Part { .. } => line.permit(&session),
            });
        }
        let locked = self.api.locked_by(&session, &keys).await?;
        for (seat, locked) in held.into_iter().zip(locked) {
            let claim = seat.claim.id;
            let line = self.keys.line(&seat.claim.name)?;
            // Not where it was: it may have been amended.
            if locked
                || self
                    .look(&line)
                    .await?
                    .find(&line, claim, &session)
                    .is_some()
            {
                let evicted = marked.iter().any(|mark| mark.claim == claim.to_string());
                if evicted {
                    self.book.change(claim, |seat| seat.evicted = true);
                }
                found.push(Audited {
                    ticket: seat.ticket(),
                    evicted,
                });
            }
        }
        for (name, claim) in doubts {
            let line = self.keys.line(&name)?;
            if let Some(held) = self.look(&line).await?.find(&line, claim, &session) {
                let ticket = Ticket {
                    lease,
                    counted: held.counted,
                    ..Ticket::own(name, claim)
                };
                found.push(Audited {
                    ticket,
                    evicted: false,
                });
            }
        }
        Ok(found)
    }

    /// The claims that operators take away.
    pub(super) async fn marked(&self) -> Result<Vec<Mark>> {
        let prefix = self.keys.marks();
        let marks = self
            .api
            .read("audit", &prefix, true, Read::Consistent)
            .await?;
        let mark = |pair: Pair| Mark {
            claim: pair.key[prefix.len()..].to_owned(),
            line: String::from_utf8_lossy(&pair.bytes()).into_owned(),
            index: pair.modify_index,
        };
        Ok(marks.pairs.into_iter().map(mark).collect())
    }

    /// Changes below a prefix, as a stream: the first look, and every one that differs from the
    /// one before. Consul wakes whoever watches what is not there at every write nearby: such a
    /// wake-up is no change, and is followed by a pause.
    fn changes(
        self: Arc<Self>,
        prefix: String,
        recurse: bool,
        pause: Duration,
    ) -> BoxStream<Result<()>> {
        let state = (self, prefix, 0_u64, None);
        stream::unfold(state, move |(engine, prefix, mut index, last)| async move {
            loop {
                let read = match index {
                    0 => Read::Consistent,
                    index => Read::After(index, NAP),
                };
                match engine.api.read("watch", &prefix, recurse, read).await {
                    Ok(seen) if seen.index == index => {}
                    Ok(seen) => {
                        // Zero would never sleep; one that goes back is another history.
                        index = if seen.index < index {
                            0
                        } else {
                            seen.index.max(1)
                        };
                        let now = seen.pairs.into_iter();
                        let now: Vec<_> = now.map(|pair| (pair.key, pair.modify_index)).collect();
                        if last.as_ref() != Some(&now) {
                            return Some((Ok(()), (engine, prefix, index, Some(now))));
                        }
                        tokio::time::sleep(pause).await;
                    }
                    Err(error) => {
                        tokio::time::sleep(PAUSE).await;
                        return Some((Err(error), (engine, prefix, 0, None)));
                    }
                }
            }
        })
        .boxed()
    }

    pub(super) fn do_alarms(self: Arc<Self>) -> BoxStream<Alarm> {
        let own = self.alarms.subscribe();
        let own = stream::unfold(own, |mut own| async move {
            use tokio::sync::broadcast::error::RecvError;
            match own.recv().await {
                Ok(alarm) => Some((alarm, own)),
                Err(RecvError::Lagged(_)) => Some((Alarm::All, own)),
                Err(RecvError::Closed) => None,
            }
        });
        let marks = self.keys.marks();
        let marks = self.changes(marks, true, MARKS_PAUSE);
        let marks = marks.filter_map(|change| async { change.ok().map(|()| Alarm::All) });
        stream::select(own.boxed(), marks.boxed()).boxed()
    }

    pub(super) fn do_watch(self: Arc<Self>, scope: Scope) -> BoxStream<Result<()>> {
        match scope {
            Scope::Prefix(prefix) => {
                let prefix = self.keys.beginning(&prefix);
                self.changes(prefix, true, WATCH_PAUSE)
            }
            Scope::Line(name) => match self.keys.line(&name) {
                Ok(line) => {
                    let lock = Arc::clone(&self).changes(line.lock.clone(), false, WATCH_PAUSE);
                    stream::select(lock, self.changes(line.tree(), true, WATCH_PAUSE)).boxed()
                }
                Err(error) => stream::iter([Err(error)]).boxed(),
            },
        }
    }
}
