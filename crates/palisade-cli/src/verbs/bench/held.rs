//! The cost of renewing many held locks for one ttl.
//!
//! The figure shows renewals: leases per second, and the time of one call to the engine, which
//! renews many. The processor time and memory used are reported with it.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use palisade::command::rounded;
use palisade::events::{Event, Observer, Renewed};
use palisade::{Client, Hold};
use rustix::time::{ClockId, clock_gettime};
use tokio::task::JoinSet;

use super::figure::{Figure, Round, compare};
use super::side::{Who, stuck};
use super::{Measured, Plan, Progress, ROUNDS};
use crate::exit::{Failure, refused};

/// How many locks are taken and released concurrently.
const AT_ONCE: u32 = 64;

/// Counts renewals. The observer is called for every lease, with the time of the whole call.
#[derive(Default, Clone)]
struct Renewals {
    calls: Vec<u64>,
    leases: u64,
    failed: u64,
}

#[derive(Default, Clone)]
struct Counter(Arc<Mutex<Renewals>>);

impl Counter {
    fn take(&self) -> Renewals {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Observer for Counter {
    fn see(&self, event: &Event<'_>) {
        if let Event::Renewed { outcome, took, .. } = event {
            let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let took = took.as_nanos() as u64;
            if seen.calls.last() != Some(&took) {
                seen.calls.push(took);
            }
            seen.leases += 1;
            seen.failed += u64::from(*outcome != Renewed::Held);
        }
    }
}

pub(super) async fn measure(plan: &Plan<'_>, progress: &mut Progress) -> Result<Figure, Failure> {
    let count = plan.count.unwrap_or(10_000);
    let counter = Counter::default();
    let client = palisade::connect(plan.url).await?;
    let client = plan.cleanup.client(client.observed_by(counter.clone()));
    let ttl = client.ttl();

    let memory = resident();
    let began = Instant::now();
    let holds = take(&client, &plan.name, count).await?;
    let taken = began.elapsed();
    let each = resident().saturating_sub(memory) / u64::from(count);

    counter.take();
    let (processor, began) = (processor_time(), Instant::now());
    for _ in 0..ROUNDS {
        tokio::time::sleep(ttl / ROUNDS).await;
        progress.step("held");
    }
    let (renewals, spent, took) = (
        counter.take(),
        processor_time() - processor,
        began.elapsed(),
    );
    if !holds.iter().all(Hold::is_valid) {
        return Err(stuck("some of the locks were lost while they were held"));
    }
    let began = Instant::now();
    release(holds).await;
    let released = began.elapsed();

    let Renewals {
        calls,
        leases,
        failed,
    } = renewals;
    let per_second = |of: f64| of / took.as_secs_f64();
    let mut figure = Figure::new(&plan.engine, Measured::Held.name(), Who::Palisade);
    figure.remark = Some(format!(
        "held: {count} locks for {}: {:.1} renew calls and {:.0} leases per second ({failed} failed), \
         {:.2} % of one core, {each} bytes each in our memory; taken at {:.0}/s, released at {:.0}/s",
        rounded(ttl),
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

async fn release(holds: Vec<Hold>) {
    let mut tasks = JoinSet::new();
    for hold in holds {
        if tasks.len() >= AT_ONCE as usize {
            tasks.join_next().await;
        }
        tasks.spawn(hold.release());
    }
    while tasks.join_next().await.is_some() {}
}

/// The processor time of all our threads.
fn processor_time() -> Duration {
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
