//! Acquires that are dropped at random awaits: nothing stays in any line, and when the client is
//! gone no thread and no descriptor stays behind.
//!
//! One test in a process of its own, because it counts the threads of the process. 2 000 futures
//! for each engine, 10 000 with `PALISADE_TEST_FULL=1`.
#![cfg(all(feature = "memory", feature = "file"))]
#![allow(clippy::unwrap_used)]

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::{Duration, Instant};

use palisade::Client;
use palisade::report::Scope;

/// One line for each engine that is to be tested.
const ENGINES: [&str; 2] = ["memory:cancel?ttl=120s", "file:{dir}?ttl=120s"];

const LINES: [&str; 3] = ["a", "b", "c"];

#[test]
fn acquires_that_are_dropped_at_random_awaits_leave_nothing_behind() {
    let full = std::env::var_os("PALISADE_TEST_FULL").is_some();
    let futures = if full { 10_000 } else { 2_000 };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(4)
        .enable_all()
        .build()
        .unwrap();
    // Workers start when they are first needed.
    runtime.block_on(async {
        tokio::spawn(tokio::time::sleep(Duration::ZERO))
            .await
            .unwrap()
    });
    for engine in ENGINES {
        let dir = tempfile::tempdir().unwrap();
        let url = engine.replace("{dir}", dir.path().to_str().unwrap());
        let before = Left::behind();
        let client = runtime.block_on(palisade::connect(&url)).unwrap();
        let held = runtime.block_on(storm(&client, futures));
        println!("{engine}: {held} held while {futures} were dropped");
        assert!(held > 0);
        // Half of the ttl: a claim that nobody removes is still there.
        let limit = Instant::now() + Duration::from_secs(60);
        while runtime.block_on(in_lines(&client)) > 0 {
            assert!(
                Instant::now() < limit,
                "{engine}: a claim stayed in its line"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        // Nothing is held: the timer of the process ends, though the client lives.
        let limit = Instant::now() + Duration::from_secs(20);
        while has_timer() {
            assert!(Instant::now() < limit, "{engine}: the timer stayed");
            std::thread::sleep(Duration::from_millis(5));
        }
        let hold = runtime.block_on(client.mutex("timed").lock()).unwrap();
        // A thread gives itself its name when it begins.
        while !has_timer() {
            assert!(
                Instant::now() < limit,
                "{engine}: nobody minds the deadline"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        runtime.block_on(hold.release()).unwrap();
        drop(client);
        let limit = Instant::now() + Duration::from_secs(20);
        while Left::behind().is_more_than(&before) {
            let now = Left::behind();
            assert!(
                Instant::now() < limit,
                "{engine}: before {before:?}, after {now:?}"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Eight tasks that acquire the same few lines, until `futures` acquires were dropped in all.
/// Says how many came to hold meanwhile.
async fn storm(client: &Client, futures: usize) -> usize {
    let tasks: Vec<_> = (0..8)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(async move {
                let (mut held, mut dropped) = (0, 0);
                while dropped < futures / 8 {
                    if once(&client).await {
                        held += 1
                    } else {
                        dropped += 1
                    }
                }
                held
            })
        })
        .collect();
    let mut held = 0;
    for task in tasks {
        held += task.await.unwrap();
    }
    held
}

/// Acquires, and gives up after a random number of polls or a random while. Says whether it held.
async fn once(client: &Client) -> bool {
    let name = LINES[rand::random_range(0..LINES.len())];
    let mutex = client.mutex(name);
    let limit = Duration::from_micros(rand::random_range(1..3_000));
    let polls = rand::random_range(1..8);
    let Ok(Some(hold)) = tokio::time::timeout(limit, polled(mutex.lock(), polls)).await else {
        return false;
    };
    let hold = hold.unwrap();
    if rand::random() {
        tokio::time::sleep(Duration::from_micros(rand::random_range(1..3_000))).await;
    }
    if rand::random() {
        hold.release().await.unwrap()
    } else {
        drop(hold)
    }
    true
}

/// What `future` comes to, unless it is still pending after so many polls.
async fn polled<T>(future: impl Future<Output = T>, polls: usize) -> Option<T> {
    let mut future = pin!(future);
    let mut left = polls;
    poll_fn(|context| {
        left -= 1;
        match future.as_mut().poll(context) {
            Poll::Ready(done) => Poll::Ready(Some(done)),
            Poll::Pending if left == 0 => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

async fn in_lines(client: &Client) -> usize {
    let lines = client.survey(Scope::Prefix(String::new())).await.unwrap();
    let claims = |line: &palisade::report::LineReport| line.holders.len() + line.waiters.len();
    lines.iter().map(claims).sum()
}

/// Whether the thread that minds deadlines runs.
fn has_timer() -> bool {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let name = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm"));
    let mut names = tasks.filter_map(|task| name(task.unwrap()).ok());
    names.any(|name| name.trim() == "palisade-timer")
}

/// The threads and descriptors of this process.
#[derive(Debug)]
struct Left {
    threads: usize,
    descriptors: usize,
}

impl Left {
    fn behind() -> Self {
        let count = |path| std::fs::read_dir(path).unwrap().count();
        Self {
            threads: count("/proc/self/task"),
            descriptors: count("/proc/self/fd"),
        }
    }

    fn is_more_than(&self, before: &Self) -> bool {
        self.threads > before.threads || self.descriptors > before.descriptors
    }
}
