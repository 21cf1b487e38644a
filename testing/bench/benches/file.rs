//! What a lock on `file:` costs, beside the raw operation of the same run. Prints ratios.
//!
//! - uncontended: lock + release in one process, beside open + flock + close;
//! - hand-over: from the call of release in one process to the grant in another, beside a
//!   blocking flock passed between two processes; where the scheduler puts them, which changes it
//!   several times over (an idle core takes long to wake), and on one core;
//! - 64 names: lock + release by 64 tasks, each with a name of its own, per lock;
//! - a crowd: tasks of one process that want one name, per grant;
//! - renewal: of each of 10 000 held names;
//! - start: a process that connects, locks, releases and ends, beside one that takes a flock.
//!
//! Machines are noisy: raw and ours take turns, and the medians are compared.

#![allow(clippy::unwrap_used)]

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use palisade::BootTime;
use palisade::engine::{Lease, Renewal};
use rustix::fs::{FlockOperation, flock};

const ROUNDS: usize = 40;
const BATCH: usize = 500;
const PASSES: usize = 400;
const HELD: usize = 10_000;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, role, dir, start] = arguments.as_slice()
        && role.starts_with("pass-")
    {
        return pass(role, dir, start.parse().unwrap());
    }
    if let [_, role, dir] = arguments.as_slice()
        && role.starts_with("start-")
    {
        return start_one(role, dir);
    }
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    uncontended(dir.path());
    names(dir.path());
    crowd(dir.path(), 64);
    crowd(dir.path(), 1000);
    start(dir.path());
    hand_over(dir.path());
    renewal(dir.path());
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
}

fn uncontended(dir: &Path) {
    let runtime = runtime();
    let url = format!("file:{}", dir.join("store").display());
    let client = runtime.block_on(palisade::connect(&url)).unwrap();
    let mutex = client.mutex("bench");
    let raw_path = dir.join("raw");
    let (mut raw, mut ours) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        raw.push(per_call(|| {
            let file = OpenOptions::new()
                .create(true)
                .truncate(false)
                .write(true)
                .open(&raw_path);
            flock(file.unwrap(), FlockOperation::LockExclusive).unwrap();
        }));
        let begin = Instant::now();
        runtime.block_on(async {
            for _ in 0..BATCH {
                mutex.lock().await.unwrap().release().await.unwrap();
            }
        });
        ours.push(begin.elapsed() / BATCH as u32);
    }
    print(
        "uncontended lock + release",
        "open + flock + close",
        median(raw),
        median(ours),
    );
}

fn names(dir: &Path) {
    let runtime = runtime();
    let url = format!("file:{}", dir.join("store").display());
    let client = runtime.block_on(palisade::connect(&url)).unwrap();
    let (mut raw, mut ours) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let raw_path = dir.join("raw");
        raw.push(per_call(|| {
            let file = File::create(&raw_path).unwrap();
            flock(file, FlockOperation::LockExclusive).unwrap();
        }));
        let begin = Instant::now();
        runtime.block_on(async {
            let mut tasks = tokio::task::JoinSet::new();
            for name in 0..64 {
                let mutex = client.mutex(format!("name-{name}"));
                tasks.spawn(async move {
                    for _ in 0..BATCH / 64 {
                        mutex.lock().await.unwrap().release().await.unwrap();
                        tokio::task::yield_now().await;
                    }
                });
            }
            tasks.join_all().await;
        });
        ours.push(begin.elapsed() / (BATCH / 64 * 64) as u32);
    }
    print(
        "64 names, lock + release",
        "open + flock + close",
        median(raw),
        median(ours),
    );
}

/// What a grant costs when so many tasks of one process want one name.
fn crowd(dir: &Path, tasks: usize) {
    let runtime = runtime();
    let url = format!("file:{}?ttl=1h", dir.join("store").display());
    let client = runtime.block_on(palisade::connect(&url)).unwrap();
    let (mut raw, mut ours) = (Vec::new(), Vec::new());
    let grants = tasks.max(BATCH) / tasks;
    for _ in 0..ROUNDS / 4 {
        let raw_path = dir.join("raw");
        raw.push(per_call(|| {
            let file = File::create(&raw_path).unwrap();
            flock(file, FlockOperation::LockExclusive).unwrap();
        }));
        let begin = Instant::now();
        runtime.block_on(async {
            let mut crowd = tokio::task::JoinSet::new();
            for _ in 0..tasks {
                let mutex = client.mutex("crowd");
                crowd.spawn(async move {
                    for _ in 0..grants {
                        let hold = mutex.lock().await.unwrap();
                        // The others take their places in the line.
                        tokio::task::yield_now().await;
                        hold.release().await.unwrap();
                    }
                });
            }
            crowd.join_all().await;
        });
        ours.push(begin.elapsed() / (grants * tasks) as u32);
    }
    print(
        &format!("crowd of {tasks}, per grant"),
        "open + flock + close",
        median(raw),
        median(ours),
    );
}

/// What the renewal of each of many held names costs, in time of a core.
fn renewal(dir: &Path) {
    let runtime = runtime();
    let url = format!("file:{}?ttl=1h", dir.join("store").display());
    let client = runtime.block_on(palisade::connect(&url)).unwrap();
    let mut holds = Vec::new();
    runtime.block_on(async {
        for name in 0..HELD {
            let mutex = client.mutex(format!("held-{name}"));
            holds.push(mutex.lock().await.unwrap());
        }
    });
    let leases: Vec<Lease> = holds.iter().map(lease).collect();
    let (mut raw, mut ours) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let raw_path = dir.join("raw");
        raw.push(per_call(|| drop(File::create(&raw_path).unwrap())));
        let leases = leases.clone();
        let begin = Instant::now();
        let renewed = client.engine().renew(leases, Duration::from_secs(2));
        let renewed = runtime.block_on(renewed);
        ours.push(begin.elapsed() / HELD as u32);
        assert!(renewed.iter().all(|r| matches!(r, Renewal::Held(_))));
    }
    print(
        "renewal, of 10000",
        "open + close",
        median(raw),
        median(ours),
    );
    drop(holds);
    runtime.block_on(client.close());
}

fn lease(hold: &palisade::Hold) -> Lease {
    let ticket = hold.ticket();
    Lease::in_a_test(ticket)
}

fn start(dir: &Path) {
    let run = |role: &str| {
        let begin = Instant::now();
        let status = Command::new(std::env::current_exe().unwrap())
            .args([role, dir.to_str().unwrap()])
            .status();
        assert!(status.unwrap().success());
        begin.elapsed()
    };
    let (mut raw, mut ours) = (Vec::new(), Vec::new());
    for _ in 0..5 * ROUNDS {
        raw.push(run("start-raw"));
        ours.push(run("start-ours"));
    }
    print(
        "start, lock, release, end",
        "start, flock, end",
        median(raw),
        median(ours),
    );
}

fn start_one(role: &str, dir: &str) {
    if role == "start-raw" {
        let file = File::create(Path::new(dir).join("raw")).unwrap();
        return flock(&file, FlockOperation::LockExclusive).unwrap();
    }
    runtime().block_on(async {
        let url = format!("file:{dir}/store");
        let client = palisade::connect(&url).await.unwrap();
        let mutex = client.mutex("start");
        mutex.lock().await.unwrap().release().await.unwrap();
        drop(mutex);
        client.close().await;
    });
}

fn per_call(call: impl Fn()) -> Duration {
    let begin = Instant::now();
    (0..BATCH).for_each(|_| call());
    begin.elapsed() / BATCH as u32
}

fn hand_over(dir: &Path) {
    let places = [
        ("hand-over between processes", ""),
        ("hand-over on one core", "-pinned"),
    ];
    for (what, pinned) in places {
        let raw = passes(&format!("pass-raw{pinned}"), dir);
        let ours = passes(&format!("pass-ours{pinned}"), dir);
        print(what, "blocking flock", median(raw), median(ours));
    }
}

/// Runs two processes that pass the lock to each other, and returns how long each pass took.
fn passes(role: &str, dir: &Path) -> Vec<Duration> {
    let start = (BootTime::now() + Duration::from_millis(300))
        .as_nanos()
        .to_string();
    let spawn = || -> Child {
        Command::new(std::env::current_exe().unwrap())
            .args([role, dir.to_str().unwrap(), &start])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let mut turns: Vec<(u64, u64, usize)> = Vec::new();
    let children = [spawn(), spawn()];
    for (who, child) in children.into_iter().enumerate() {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success());
        for line in BufReader::new(output.stdout.as_slice()).lines() {
            let line = line.unwrap();
            let (granted, released) = line.split_once(' ').unwrap();
            turns.push((granted.parse().unwrap(), released.parse().unwrap(), who));
        }
    }
    turns.sort_unstable();
    let pass = |pair: &[(u64, u64, usize)]| {
        (pair[0].2 != pair[1].2).then(|| Duration::from_nanos(pair[1].0 - pair[0].1))
    };
    turns.windows(2).filter_map(pass).collect()
}

/// One of the two processes: takes its turns and prints when each was granted and released.
fn pass(role: &str, dir: &str, start: u64) {
    if role.ends_with("-pinned") {
        let ours = rustix::thread::sched_getaffinity(None).unwrap();
        let mut first = rustix::thread::CpuSet::new();
        first.set((0..1024).find(|cpu| ours.is_set(*cpu)).unwrap());
        rustix::thread::sched_setaffinity(None, &first).unwrap();
    }
    std::thread::sleep(BootTime::from_nanos(start).remaining());
    let mut out = std::io::BufWriter::new(std::io::stdout());
    let mut turn = |granted: BootTime, released: BootTime| {
        writeln!(out, "{} {}", granted.as_nanos(), released.as_nanos()).unwrap();
    };
    // Whoever has passed it on stays away until the other has it, and is back, asleep in the
    // queue, long before its next turn.
    let hold = || std::thread::sleep(Duration::from_millis(2));
    let away = || std::thread::sleep(Duration::from_millis(1));
    if role.starts_with("pass-raw") {
        let file = File::create(Path::new(dir).join("raw")).unwrap();
        for _ in 0..PASSES {
            flock(&file, FlockOperation::LockExclusive).unwrap();
            let granted = BootTime::now();
            hold();
            let released = BootTime::now();
            flock(&file, FlockOperation::Unlock).unwrap();
            turn(granted, released);
            away();
        }
        return;
    }
    runtime().block_on(async {
        let client = palisade::connect(&format!("file:{dir}/store"))
            .await
            .unwrap();
        let mutex = client.mutex("pass");
        for _ in 0..PASSES {
            let held = mutex.lock().await.unwrap();
            let granted = BootTime::now();
            hold();
            let released = BootTime::now();
            held.release().await.unwrap();
            turn(granted, released);
            away();
        }
    });
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

fn print(what: &str, raw_is: &str, raw: Duration, ours: Duration) {
    let micros = |time: Duration| time.as_nanos() as f64 / 1e3;
    println!(
        "{what:<30} {:>8.1} µs   {raw_is:<22} {:>8.1} µs   ratio {:.2}",
        micros(ours),
        micros(raw),
        micros(ours) / micros(raw)
    );
}
