//! Entering, waiting, renewing and leaving with session locks.
//!
//! Invariant: what a lease counts from is before the lock was had, or a heartbeat's. The server
//! lets a session be idle for a ttl from the grant on, and a claim that waits is renewed as of a
//! moment at which the server said that it still waited.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::join_all;
use tokio::sync::OwnedMutexGuard;

use super::super::pooler::no_session_locks;
use super::chair::{Chair, taking};
use super::hall::{Hall, failed};
use super::own::{Beat, Taken};
use super::scribe::Scribe;
use super::statement::Verb;
use crate::core::claim::{Ask, Claim};
use crate::core::clock::BootTime;
use crate::core::engine::{Amended, Amendment, Entered, Left, Place, Renewal};
use crate::core::error::{Error, Kind, Result};
use crate::core::sync;
use crate::core::ticket::{Lease, LeaseStart, Ticket};
use crate::engines::remote::timed;

/// How long a waiter sleeps at most before it looks whether the server still answers.
const RECHECK: Duration = Duration::from_secs(1);

/// The pause before another attempt to get a connection for a claim whose turn it is.
const AGAIN: Duration = Duration::from_millis(100);

/// Whose sessions waited when it was asked.
struct Waiting {
    sent: BootTime,
    pids: Vec<i32>,
}

fn unknown(why: &str) -> Error {
    Error::new(Kind::Unreachable, "renew", why)
}

fn moved() -> Error {
    let message =
        "the server has become a standby or another timeline, where session locks are not known";
    Error::new(Kind::Lost, "renew", message)
}

/// The locks of one client.
#[derive(Clone)]
pub(super) struct Locks {
    pub(super) hall: Arc<Hall>,
    pub(super) scribe: Arc<Scribe>,
}

impl Locks {
    pub(super) async fn enter(&self, claim: Arc<Claim>) -> Result<Entered> {
        let hall = &self.hall;
        if hall.has_departed(claim.id) {
            return Ok(Entered::Busy);
        }
        let sent = BootTime::now();
        if let Some(chair) = hall.chair(claim.id) {
            return again(&chair, sent).await;
        }
        let key = hall.keys.of(&claim.name)?;
        let permit = hall.place().await?;
        // Dropped at any await below, the connection goes with us and the lock with it.
        let own = hall.connection().await?;
        let sent = BootTime::now();
        let verb = taking(claim.ask, false);
        let taken = own.take(verb, &key, claim.ttl);
        let taken = timed("enter", hall.timeout, taken).await?;
        let place = match taken.map_err(|error| failed("enter", &error))? {
            Taken::Token(sequence) => Place::Held { sequence },
            Taken::Busy if claim.queue => Place::Waiting,
            Taken::Busy => {
                hall.spare(own);
                return Ok(Entered::Busy);
            }
            Taken::Away => return Err(no_session_locks("enter")),
        };
        let chair = Chair::new(Arc::clone(&claim), key, place, sent);
        if place == Place::Waiting {
            hall.seat(Arc::clone(&chair));
            match hall.turn(&chair.key).try_lock_owned() {
                Ok(turn) => {
                    chair.settle(own, permit);
                    self.queue(&chair, Some(turn));
                }
                // Another claim of ours waits at the server already.
                Err(_) => {
                    hall.spare(own);
                    self.queue(&chair, None);
                }
            }
        } else {
            chair.settle(own, permit);
            hall.seat(Arc::clone(&chair));
            self.scribe.note(&chair, hall);
        }
        Ok(entered(&chair, place, sent))
    }

    /// Waits for the lock on the chair's connection, beside everything else. Here, where whoever
    /// is told waits too: if this runtime is blocked or ends, so does the wait, by the ttl.
    fn queue(&self, chair: &Arc<Chair>, turn: Option<OwnedMutexGuard<()>>) {
        let (locks, chair) = (self.clone(), Arc::clone(chair));
        tokio::spawn(async move {
            let place = tokio::select! {
                taken = locks.block(&chair, turn) => match taken {
                    Some(sequence) => Place::Held { sequence },
                    None => Place::Gone,
                },
                () = chair.gone() => Place::Gone,
                () = chair.outlived() => {
                    locks.cancel(&chair).await;
                    Place::Gone
                }
            };
            chair.moved(place);
            match place {
                Place::Held { .. } => locks.scribe.note(&chair, &locks.hall),
                _ => {
                    locks.hall.unseat(chair.claim.id, 0);
                    locks.hall.alarm(chair.claim.id);
                }
            }
        });
    }

    /// Waits for the chair's turn, then for the lock.
    async fn block(&self, chair: &Chair, turn: Option<OwnedMutexGuard<()>>) -> Option<u64> {
        let hall = &self.hall;
        let _turn = match turn {
            Some(turn) => turn,
            None => hall.turn(&chair.key).lock_owned().await,
        };
        while chair.own().is_none() {
            let connected =
                async { Ok::<_, Error>((hall.place().await?, hall.connection().await?)) };
            match connected.await {
                Ok((permit, own)) => chair.settle(own, permit),
                // The claim is as good as it was, and whoever waits is told by the look of `wait`.
                Err(error) if error.is_transient() => tokio::time::sleep(AGAIN).await,
                Err(_) => return None,
            }
        }
        let verb = taking(chair.claim.ask, true);
        match chair.own()?.take(verb, &chair.key, chair.claim.ttl).await {
            Ok(Taken::Token(sequence)) => Some(sequence),
            _ => None,
        }
    }

    pub(super) async fn wait(&self, ticket: &Ticket, until: BootTime) -> Result<Place> {
        let Some(chair) = self.hall.chair(ticket.claim) else {
            return Ok(Place::Gone);
        };
        if chair.stands() != Place::Waiting || until.has_passed() {
            return Ok(chair.stands());
        }
        let mut place = chair.place.subscribe();
        let recheck = BootTime::now() + RECHECK;
        let moved = async {
            // The sender lives in the chair.
            let _ = place.wait_for(|place| *place != Place::Waiting).await;
        };
        tokio::select! {
            () = moved => {}
            () = sync::sleep_until(until.min(recheck)) => {}
        }
        if chair.stands() == Place::Waiting && recheck.has_passed() {
            self.ping().await?;
        }
        Ok(chair.stands())
    }

    /// Whether the server answers at all: a connection that waits for a lock can't tell. An answer
    /// that one has had is good for all; while there is none everyone asks, beside each other.
    async fn ping(&self) -> Result<()> {
        let hall = &self.hall;
        if !(*hall.answered.lock() + RECHECK).has_passed() {
            return Ok(());
        }
        let sent = BootTime::now();
        let desk = hall.desk().await?;
        let beat = desk.connection.beat();
        hall.answer("wait", hall.timeout, &desk, beat).await?;
        let mut answered = hall.answered.lock();
        *answered = sent.max(*answered);
        Ok(())
    }

    pub(super) async fn prolong(&self, leases: Vec<Lease>, within: Duration) -> Vec<Renewal> {
        let limit = within.min(self.hall.timeout);
        let waiting = timed("renew", limit, self.look_at_waiters(&leases, limit));
        let waiting = waiting.map(|waiting| Arc::new(waiting.flatten())).shared();
        let renewals = leases.iter();
        join_all(renewals.map(|lease| self.prolong_one(lease, waiting.clone(), limit))).await
    }

    /// Asks which of those who wait still do; beside their connections, which can't answer.
    async fn look_at_waiters(&self, leases: &[Lease], limit: Duration) -> Result<Waiting> {
        let sent = BootTime::now();
        let tickets = leases.iter().filter_map(|lease| lease.ticket.as_ref());
        let chairs = tickets.filter_map(|ticket| self.hall.chair(ticket.claim));
        let pids: Vec<i32> = chairs
            .filter(|chair| chair.stands() == Place::Waiting)
            .filter_map(|chair| chair.pid())
            .collect();
        if pids.is_empty() {
            return Ok(Waiting { sent, pids });
        }
        let desk = self.hall.desk().await?;
        let asked = desk.connection.waiting(&pids);
        let asked = self.hall.answer("renew", limit, &desk, asked);
        Ok(Waiting {
            sent,
            pids: asked.await?,
        })
    }

    async fn prolong_one(
        &self,
        lease: &Lease,
        waiting: impl Future<Output = Arc<Result<Waiting>>>,
        limit: Duration,
    ) -> Renewal {
        let Some(chair) = lease.ticket.as_ref().and_then(|ticket| {
            let chair = self.hall.chair(ticket.claim)?;
            let same = ticket.sequence == 0 || ticket.sequence == chair.sequence();
            same.then_some(chair)
        }) else {
            return Renewal::Lost;
        };
        if chair.is_marked() {
            return Renewal::Evicted;
        }
        let sent = BootTime::now();
        let armed = |sent| LeaseStart {
            sent,
            ttl: chair.claim.ttl,
        };
        match (chair.stands(), chair.own()) {
            (Place::Waiting, None) => {
                // Its turn has not come: it has asked for nothing yet.
                chair.want();
                chair.waited(sent);
                Renewal::Held(armed(sent))
            }
            (Place::Gone, _) | (_, None) => Renewal::Lost,
            (Place::Waiting, Some(own)) => {
                chair.want();
                match &*waiting.await {
                    Ok(waiting) if waiting.pids.contains(&own.pid) => {
                        chair.waited(waiting.sent);
                        Renewal::Held(armed(waiting.sent))
                    }
                    // It is being granted, or not yet begun: soon more is known.
                    Ok(_) => Renewal::Unknown(unknown("the answer of the lock is under way")),
                    Err(error) => Renewal::Unknown(unknown(error.message())),
                }
            }
            (Place::Held { .. }, Some(own)) => match timed("renew", limit, own.beat()).await {
                Ok(Ok(Beat::Alive)) => Renewal::Held(armed(sent)),
                Ok(Ok(Beat::Moved)) => Renewal::Revoked(moved()),
                Ok(Ok(Beat::Away)) => Renewal::Revoked(no_session_locks("renew")),
                Ok(Err(_)) if own.client.is_closed() => Renewal::Lost,
                Ok(Err(error)) => Renewal::Unknown(failed("renew", &error)),
                Err(late) => Renewal::Unknown(late),
            },
        }
    }

    pub(super) async fn amend(&self, ticket: &Ticket, amendment: Amendment) -> Result<Amended> {
        let hall = &self.hall;
        let chair = hall.chair(ticket.claim).filter(|chair| {
            let sequence = chair.sequence();
            sequence != 0 && sequence == ticket.sequence && chair.stands() != Place::Gone
        });
        let Some((chair, own)) = chair.as_ref().and_then(|chair| Some((chair, chair.own()?)))
        else {
            return Ok(Amended::Gone);
        };
        let asked = match amendment {
            Amendment::Value(value) => {
                *chair.value.lock() = Some(value);
                let recorded = self.scribe.record(chair, hall);
                timed("amend", hall.timeout, recorded).await??;
                return Ok(Amended::Done);
            }
            Amendment::Ask(ask) => ask,
        };
        let now = *chair.ask.lock();
        let verb = match (now, asked) {
            (Ask::Whole, Ask::READ) => Verb::Downgrade,
            (Ask::READ, Ask::Whole) => Verb::Upgrade,
            (now, asked) if now == asked => return Ok(Amended::Done),
            _ => {
                let message = "session locks are exclusive or shared, and nothing else";
                return Err(Error::new(Kind::Unsupported, "amend", message));
            }
        };
        let changed = timed("amend", hall.timeout, own.whether(verb, &chair.key)).await?;
        match changed.map_err(|error| failed("amend", &error))? {
            Some(true) => {
                *chair.ask.lock() = asked;
                Ok(Amended::Done)
            }
            Some(false) => Ok(Amended::Busy),
            None => Err(no_session_locks("amend")),
        }
    }

    pub(super) async fn leave(&self, ticket: &Ticket) -> Result<Left> {
        let hall = &self.hall;
        let chair = hall.unseat(ticket.claim, ticket.sequence);
        if ticket.in_doubt || (chair.is_none() && ticket.sequence == 0) {
            hall.depart(ticket.claim);
        }
        let Some(chair) = chair else {
            return Ok(Left::Absent);
        };
        match (chair.stands(), chair.own()) {
            (Place::Waiting, _) => {
                self.stop_waiting(&chair).await;
                Ok(Left::Done)
            }
            (Place::Gone, _) | (_, None) => Ok(Left::Absent),
            (Place::Held { .. }, Some(own)) => {
                let unlocked = own.give(chair.unlock(), &chair.key);
                let unlocked = timed("leave", hall.timeout, unlocked).await?;
                match unlocked {
                    Ok(Some(true)) => {
                        hall.spare(Arc::clone(own));
                        Ok(Left::Done)
                    }
                    // A connection that did not have the lock is not to be trusted.
                    Ok(Some(false)) => Ok(Left::Absent),
                    Ok(None) => Err(no_session_locks("leave")),
                    // The session has ended, or ends with this connection: and the lock with it.
                    Err(error) => match failed("leave", &error) {
                        ended if ended.is_transient() => Ok(Left::Absent),
                        other => Err(other),
                    },
                }
            }
        }
    }

    /// Asks the server to end the statement that waits, if there is one.
    async fn cancel(&self, chair: &Chair) {
        let Some(own) = chair.own() else { return };
        let cancelled = self.hall.server.cancel(&own.client, own.at);
        // If it does not work, the server notices that we are gone.
        let _ = tokio::time::timeout(self.hall.timeout, cancelled).await;
    }

    /// Ends the statement that waits, and with it its connection.
    pub(super) async fn stop_waiting(&self, chair: &Chair) {
        if chair.own().is_some() {
            self.cancel(chair).await;
            let mut place = chair.place.subscribe();
            let ended = place.wait_for(|place| *place != Place::Waiting);
            let _ = tokio::time::timeout(Duration::from_millis(500), ended).await;
        }
        chair.moved(Place::Gone);
    }
}

/// The answer to a claim that is known already: what it holds is armed by a heartbeat.
async fn again(chair: &Chair, sent: BootTime) -> Result<Entered> {
    let place = chair.stands();
    match (place, chair.own()) {
        (Place::Waiting, _) => Ok(entered(chair, place, chair.known_to_wait())),
        (Place::Gone, _) | (_, None) => Ok(Entered::Busy),
        (Place::Held { .. }, Some(own)) => {
            let beat = timed("enter", chair.claim.ttl, own.beat()).await?;
            match beat.map_err(|error| failed("enter", &error))? {
                Beat::Alive => Ok(entered(chair, place, sent)),
                Beat::Moved | Beat::Away => Ok(Entered::Busy),
            }
        }
    }
}

fn entered(chair: &Chair, place: Place, sent: BootTime) -> Entered {
    let claim = &chair.claim;
    Entered::In {
        ticket: Ticket {
            sequence: chair.sequence(),
            ..Ticket::own(claim.name.clone(), claim.id)
        },
        armed: LeaseStart {
            sent,
            ttl: claim.ttl,
        },
        place,
    }
}
