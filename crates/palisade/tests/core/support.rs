//! A fault layer over an engine, for tests of the core: each verb can be made to fail, to hang,
//! to lose its answer, or to lie about a lease, by switches that a test turns.

use std::collections::VecDeque;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use palisade::engine::{
    BoxFuture, Claim, Entered, Layer, Lease, Left, Place, Renewal, Settings, SharedEngine, Ticket,
    Url,
};
use palisade::report::{Checkup, Finding, Scope};
use palisade::{BootTime, Capability, Client, Error, ErrorKind, Guarantee, Name, Result};
use parking_lot::Mutex;
use tokio::sync::Notify;

/// What to do with one call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fault {
    /// Let it through.
    Pass,
    /// Fail without applying it.
    Refuse,
    /// Apply it, then fail as if the answer was lost.
    EatReply,
    /// Fail as if the answer was lost, and apply it when the test says so.
    Defer,
    /// Never answer, never apply.
    Hang,
    /// Apply it, answer only after this long.
    Late(Duration),
    /// Apply it, answer when the test says so.
    Held,
    /// Panic inside the engine.
    Panic,
    /// Let nothing else happen on the thread until the test says so, or for ever.
    Block,
}

/// The faults for the next calls of one verb; when they run out, `then` goes on for ever.
pub(crate) struct Script {
    queue: Mutex<(VecDeque<Fault>, Fault)>,
    deferred: Mutex<Vec<BoxFuture<()>>>,
    answers: Notify,
    unblocked: AtomicBool,
    calls: AtomicUsize,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            queue: Mutex::new((VecDeque::new(), Fault::Pass)),
            deferred: Mutex::default(),
            answers: Notify::new(),
            unblocked: AtomicBool::new(false),
            calls: AtomicUsize::new(0),
        }
    }
}

impl Script {
    pub(crate) fn set(&self, first: impl IntoIterator<Item = Fault>, then: Fault) {
        *self.queue.lock() = (first.into_iter().collect(), then);
    }

    pub(crate) fn calls(&self) -> usize {
        self.calls.load(Ordering::SeqCst)
    }

    fn next(&self) -> Fault {
        self.calls.fetch_add(1, Ordering::SeqCst);
        let mut queue = self.queue.lock();
        let then = queue.1;
        queue.0.pop_front().unwrap_or(then)
    }

    /// Lets a thread go on that was blocked.
    pub(crate) fn unblock(&self) {
        self.unblocked.store(true, Ordering::SeqCst);
    }

    /// Lets the answer through that is held.
    pub(crate) fn answer(&self) {
        self.answers.notify_one();
    }

    /// Lets the calls arrive that were deferred; says how many.
    pub(crate) async fn arrive(&self) -> usize {
        let calls = std::mem::take(&mut *self.deferred.lock());
        let count = calls.len();
        for call in calls {
            call.await;
        }
        count
    }

    async fn apply<T: 'static>(
        &self,
        verb: &'static str,
        call: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        let gone = || Error::new(ErrorKind::Unreachable, verb, "cut off by the test");
        match self.next() {
            Fault::Pass => call.await,
            Fault::Refuse => Err(gone()),
            Fault::EatReply => {
                let _ = call.await;
                Err(gone().maybe_applied())
            }
            Fault::Defer => {
                let call = async move { drop(call.await) };
                self.deferred.lock().push(Box::pin(call));
                Err(gone().maybe_applied())
            }
            Fault::Hang => std::future::pending().await,
            Fault::Late(by) => {
                let answer = call.await;
                tokio::time::sleep(by).await;
                answer
            }
            Fault::Held => {
                let answer = call.await;
                self.answers.notified().await;
                answer
            }
            Fault::Panic => panic!("the test asked for a panic in {verb}"),
            Fault::Block => {
                while !self.unblocked.load(Ordering::SeqCst) {
                    #[cfg(not(palisade_shuttle))]
                    std::thread::park_timeout(ms(10));
                    #[cfg(palisade_shuttle)]
                    shuttle::thread::yield_now();
                }
                call.await
            }
        }
    }
}

/// An engine with a script for each verb that changes something.
pub(crate) struct Faulty {
    inner: SharedEngine,
    pub(crate) enter: Arc<Script>,
    pub(crate) wait: Arc<Script>,
    pub(crate) renew: Arc<Script>,
    pub(crate) leave: Arc<Script>,
    /// What it says of its class instead of the truth.
    pub(crate) class: Mutex<Option<Guarantee>>,
    /// What it finds wrong with itself.
    pub(crate) findings: Mutex<Vec<Finding>>,
}

impl Faulty {
    /// A faulty engine over a fresh memory store, and a client of it with a ttl of `ttl`.
    pub(crate) async fn client(ttl: Duration) -> (Arc<Self>, Client) {
        let store = format!("memory:{:x}", rand::random::<u64>());
        let inner = Arc::clone(palisade::connect(&store).await.unwrap().engine());
        let faulty = Arc::new(Self {
            inner,
            enter: Arc::default(),
            wait: Arc::default(),
            renew: Arc::default(),
            leave: Arc::default(),
            class: Mutex::default(),
            findings: Mutex::default(),
        });
        let url = format!("memory:?ttl={}ms&timeout=10s", ttl.as_millis());
        let settings: Settings = Url::parse(&url).unwrap().take_settings().unwrap();
        let client = Client::new(faulty.clone(), &settings).unwrap();
        (faulty, client)
    }

    /// How many claims are in the line `name`.
    pub(crate) async fn in_line(&self, name: &str) -> usize {
        in_line(&self.inner, name).await
    }

    /// Waits until so many claims are in the line.
    pub(crate) async fn until_in_line(&self, name: &str, count: usize) {
        until(async || self.in_line(name).await == count).await;
    }
}

/// Longer than anything here takes. It stays far below [`LEFT`], the ttl of tests about what is left
/// behind: else the end of the lease would remove what nobody has left.
pub(crate) const SOON: Duration = Duration::from_secs(20);

/// A ttl whose end no test sees.
pub(crate) const LEFT: Duration = Duration::from_secs(120);

pub(crate) const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// How many claims are in the line `name` of an engine.
pub(crate) async fn in_line(engine: &SharedEngine, name: &str) -> usize {
    let scope = Scope::Line(Name::new(name).unwrap());
    let lines = engine.survey(scope).await.unwrap();
    let claims = lines.iter();
    claims
        .map(|line| line.holders.len() + line.waiters.len())
        .sum()
}

/// Looks until `test` is true.
#[track_caller]
pub(crate) fn until(mut test: impl AsyncFnMut() -> bool) -> impl Future<Output = ()> {
    within(SOON, async move {
        while !test().await {
            tokio::time::sleep(ms(1)).await;
        }
    })
}

/// What `event` comes to, or a failed test when it does not come.
#[track_caller]
pub(crate) fn within<T>(
    limit: Duration,
    event: impl Future<Output = T>,
) -> impl Future<Output = T> {
    let caller = std::panic::Location::caller();
    async move {
        match tokio::time::timeout(limit, event).await {
            Ok(came) => came,
            Err(_) => panic!("nothing came within {limit:?}, waited for at {caller}"),
        }
    }
}

impl Layer for Faulty {
    fn inner(&self) -> &SharedEngine {
        &self.inner
    }

    fn capability(&self) -> Capability {
        let mut capability = self.inner.capability();
        capability.class = self.class.lock().unwrap_or(capability.class);
        capability
    }

    async fn enter(&self, claim: Arc<Claim>) -> Result<Entered> {
        let inner = Arc::clone(&self.inner);
        let call = async move { inner.enter(claim).await };
        self.enter.apply("enter", call).await
    }

    async fn wait(&self, ticket: Ticket, until: BootTime) -> Result<Place> {
        let inner = Arc::clone(&self.inner);
        let call = async move { inner.wait(ticket, until).await };
        self.wait.apply("wait", call).await
    }

    async fn renew(&self, leases: Vec<Lease>, within: Duration) -> Vec<Renewal> {
        let (inner, count) = (Arc::clone(&self.inner), leases.len());
        let call = async move { Ok(inner.renew(leases, within).await) };
        let unknown = |_| Renewal::Unknown(Error::new(ErrorKind::Unreachable, "renew", "cut off"));
        let answer = self.renew.apply("renew", call).await;
        answer.unwrap_or_else(|_| (0..count).map(unknown).collect())
    }

    async fn leave(&self, ticket: Ticket) -> Result<Left> {
        let inner = Arc::clone(&self.inner);
        let call = async move { inner.leave(ticket).await };
        self.leave.apply("leave", call).await
    }

    async fn check(&self) -> Result<Checkup> {
        let mut checkup = Checkup::default();
        checkup.findings = self.findings.lock().clone();
        Ok(checkup)
    }
}
