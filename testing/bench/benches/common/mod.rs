//! What the benchmarks of single engines share: servers of their own, turns that both sides take,
//! so that whatever else the machine does hits both, and the hand-over of a lock.

#![allow(dead_code)] // Each benchmark uses what it needs.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use palisade::command::Baseline;
use palisade::{BootTime, Client};

/// A server of our own, which ends with this.
pub(crate) struct Server {
    child: Child,
    pub(crate) host: String,
    _data: tempfile::TempDir,
}

impl Server {
    /// Starts what `command` makes of a port and an empty folder in memory; `None` where that is
    /// not installed.
    pub(crate) fn start(command: impl FnOnce(u16, &std::path::Path) -> Command) -> Option<Self> {
        let (port, folder) = (free_port(), tempfile::tempdir_in("/dev/shm"));
        let data = folder.or_else(|_| tempfile::tempdir()).unwrap();
        let mut command = command(port, data.path());
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        Some(Self {
            child: child.ok()?,
            host: format!("127.0.0.1:{port}"),
            _data: data,
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn free_port() -> u16 {
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    free.local_addr().unwrap().port()
}

/// Waits until what has just been started answers.
pub(crate) async fn answers(url: &str) {
    let end = Instant::now() + Duration::from_secs(10);
    while palisade::connect(url).await.is_err() {
        assert!(Instant::now() < end, "no answer from {url}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// How many turns each side has, and how long one is.
#[derive(Clone, Copy)]
pub(crate) struct Turns(pub(crate) usize, pub(crate) Duration);

pub(crate) const SHORT: Turns = Turns(31, Duration::from_millis(150));

pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The median of what each turn of ours was to the other side's next to it.
pub(crate) fn ratio(ours: &[f64], theirs: &[f64]) -> f64 {
    median(ours.iter().zip(theirs).map(|(a, b)| a / b).collect())
}

/// Cycles per second of so many tasks at once.
pub(crate) async fn rate<F: Future<Output = ()> + Send + 'static>(
    turn: Duration,
    tasks: usize,
    cycle: impl Fn(usize) -> F + Send + Sync + 'static,
) -> f64 {
    let (cycle, done) = (Arc::new(cycle), Arc::new(AtomicU32::new(0)));
    let start = Instant::now();
    let mut set = tokio::task::JoinSet::new();
    for task in 0..tasks {
        let (cycle, done) = (Arc::clone(&cycle), Arc::clone(&done));
        set.spawn(async move {
            while start.elapsed() < turn {
                cycle(task).await;
                done.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    set.join_all().await;
    f64::from(done.load(Ordering::Relaxed)) / start.elapsed().as_secs_f64()
}

/// One turn of raw cycles, of so many tasks on names of their own.
pub(crate) async fn raw_turn(raw: &Arc<dyn Baseline>, turn: Duration, tasks: usize) -> f64 {
    let raw = Arc::clone(raw);
    let cycle = move |task| {
        let cycle = raw.cycle(format!("raw-{task}"));
        async move { cycle.await.unwrap() }
    };
    rate(turn, tasks, cycle).await
}

/// One turn of ours: each task locks and unlocks what `name` says, by one of the clients.
pub(crate) async fn our_turn(
    clients: &[Client],
    turn: Duration,
    tasks: usize,
    name: impl Fn(usize) -> String + Send + Sync + 'static,
) -> f64 {
    let clients = clients.to_vec();
    let cycle = move |task: usize| {
        let mutex = clients[task % clients.len()].mutex(name(task));
        async move { mutex.lock().await.unwrap().release().await.unwrap() }
    };
    rate(turn, tasks, cycle).await
}

/// Lock and unlock of so many tasks on names of their own, beside the raw operations.
pub(crate) async fn beside_raw(
    what: &str,
    tasks: usize,
    turns: Turns,
    url: &str,
    raw: &Arc<dyn Baseline>,
) {
    let clients = [palisade::connect(url).await.unwrap()];
    let (mut raws, mut ours) = (Vec::new(), Vec::new());
    for _ in 0..turns.0 {
        raws.push(raw_turn(raw, turns.1, tasks).await);
        let name = |task| format!("name-{task}");
        ours.push(our_turn(&clients, turns.1, tasks, name).await);
    }
    println!(
        "{what:12} {:7.0}/s   raw {:7.0}/s ({:.2})",
        median(ours.clone()),
        median(raws.clone()),
        ratio(&ours, &raws)
    );
}

/// From the call of release to the grant of the one that waits; each holds for 10 ms and stays
/// away until the other has the lock, as in `palisade bench`.
pub(crate) async fn pass(url: &str) {
    const PASSES: usize = 200;
    let released = Arc::new(parking_lot::Mutex::new(None));
    // Told at every grant.
    let granted = Arc::new(tokio::sync::watch::channel(0).0);
    let times = Arc::new(parking_lot::Mutex::new(Vec::new()));
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..2 {
        let client = palisade::connect(url).await.unwrap();
        let (released, times) = (Arc::clone(&released), Arc::clone(&times));
        let granted = Arc::clone(&granted);
        tasks.spawn(async move {
            let mutex = client.mutex("pass");
            let mut others = granted.subscribe();
            for round in 0..PASSES {
                let hold = mutex.lock().await.unwrap();
                if let Some(at) = released.lock().take() {
                    times.lock().push(BootTime::now().saturating_since(at));
                }
                granted.send_modify(|grants| *grants += 1);
                let this = *others.borrow_and_update();
                tokio::time::sleep(Duration::from_millis(10)).await;
                *released.lock() = Some(BootTime::now());
                hold.release().await.unwrap();
                // At the end the other may have had its last.
                if round + 1 < PASSES {
                    others.wait_for(|grants| *grants > this).await.unwrap();
                }
            }
        });
    }
    tasks.join_all().await;
    let mut times = times.lock().clone();
    times.sort_unstable();
    let (p50, p99) = (times[times.len() / 2], times[times.len() * 99 / 100]);
    println!(
        "pass         p50 {p50:.2?}   p99 {p99:.2?}   ({} passes)",
        times.len()
    );
}
