//! `wait`: a watch on the nearest one ahead that excludes the claim, and a look.
//!
//! Watch first, look afterwards: whatever changes between the two is pushed. A look is a read
//! that confirms what the enter decided; it counts only with our own key in the answer.

use std::time::Duration;

use super::Inner;
use super::keys::{prefix_end, prefix_start};
use super::ops;
use super::queue::{Ahead, Queue};
use super::watching::{News, Watch};
use super::wire::TxnRequest;
use crate::core::claim::Ask;
use crate::core::clock::BootTime;
use crate::core::engine::Place;
use crate::core::error::{Error, Kind, Result};
use crate::core::sync::sleep_until;
use crate::core::ticket::Ticket;

/// A push can be lost, and nobody pushes the end of one's own place.
const RECHECK: Duration = Duration::from_secs(1);

impl Inner {
    pub(super) async fn wait(&self, ticket: Ticket, until: BootTime) -> Result<Place> {
        let prefix = self.keys.line(&ticket.name)?;
        let Some(key) = self.key_of(&ticket)? else {
            return Ok(Place::Gone);
        };
        // Known from the enter, or from an earlier look.
        let mut ahead = self.ahead_of(&ticket);
        if ahead.is_none() || until.has_passed() {
            match self.look(&ticket, &prefix, key.as_bytes()).await? {
                (place, _) if place != Place::Waiting || until.has_passed() => return Ok(place),
                (_, now) => ahead = now,
            }
        }
        loop {
            let watched = ahead.unwrap_or(Ahead::Anyone);
            let mut watch = self.watch_ahead(&watched, &prefix).await?;
            loop {
                let (place, now) = self.look(&ticket, &prefix, key.as_bytes()).await?;
                if place != Place::Waiting || until.has_passed() {
                    self.set_ahead(&ticket, now);
                    return Ok(place);
                }
                // Someone else is the nearest now.
                if now.as_ref() != Some(&watched) {
                    ahead = now;
                    break;
                }
                let look_at = until.min(BootTime::now() + RECHECK);
                tokio::select! {
                    news = watch.next() => if let News::Over = news {
                        ahead = now;
                        break;
                    },
                    () = sleep_until(look_at) => {}
                }
            }
        }
    }

    /// Watches what is ahead, and returns when every further change is told.
    async fn watch_ahead(&self, ahead: &Ahead, prefix: &str) -> Result<Watch> {
        let (key, end) = match ahead {
            Ahead::Key(key) => (key.clone(), Vec::new()),
            Ahead::Anyone => (prefix_start(prefix), prefix_end(prefix)),
        };
        self.begin_watch("wait", key, end).await
    }

    /// Begins a watch, and returns when every further change is told.
    pub(super) async fn begin_watch(
        &self,
        operation: &'static str,
        key: Vec<u8>,
        end: Vec<u8>,
    ) -> Result<Watch> {
        let link = self.rpc.links.get().await?;
        let failed = |message: &str| Error::new(Kind::Unreachable, operation, message);
        let mut watch = link.connection.watcher().watch(key, end);
        let begun = tokio::time::timeout(self.rpc.timeout, watch.next()).await;
        match begun {
            Ok(News::Over) => {
                self.rpc.links.broken(&link).await;
                Err(failed("etcd has ended the watch"))
            }
            Ok(_) => Ok(watch),
            Err(_) => {
                self.rpc.links.broken(&link).await;
                Err(failed("the watch was not begun in time"))
            }
        }
    }

    /// Where the ticket stands, and whose change may let it in.
    async fn look(
        &self,
        ticket: &Ticket,
        prefix: &str,
        key: &[u8],
    ) -> Result<(Place, Option<Ahead>)> {
        let created = i64::try_from(ticket.counted).unwrap_or(0);
        let whole = self.known.lock().get(&ticket.claim).map(|known| known.ask) == Some(Ask::Whole);
        if whole && created > 0 {
            return self.look_as_whole(prefix, key, created).await;
        }
        let mut range = ops::all(prefix);
        range.max_create_revision = created;
        let found = self.rpc.range("wait", range).await?.kvs;
        let queue = Queue::new(&self.keys, prefix, found);
        let own = |at: &usize| created == 0 || queue.seats[*at].created == created;
        let Some(at) = queue.find(key).filter(own) else {
            return Ok((Place::Gone, None));
        };
        Ok(match queue.behind(at) {
            None => (held(queue.seats[at].created), None),
            ahead => (Place::Waiting, ahead),
        })
    }

    /// Everyone ahead of a claim to the whole line excludes it: only the nearest is read.
    async fn look_as_whole(
        &self,
        prefix: &str,
        key: &[u8],
        created: i64,
    ) -> Result<(Place, Option<Ahead>)> {
        let mut own = ops::one(key);
        own.keys_only = true;
        let mut nearest = ops::youngest(prefix, 1);
        nearest.max_create_revision = created - 1;
        let request = TxnRequest {
            success: vec![ops::range(own), ops::range(nearest)],
            ..Default::default()
        };
        let mut found = ops::found(self.rpc.txn("wait", request).await?).into_iter();
        let (own, nearest) = (found.next(), found.next().unwrap_or_default());
        let own = own.unwrap_or_default().pop();
        if own.is_none_or(|own| own.create_revision != created) {
            return Ok((Place::Gone, None));
        }
        Ok(match nearest.into_iter().next() {
            None => (held(created), None),
            Some(ahead) => (Place::Waiting, Some(Ahead::Key(ahead.key))),
        })
    }

    fn ahead_of(&self, ticket: &Ticket) -> Option<Ahead> {
        let known = self.known.lock();
        known
            .get(&ticket.claim)
            .and_then(|known| known.ahead.clone())
    }

    fn set_ahead(&self, ticket: &Ticket, ahead: Option<Ahead>) {
        if let Some(known) = self.known.lock().get_mut(&ticket.claim) {
            known.ahead = ahead;
        }
    }
}

fn held(created: i64) -> Place {
    Place::Held {
        counted: u64::try_from(created).unwrap_or(0),
    }
}
