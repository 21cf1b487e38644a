//! How fast locks on Redis are beside the raw operations, measured in the same run:
//! `cargo run --release -p palisade-testkit --example redis_speed -- [redis://host] [held]`.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use palisade::Client;
use palisade::command::Baseline;
use palisade_testkit::lab::launch;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let running = match arguments.first().filter(|url| url.starts_with("redis")) {
        Some(_) => None,
        None => Some(launch::start("redis").unwrap()),
    };
    let url = running
        .as_ref()
        .map_or_else(|| arguments[0].clone(), |r| r.url().to_owned());
    let single = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    single.block_on(async {
        let client = palisade::connect(&url).await.unwrap();
        let raw = palisade::command::baseline(&url).await.unwrap().unwrap();
        if arguments.iter().any(|a| a == "held") {
            return held(&client).await;
        }
        sequential(&client, &raw).await;
        many(&client, &raw).await;
        pass(&client, &raw, &url).await;
    });
}

async fn sequential(client: &Client, raw: &Arc<dyn Baseline>) {
    let mutex = client.mutex("sequential");
    let (mut ours, mut raws) = (Vec::new(), Vec::new());
    for _ in 0..40 {
        let start = Instant::now();
        for _ in 0..200 {
            raw.cycle("raw-sequential".into()).await.unwrap();
        }
        raws.push(start.elapsed() / 200);
        let start = Instant::now();
        for _ in 0..200 {
            mutex.lock().await.unwrap().release().await.unwrap();
        }
        ours.push(start.elapsed() / 200);
    }
    let (ours, raws) = (median(ours), median(raws));
    println!(
        "sequential: ours {ours:?}, raw {raws:?}, ratio {:.2}",
        raws.as_secs_f64() / ours.as_secs_f64()
    );
}

async fn many(client: &Client, raw: &Arc<dyn Baseline>) {
    let (mut ours, mut raws) = (Vec::new(), Vec::new());
    for _ in 0..12 {
        let start = Instant::now();
        let tasks: Vec<_> = (0..64)
            .map(|i| {
                let raw = Arc::clone(raw);
                tokio::spawn(async move {
                    for _ in 0..100 {
                        raw.cycle(format!("raw-many-{i}")).await.unwrap();
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
        raws.push(start.elapsed());
        let start = Instant::now();
        let tasks: Vec<_> = (0..64)
            .map(|i| {
                let mutex = client.mutex(format!("many-{i}"));
                tokio::spawn(async move {
                    for _ in 0..100 {
                        mutex.lock().await.unwrap().release().await.unwrap();
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
        ours.push(start.elapsed());
    }
    let (ours, raws) = (median(ours), median(raws));
    let rate = |took: Duration| 6400.0 / took.as_secs_f64();
    println!(
        "64 names: ours {:.0}/s, raw {:.0}/s, ratio {:.2}",
        rate(ours),
        rate(raws),
        rate(ours) / rate(raws)
    );
}

/// Two clients hand a lock to each other; the time from the release to the other's grant.
async fn pass(client: &Client, raw: &Arc<dyn Baseline>, url: &str) {
    let other = palisade::connect(url).await.unwrap();
    let mut ours = Vec::new();
    let mut hold = client.mutex("pass").lock().await.unwrap();
    for round in 0..400 {
        let next = if round % 2 == 0 { &other } else { client };
        let mutex = next.mutex("pass");
        let waiter = tokio::spawn(async move {
            let hold = mutex.lock().await.unwrap();
            (hold, Instant::now())
        });
        tokio::time::sleep(Duration::from_millis(3)).await;
        let start = Instant::now();
        hold.release().await.unwrap();
        let (got, at) = waiter.await.unwrap();
        ours.push(at - start);
        hold = got;
    }
    let mut raws = Vec::new();
    for _ in 0..400 {
        let taker = Arc::clone(raw);
        let waiter = tokio::spawn(async move {
            taker.take("raw-pass".into()).await.unwrap();
            Instant::now()
        });
        tokio::time::sleep(Duration::from_millis(3)).await;
        let start = Instant::now();
        raw.give("raw-pass".into()).await.unwrap();
        raws.push(waiter.await.unwrap() - start);
    }
    println!("pass: ours {:?}, raw {:?}", median(ours), median(raws));
}

fn cpu() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat
        .rsplit(')')
        .next()
        .unwrap()
        .split_whitespace()
        .collect();
    let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
    Duration::from_millis(ticks * 10)
}

async fn held(client: &Client) {
    let start = Instant::now();
    let mut holds = Vec::new();
    for i in 0..10_000 {
        holds.push(client.mutex(format!("held-{i}")).lock().await.unwrap());
    }
    println!("10,000 locks taken in {:?}", start.elapsed());
    tokio::time::sleep(Duration::from_secs(15)).await;
    let (start, before) = (Instant::now(), cpu());
    tokio::time::sleep(Duration::from_secs(30)).await;
    let share = (cpu() - before).as_secs_f64() / start.elapsed().as_secs_f64();
    println!(
        "holding them: {:.2} % of a core; all valid: {}",
        share * 100.0,
        holds.iter().all(|h| h.is_valid())
    );
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}
