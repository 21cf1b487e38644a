//! What the keeper asks: `renew`, `audit`, and the alarms that make it ask earlier.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use futures_util::{StreamExt, stream};
use tokio::time::timeout;

use super::ConsulEngine;
use super::api::Read;
use super::book::Stage;
use super::wire::{Op, Pair, session_text};
use crate::core::claim::Ask;
use crate::core::clock::BootTime;
use crate::core::engine::{Alarm, Audited, BoxStream, Renewal};
use crate::core::error::Result;
use crate::core::report::Scope;
use crate::core::ticket::{Lease, LeaseId, Ticket};

/// How long a query for marks or changes sleeps. Its connection is noticed to be dead by then.
const NAP: Duration = Duration::from_secs(10);

/// The pause after a query that failed.
const FAILED_PAUSE: Duration = Duration::from_millis(250);

/// The pause after a query that woke for nothing: the first, and the longest.
const PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// How often each session looks for what others have left behind, about.
const SWEEP: Duration = Duration::from_secs(6 * 60 * 60);

/// What says that an operator takes a claim away.
pub(super) struct Mark {
    pub(super) claim: String,
    /// The lock's key of the line that it was in.
    pub(super) line: String,
    pub(super) index: u64,
}

impl ConsulEngine {
    pub(super) async fn do_renew(
        self: Arc<Self>,
        leases: Vec<Lease>,
        within: Duration,
    ) -> Vec<Renewal> {
        let leases = leases.into_iter();
        join_all(leases.map(|lease| self.renew_one(lease.id, within))).await
    }

    async fn renew_one(&self, lease: LeaseId, within: Duration) -> Renewal {
        let session = session_text(lease.0);
        if self.book.retire(lease.0) {
            // Nothing hangs on it, and another one is there.
            let _ = timeout(within, self.api.destroy_session(&session)).await;
            return Renewal::Lost;
        }
        let sent = BootTime::now();
        match self.api.renew_session(&session, within).await {
            Ok(true) => match self.book.renewed(lease.0, sent) {
                Some(armed) => {
                    let chance = (armed.ttl / 3).as_secs_f64() / SWEEP.as_secs_f64();
                    if !self.keys.is_bare() && rand::random_bool(chance.min(1.0)) {
                        self.book.suspect(Some(lease.0));
                    }
                    Renewal::Held(armed)
                }
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
        let suspicion = self.book.suspicion(lease.0);
        if let Some(suspicion) = suspicion {
            match self.strangers(lease).await {
                // The next audit asks again.
                Err(error) if error.is_transient() => {}
                strangers => {
                    found.extend(strangers.unwrap_or_default());
                    self.book.cleared(lease.0, suspicion);
                }
            }
        }
        for (name, claim) in doubts {
            let line = self.keys.line(&name)?;
            if let Some(held) = self.look(&line).await?.find(&line, claim, &session) {
                let ticket = Ticket {
                    lease,
                    sequence: held.sequence,
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

    /// What the store has on a session and the book does not: a snapshot was restored from
    /// before it was left. Nobody else would ever remove it, since the session lives.
    async fn strangers(self: &Arc<Self>, lease: LeaseId) -> Result<Vec<Audited>> {
        let session = session_text(lease.0);
        let from = self.keys.beginning("");
        let seen = self.api.read("audit", &from, true, Read::Consistent);
        let lines = self.lines(seen.await?.pairs);
        let mut strangers = Vec::new();
        for (name, view) in &lines {
            let line = self.keys.line(name)?;
            let pairs = view.lock.iter().chain(&view.tree);
            let held = pairs.filter(|pair| pair.holder() == Some(&session));
            for record in held.filter_map(Pair::record) {
                let Ok(claim) = record.claim.parse() else {
                    continue;
                };
                let seat = self.book.seat(claim);
                let is_known = seat.is_some_and(|seat| seat.session == lease.0);
                if let Some(found) = view.find(&line, claim, &session).filter(|_| !is_known) {
                    let ticket = Ticket {
                        lease,
                        sequence: found.sequence,
                        ..Ticket::own(name.clone(), claim)
                    };
                    strangers.push(Audited {
                        ticket,
                        evicted: false,
                    });
                }
            }
        }
        // Nobody waits for it.
        let engine = Arc::clone(self);
        tokio::spawn(async move { engine.sweep_dead(&lines).await });
        Ok(strangers)
    }

    /// Changes below a prefix, as a stream: the first look, and every one that differs from the
    /// one before. Consul wakes whoever watches what is not there at every write nearby: such a
    /// wake-up is no change, and is followed by a pause that gets longer.
    fn changes(self: Arc<Self>, prefix: String, recurse: bool) -> BoxStream<Result<()>> {
        let watching = Watching {
            engine: self,
            prefix,
            recurse,
            index: 0,
            last: None,
            pause: PAUSE,
            restored: BootTime::PAST,
            calm: Duration::ZERO,
        };
        stream::unfold(watching, |mut watching| async move {
            let changed = watching.next().await;
            Some((changed, watching))
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
        let marks = self.changes(marks, true);
        let marks = marks.filter_map(|change| async { change.ok().map(|()| Alarm::All) });
        stream::select(own.boxed(), marks.boxed()).boxed()
    }

    pub(super) fn do_watch(self: Arc<Self>, scope: Scope) -> BoxStream<Result<()>> {
        match scope {
            Scope::Prefix(prefix) => {
                let prefix = self.keys.beginning(&prefix);
                self.changes(prefix, true)
            }
            Scope::Line(name) => match self.keys.line(&name) {
                Ok(line) => {
                    let lock = Arc::clone(&self).changes(line.lock.clone(), false);
                    stream::select(lock, self.changes(line.tree(), true)).boxed()
                }
                Err(error) => stream::iter([Err(error)]).boxed(),
            },
        }
    }
}

/// Keys that are watched, and what was seen of them last.
struct Watching {
    engine: Arc<ConsulEngine>,
    prefix: String,
    recurse: bool,
    /// Zero to look at once.
    index: u64,
    last: Option<Vec<(String, u64)>>,
    pause: Duration,
    /// When a snapshot was last taken to be restored, and how long nobody is told again.
    restored: BootTime,
    calm: Duration,
}

impl Watching {
    /// Takes a snapshot to be restored, unless that seems to happen all the time: something
    /// between us and Consul ends queries early.
    fn restored(&mut self) -> bool {
        let again = (self.restored + self.calm).has_passed();
        if again {
            self.restored = BootTime::now();
            self.calm = (self.calm * 2).clamp(Duration::from_secs(1), SWEEP);
            self.engine.book.suspect(None);
        }
        again
    }

    /// Waits for a change.
    async fn next(&mut self) -> Result<()> {
        loop {
            let read = match self.index {
                0 => Read::Consistent,
                index => Read::After(index, NAP),
            };
            let asked = BootTime::now();
            let api = &self.engine.api;
            let seen = match api.read("watch", &self.prefix, self.recurse, read).await {
                Ok(seen) => seen,
                Err(error) => {
                    // Whatever comes back may have another history.
                    if error.is_transient() {
                        self.engine.book.suspect(None);
                    }
                    (self.index, self.last) = (0, None);
                    tokio::time::sleep(FAILED_PAUSE).await;
                    return Err(error);
                }
            };
            let woken = BootTime::now().saturating_since(asked) < NAP;
            if self.index > 0 && woken && seen.index <= self.index {
                // Consul wakes everyone when it restores a snapshot.
                (self.index, self.last) = (0, None);
                if self.restored() {
                    return Ok(());
                }
                tokio::time::sleep(LONGEST_PAUSE).await;
                continue;
            }
            if seen.index == self.index {
                self.calm = Duration::ZERO;
                continue;
            }
            // Zero would never sleep; one that goes back is another history.
            self.index = if seen.index < self.index {
                0
            } else {
                seen.index.max(1)
            };
            let absent = seen.pairs.is_empty();
            let now = seen.pairs.into_iter();
            let now: Vec<_> = now.map(|pair| (pair.key, pair.modify_index)).collect();
            if self.last.as_ref() != Some(&now) {
                self.last = Some(now);
                self.pause = PAUSE;
                if absent {
                    self.anchor().await;
                }
                return Ok(());
            }
            tokio::time::sleep(self.pause).await;
            self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Writes a key among the marks if there is none, so that only marks wake who watches them.
    async fn anchor(&self) {
        let keys = &self.engine.keys;
        if self.prefix == keys.marks() {
            let key = keys.removed_last();
            let ops = [Op::unchanged(&key, None), Op::set(&key, 0, "")];
            // Without the right to it, or when another was quicker, nothing is lost.
            let _ = self.engine.api.transact("watch", &ops).await;
        }
    }
}
