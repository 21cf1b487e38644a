//! Many locks that are held: what it costs to renew them for one ttl.
//!
//! The figure is of renewals: leases per second, and how long one call to the engine took, which
//! renews many. What it took of our processor and memory is told beside it.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use palisade::{Client, Hold, Url};
use rustix::time::{ClockId, clock_gettime};
use tokio::task::JoinSet;

use super::counting::Counting;
use super::course::{Course, Plan};
use super::figure::{Figure, Round, Who, compare};
use super::{Progress, ROUNDS, refused, stuck};
use crate::exit::Failure;

/// How many are taken and released at the same time.
const AT_ONCE: u32 = 64;

pub(super) async fn measure(plan: &Plan, progress: &Progress) -> Result<Figure, Failure> {
    let count = plan.count.unwrap_or(10_000);
    let settings = Url::parse(&plan.url)?.take_settings()?;
    let connected = palisade::connect(&plan.url).await?;
    let engine = Counting::new(Arc::clone(connected.engine()));
    let counted = engine.counted();
    let client = plan.traces.of(Client::new(Arc::new(engine), &settings)?);
    let ttl = client.ttl();

    let memory = resident();
    let began = Instant::now();
    let holds = take(&client, &plan.name, count).await?;
    let taken = began.elapsed();
    let each = resident().saturating_sub(memory) / u64::from(count);

    let counted = || {
        counted
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    };
    let (before, processor, began) = (counted(), processor(), Instant::now());
    for _ in 0..ROUNDS {
        tokio::time::sleep(ttl / ROUNDS).await;
        progress.step("held");
    }
    let (after, spent, took) = (counted(), self::processor() - processor, began.elapsed());
    if !holds.iter().all(Hold::is_valid) {
        return Err(stuck("some of the locks were lost while they were held"));
    }
    let began = Instant::now();
    release(holds).await?;
    let released = began.elapsed();

    let calls = after.calls[before.calls.len()..].to_vec();
    let leases = after.leases - before.leases;
    let failed = after.failed - before.failed;
    let per_second = |of: f64| of / took.as_secs_f64();
    let mut figure = Figure::new(&plan.engine, Course::Held.name(), Who::Palisade);
    figure.remark = Some(format!(
        "held: {count} locks for {ttl:?}: {:.1} renew calls and {:.0} leases per second ({failed} failed), \
         {:.2} % of one core, {each} bytes each in our memory; taken at {:.0}/s, released at {:.0}/s",
        per_second(calls.len() as f64),
        per_second(leases as f64),
        per_second(spent.as_secs_f64()) * 100.0,
        f64::from(count) / taken.as_secs_f64(),
        f64::from(count) / released.as_secs_f64(),
    ));
    figure.ops_s = Some(per_second(leases as f64));
    figure.rounds.push(Round { times: calls, took });
    compare(std::slice::from_mut(&mut figure))?;
    Ok(figure)
}

async fn take(client: &Client, name: &str, count: u32) -> Result<Vec<Hold>, Failure> {
    let mut tasks = JoinSet::new();
    for first in 0..AT_ONCE.min(count) {
        let (client, name) = (client.clone(), name.to_owned());
        tasks.spawn(async move {
            let mut holds = Vec::new();
            for at in (first..count).step_by(AT_ONCE as usize) {
                holds.push(client.mutex(format!("{name}-held-{at}")).lock().await?);
            }
            Ok::<_, palisade::Error>(holds)
        });
    }
    let mut all = Vec::new();
    while let Some(holds) = tasks.join_next().await {
        all.extend(holds.map_err(|error| refused("a task ended")(error.into()))??);
    }
    Ok(all)
}

async fn release(holds: Vec<Hold>) -> Result<(), Failure> {
    let mut tasks = JoinSet::new();
    for hold in holds {
        if tasks.len() >= AT_ONCE as usize {
            tasks.join_next().await;
        }
        tasks.spawn(hold.release());
    }
    while tasks.join_next().await.is_some() {}
    Ok(())
}

/// The processor time of all our threads.
fn processor() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Our memory in bytes.
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm
        .split(' ')
        .nth(1)
        .and_then(|pages| pages.parse::<u64>().ok());
    pages.unwrap_or_default() * rustix::param::page_size() as u64
}
