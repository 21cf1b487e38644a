//! `wait`: a watch on the nearest one ahead that excludes the claim, and a look.
//!
//! Whatever changes after the last look is pushed, or else there is another look when the watch
//! has begun. A look is a read that confirms what the enter decided; it counts only with our own
//! key in the answer.

use std::time::Duration;

use super::Inner;
use super::book::{Begun, News, Range};
use super::keys::{prefix_end, prefix_start};
use super::ops;
use super::queue::{Ahead, Queue};
use super::rpc::{Connection, revision};
use super::watching::Watch;
use super::wire::{RangeRequest, RangeResponse, TxnRequest, TxnResponse};
use crate::core::claim::Ask;
use crate::core::clock::BootTime;
use crate::core::engine::Place;
use crate::core::error::{Error, Kind, Result};
use crate::core::sync::sleep_until;
use crate::core::ticket::Ticket;
use crate::engines::remote::Link;

/// A push can be lost, and nobody pushes the end of one's own place.
const RECHECK: Duration = Duration::from_secs(1);

/// What a look found.
enum Seen {
    /// Others are ahead, at this revision.
    Waiting(Ahead, i64),
    Place(Place),
}

impl Inner {
    pub(super) async fn wait(&self, ticket: Ticket, until: BootTime) -> Result<Place> {
        let prefix = self.keys.line(&ticket.name)?;
        let Some(key) = self.key_of(&ticket) else {
            return Ok(Place::Gone);
        };
        let looking = Looking {
            inner: self,
            whole: self.asks_for_the_whole(&ticket),
            created: i64::try_from(ticket.sequence).unwrap_or(0),
            prefix: &prefix,
            key: key.as_bytes(),
        };
        // Known from the enter, or from an earlier look.
        let mut known = self.ahead_of(&ticket).filter(|_| !until.has_passed());
        loop {
            let (ahead, revision) = match known.take() {
                Some(known) => known,
                None => match looking.look(None).await? {
                    Seen::Place(place) => return Ok(place),
                    Seen::Waiting(..) if until.has_passed() => return Ok(Place::Waiting),
                    Seen::Waiting(ahead, revision) => (ahead, revision),
                },
            };
            let told_by = looking.sleep(&ahead, revision, until).await?;
            match looking.look(told_by.as_ref()).await? {
                Seen::Place(place) => return Ok(place),
                Seen::Waiting(ahead, revision) => {
                    self.set_ahead(&ticket, (ahead.clone(), revision));
                    if until.has_passed() {
                        return Ok(Place::Waiting);
                    }
                    known = Some((ahead, revision));
                }
            }
        }
    }

    /// Begins a watch of its own, and returns when every further change is told.
    pub(super) async fn begin_watch(&self, operation: &'static str, range: Range) -> Result<Watch> {
        let link = self.rpc.links.get().await?;
        let mut watch = link.connection.watcher().watch(range);
        self.begun(operation, &link, &mut watch).await?;
        Ok(watch)
    }

    /// Waits until every further change is told.
    async fn begun(
        &self,
        operation: &'static str,
        link: &Link<Connection>,
        watch: &mut Watch,
    ) -> Result<Begun> {
        let why = match tokio::time::timeout(self.rpc.timeout, watch.next()).await {
            Ok(News::Begun(begun)) => return Ok(begun),
            Ok(_) => "etcd has ended the watch",
            Err(_) => "the watch was not begun in time",
        };
        self.rpc.links.broken(link).await;
        Err(Error::new(Kind::Unreachable, operation, why))
    }

    fn asks_for_the_whole(&self, ticket: &Ticket) -> bool {
        let known = self.known.lock();
        known.get(&ticket.claim).map(|known| known.ask) == Some(Ask::Whole)
    }

    fn ahead_of(&self, ticket: &Ticket) -> Option<(Ahead, i64)> {
        let known = self.known.lock();
        known
            .get(&ticket.claim)
            .and_then(|known| known.ahead.clone())
    }

    fn set_ahead(&self, ticket: &Ticket, ahead: (Ahead, i64)) {
        if let Some(known) = self.known.lock().get_mut(&ticket.claim) {
            known.ahead = Some(ahead);
        }
    }
}

/// One claim that waits.
struct Looking<'a> {
    inner: &'a Inner,
    whole: bool,
    /// The create revision of its place; 0 when it is not known.
    created: i64,
    prefix: &'a str,
    key: &'a [u8],
}

impl Looking<'_> {
    /// Sleeps until what was seen at `revision` may have changed, and answers with the link to the
    /// member that said so; with nothing when it is time to look, or nothing is told any more.
    async fn sleep(
        &self,
        ahead: &Ahead,
        revision: i64,
        until: BootTime,
    ) -> Result<Option<Link<Connection>>> {
        let range = match ahead {
            Ahead::Key(key) => Range {
                key: key.clone(),
                end: Vec::new(),
                // Who asks for the whole line gains nothing by what others change their place to.
                deletes: self.whole,
            },
            Ahead::Anyone => Range {
                key: prefix_start(self.prefix),
                end: prefix_end(self.prefix),
                deletes: false,
            },
        };
        let look_at = until.min(BootTime::now() + RECHECK);
        let link = self.inner.rpc.links.get().await?;
        let mut watch = link.connection.watcher().stand(range);
        let begun = self.inner.begun("wait", &link, &mut watch).await?;
        if begun.may_have_missed(revision) {
            return Ok(Some(link));
        }
        loop {
            let news = tokio::select! {
                news = watch.next() => news,
                () = sleep_until(look_at) => return Ok(None),
            };
            match news {
                News::Changed(at, _) if at > revision => return Ok(Some(link)),
                // Told late: it was seen already.
                News::Changed(..) | News::Begun(_) => {}
                News::Over => return Ok(None),
            }
        }
    }

    /// Where the claim stands, and whose change may let it in.
    ///
    /// A member that has just told of a change has applied it: over its `link` it is asked for
    /// what it knows, without asking the others. That may be stale, but whoever is ahead can only
    /// go, so that a place which held at any revision holds while its key is there and its lease
    /// is good. That a place is gone is only believed when a majority says so.
    async fn look(&self, link: Option<&Link<Connection>>) -> Result<Seen> {
        let seen = self.look_at(link).await?;
        match seen {
            Seen::Place(Place::Gone) if link.is_some() => self.look_at(None).await,
            seen => Ok(seen),
        }
    }

    async fn look_at(&self, link: Option<&Link<Connection>>) -> Result<Seen> {
        match self.whole && self.created > 0 {
            true => self.look_as_whole(link).await,
            false => self.look_at_all(link).await,
        }
    }

    async fn look_at_all(&self, link: Option<&Link<Connection>>) -> Result<Seen> {
        let (inner, created) = (self.inner, self.created);
        let mut range = ops::all(self.prefix);
        range.max_create_revision = created;
        range.serializable = link.is_some();
        let found: RangeResponse = match link {
            Some(link) => {
                let path = "/etcdserverpb.KV/Range";
                inner.rpc.ask_over(link, "wait", path, range).await?
            }
            None => inner.rpc.range("wait", range).await?,
        };
        let seen = revision(found.header.as_ref());
        let queue = Queue::new(&inner.keys, self.prefix, found.kvs);
        let own = |at: &usize| created == 0 || queue.seats[*at].created == created;
        let Some(at) = queue.find(self.key).filter(own) else {
            return Ok(Seen::Place(Place::Gone));
        };
        Ok(match queue.behind(at) {
            None => held(queue.seats[at].created),
            Some(ahead) => Seen::Waiting(ahead, seen),
        })
    }

    /// Everyone ahead of a claim to the whole line excludes it: only the nearest is read.
    async fn look_as_whole(&self, link: Option<&Link<Connection>>) -> Result<Seen> {
        let serializable = link.is_some();
        let own = RangeRequest {
            keys_only: true,
            serializable,
            ..ops::one(self.key)
        };
        let nearest = RangeRequest {
            max_create_revision: self.created - 1,
            serializable,
            ..ops::youngest(self.prefix, 1)
        };
        let request = TxnRequest {
            success: vec![ops::range(own), ops::range(nearest)],
            ..Default::default()
        };
        let rpc = &self.inner.rpc;
        let found: TxnResponse = match link {
            Some(link) => {
                let path = "/etcdserverpb.KV/Txn";
                rpc.ask_over(link, "wait", path, request).await?
            }
            None => rpc.txn("wait", request).await?,
        };
        let seen = revision(found.header.as_ref());
        let mut found = ops::found(found).into_iter();
        let (own, nearest) = (found.next(), found.next().unwrap_or_default());
        let own = own.unwrap_or_default().pop();
        if own.is_none_or(|own| own.create_revision != self.created) {
            return Ok(Seen::Place(Place::Gone));
        }
        Ok(match nearest.into_iter().next() {
            None => held(self.created),
            Some(ahead) => Seen::Waiting(Ahead::Key(ahead.key), seen),
        })
    }
}

fn held(created: i64) -> Seen {
    Seen::Place(Place::Held {
        sequence: u64::try_from(created).unwrap_or(0),
    })
}
