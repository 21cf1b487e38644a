//! What asking a hold costs: `is_valid()` beside the bare reading of the clock, in one run.

#![allow(clippy::unwrap_used)]

use std::hint::black_box;
use std::time::{Duration, Instant};

use palisade::BootTime;

const ROUNDS: u32 = 50;
const CALLS: u32 = 20_000;

fn main() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let client = runtime.block_on(palisade::connect("memory:")).unwrap();
    let hold = runtime.block_on(client.mutex("bench").lock()).unwrap();
    let (mut clock, mut valid) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        clock.push(time(|| {
            black_box(BootTime::now());
        }));
        valid.push(time(|| assert!(black_box(&hold).is_valid())));
    }
    let nanos = |mut times: Vec<Duration>| {
        times.sort_unstable();
        times[times.len() / 2].as_nanos() as f64 / f64::from(CALLS)
    };
    let (clock, valid) = (nanos(clock), nanos(valid));
    let ratio = valid / clock;
    println!("is_valid {valid:.1} ns   reading the clock {clock:.1} ns   ratio {ratio:.2}");
}

fn time(call: impl Fn()) -> Duration {
    let begin = Instant::now();
    (0..CALLS).for_each(|_| call());
    begin.elapsed()
}
