//! `Fixture`: one case on one engine. It has a fresh random namespace with clients, lines and
//! claims, ttls that the engine accepts, and second processes.
//!
//! [`Line`] and [`Seat`] wrap the engine trait for one name and one claim. Every method panics if
//! the engine answers wrongly; a panic is how a case fails.

use std::fmt::Debug;
use std::future::Future;
use std::ops::RangeInclusive;
use std::panic::Location;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use palisade::engine::{
    Amended, Amendment, Ask, Claim, ClaimId, Engine, Entered, Lease, LeaseStart, Left, Place,
    Renewal, Settings, SharedEngine, Ticket, Url,
};
use palisade::report::{LineReport, Owner, Scope};
use palisade::{BootTime, Capability, Client, ErrorKind, Eviction, Hold, Name};
use parking_lot::Mutex;
use tokio::task::JoinHandle;

use super::NotApplicable;
use crate::engine::{EngineUnderTest, Site, with_option};
use crate::lab::proxy::Proxies;
pub(super) use crate::lab::trial::fails;
use crate::spy::Spy;
use crate::taker::{Second, Taker, TakerArgs};

/// How long an event may take that is due at once: far more than it takes on an idle machine, and
/// far less than a trial may take.
///
/// A case about a place that is left behind, or about an alarm, needs the long ttl (`long_ttl` of
/// its fixture): else the end of the lease, or a renewal and its audit after a third of the ttl,
/// brings about what the case waits for.
pub const SOON: Duration = Duration::from_secs(10);

/// The longest sleep of one `wait`; clients re-check at least this often too.
pub(super) const RECHECK: Duration = Duration::from_secs(1);

/// How long a renewal may take.
const RENEWAL: Duration = Duration::from_secs(2);

/// Numbers that a case measured.
pub(crate) type Notes = Arc<Mutex<Vec<(String, f64)>>>;

/// Waits for `future`, and panics with the name `what` if it takes longer than `limit`.
///
/// # Panics
/// When it takes longer.
#[track_caller]
pub fn within<F: Future>(
    limit: Duration,
    what: &str,
    future: F,
) -> impl Future<Output = F::Output> + use<F> {
    let late = format!(
        "{what} did not happen within {limit:?} [{}]",
        Location::caller()
    );
    async move {
        let done = tokio::time::timeout(limit, future).await;
        done.unwrap_or_else(|_| panic!("{late}"))
    }
}

/// Waits for something that is due at once.
///
/// # Panics
/// When it does not happen.
#[track_caller]
pub fn soon<F: Future>(what: &str, future: F) -> impl Future<Output = F::Output> + use<F> {
    within(SOON, what, future)
}

/// The result of a task of [`Fixture::queued`], which must be granted.
#[track_caller]
pub(super) fn granted<T: Debug>(
    waiter: JoinHandle<palisade::Result<T>>,
) -> impl Future<Output = T> {
    let grant = soon("the grant", waiter);
    async move { grant.await.unwrap().unwrap() }
}

/// Unwraps a hold, and panics if the lock was busy.
#[track_caller]
pub(super) fn free<T>(answer: palisade::Result<Option<T>>) -> T {
    answer.unwrap().expect("a free lock is busy")
}

/// Panics if the lock was acquired: another must hold it.
#[track_caller]
pub(super) fn taken<T>(answer: palisade::Result<Option<T>>) {
    assert!(answer.unwrap().is_none(), "two holders");
}

/// Retries while the engine does not answer in time, which may happen on a busy machine.
pub(super) async fn answered<T>(
    client: &Client,
    ask: impl AsyncFn() -> palisade::Result<T>,
) -> palisade::Result<T> {
    let deadline = BootTime::now() + SOON;
    loop {
        match soon("an answer", ask()).await {
            Err(error) if error.kind() == ErrorKind::Unreachable && !deadline.has_passed() => {
                // The request may have been applied; wait until it is left in the background.
                client.flush().await;
            }
            answer => return answer,
        }
    }
}

/// Panics unless the value matches the pattern, and shows the value.
macro_rules! assert_is {
    ($value:expr, $pattern:pat) => {
        match $value {
            $pattern => {}
            #[allow(unreachable_patterns)]
            other => panic!("{} is {other:?}", stringify!($value)),
        }
    };
}
pub(super) use assert_is;

/// One case on one engine.
#[derive(Clone)]
pub struct Fixture(Arc<Inner>);

struct Inner {
    engine: EngineUnderTest,
    site: Site,
    url: String,
    program: PathBuf,
    client: Client,
    notes: Notes,
}

impl Fixture {
    /// A fixture with its own namespace. `program` is run as second processes.
    ///
    /// # Errors
    /// When the engine can't be connected to.
    pub(crate) async fn new(
        engine: EngineUnderTest,
        site: Site,
        program: PathBuf,
        notes: Notes,
    ) -> palisade::Result<Self> {
        let url = site.fresh_url();
        let client = (engine.connect)(url.clone()).await?;
        Ok(Self(Arc::new(Inner {
            engine,
            site,
            url,
            program,
            client,
            notes,
        })))
    }

    /// The engine's URL with this fixture's namespace.
    pub(crate) fn url(&self) -> &str {
        &self.0.url
    }

    pub(crate) fn site(&self) -> &Site {
        &self.0.site
    }

    pub(crate) fn capability(&self) -> Capability {
        self.0.client.capability()
    }

    /// The fixture's own client.
    pub(crate) fn client(&self) -> Client {
        self.0.client.clone()
    }

    /// The engine of the fixture's own client.
    pub(crate) fn engine(&self) -> SharedEngine {
        Arc::clone(self.0.client.engine())
    }

    /// A second, independent client.
    pub(crate) async fn other_client(&self) -> Client {
        self.client_of(self.url()).await.unwrap()
    }

    /// Another client, whose default ttl is the long one: nothing that it leaves behind goes by
    /// itself within [`SOON`].
    pub(crate) async fn lasting_client(&self) -> Client {
        let ttl = format!("{}ms", self.long_ttl().as_millis());
        self.client_with("ttl", &ttl).await.unwrap()
    }

    /// A client of another URL on the same engine.
    pub(crate) async fn client_of(&self, url: &str) -> palisade::Result<Client> {
        (self.0.engine.connect)(url.to_owned()).await
    }

    /// A client of the same URL with another option.
    pub(crate) async fn client_with(&self, option: &str, value: &str) -> palisade::Result<Client> {
        self.client_of(&with_option(self.url(), option, value))
            .await
    }

    /// A client through a spy, which loses or counts calls, around a separate engine.
    pub(crate) async fn spied_client(&self) -> (Arc<Spy>, Client) {
        // Nothing is acquired through this client, so its keeper never subscribes to alarms.
        let engine = Arc::clone(self.other_client().await.engine());
        let capability = engine.capability();
        self.spying(engine, capability)
    }

    /// A client through a spy that reports another capability.
    pub(crate) fn spying(
        &self,
        engine: SharedEngine,
        capability: Capability,
    ) -> (Arc<Spy>, Client) {
        let spy = Arc::new(Spy::with_capability(engine, capability));
        let client = Client::new(spy.clone(), &self.settings()).unwrap();
        (spy, client)
    }

    /// A client behind its own fault proxies, which affect no other case.
    pub(crate) async fn proxied_client(&self) -> (Proxies, Client) {
        let proxies = Proxies::before(self.url()).unwrap();
        let client = self.client_of(proxies.url()).await.unwrap();
        (proxies, client)
    }

    fn settings(&self) -> Settings {
        let url = Url::parse(self.url());
        url.and_then(|mut url| url.take_settings()).unwrap()
    }

    /// A second process that waits for or holds `name`.
    pub(crate) fn taker(&self, name: &str, args: TakerArgs) -> Taker {
        self.second().taker(self.url(), name, &args).unwrap()
    }

    /// How second processes are started.
    pub(crate) fn second(&self) -> Second {
        Second {
            program: self.0.program.clone(),
            engine: self.0.engine.name,
        }
    }

    /// Adds a measured number to the report of this case.
    pub(crate) fn note(&self, what: &str, value: f64) {
        self.0.notes.lock().push((what.to_owned(), value));
    }

    /// A ttl so long that no case sees its end.
    pub(crate) fn long_ttl(&self) -> Duration {
        self.fit(Duration::from_secs(60))
    }

    /// A ttl that a case can wait for and that a busy machine renews in time; doubled behind a
    /// gateway.
    pub(crate) fn short_ttl(&self) -> Duration {
        let seconds = if self.site().promised { 2 } else { 1 };
        self.fit(Duration::from_secs(seconds))
    }

    /// The range of lease times that may be granted for a requested `ttl`.
    pub(crate) fn granted(&self, ttl: Duration) -> RangeInclusive<Duration> {
        let least = if self.site().promised { ttl / 3 } else { ttl };
        least..=ttl
    }

    /// The longest name in bytes; behind a gateway the namespace counts too.
    pub(crate) fn longest_name(&self) -> usize {
        let namespace = self.settings().namespace;
        if self.url().starts_with("http") {
            255 - namespace.len() - 1
        } else {
            255
        }
    }

    /// `ttl` clamped to the engine's range and rounded up to its step.
    pub(crate) fn fit(&self, ttl: Duration) -> Duration {
        let range = self.capability().ttl;
        let ttl = ttl.clamp(range.min, range.max);
        self.capability().explicit_ttl(ttl).unwrap_or(range.max)
    }

    /// A mutex of the fixture's own client.
    pub(crate) fn mutex(&self, name: &str) -> palisade::Mutex {
        self.0.client.mutex(name)
    }

    /// Asserts that the hold stays valid and is not lost for `time`.
    pub(crate) async fn keeps(&self, hold: &Hold, time: Duration) {
        let lost = tokio::time::timeout(time, hold.lost()).await;
        assert!(lost.is_err(), "lost: {lost:?}");
        assert!(hold.is_valid(), "not valid");
    }

    /// The line `name` through the fixture's own client.
    pub(crate) fn line(&self, name: &str) -> Line {
        self.line_on(&self.0.client, name)
    }

    /// The line `name` through another client.
    pub(crate) fn line_on(&self, client: &Client, name: &str) -> Line {
        Line {
            name: Name::new(name).unwrap(),
            owner: self.0.client.owner().to_owned(),
            ttl: self.long_ttl(),
            engine: Arc::clone(client.engine()),
            fixture: self.clone(),
        }
    }

    /// Starts `acquire` in a task, and waits until its claim is one of `waiting` in the line
    /// `name`, if waiters are visible.
    pub(crate) async fn queued<T: Send + 'static>(
        &self,
        name: &str,
        waiting: usize,
        acquire: impl Future<Output = T> + Send + 'static,
    ) -> JoinHandle<T> {
        let waiter = tokio::spawn(acquire);
        if self.capability().waiters_visible {
            self.line(name).until_waiting(waiting).await;
        }
        waiter
    }
}

/// One line of the fixture's namespace.
#[derive(Clone)]
pub(crate) struct Line {
    pub(super) name: Name,
    owner: String,
    ttl: Duration,
    engine: SharedEngine,
    fixture: Fixture,
}

impl Line {
    /// A claim that queues and has a long ttl.
    pub(super) fn claim(&self, ask: Ask) -> Claim {
        Claim {
            id: ClaimId::random(),
            name: self.name.clone(),
            ask,
            ttl: self.ttl,
            queue: true,
            owner: Owner::here(&self.owner, None),
            value: None,
            renewed: true,
            at_least: Duration::ZERO,
        }
    }

    /// The same line with a short ttl.
    pub(super) fn brief(&self) -> Self {
        Self {
            ttl: self.fixture.short_ttl(),
            ..self.clone()
        }
    }

    /// Enters, and returns any answer.
    pub(super) async fn ask(&self, claim: Claim) -> palisade::Result<Entered> {
        self.engine.enter(Arc::new(claim)).await
    }

    /// Enters, and expects a place.
    pub(super) async fn enter(&self, claim: Claim) -> Seat {
        match soon("enter", self.ask(claim)).await.unwrap() {
            Entered::In {
                ticket,
                armed,
                place,
            } => Seat {
                ticket,
                armed,
                place,
                engine: Arc::clone(&self.engine),
            },
            Entered::Busy => panic!("a claim that queues finds no place"),
        }
    }

    /// Enters, and expects to hold.
    #[track_caller]
    pub(super) fn held(&self, ask: Ask) -> impl Future<Output = Seat> {
        self.placed(ask, "holds at once", |place| {
            matches!(place, Place::Held { .. })
        })
    }

    /// Enters, and expects to wait.
    #[track_caller]
    pub(super) fn waiting(&self, ask: Ask) -> impl Future<Output = Seat> {
        self.placed(ask, "waits", |place| *place == Place::Waiting)
    }

    #[track_caller]
    fn placed(
        &self,
        ask: Ask,
        expected: &'static str,
        is: fn(&Place) -> bool,
    ) -> impl Future<Output = Seat> {
        let at = Location::caller();
        async move {
            let seat = self.enter(self.claim(ask)).await;
            let place = &seat.place;
            assert!(is(place), "{ask:?} {expected}, not {place:?} [{at}]");
            seat
        }
    }

    /// Enters without queueing, and expects `Busy`.
    pub(super) async fn busy(&self, ask: Ask) {
        let claim = Claim {
            queue: false,
            ..self.claim(ask)
        };
        assert_is!(self.ask(claim).await.unwrap(), Entered::Busy);
    }

    /// The line as a survey shows it; empty if it is not shown.
    pub(super) async fn shown(&self) -> LineReport {
        let scope = Scope::Line(self.name.clone());
        let mut lines = self.fixture.engine().survey(scope).await.unwrap();
        assert!(lines.len() <= 1, "a survey of one line shows {lines:?}");
        let shown = lines.pop();
        shown.unwrap_or_else(|| LineReport::empty(self.name.as_str()))
    }

    /// The number of holders, and the number of waiters.
    pub(super) async fn length(&self) -> (usize, usize) {
        let line = self.shown().await;
        (line.holders.len(), line.waiters.len())
    }

    /// The ids of the holders, and those of the waiters.
    pub(super) async fn ids(&self) -> (Vec<String>, Vec<String>) {
        let line = self.shown().await;
        let ids =
            |claims: Vec<palisade::report::ClaimReport>| claims.into_iter().map(|c| c.id).collect();
        (ids(line.holders), ids(line.waiters))
    }

    /// Waits until a survey passes `test`.
    #[track_caller]
    pub(super) fn until<'a, T: Fn(&LineReport) -> bool>(
        &'a self,
        what: &str,
        test: T,
    ) -> impl Future<Output = LineReport> + use<'a, T> {
        soon(what, async move {
            let mut pause = Duration::from_millis(1);
            loop {
                let line = self.shown().await;
                if test(&line) {
                    return line;
                }
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(Duration::from_millis(20));
            }
        })
    }

    /// Waits until the line has `count` waiters. Needs visible waiters.
    #[track_caller]
    pub(super) fn until_waiting(&self, count: usize) -> impl Future<Output = LineReport> {
        let what = format!("a line of {count} waiters");
        self.until(&what, move |line| line.waiters.len() == count)
    }

    /// Waits until the line has one holder.
    #[track_caller]
    pub(super) fn until_held(&self) -> impl Future<Output = LineReport> {
        self.until("a holder", |line| line.holders.len() == 1)
    }

    /// Waits until the line is empty.
    #[track_caller]
    pub(super) fn until_empty(&self) -> impl Future<Output = LineReport> {
        let empty = |line: &LineReport| line.holders.is_empty() && line.waiters.is_empty();
        self.until("an empty line", empty)
    }

    pub(super) async fn resize(&self, capacity: u32) -> palisade::Result<bool> {
        self.engine.resize(self.name.clone(), capacity).await
    }

    pub(super) async fn evict(&self, id: impl ToString, eviction: Eviction) -> bool {
        let (name, id) = (self.name.clone(), id.to_string());
        self.engine.evict(name, id, eviction).await.unwrap()
    }

    /// Leaves with a claim that has not entered.
    pub(super) async fn leave_unentered(&self, claim: ClaimId) -> Left {
        let ticket = Ticket::own(self.name.clone(), claim);
        self.engine.leave(ticket).await.unwrap()
    }
}

/// A claim in a line, as the engine answered.
#[derive(Clone)]
pub(super) struct Seat {
    pub(super) ticket: Ticket,
    pub(super) armed: LeaseStart,
    pub(super) place: Place,
    engine: SharedEngine,
}

impl Seat {
    /// The sequence number of its grant, 0 while it waits.
    pub(super) fn sequence(&self) -> u64 {
        match self.place {
            Place::Held { sequence } => sequence,
            _ => 0,
        }
    }

    pub(super) fn id(&self) -> String {
        self.ticket.claim.to_string()
    }

    /// The earliest time at which the engine may end its lease.
    pub(super) fn ends(&self) -> BootTime {
        self.armed.sent + self.armed.ttl
    }

    /// How long to wait for something that follows the end of its lease.
    pub(super) fn after_its_end(&self) -> Duration {
        self.armed.ttl + SOON
    }

    /// The lease to renew it with.
    pub(super) fn lease(&self) -> Lease {
        Lease::in_a_test(&self.ticket)
    }

    /// Ends the case as not applicable if its lease is shared with other tickets.
    pub(super) fn must_own_lease(&self) {
        if !self.ticket.has_own_lease() {
            NotApplicable::because("tickets share a lease");
        }
    }

    /// The same claim as another incarnation.
    pub(super) fn another_incarnation(&self) -> Self {
        let mut other = self.clone();
        other.ticket.sequence += 1;
        other
    }

    pub(super) async fn leave(&self) -> Left {
        self.engine.leave(self.ticket.clone()).await.unwrap()
    }

    /// Where it stands now.
    pub(super) async fn now(&self) -> Place {
        let look = self.engine.wait(self.ticket.clone(), BootTime::PAST);
        look.await.unwrap()
    }

    /// Sleeps until its place may have changed.
    pub(super) async fn wait(&self, until: BootTime) -> palisade::Result<Place> {
        self.engine.wait(self.ticket.clone(), until).await
    }

    /// Waits until it holds, and returns the sequence of its grant.
    #[track_caller]
    pub(super) fn granted(&self) -> impl Future<Output = u64> {
        self.granted_within(SOON)
    }

    /// As `granted`, with another limit.
    #[track_caller]
    pub(super) fn granted_within(&self, limit: Duration) -> impl Future<Output = u64> {
        within(limit, "the grant", async move {
            loop {
                match self.wait(BootTime::now() + RECHECK).await.unwrap() {
                    Place::Held { sequence } => return sequence,
                    Place::Waiting => {}
                    Place::Gone => panic!("a claim that waits is gone"),
                }
            }
        })
    }

    pub(super) async fn renew(&self) -> Renewal {
        let mut answers = self.engine.renew(vec![self.lease()], RENEWAL).await;
        assert_eq!(answers.len(), 1, "answers for one lease");
        answers.remove(0)
    }

    pub(super) async fn amend(&self, amendment: Amendment) -> Amended {
        self.engine
            .amend(self.ticket.clone(), amendment)
            .await
            .unwrap()
    }

    /// Changes the part of the line that it takes.
    pub(super) async fn reweigh(&self, ask: Ask) -> Amended {
        self.amend(Amendment::Ask(ask)).await
    }

    pub(super) async fn evict(&self, eviction: Eviction) -> bool {
        let name = self.ticket.name.clone();
        self.engine.evict(name, self.id(), eviction).await.unwrap()
    }
}
