//! Supervision over an engine that can be cut off: what the child sees and when.

use std::ffi::OsString;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use palisade::core::claim::Claim;
use palisade::core::engine::{
    Alarm, Amended, Amendment, Audited, BoxFuture, BoxStream, Entered, Eviction, Left, Place,
    Renewal,
};
use palisade::core::ticket::{Lease, LeaseId, Ticket};
use palisade::{
    BootTime, Capability, Client, Engine, Error, Finding, Hold, Kind, LineReport, LossReason, Name,
    Result, Scope, Url,
};
use tempfile::TempDir;

use super::{End, KILL_LEAD, grace, supervise};
use crate::child::Child;
use crate::signals::{Endings, Signals};

const TTL: Duration = Duration::from_millis(1500);

/// An engine whose renewals go unanswered while it is cut off.
struct Cuttable {
    inner: Arc<dyn Engine>,
    cut: AtomicBool,
}

impl Engine for Cuttable {
    fn renew(&self, leases: Vec<Lease>) -> BoxFuture<Vec<Renewal>> {
        if !self.cut.load(Ordering::SeqCst) {
            return self.inner.renew(leases);
        }
        let unknown = |_| Renewal::Unknown(Error::new(Kind::Unreachable, "renew", "cut off"));
        Box::pin(async move { leases.into_iter().map(unknown).collect() })
    }

    fn capability(&self) -> Capability {
        self.inner.capability()
    }
    fn describe(&self) -> String {
        self.inner.describe()
    }
    fn enter(&self, claim: Arc<Claim>) -> BoxFuture<Result<Entered>> {
        self.inner.enter(claim)
    }
    fn wait(&self, ticket: Ticket, until: BootTime) -> BoxFuture<Result<Place>> {
        self.inner.wait(ticket, until)
    }
    fn amend(&self, ticket: Ticket, amendment: Amendment) -> BoxFuture<Result<Amended>> {
        self.inner.amend(ticket, amendment)
    }
    fn leave(&self, ticket: Ticket) -> BoxFuture<Result<Left>> {
        self.inner.leave(ticket)
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
    fn check(&self) -> BoxFuture<Result<Vec<Finding>>> {
        self.inner.check()
    }
    fn close(&self) -> BoxFuture<()> {
        self.inner.close()
    }
}

struct Scene {
    engine: Arc<Cuttable>,
    hold: Hold,
    child: Child,
    signals: Signals,
    dir: TempDir,
}

impl Scene {
    /// A held lock, and a script that has said it is ready; `$D` is its directory.
    async fn start(script: &str) -> Self {
        let dir = TempDir::new().unwrap();
        let memory = format!("memory:{}", dir.path().display());
        let inner = Arc::clone(palisade::connect(&memory).await.unwrap().engine());
        let cut = AtomicBool::new(false);
        let engine = Arc::new(Cuttable { inner, cut });
        let url = format!("memory:?ttl={}ms", TTL.as_millis());
        let settings = Url::parse(&url).unwrap().take_settings().unwrap();
        let client = Client::new(engine.clone(), &settings).unwrap();
        let hold = client.mutex("x").unwrap().lock().await.unwrap();
        let signals = Signals::listen(Endings::listen().unwrap()).unwrap();
        let command = ["sh", "-c", script].map(OsString::from);
        let here = dir.path().display().to_string();
        let child = Child::start(&command, &[("D", here)]).unwrap();
        let scene = Self {
            engine,
            hold,
            child,
            signals,
            dir,
        };
        scene.until_there("ready").await;
        scene
    }

    async fn until_there(&self, name: &str) {
        let path = self.dir.path().join(name);
        let there = async {
            while !path.exists() {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), there)
            .await
            .unwrap();
    }

    fn is_there(&self, name: &str) -> bool {
        self.dir.path().join(name).exists()
    }

    fn cut_off(&self) {
        self.engine.cut.store(true, Ordering::SeqCst);
    }

    async fn supervise(&mut self) -> End {
        supervise(&mut self.child, &self.hold, TTL, &mut self.signals).await
    }
}

/// A script that notes TERM in `$D/asked` and goes on.
const STUBBORN: &str = "trap ': >$D/asked' TERM; : >$D/ready; while :; do sleep 0.02; done";

#[tokio::test]
async fn a_child_is_asked_before_the_deadline_and_killed_before_it_too() {
    let mut scene = Scene::start(STUBBORN).await;
    scene.cut_off();
    let asked = scene.dir.path().join("asked");
    let noticed = async move {
        while !asked.exists() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        BootTime::now()
    };
    let (hold, child, signals) = (&scene.hold, &mut scene.child, &mut scene.signals);
    // A renewal may be under way when the engine is cut off: the deadline is read a little later.
    let deadline = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        hold.deadline()
    };
    let end = async {
        let end = supervise(child, hold, TTL, signals).await;
        (end, BootTime::now())
    };
    let all = async { tokio::join!(end, noticed, deadline) };
    let all = tokio::time::timeout(Duration::from_secs(10), all).await;
    let ((end, ended_at), asked_at, deadline) = all.unwrap();
    assert_eq!(end, End::Lost(LossReason::Expired));
    let slack = Duration::from_millis(150);
    let left = deadline.saturating_since(asked_at);
    assert!(
        left <= grace(TTL) && left + slack > grace(TTL),
        "asked {left:?} before"
    );
    let left = deadline.saturating_since(ended_at);
    assert!(
        !left.is_zero() && left <= KILL_LEAD,
        "killed {left:?} before the deadline"
    );
}

#[tokio::test]
async fn a_child_that_ends_when_asked_has_lost_its_lock_all_the_same() {
    let script = "trap ': >$D/asked; exit 0' TERM; : >$D/ready; while :; do sleep 0.02; done";
    let mut scene = Scene::start(script).await;
    scene.cut_off();
    assert_eq!(scene.supervise().await, End::Lost(LossReason::Expired));
    assert!(scene.is_there("asked"));
}

#[tokio::test]
async fn a_child_is_left_alone_when_the_engine_comes_back_in_time() {
    let script = ": >$D/ready; while [ ! -e $D/stop ]; do sleep 0.02; done";
    let mut scene = Scene::start(script).await;
    scene.cut_off();
    let (engine, stop) = (Arc::clone(&scene.engine), scene.dir.path().join("stop"));
    let back = async move {
        tokio::time::sleep(TTL / 2).await;
        engine.cut.store(false, Ordering::SeqCst);
        tokio::time::sleep(TTL).await;
        std::fs::write(stop, "").unwrap();
    };
    let (end, ()) = tokio::join!(scene.supervise(), back);
    assert_eq!(end, End::Ended);
    assert!(scene.hold.is_valid());
}

/// A stopped process acts on no TERM.
#[tokio::test]
async fn a_stopped_child_is_resumed_to_hear_that_it_must_end() {
    let script = "trap ': >$D/asked; exit 0' TERM; : >$D/ready; kill -STOP $$; sleep 60";
    let mut scene = Scene::start(script).await;
    scene.cut_off();
    assert_eq!(scene.supervise().await, End::Lost(LossReason::Expired));
    assert!(scene.is_there("asked"));
}

#[test]
fn the_grace_is_a_sixth_of_the_ttl_but_not_less_than_200_ms() {
    assert_eq!(grace(Duration::from_secs(30)), Duration::from_secs(5));
    assert_eq!(grace(Duration::from_secs(1)), Duration::from_millis(200));
}
