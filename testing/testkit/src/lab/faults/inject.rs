//! How each fault is injected, repeatedly until the time is over.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use palisade::BootTime;
use rand::RngExt;

use super::Fault;
use super::crew::{Crew, Phase};
use crate::engine::{Outage, Site};
use crate::lab::history::What;

/// Injects `fault` until `end`.
pub(super) async fn inject(
    crew: &mut Crew,
    site: &Site,
    (fault, every): (Fault, Option<Duration>),
    ttl: Duration,
    end: BootTime,
) -> Result<(), String> {
    let words = |error: io::Error| format!("{fault}: {error}");
    match fault {
        Fault::None | Fault::DropFutures => {
            rest(end, end.remaining()).await;
            Ok(())
        }
        Fault::Slow => slow(crew, end).await,
        Fault::Engine(outage) => engine(crew, site, outage, ttl, end).await,
        _ => {
            // The first injection must hit a holder; the others happen at any time.
            let (mut aim, mut next) = (Aim::Sure, BootTime::now());
            while !end.has_passed() {
                let calm = Duration::from_millis(crew.rng.random_range(40..160));
                rest(end, calm.max(next.remaining())).await;
                next = BootTime::now() + every.unwrap_or_default();
                let hit = once(crew, (fault, aim), (ttl, site.lasts), end).await;
                if hit.map_err(words)? {
                    aim = Aim::Quick;
                }
            }
            Ok(())
        }
    }
}

/// How a holder is hit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Aim {
    /// Immediately: holds are short, so it may have released by then.
    Quick,
    /// While it holds for certain.
    Sure,
}

/// Sleeps, but not beyond the end.
async fn rest(end: BootTime, time: Duration) {
    tokio::time::sleep(time.min(end.remaining())).await;
}

/// Injects the fault into one worker; returns whether a suitable worker was found. A lease lasts at
/// most `lasts` times its ttl.
async fn once(
    crew: &mut Crew,
    (fault, aim): (Fault, Aim),
    (ttl, lasts): (Duration, u32),
    end: BootTime,
) -> io::Result<bool> {
    let phase = match fault {
        Fault::KillWaiter => Phase::Waiting,
        _ => Phase::Held,
    };
    let Some(at) = crew.one(phase, end).await else {
        return Ok(false);
    };
    let still = matches!(
        (fault, aim),
        (Fault::PauseBeforeWrite, _)
            | (
                Fault::KillHolder | Fault::PauseHolder | Fault::PauseShort,
                Aim::Sure
            )
    );
    if still && !holds_still(crew, at, ttl * 4).await {
        return Ok(false);
    }
    match fault {
        Fault::PauseHolder => {
            crew.stop(at)?;
            if still {
                crew.members[at].tell("go");
            }
            // Its last report before the stop may still be on its way: it may have released just
            // then.
            tokio::time::sleep(Duration::from_millis(5)).await;
            if !matches!(crew.members[at].phase(), Phase::Held | Phase::Gate) {
                crew.go_on(at)?;
                return Ok(false);
            }
            // Longer than the lease whenever it was last renewed, and long enough for others to
            // work.
            let pause = ttl * lasts + ttl.mul_f64(crew.rng.random_range(0.3..0.6));
            tokio::time::sleep(pause).await;
            crew.go_on(at)?;
        }
        Fault::PauseShort => {
            crew.stop(at)?;
            if still {
                crew.members[at].tell("go");
            }
            // A lease is renewed after a third of its ttl, so this pause can't end it.
            let pause = ttl.mul_f64(crew.rng.random_range(0.1..0.25));
            tokio::time::sleep(pause).await;
            crew.go_on(at)?;
        }
        Fault::KillHolder | Fault::KillWaiter => crew.replace(at)?,
        Fault::PauseBeforeWrite => {
            crew.stop(at)?;
            let before = crew.wrote_beside(at);
            let limit = BootTime::now() + ttl * (2 + lasts);
            let others = |crew: &mut Crew| (crew.wrote_beside(at) > before).then_some(());
            crew.until(limit, others).await;
            crew.members[at].tell("go");
            crew.go_on(at)?;
        }
        _ => {}
    }
    Ok(true)
}

/// Makes a worker pause once it holds; `false` if it does not get there in time.
async fn holds_still(crew: &mut Crew, at: usize, limit: Duration) -> bool {
    crew.members[at].tell("gate");
    let at_gate = |crew: &mut Crew| (crew.members[at].phase() == Phase::Gate).then_some(());
    let there = crew.until(BootTime::now() + limit, at_gate).await.is_some();
    if !there {
        crew.members[at].tell("go");
    }
    there
}

/// Starves the workers of CPU time by several busy threads per core.
async fn slow(crew: &mut Crew, end: BootTime) -> Result<(), String> {
    const SPINNERS_PER_CORE: usize = 2;
    let cores = std::thread::available_parallelism().map_or(2, usize::from);
    let over = Arc::new(AtomicBool::new(false));
    let fault = || Fault::Slow.name().to_owned();
    let begin = What::FaultBegin { fault: fault() };
    crew.record.record(begin);
    for _ in 0..cores * SPINNERS_PER_CORE {
        let over = Arc::clone(&over);
        std::thread::spawn(move || {
            while !over.load(Ordering::Relaxed) && !end.has_passed() {
                std::hint::spin_loop();
            }
        });
    }
    rest(end, end.remaining()).await;
    over.store(true, Ordering::Relaxed);
    crew.record.record(What::FaultEnd { fault: fault() });
    Ok(())
}

/// Disturbs the engine's server for longer than a lease, heals it, and then lets it run for a
/// while.
async fn engine(
    crew: &mut Crew,
    site: &Site,
    outage: Outage,
    ttl: Duration,
    end: BootTime,
) -> Result<(), String> {
    let outages = site.outages.clone().ok_or("nothing can happen to it")?;
    let name = Fault::Engine(outage).name();
    let fault = || name.to_owned();
    while !end.has_passed() {
        rest(end, ttl).await;
        crew.record.record(What::FaultBegin { fault: fault() });
        let (begin, heal) = (Arc::clone(&outages), Arc::clone(&outages));
        let joined = tokio::task::spawn_blocking(move || begin.begin(outage)).await;
        joined.map_err(|error| error.to_string())??;
        tokio::time::sleep(ttl.mul_f64(crew.rng.random_range(0.5..2.0))).await;
        // A server may act as soon as it continues, long before it is ready.
        crew.record.record(What::FaultHeal { fault: fault() });
        let joined = tokio::task::spawn_blocking(move || heal.end(outage)).await;
        joined.map_err(|error| error.to_string())??;
        crew.record.record(What::FaultEnd { fault: fault() });
    }
    Ok(())
}
