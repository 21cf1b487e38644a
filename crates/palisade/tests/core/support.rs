//! A fault layer over an engine, for tests of the core: each verb can be made to fail, to hang,
//! to lose its answer, or to lie about a lease, by switches that a test turns.

use std::collections::VecDeque;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use palisade::core::capability::Class;
use palisade::core::claim::Claim;
use palisade::core::engine::{
    Alarm, Amended, Amendment, Audited, BoxFuture, BoxStream, Engine, Entered, Eviction, Left,
    Place, Renewal,
};
use palisade::core::report::Finding;
use palisade::core::ticket::{Lease, LeaseId, Ticket};
use palisade::{
    BootTime, Capability, Checkup, Client, Error, Kind, LineReport, Name, Result, Scope, Settings,
    Url,
};
use parking_lot::Mutex;

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
    /// Panic inside the engine.
    Panic,
}

/// The faults for the next calls of one verb; when they run out, `then` goes on for ever.
pub(crate) struct Script {
    queue: Mutex<(VecDeque<Fault>, Fault)>,
    deferred: Mutex<Vec<BoxFuture<()>>>,
    calls: AtomicUsize,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            queue: Mutex::new((VecDeque::new(), Fault::Pass)),
            deferred: Mutex::default(),
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
        let gone = || Error::new(Kind::Unreachable, verb, "cut off by the test");
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
            Fault::Panic => panic!("the test asked for a panic in {verb}"),
        }
    }
}

/// An engine with a script for each verb that changes something.
pub(crate) struct Faulty {
    inner: Arc<dyn Engine>,
    pub(crate) enter: Arc<Script>,
    pub(crate) wait: Arc<Script>,
    pub(crate) renew: Arc<Script>,
    pub(crate) leave: Arc<Script>,
    /// What it says of its class instead of the truth.
    pub(crate) class: Mutex<Option<Class>>,
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
        let lines = self
            .inner
            .survey(Scope::Line(Name::new(name).unwrap()))
            .await
            .unwrap();
        lines
            .iter()
            .map(|line| line.holders.len() + line.waiters.len())
            .sum()
    }

    /// Waits until so many claims are in the line.
    pub(crate) async fn until_in_line(&self, name: &str, count: usize) {
        within(Duration::from_secs(5), async {
            while self.in_line(name).await != count {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        })
        .await;
    }
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

impl Engine for Faulty {
    fn capability(&self) -> Capability {
        let mut capability = self.inner.capability();
        capability.class = self.class.lock().unwrap_or(capability.class);
        capability
    }

    fn describe(&self) -> String {
        self.inner.describe()
    }

    fn enter(&self, claim: Arc<Claim>) -> BoxFuture<Result<Entered>> {
        let (script, call) = (self.enter.clone(), self.inner.enter(claim));
        Box::pin(async move { script.apply("enter", call).await })
    }

    fn wait(&self, ticket: Ticket, until: BootTime) -> BoxFuture<Result<Place>> {
        let (script, call) = (self.wait.clone(), self.inner.wait(ticket, until));
        Box::pin(async move { script.apply("wait", call).await })
    }

    fn renew(&self, leases: Vec<Lease>, within: Duration) -> BoxFuture<Vec<Renewal>> {
        let (script, count, call) = (
            self.renew.clone(),
            leases.len(),
            self.inner.renew(leases, within),
        );
        Box::pin(async move {
            let answer = script.apply("renew", async move { Ok(call.await) }).await;
            let unknown = |_| Renewal::Unknown(Error::new(Kind::Unreachable, "renew", "cut off"));
            answer.unwrap_or_else(|_| (0..count).map(unknown).collect())
        })
    }

    fn amend(&self, ticket: Ticket, amendment: Amendment) -> BoxFuture<Result<Amended>> {
        self.inner.amend(ticket, amendment)
    }

    fn leave(&self, ticket: Ticket) -> BoxFuture<Result<Left>> {
        let (script, call) = (self.leave.clone(), self.inner.leave(ticket));
        Box::pin(async move { script.apply("leave", call).await })
    }

    fn audit(&self, lease: LeaseId) -> BoxFuture<Result<Vec<Audited>>> {
        self.inner.audit(lease)
    }

    fn alarms(&self) -> BoxStream<Alarm> {
        self.inner.alarms()
    }

    fn survey(&self, scope: Scope) -> BoxFuture<Result<Vec<LineReport>>> {
        self.inner.survey(scope)
    }

    fn watch(&self, scope: Scope) -> BoxStream<Result<()>> {
        self.inner.watch(scope)
    }

    fn evict(&self, name: Name, id: String, eviction: Eviction) -> BoxFuture<Result<bool>> {
        self.inner.evict(name, id, eviction)
    }

    fn resize(&self, name: Name, capacity: u32) -> BoxFuture<Result<bool>> {
        self.inner.resize(name, capacity)
    }

    fn check(&self) -> BoxFuture<Result<Checkup>> {
        let checkup = Checkup {
            findings: self.findings.lock().clone(),
            ..Checkup::default()
        };
        Box::pin(std::future::ready(Ok(checkup)))
    }

    fn key(&self, ticket: &Ticket) -> Option<String> {
        self.inner.key(ticket)
    }

    fn close(&self) -> BoxFuture<()> {
        self.inner.close()
    }
}
