//! What a lock on a majority of five Redis servers costs, beside five raw SETs and five
//! compare-and-deletes, each five awaited together, in the same run.
//!
//! - sequential: lock + unlock, one after the other;
//! - parallel: 64 names at once;
//! - pass: from the call of release to the grant of the one that waits; each holds for 10 ms and
//!   stays away until the other has the lock, as in `palisade bench`.
//!
//! `PALISADE_BENCH_REDLOCK=host:port,…` names servers; otherwise five are started, with nothing on
//! disk. Both sides take short turns, so that whatever else the machine does hits both; the ratio is
//! the median over the turns.

#![allow(clippy::unwrap_used)]

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use palisade::BootTime;
use palisade::command::Baseline;

/// How many turns each side has, and how long one is.
const TURNS: usize = 31;
const TURN: Duration = Duration::from_millis(150);

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let named = std::env::var("PALISADE_BENCH_REDLOCK");
    let mut servers = Vec::new();
    let hosts = match named {
        Ok(hosts) => hosts,
        Err(_) => {
            servers.extend((0..5).map_while(|_| Server::start()));
            if servers.len() < 5 {
                return println!("skipped: there is no redis-server to start");
            }
            let hosts: Vec<String> = servers.iter().map(|s: &Server| s.host.clone()).collect();
            hosts.join(",")
        }
    };
    let url = format!("redlock://{hosts}?restart_guard=off&node_timeout=1s");
    let end = Instant::now() + Duration::from_secs(10);
    while palisade::connect(&url).await.is_err() {
        assert!(Instant::now() < end, "no servers at {hosts}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let raw = palisade::command::baseline(&url).await.unwrap().unwrap();
    for (what, tasks) in [("sequential", 1), ("64 names", 64)] {
        beside_raw(what, tasks, &url, &raw).await;
    }
    pass(&url).await;
}

/// A server of our own.
struct Server {
    child: Child,
    host: String,
}

impl Server {
    fn start() -> Option<Self> {
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = free.local_addr().unwrap().port().to_string();
        drop(free);
        let child = Command::new("redis-server")
            .args(["--port", &port, "--bind", "127.0.0.1"])
            .args(["--save", "", "--appendonly", "no"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        Some(Self {
            child: child.ok()?,
            host: format!("127.0.0.1:{port}"),
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Cycles per second of many tasks at once.
async fn rate<F: Future<Output = ()> + Send + 'static>(
    tasks: usize,
    cycle: impl Fn(usize) -> F + Send + Sync + 'static,
) -> f64 {
    let (cycle, done) = (Arc::new(cycle), Arc::new(AtomicU32::new(0)));
    let start = Instant::now();
    let mut set = tokio::task::JoinSet::new();
    for task in 0..tasks {
        let (cycle, done) = (Arc::clone(&cycle), Arc::clone(&done));
        set.spawn(async move {
            while start.elapsed() < TURN {
                cycle(task).await;
                done.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    set.join_all().await;
    f64::from(done.load(Ordering::Relaxed)) / start.elapsed().as_secs_f64()
}

async fn beside_raw(what: &str, tasks: usize, url: &str, raw: &Arc<dyn Baseline>) {
    let client = palisade::connect(url).await.unwrap();
    let (mut raws, mut ours, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..TURNS {
        let baseline = Arc::clone(raw);
        let cycle = move |task| {
            let cycle = baseline.cycle(format!("raw-{task}"));
            async move { cycle.await.unwrap() }
        };
        let theirs = rate(tasks, cycle).await;
        let client = client.clone();
        let cycle = move |task: usize| {
            let mutex = client.mutex(format!("name-{task}"));
            async move { mutex.lock().await.unwrap().release().await.unwrap() }
        };
        let mine = rate(tasks, cycle).await;
        ratios.push(mine / theirs);
        raws.push(theirs);
        ours.push(mine);
    }
    println!(
        "{what:12} {:7.0}/s   raw {:7.0}/s ({:.2})",
        median(ours),
        median(raws),
        median(ratios)
    );
}

async fn pass(url: &str) {
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
