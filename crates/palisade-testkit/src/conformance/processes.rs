//! What is promised to processes that share an engine.

use palisade::core::claim::Ask;

use super::bed::held;
use super::failure::{ensure, ensure_eq};
use super::{Bed, Check, Failure, SOON, cases, needs, permits};
use crate::taker::{TakerArgs, What};

cases! { pub(super) CASES, "processes";
    "Processes exclude each other." => [
        another_process_is_excluded if needs::processes,
        counting_loses_nothing if needs::processes,
        counting_without_the_lock_loses_updates if needs::processes,
        readers_of_other_processes_share if needs::shared_processes,
        permits_of_other_processes_count if needs::permits_processes,
    ],
    "Processes are granted in the order in which they came." => [
        order_of_entry_is_order_of_grants if needs::fair_processes,
        a_release_is_pushed_to_another_process if needs::processes,
    ],
}

async fn another_process_is_excluded(bed: Bed) -> Check {
    let name = bed.name("process")?;
    let mut taker = bed.taker(&name, TakerArgs::default())?;
    let event = taker.until(What::Held, SOON).await?;
    let mutex = bed.client().mutex("process");
    ensure!(mutex.try_lock().await?.is_none(), "two holders");
    let line = bed.line(&name).await?;
    let owner = line.holders.first().and_then(|holder| holder.owner.clone());
    ensure_eq!(
        owner.map(|owner| owner.pid),
        Some(taker.pid()),
        "the process shown"
    );
    taker.tell("release")?;
    let released = taker.until(What::Released, SOON).await?;
    ensure_eq!(released.detail, None, "the release");
    let hold = held(mutex.try_lock().await?)?;
    ensure!(
        Some(hold.token().0) > event.token,
        "token {} after {:?}",
        hold.token(),
        event.token
    );
    Ok(())
}

const PROCESSES: u32 = 4;
const TIMES: u32 = 25;

/// Lets processes count, and gives what is in the file at the end.
async fn sequence(bed: &Bed, unlocked: bool) -> Result<u64, Failure> {
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("counter");
    std::fs::write(&file, format!("{:020}\n", 0))?;
    let mut all = Vec::new();
    for _ in 0..PROCESSES {
        let line = (bed.url(), "counter");
        all.push(bed.second().counter(line, &file, TIMES, unlocked)?);
    }
    for taker in &mut all {
        taker.until(What::Counted, SOON * 4).await?;
    }
    let text = std::fs::read_to_string(&file)?;
    text.trim()
        .parse()
        .map_err(|_| Failure::new(format!("not a number: {text:?}")))
}

async fn counting_loses_nothing(bed: Bed) -> Check {
    ensure_eq!(
        sequence(&bed, false).await?,
        u64::from(PROCESSES * TIMES),
        "the count"
    );
    Ok(())
}

/// The control: if it loses nothing, the case above could not have seen an overlap.
async fn counting_without_the_lock_loses_updates(bed: Bed) -> Check {
    let count = sequence(&bed, true).await?;
    ensure!(
        count < u64::from(PROCESSES * TIMES),
        "no update was lost: {count}"
    );
    Ok(())
}

async fn readers_of_other_processes_share(bed: Bed) -> Check {
    let name = bed.name("shared")?;
    let args = TakerArgs {
        ask: Ask::READ,
        ..TakerArgs::default()
    };
    let mut one = bed.taker(&name, args)?;
    let mut two = bed.taker(&name, args)?;
    one.until(What::Held, SOON).await?;
    two.until(What::Held, SOON).await?;
    let lock = bed.client().rwlock("shared");
    ensure!(lock.try_write().await?.is_none(), "a writer beside readers");
    let reader = held(lock.try_read().await?)?;
    reader.release().await?;
    Ok(())
}

async fn permits_of_other_processes_count(bed: Bed) -> Check {
    let name = bed.name("permits")?;
    let args = TakerArgs {
        ask: permits(1, 2),
        ..TakerArgs::default()
    };
    let mut taker = bed.taker(&name, args)?;
    taker.until(What::Held, SOON).await?;
    let semaphore = bed.client().semaphore("permits", 2);
    let one = held(semaphore.try_acquire().await?)?;
    ensure!(semaphore.try_acquire().await?.is_none(), "three of two");
    one.release().await?;
    Ok(())
}

async fn order_of_entry_is_order_of_grants(bed: Bed) -> Check {
    let name = bed.name("order")?;
    let first = bed.client().mutex("order").lock().await?;
    let mut takers = Vec::new();
    for index in 0..4 {
        takers.push(bed.taker(&name, TakerArgs::default())?);
        bed.until_waiting(&name, index + 1).await?;
    }
    let mut last = Some(first.token().0);
    first.release().await?;
    for taker in &mut takers {
        let event = taker.until(What::Held, SOON).await?;
        ensure!(event.token > last, "token {:?} after {last:?}", event.token);
        last = event.token;
        taker.tell("release")?;
        taker.until(What::Released, SOON).await?;
    }
    Ok(())
}

async fn a_release_is_pushed_to_another_process(bed: Bed) -> Check {
    let name = bed.name("pushed")?;
    let hold = bed.client().mutex("pushed").lock().await?;
    let mut taker = bed.taker(&name, TakerArgs::default())?;
    taker.until(What::Waiting, SOON).await?;
    if bed.capability().waiters_visible {
        bed.until_waiting(&name, 1).await?;
    }
    let start = palisade::BootTime::now();
    hold.release().await?;
    let event = taker.until(What::Held, SOON).await?;
    let took = palisade::BootTime::from_nanos(event.at).saturating_since(start);
    bed.note("handover_us", took.as_micros() as f64);
    // Well below the bounded re-check of one second.
    ensure!(
        took < std::time::Duration::from_millis(700),
        "handed over after {took:?}"
    );
    Ok(())
}
