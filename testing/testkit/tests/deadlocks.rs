//! Planted circles and near misses on real engines: each circle is found in time and one of its
//! agents gives way, no bystander does, and without a circle nobody does.
//!
//! `PALISADE_TEST_FULL=1` plants a thousand of each on every engine.

#![allow(clippy::unwrap_used)]

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use palisade::engine::{Ask, Claim, ClaimId, DynEngine as _, SharedEngine, Url};
use palisade::report::{Agent, Owner, Scope};
use palisade::{Client, ErrorKind, Eviction, Hold, Name, Patience, Result, Which};
use palisade_testkit::lab::launch;
use palisade_testkit::spy::{Spy, Verb};
use rand::RngExt as _;
use rand::SeedableRng;
use rand::rngs::StdRng;
use tokio::sync::Barrier;
use tokio::task::JoinSet;

/// Renewal is due after a third of this.
const TTL: Duration = Duration::from_secs(3);
const AFTER: Duration = Duration::from_millis(500);
/// The promised bound: `deadlock_after`, a third of the ttl, and 5 s.
const FOUND_WITHIN: Duration = Duration::from_millis(500 + 1_000 + 5_000);
/// A wait without a deadlock must last this long, well beyond several looks.
const NEAR_MISS: Duration = Duration::from_millis(2_500);
/// Far more than anything takes.
const LIMIT: Duration = Duration::from_secs(60);

fn full() -> bool {
    std::env::var_os("PALISADE_TEST_FULL").is_some()
}

/// Where agents meet.
struct Site {
    url: String,
    /// How many circles are planted at once: each agent has its own connection.
    beside: usize,
    _keep: Option<launch::Running>,
}

impl Site {
    fn served(name: &str, beside: usize) -> Option<Self> {
        let running = launch::need(name)?;
        Some(Self {
            url: running.url().to_owned(),
            beside,
            _keep: Some(running),
        })
    }

    async fn connect(&self, namespace: &str) -> Client {
        let joint = if self.url.contains('?') { '&' } else { '?' };
        let ttl = TTL.as_millis();
        let url = format!("{}{joint}namespace={namespace}&ttl={ttl}ms", self.url);
        palisade::connect(url.as_str()).await.unwrap()
    }
}

fn namespace() -> String {
    format!("d{:016x}", rand::random::<u64>())
}

/// How an agent ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Finished,
    GaveWay,
}

fn end(waited: Result<Option<Hold>>) -> (End, Option<Hold>) {
    match waited {
        Ok(hold) => (End::Finished, Some(hold.unwrap())),
        Err(error) if error.kind() == ErrorKind::Deadlock => (End::GaveWay, None),
        Err(error) => panic!("{error:?}"),
    }
}

/// What an agent holds, and what the agent before it requests.
#[derive(Debug, Clone, Copy)]
enum Kind {
    Mutex,
    ReaderThenWriter,
    WriterThenReader,
    Permits,
    /// One of two names, both of which the next agent holds.
    Any,
}

async fn hold(client: &Client, kind: Kind, name: &str) -> Vec<Hold> {
    let ask = match kind {
        Kind::Mutex | Kind::WriterThenReader | Kind::Any => Ask::Whole,
        Kind::ReaderThenWriter => Ask::READ,
        Kind::Permits => Ask::Part {
            weight: 2,
            capacity: 3,
        },
    };
    let mut holds = Vec::new();
    for name in [name.to_owned(), format!("{name}-other")] {
        if holds.is_empty() || matches!(kind, Kind::Any) {
            let held = client.line(name, ask).acquire(Patience::Forever).await;
            holds.push(held.unwrap().unwrap());
        }
    }
    holds
}

async fn ask(client: &Client, kind: Kind, name: &str) -> Result<Option<Hold>> {
    let ask = match kind {
        Kind::Mutex | Kind::ReaderThenWriter => Ask::Whole,
        Kind::WriterThenReader => Ask::READ,
        Kind::Permits => Ask::Part {
            weight: 2,
            capacity: 3,
        },
        Kind::Any => {
            let names = [name.to_owned(), format!("{name}-other")];
            // It has no options, so the default of 2 s applies.
            return client.lock_any(names, Patience::Forever).await;
        }
    };
    let line = client.line(name, ask).deadlock_after(AFTER);
    line.acquire(Patience::Forever).await
}

/// Measures by how much the machine was late, until it is dropped: the bound is only promised on a
/// machine that is not overloaded.
struct Lateness {
    total: Arc<AtomicU64>,
    task: tokio::task::JoinHandle<()>,
}

impl Lateness {
    fn watch() -> Self {
        let total = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&total);
        let task = tokio::spawn(async move {
            let nap = Duration::from_millis(20);
            loop {
                let began = Instant::now();
                tokio::time::sleep(nap).await;
                let late = began.elapsed().saturating_sub(nap);
                counted.fetch_add(late.as_millis() as u64, Ordering::Relaxed);
            }
        });
        Self { total, task }
    }

    fn total(&self) -> Duration {
        Duration::from_millis(self.total.load(Ordering::Relaxed))
    }
}

impl Drop for Lateness {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Plants a circle with tails; returns how long it took until one agent gave way.
async fn circle(site: &Site, seed: u64) -> Duration {
    let mut random = StdRng::seed_from_u64(seed);
    let namespace = namespace();
    let size = random.random_range(2..=8_usize);
    let kinds: Vec<Kind> = (0..size)
        .map(|_| match random.random_range(0..5) {
            0 => Kind::Mutex,
            1 => Kind::ReaderThenWriter,
            2 => Kind::WriterThenReader,
            3 => Kind::Permits,
            _ => Kind::Any,
        })
        .collect();
    let any = kinds.iter().any(|kind| matches!(kind, Kind::Any));
    let bystanders = random.random_range(0..=3_usize);
    let all_hold = Arc::new(Barrier::new(size + bystanders));
    let mut agents = JoinSet::new();
    let mut clients = Vec::new();
    for me in 0..size + bystanders {
        let client = site.connect(&namespace).await;
        clients.push(client.clone());
        // All have the same name; their clients tell them apart.
        let client = client.agent("worker");
        let next = if me < size {
            (me + 1) % size
        } else {
            random.random_range(0..size)
        };
        let (kinds, all_hold) = (kinds.clone(), Arc::clone(&all_hold));
        let late = Duration::from_millis(random.random_range(0..200));
        agents.spawn(async move {
            let own = if me < size { kinds[me] } else { Kind::Mutex };
            let holds = hold(&client, own, &format!("r{me}")).await;
            all_hold.wait().await;
            let began = Instant::now();
            // Bystanders come last, and would be granted last.
            let late = if me < size {
                late
            } else {
                Duration::from_millis(250)
            };
            tokio::time::sleep(late).await;
            let (ended, got) = end(ask(&client, kinds[next], &format!("r{next}")).await);
            let took = began.elapsed();
            if let Some(got) = got {
                got.release().await.unwrap();
            }
            for hold in holds {
                hold.release().await.unwrap();
            }
            (me, ended, took)
        });
    }
    let lateness = Lateness::watch();
    let ends = tokio::time::timeout(LIMIT, agents.join_all()).await;
    let ends = ends.unwrap_or_else(|_| panic!("seed {seed}: a circle of {kinds:?} is stuck"));
    let gave_way: Vec<_> = ends
        .iter()
        .filter(|(_, end, _)| *end == End::GaveWay)
        .collect();
    assert_eq!(gave_way.len(), 1, "seed {seed}, {kinds:?}: {ends:?}");
    assert!(
        gave_way[0].0 < size,
        "seed {seed}: a bystander gave way: {ends:?}"
    );
    let more = if any {
        Duration::from_secs(2) - AFTER
    } else {
        Duration::ZERO
    };
    let late = lateness.total();
    assert!(
        gave_way[0].2 <= FOUND_WITHIN + more + late,
        "seed {seed}, {kinds:?}, late by {late:?}: {ends:?}"
    );
    for client in clients {
        client.close().await;
    }
    gave_way[0].2
}

/// Two agents that would wait for each other, except for what `near` does. Nobody may give way.
/// `near` receives the namespace's first client and the holds of the two.
async fn near_miss<F: Future<Output = ()>>(
    site: &Site,
    what: &str,
    near: impl FnOnce(Client, Hold, Hold) -> F,
) {
    let namespace = namespace();
    let (one, two) = (
        site.connect(&namespace).await,
        site.connect(&namespace).await,
    );
    let (a, b) = (one.agent("worker"), two.agent("worker"));
    let x = a.mutex("x").lock().await.unwrap();
    let y = b.mutex("y").lock().await.unwrap();
    let waits = |client: Client, name: &'static str| async move {
        let line = client.line(name, Ask::Whole).deadlock_after(AFTER);
        let (ended, got) = end(line.acquire(Patience::Forever).await);
        assert_eq!(ended, End::Finished, "{what}: {name}");
        drop(got);
    };
    let all = async { tokio::join!(waits(a, "y"), waits(b, "x"), near(one.clone(), x, y)) };
    let all = tokio::time::timeout(LIMIT, all).await;
    all.unwrap_or_else(|_| panic!("{what}: somebody is stuck"));
    one.close().await;
    two.close().await;
}

async fn near_misses(site: &Site) {
    let site = &site;
    let released = near_miss(
        site,
        "a hold released while looking",
        |_, x, y| async move {
            // Between the first look and the second.
            tokio::time::sleep(AFTER + Duration::from_millis(100)).await;
            drop(x);
            // The other agent is granted, and then this one.
            drop(y);
        },
    );
    let marked = near_miss(site, "a marked claim", |client, x, y| async move {
        let evict = client.evict("x", Which::Holders, Eviction::Mark);
        let keep = async {
            x.lost().await;
            tokio::time::sleep(NEAR_MISS).await;
            drop(x);
            drop(y);
        };
        let (evicted, ()) = tokio::join!(evict, keep);
        evicted.unwrap();
    });
    tokio::join!(
        released,
        marked,
        one_edge_missing(site),
        any_with_one_free(site),
        unrenewed(site),
        an_upgrade(site),
        killed(site)
    );
}

async fn no_one_gives_way(line: palisade::Request) {
    let (ended, got) = end(line.deadlock_after(AFTER).acquire(Patience::Forever).await);
    assert_eq!(ended, End::Finished);
    got.unwrap().release().await.unwrap();
}

/// A chain: the last agent works, and then releases.
async fn one_edge_missing(site: &Site) {
    let namespace = namespace();
    let (one, two) = (
        site.connect(&namespace).await,
        site.connect(&namespace).await,
    );
    let (a, b) = (one.agent("w"), two.agent("w"));
    let x = a.mutex("x").lock().await.unwrap();
    let y = b.mutex("y").lock().await.unwrap();
    let a = async {
        no_one_gives_way(a.line("y", Ask::Whole)).await;
        x.release().await.unwrap();
    };
    let b = async {
        tokio::time::sleep(NEAR_MISS).await;
        assert_eq!(one.deadlocks().await.unwrap(), []);
        y.release().await.unwrap();
    };
    tokio::join!(a, b);
}

/// `lock_any`, one of whose names becomes free.
async fn any_with_one_free(site: &Site) {
    let namespace = namespace();
    let (one, two) = (
        site.connect(&namespace).await,
        site.connect(&namespace).await,
    );
    let (a, b) = (one.agent("a"), two.agent("b"));
    let x = a.mutex("x").lock().await.unwrap();
    let y = b.mutex("y").lock().await.unwrap();
    let z = two.mutex("z").lock().await.unwrap();
    let a = async {
        let (ended, got) = end(a.lock_any(["y", "z"], Patience::Forever).await);
        assert_eq!(ended, End::Finished);
        got.unwrap().release().await.unwrap();
        x.release().await.unwrap();
    };
    let b = async {
        no_one_gives_way(b.line("x", Ask::Whole)).await;
        y.release().await.unwrap();
    };
    let z = async {
        tokio::time::sleep(NEAR_MISS + Duration::from_secs(2)).await;
        z.release().await.unwrap();
    };
    tokio::join!(a, b, z);
}

/// A hold that ends by itself.
async fn unrenewed(site: &Site) {
    let namespace = namespace();
    let (one, two) = (
        site.connect(&namespace).await,
        site.connect(&namespace).await,
    );
    if !one.capability().detached {
        return;
    }
    let (a, b) = (one.agent("a"), two.agent("b"));
    let x = a.mutex("x").unrenewed().lock().await.unwrap();
    let y = b.mutex("y").lock().await.unwrap();
    let a = async {
        no_one_gives_way(a.line("y", Ask::Whole)).await;
        drop(x);
    };
    let b = async {
        no_one_gives_way(b.line("x", Ask::Whole)).await;
        y.release().await.unwrap();
    };
    tokio::join!(a, b);
}

/// Two readers that try to become writers: an upgrade does not wait in the line.
async fn an_upgrade(site: &Site) {
    let namespace = namespace();
    let (one, two) = (
        site.connect(&namespace).await,
        site.connect(&namespace).await,
    );
    let a = one.agent("a").rwlock("x").read().await.unwrap();
    let mut b = two.agent("b").rwlock("x").read().await.unwrap();
    assert!(!b.try_upgrade().await.unwrap());
    assert_eq!(one.deadlocks().await.unwrap(), []);
    drop((a, b));
}

/// A claim that nobody renews, as of a killed process.
async fn dead_claim(client: &Client, name: &str, holds: &[&str]) {
    let agent = Agent {
        client: "dead".into(),
        name: "dead".into(),
        ttl: TTL.as_millis() as u64,
        holds: holds.iter().map(|name| (*name).to_owned()).collect(),
        ..Agent::default()
    };
    let mut owner = Owner::here("dead", None);
    owner.agent = Some(agent);
    let claim = Claim {
        id: ClaimId::random(),
        name: Name::new(name).unwrap(),
        ask: Ask::Whole,
        ttl: TTL,
        queue: true,
        owner,
        value: None,
        renewed: true,
        at_least: Duration::ZERO,
    };
    client.engine().enter(Arc::new(claim)).await.unwrap();
}

/// A holder that was just killed is part of the circle until its lease ends, but nobody gives way.
async fn killed(site: &Site) {
    let namespace = namespace();
    let (dead, two) = (
        site.connect(&namespace).await,
        site.connect(&namespace).await,
    );
    let b = two.agent("b");
    let y = b.mutex("y").lock().await.unwrap();
    dead_claim(&dead, "x", &[]).await;
    dead_claim(&dead, "y", &["x"]).await;
    // It looks like a deadlock, and is reported as one, until the leases end.
    let lines = two.survey(Scope::Prefix(String::new())).await.unwrap();
    assert_eq!(
        lines.iter().map(|line| line.waiters.len()).sum::<usize>(),
        1
    );
    no_one_gives_way(b.line("x", Ask::Whole)).await;
    y.release().await.unwrap();
    dead.close().await;
}

/// How many other waiters of the same client are ahead of the claims of a circle: more than any
/// engine keeps in a server's line.
const CROWD: usize = 30;

/// Two agents wait for each other, each behind a crowd of its own client. `late`: the first comes to
/// hold something only while it is held back behind the crowd, before its record is made.
async fn behind_a_crowd(site: &Site, late: bool) {
    let namespace = namespace();
    let (one, two) = (
        site.connect(&namespace).await,
        site.connect(&namespace).await,
    );
    let (a, b) = (one.agent("a"), two.agent("b"));
    let y = b.mutex("y").lock().await.unwrap();
    let x = if late {
        None
    } else {
        Some(a.mutex("x").lock().await.unwrap())
    };
    let mut crowd = JoinSet::new();
    for (client, name) in [(&one, "y"), (&two, "x")] {
        let held = if late && name == "x" { 0 } else { CROWD };
        for _ in 0..held {
            let line = client.line(name, Ask::Whole);
            crowd.spawn(async move { drop(line.acquire(Patience::Forever).await.unwrap()) });
        }
    }
    let waiters = async |name| {
        let scope = Scope::Line(Name::new(name).unwrap());
        let lines = one.survey(scope).await.unwrap();
        lines.iter().map(|line| line.waiters.len()).sum::<usize>()
    };
    while waiters("y").await < 16 || !late && waiters("x").await < 16 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    // Those whose enter is still under way.
    tokio::time::sleep(Duration::from_millis(200)).await;
    let waits = |client: &Client, name: &'static str| {
        let line = client.line(name, Ask::Whole).deadlock_after(AFTER);
        tokio::spawn(async move { end(line.acquire(Patience::Forever).await) })
    };
    let first = waits(&a, "y");
    let x = match x {
        Some(x) => x,
        None => {
            tokio::time::sleep(Duration::from_millis(300)).await;
            a.mutex("x").lock().await.unwrap()
        }
    };
    let (lateness, began) = (Lateness::watch(), Instant::now());
    let second = waits(&b, "x");
    let found = async {
        tokio::select! {
            ended = first => (ended.unwrap().0, true),
            ended = second => (ended.unwrap().0, false),
        }
    };
    let found = tokio::time::timeout(LIMIT, found).await;
    let (ended, _) = found.unwrap_or_else(|_| panic!("a circle behind a crowd is stuck"));
    assert_eq!(ended, End::GaveWay);
    let (took, late_by) = (began.elapsed(), lateness.total());
    // A claim that was held back looks once a second whether it must pass.
    let bound = FOUND_WITHIN + if late { TTL } else { Duration::ZERO };
    assert!(took <= bound + late_by, "{took:?}, late by {late_by:?}");
    drop((x, y));
    crowd.shutdown().await;
    one.close().await;
    two.close().await;
}

fn planted(site: Option<Site>, circles: u64) {
    let Some(site) = site else { return };
    let circles = if full() { 1_000 } else { circles };
    let seed: u64 = rand::random::<u32>().into();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .unwrap();
    let site = Arc::new(site);
    runtime.block_on(async {
        let mut slowest = Duration::ZERO;
        let mut running = JoinSet::new();
        for at in 0..circles {
            if running.len() >= site.beside {
                slowest = slowest.max(running.join_next().await.unwrap().unwrap());
            }
            let site = Arc::clone(&site);
            running.spawn(async move { circle(&site, seed + at).await });
        }
        slowest = running
            .join_all()
            .await
            .into_iter()
            .fold(slowest, Duration::max);
        println!("{circles} circles from seed {seed}: the slowest gave way after {slowest:?}");
        behind_a_crowd(&site, false).await;
        if site.url.starts_with("postgres") {
            behind_a_crowd(&site, true).await;
        }
        let mut running = JoinSet::new();
        for _ in 0..if full() { 150 } else { 1 } {
            if running.len() >= site.beside.div_ceil(3) {
                running.join_next().await.unwrap().unwrap();
            }
            let site = Arc::clone(&site);
            running.spawn(async move { near_misses(&site).await });
        }
        running.join_all().await;
    });
}

fn memory() -> Site {
    Site {
        url: format!("memory:{}", namespace()),
        beside: 40,
        _keep: None,
    }
}

#[test]
fn circles_in_memory() {
    planted(Some(memory()), 40);
}

#[test]
fn circles_in_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let url = format!("file:{}", dir.path().display());
    let site = Site {
        url,
        beside: 4,
        _keep: None,
    };
    planted(Some(site), 8);
}

#[test]
fn circles_on_redis() {
    planted(Site::served("redis", 6), 12);
}

#[test]
fn circles_on_postgres() {
    planted(Site::served("postgres", 3), 6);
}

#[test]
fn circles_on_etcd() {
    planted(Site::served("etcd", 3), 6);
}

/// Only the servers know when a session was renewed, so a separate node shows that.
#[test]
fn circles_on_zookeeper() {
    planted(Site::served("zookeeper", 3), 6);
}

#[tokio::test]
async fn engines_without_visible_waiters_are_refused() {
    let client = palisade::connect("memory:").await.unwrap();
    let mut capability = client.capability();
    capability.waiters_visible = false;
    let blind = client.layer(|engine| Spy::with_capability(engine, capability));
    let error = blind.deadlocks().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    // The owner record has no agent, because nobody could use it.
    let _hold = blind.agent("a").mutex("blind").lock().await.unwrap();
    let name = Name::new("blind").unwrap();
    let lines = blind.survey(Scope::Line(name)).await.unwrap();
    assert_eq!(lines[0].holders[0].owner.as_ref().unwrap().agent, None);
}

/// An agent that holds nothing and has no parent can't be in a circle.
#[tokio::test]
async fn waiters_who_hold_nothing_never_look() {
    const LINES: usize = 100;
    let client = palisade::connect(format!("memory:{}", namespace()).as_str())
        .await
        .unwrap();
    let spy = Arc::new(Spy::new(Arc::clone(client.engine())));
    let settings = Url::parse("memory:").unwrap().take_settings().unwrap();
    let client = Client::new(Arc::clone(&spy) as SharedEngine, &settings).unwrap();
    let mut holds = Vec::new();
    for line in 0..LINES {
        holds.push(client.mutex(format!("l{line}")).lock().await.unwrap());
    }
    let mut waiters = JoinSet::new();
    for waiter in 0..10_000 {
        let agent = client.agent(format!("w{waiter}"));
        let line = agent.line(format!("l{}", waiter % LINES), Ask::Whole);
        let line = line.deadlock_after(Duration::from_millis(50));
        waiters.spawn(async move { drop(line.acquire(Patience::Forever).await.unwrap()) });
    }
    // Long enough for many looks by each waiter.
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(spy.calls(Verb::Survey).is_empty());
    // An agent that holds something does look.
    let agent = client.agent("busy");
    let _own = agent.mutex("own").lock().await.unwrap();
    let line = agent
        .line("l0", Ask::Whole)
        .deadlock_after(Duration::from_millis(50));
    let looked = async {
        while spy.calls(Verb::Survey).is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::select! {
        _ = line.acquire(Patience::Forever) => panic!("it is held"),
        () = looked => {}
    }
    waiters.shutdown().await;
    drop(holds);
}
