//! What a lock on PostgreSQL costs, beside the raw operations of the same run. Prints ratios.
//!
//! - cycle: lock + release of a free lock, beside two updates of one row (table), and beside
//!   `pg_try_advisory_lock` + `pg_advisory_unlock` (advisory);
//! - pass: from the call of release to the grant of another client on another thread.
//!
//! The server keeps its data in memory. Machines are noisy: raw and ours take turns, and the
//! medians are compared.

#![allow(clippy::unwrap_used)]

use std::sync::mpsc;
use std::time::{Duration, Instant};

use palisade::BootTime;
use palisade_testkit::lab::launch;

const ROUNDS: usize = 40;
const BATCH: usize = 100;
const PASSES: usize = 300;

fn main() {
    let Some(server) = launch::need("postgres") else {
        return;
    };
    let advisory = server.url().replacen("postgres:", "postgres+advisory:", 1);
    let mut ok = true;
    for (url, ratio, pass_ms) in [(server.url(), 0.60, 1.0), (&advisory, 0.80, 0.5)] {
        ok &= cycle(url, ratio);
        ok &= pass(url, pass_ms);
    }
    std::process::exit(i32::from(!ok));
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

fn scheme(url: &str) -> &str {
    url.split(':').next().unwrap()
}

fn cycle(url: &str, wanted: f64) -> bool {
    let (raw, ours) = runtime().block_on(async {
        let baseline = palisade::command::baseline(url).await.unwrap().unwrap();
        let client = palisade::connect(url).await.unwrap();
        let mutex = client.mutex("bench");
        let (mut raw, mut ours) = (Vec::new(), Vec::new());
        for _ in 0..=ROUNDS {
            let begin = Instant::now();
            for _ in 0..BATCH {
                baseline.cycle("bench".into()).await.unwrap();
            }
            raw.push(begin.elapsed() / BATCH as u32);
            let begin = Instant::now();
            for _ in 0..BATCH {
                mutex.lock().await.unwrap().release().await.unwrap();
            }
            ours.push(begin.elapsed() / BATCH as u32);
        }
        (median(raw), median(ours))
    });
    let ratio = raw.as_secs_f64() / ours.as_secs_f64();
    let verdict = if ratio >= wanted { "ok" } else { "TOO SLOW" };
    println!(
        "{:18} cycle: raw {raw:?}, ours {ours:?}, ratio {ratio:.2} (wanted {wanted:.2}) {verdict}",
        scheme(url)
    );
    ratio >= wanted
}

/// Two threads hand the lock to each other: each waits in line before the other lets go.
fn pass(url: &str, wanted_ms: f64) -> bool {
    let (tell, told) = mpsc::channel::<(BootTime, BootTime)>();
    let threads = [(); 2].map(|()| {
        let (url, tell) = (url.to_owned(), tell.clone());
        std::thread::spawn(move || {
            runtime().block_on(async {
                let client = palisade::connect(&url).await.unwrap();
                let mutex = client.mutex("pass");
                for _ in 0..PASSES {
                    let hold = mutex.lock().await.unwrap();
                    let granted = BootTime::now();
                    // Time for the other to be in line.
                    tokio::time::sleep(Duration::from_millis(4)).await;
                    let released = BootTime::now();
                    hold.release().await.unwrap();
                    tell.send((granted, released)).unwrap();
                    // The turn of the other, who waits already.
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
            });
        })
    });
    drop(tell);
    let mut turns: Vec<_> = told.into_iter().collect();
    threads
        .into_iter()
        .for_each(|thread| thread.join().unwrap());
    turns.sort_unstable_by_key(|(granted, _)| *granted);
    let gaps = turns
        .windows(2)
        .map(|pair| pair[1].0.saturating_since(pair[0].1));
    let middle = median(gaps.collect());
    let ok = middle.as_secs_f64() * 1e3 <= wanted_ms;
    let verdict = if ok { "ok" } else { "TOO SLOW" };
    println!(
        "{:18} pass:  median {middle:?} (wanted {wanted_ms} ms) {verdict}",
        scheme(url)
    );
    ok
}
