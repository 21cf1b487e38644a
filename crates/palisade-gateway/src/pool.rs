//! `Pool`: the places of connections, and who gives way when they run short.
//!
//! A connection without a valid token costs a client nothing but a descriptor of its own, so such
//! connections have at most a quarter of the places, and so many per peer. Beyond that the oldest of
//! them ends, of the peer that has most: a new one may be a holder that has to renew. Per peer, those
//! of the last moment don't count, since their requests may just not have been read. The others count per principal, three
//! quarters of the places at most; when the places are used up, the principal with the most of them
//! loses its oldest. A connection that ends changes nothing: a client's locks belong to its session.
//!
//! The last places are never taken by principals. Who gets one of them is in a hurry: there is less
//! time for a head, and only health and requests with a valid token are answered.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::problem::Problem;

/// The places that are kept for health and for clients that show a token at once.
const LAST: usize = 32;
/// For how long a connection does not count per peer: hundreds of programs of a machine may start
/// at once, and show their tokens as soon as they are read.
const MOMENT: Duration = Duration::from_secs(2);

/// See the module's documentation.
pub(crate) struct Pool {
    most: usize,
    /// The connections without a valid token that one peer may have; 0 for any number.
    per_peer: usize,
    places: Mutex<Places>,
}

#[derive(Default)]
struct Places {
    next: u64,
    /// Without a valid token, the oldest first.
    unknown: BTreeMap<u64, Unknown>,
    by_peer: HashMap<IpAddr, BTreeSet<u64>>,
    known: HashMap<Arc<str>, BTreeMap<u64, Ender>>,
    /// How many there are in `known`.
    principals: usize,
}

struct Unknown {
    peer: Option<IpAddr>,
    since: Instant,
    ender: Ender,
}

/// Ends a connection when it is dropped.
type Ender = oneshot::Sender<()>;

/// A place, until it is dropped.
pub(crate) struct Place {
    pool: Arc<Pool>,
    id: u64,
    peer: Option<IpAddr>,
    hurried: bool,
    who: Mutex<Option<Arc<str>>>,
}

impl Pool {
    pub(crate) fn new(most: usize, per_peer: usize) -> Arc<Self> {
        Arc::new(Self {
            most: most.max(2),
            per_peer,
            places: Mutex::default(),
        })
    }

    /// The last places; of a very small pool not all of them.
    fn last(&self) -> usize {
        LAST.min(self.most / 4).max(1)
    }

    /// How many connections without a valid token there may be. Principals leave the last places
    /// free, so that there is always room for some.
    fn room(&self, places: &Places) -> usize {
        (self.most / 4).min(self.most - places.principals).max(1)
    }

    /// Whether a new connection would end another one, which might just need a moment.
    pub(crate) fn is_full(&self) -> bool {
        let places = self.places.lock();
        places.unknown.len() >= self.room(&places)
    }

    /// A place for a new connection, which is to end when the receiver resolves.
    pub(crate) fn enter(self: &Arc<Self>, peer: Option<IpAddr>) -> (Place, oneshot::Receiver<()>) {
        let peer = peer.map(network);
        let (ender, ended) = oneshot::channel();
        let mut places = self.places.lock();
        if let Some(peer) = peer.filter(|_| self.per_peer > 0) {
            while let Some(oldest) = places.oldest_of(peer, self.per_peer)
                && places.unknown[&oldest].since.elapsed() >= MOMENT
            {
                places.forget_unknown(oldest);
            }
        }
        if places.unknown.len() >= self.room(&places)
            && let Some(oldest) = places.first_to_go(self.per_peer > 0)
        {
            places.forget_unknown(oldest);
        }
        let taken = places.unknown.len() + places.principals;
        let id = places.next;
        places.next += 1;
        places.add_unknown(id, peer, ender);
        let place = Place {
            pool: Arc::clone(self),
            id,
            peer,
            hurried: taken + self.last() >= self.most,
            who: Mutex::new(None),
        };
        (place, ended)
    }
}

impl Places {
    /// The oldest without a valid token of a peer that has at least `count`.
    fn oldest_of(&self, peer: IpAddr, count: usize) -> Option<u64> {
        let own = self.by_peer.get(&peer).filter(|own| own.len() >= count)?;
        own.first().copied()
    }

    /// The oldest without a valid token; that of the peer with most, if there is more than one peer.
    fn first_to_go(&self, per_peer: bool) -> Option<u64> {
        let greatest = self.by_peer.values().max_by_key(|own| own.len());
        match greatest.filter(|_| per_peer) {
            Some(own) => own.first().copied(),
            None => self.unknown.keys().next().copied(),
        }
    }

    fn add_unknown(&mut self, id: u64, peer: Option<IpAddr>, ender: Ender) {
        let since = Instant::now();
        let unknown = Unknown { peer, since, ender };
        self.unknown.insert(id, unknown);
        if let Some(peer) = peer {
            self.by_peer.entry(peer).or_default().insert(id);
        }
    }

    fn forget_unknown(&mut self, id: u64) -> Option<Ender> {
        let Unknown { peer, ender, .. } = self.unknown.remove(&id)?;
        if let Some(peer) = peer
            && let Some(own) = self.by_peer.get_mut(&peer)
        {
            own.remove(&id);
            if own.is_empty() {
                self.by_peer.remove(&peer);
            }
        }
        Some(ender)
    }

    fn forget_known(&mut self, who: &Arc<str>, id: u64) -> Option<Ender> {
        let own = self.known.get_mut(who)?;
        let ender = own.remove(&id)?;
        if own.is_empty() {
            self.known.remove(who);
        }
        self.principals -= 1;
        Some(ender)
    }

    fn count(&self, who: &str) -> usize {
        self.known.get(who).map_or(0, BTreeMap::len)
    }
}

impl Place {
    /// Whether it was one of the last when it was taken, and nobody has shown a valid token since.
    pub(crate) fn is_hurried(&self) -> bool {
        self.hurried && self.who.lock().is_none()
    }

    /// Records that a request with a valid token came in.
    ///
    /// # Errors
    /// When this principal has as many as it may have.
    pub(crate) fn known(&self, principal: &str) -> Result<(), Problem> {
        let mut who = self.who.lock();
        if who.as_deref() == Some(principal) {
            return Ok(());
        }
        let mut places = self.pool.places.lock();
        let places = &mut *places;
        let most = (self.pool.most * 3 / 4).max(1);
        let too_many = || Problem::too_many("connections", most);
        let count = places.count(principal);
        if count >= most {
            return Err(too_many());
        }
        let moves = who.is_some();
        if !moves && places.principals + self.pool.last() >= self.pool.most {
            let greatest = places.known.iter().max_by_key(|(_, own)| own.len());
            let oldest = greatest
                .filter(|(_, own)| own.len() > count + 1)
                .and_then(|(who, own)| Some((Arc::clone(who), *own.first_key_value()?.0)));
            let (greatest, oldest) = oldest.ok_or_else(too_many)?;
            places.forget_known(&greatest, oldest);
        }
        let ender = match &*who {
            None => places.forget_unknown(self.id),
            Some(before) => places.forget_known(before, self.id),
        };
        // Without one it is about to end.
        if let Some(ender) = ender {
            let principal: Arc<str> = principal.into();
            let own = places.known.entry(Arc::clone(&principal)).or_default();
            own.insert(self.id, ender);
            places.principals += 1;
            *who = Some(principal);
        }
        Ok(())
    }

    /// Records that a request needed a valid token and had none.
    pub(crate) fn unknown(&self) {
        let mut who = self.who.lock();
        let Some(before) = who.take() else {
            return;
        };
        let mut places = self.pool.places.lock();
        if let Some(ender) = places.forget_known(&before, self.id) {
            places.add_unknown(self.id, self.peer, ender);
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut places = self.pool.places.lock();
        match &*self.who.lock() {
            None => drop(places.forget_unknown(self.id)),
            Some(who) => drop(places.forget_known(who, self.id)),
        }
    }
}

/// What counts as one peer: an IPv4 address, or the network of an IPv6 one, of which a client has
/// any number.
fn network(peer: IpAddr) -> IpAddr {
    match peer.to_canonical() {
        IpAddr::V6(peer) => {
            let network = u128::from(peer) >> 64 << 64;
            IpAddr::V6(network.into())
        }
        peer => peer,
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot::error::TryRecvError;

    use super::*;

    type Connection = (Place, oneshot::Receiver<()>);

    fn peer(last: u8) -> Option<IpAddr> {
        Some(IpAddr::from([192, 0, 2, last]))
    }

    fn ended((_, ended): &mut Connection) -> bool {
        ended.try_recv() != Err(TryRecvError::Empty)
    }

    fn by(pool: &Arc<Pool>, who: &str) -> Connection {
        let one = pool.enter(peer(1));
        one.0.known(who).unwrap();
        one
    }

    #[test]
    fn without_a_token_a_quarter_and_the_oldest_goes_first() {
        let pool = Pool::new(400, 0);
        let mut holder = by(&pool, "p");
        let mut all: Vec<_> = (0..150).map(|_| pool.enter(peer(2))).collect();
        let gone = all.iter_mut().map(ended).collect::<Vec<_>>();
        assert!(gone[..50].iter().all(|gone| *gone) && !gone[50..].contains(&true));
        assert!(!ended(&mut holder));
        drop(all);
        let places = pool.places.lock();
        assert_eq!(
            (
                places.unknown.len(),
                places.by_peer.len(),
                places.principals
            ),
            (0, 0, 1)
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_has_so_many_and_a_token_counts_no_more() {
        let pool = Pool::new(400, 3);
        let mut other = pool.enter(peer(2));
        let mut holders: Vec<_> = (0..10).map(|_| by(&pool, "p")).collect();
        // Many at once may be clients that show a token in a moment.
        let mut all: Vec<_> = (0..50).map(|_| pool.enter(peer(1))).collect();
        assert!(!all.iter_mut().any(ended));
        all.iter().for_each(|(place, _)| place.known("p").unwrap());
        tokio::time::advance(MOMENT).await;
        let mut all: Vec<_> = (0..5).map(|_| pool.enter(peer(1))).collect();
        assert!(!all.iter_mut().any(ended));
        tokio::time::advance(MOMENT).await;
        let mut last = pool.enter(peer(1));
        let gone: Vec<_> = all.iter_mut().map(ended).collect();
        assert_eq!(gone, [true, true, true, false, false]);
        assert!(!holders.iter_mut().any(ended) && !ended(&mut other) && !ended(&mut last));
        // A network is one peer, and so is an address in both forms.
        let v6 = |text: &str| network(text.parse().unwrap());
        assert_eq!(v6("2001:db8::1"), v6("2001:db8::ffff:1"));
        assert_ne!(v6("2001:db8::1"), v6("2001:db8:0:1::1"));
        assert_eq!(Some(v6("::ffff:192.0.2.1")), peer(1));
    }

    /// However fast it is.
    #[test]
    fn a_crowd_of_one_peer_ends_only_its_own() {
        let pool = Pool::new(400, 64);
        let mut others: Vec<_> = (2..30).map(|last| pool.enter(peer(last))).collect();
        let crowd: Vec<_> = (0..1000).map(|_| pool.enter(peer(1))).collect();
        assert!(!others.iter_mut().any(ended));
        assert_eq!(pool.places.lock().unknown.len(), 100);
        drop(crowd);
    }

    #[test]
    fn one_principal_leaves_room_and_many_leave_the_last_places() {
        let pool = Pool::new(400, 0);
        let mut greedy: Vec<_> = (0..300).map(|_| by(&pool, "greedy")).collect();
        let refused = pool.enter(None);
        assert!(refused.0.known("greedy").is_err());
        assert!(!refused.0.is_hurried());
        drop(refused);
        let _more: Vec<_> = (0..68).map(|_| by(&pool, "more")).collect();
        assert!(!greedy.iter_mut().any(ended), "there was room");
        // All but the last places are taken.
        let mut calm = pool.enter(None);
        assert!(calm.0.is_hurried());
        calm.0.known("calm").unwrap();
        assert!(!calm.0.is_hurried() && !ended(&mut calm));
        assert_eq!(
            greedy
                .iter_mut()
                .filter_map(|one| ended(one).then_some(()))
                .count(),
            1
        );
        assert!(ended(&mut greedy[0]), "the oldest");
        // However many come without a token.
        let _flood: Vec<_> = (0..1000).map(|_| pool.enter(None)).collect();
        let places = pool.places.lock();
        assert_eq!(places.unknown.len() + places.principals, 400);
    }

    #[test]
    fn a_token_that_is_not_valid_any_more_counts_as_none() {
        let pool = Pool::new(8, 0);
        let (place, _ended) = by(&pool, "p");
        place.unknown();
        assert_eq!(pool.places.lock().principals, 0);
        place.known("q").unwrap();
        place.known("r").unwrap();
        assert_eq!(pool.places.lock().count("q"), 0);
        assert_eq!(pool.places.lock().count("r"), 1);
        drop(place);
        assert!(pool.places.lock().known.is_empty());
    }
}
