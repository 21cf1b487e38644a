//! What is promised when a process that shares an engine is killed or stopped.

use std::time::Duration;

use palisade::core::clock::BootTime;

use super::bed::held;
use super::failure::{ensure, ensure_eq};
use super::{Bed, Check, SOON, cases, needs};
use crate::taker::{TakerArgs, What};

cases! { pub(super) CASES, "faults";
    "A killed process hands over: at once where its death is noticed, by its ttl everywhere." => [
        a_killed_holder_hands_over if needs::processes,
        a_killed_waiter_is_skipped if needs::fair_processes,
        a_killed_process_leaves_no_claim if needs::processes,
        a_process_that_exits_without_release_hands_over if needs::processes,
    ],
    "A holder stopped beyond its ttl is replaced with a greater token, and knows when it goes on." => [
        a_stopped_holder_is_replaced_and_knows if needs::processes,
    ],
    "A holder stopped for less than its ttl keeps its lock." => [
        a_short_stop_is_no_loss if needs::processes,
    ],
}

impl Bed {
    /// A ttl for processes, and how long after a death the next may have to wait.
    fn after_death(&self) -> (Duration, Duration) {
        match self.site().notices_death {
            Some(bound) => (self.long_ttl(), bound),
            None => (
                self.short_ttl(),
                self.short_ttl() + Duration::from_millis(1500),
            ),
        }
    }
}

async fn a_killed_holder_hands_over(bed: Bed) -> Check {
    let (ttl, bound) = bed.after_death();
    let mut took = Vec::new();
    // The median of some, because a busy machine may schedule one of them late.
    for round in 0..5 {
        let name = bed.name(&format!("killed-{round}"))?;
        let mut holder = bed.taker(&name, TakerArgs::ttl(ttl))?;
        let first = holder.until(What::Held, SOON).await?;
        let mut next = bed.taker(&name, TakerArgs::ttl(ttl))?;
        next.until(What::Waiting, SOON).await?;
        if bed.capability().waiters_visible {
            bed.until_waiting(&name, 1).await?;
        }
        let killed = BootTime::now();
        holder.kill()?;
        let event = next.until(What::Held, bound + SOON).await?;
        ensure!(
            event.token > first.token,
            "token {:?} after {:?}",
            event.token,
            first.token
        );
        took.push(BootTime::from_nanos(event.at).saturating_since(killed));
    }
    took.sort();
    bed.note("handover_median_ms", took[2].as_secs_f64() * 1e3);
    bed.note("handover_max_ms", took[4].as_secs_f64() * 1e3);
    ensure!(
        took[2] <= bound,
        "handed over after {took:?}, more than {bound:?}"
    );
    Ok(())
}

async fn a_killed_waiter_is_skipped(bed: Bed) -> Check {
    let (ttl, bound) = bed.after_death();
    let name = bed.name("skipped")?;
    let hold = bed.client().mutex("skipped").lock().await?;
    let first = bed.taker(&name, TakerArgs::ttl(ttl))?;
    bed.until_waiting(&name, 1).await?;
    let mut second = bed.taker(&name, TakerArgs::ttl(ttl))?;
    bed.until_waiting(&name, 2).await?;
    first.kill()?;
    let start = BootTime::now();
    hold.release().await?;
    let event = second.until(What::Held, bound + SOON).await?;
    let took = BootTime::from_nanos(event.at).saturating_since(start);
    bed.note("handover_ms", took.as_secs_f64() * 1e3);
    // Once only, so with room for a machine that is busy with other trials.
    ensure!(
        took <= bound + Duration::from_secs(1),
        "handed over after {took:?}"
    );
    Ok(())
}

async fn a_killed_process_leaves_no_claim(bed: Bed) -> Check {
    let (ttl, bound) = bed.after_death();
    let name = bed.name("nothing")?;
    let mut holder = bed.taker(&name, TakerArgs::ttl(ttl))?;
    holder.until(What::Held, SOON).await?;
    let mut waiter = bed.taker(&name, TakerArgs::ttl(ttl))?;
    waiter.until(What::Waiting, SOON).await?;
    if bed.capability().waiters_visible {
        bed.until_waiting(&name, 1).await?;
    }
    holder.kill()?;
    waiter.kill()?;
    tokio::time::sleep(bound.saturating_sub(Duration::from_secs(1))).await;
    bed.until_empty(&name).await?;
    held(bed.client().mutex("nothing").try_lock().await?)?
        .release()
        .await?;
    Ok(())
}

async fn a_process_that_exits_without_release_hands_over(bed: Bed) -> Check {
    let (ttl, bound) = bed.after_death();
    let name = bed.name("exited")?;
    let args = TakerArgs {
        no_release: true,
        ..TakerArgs::ttl(ttl)
    };
    let mut holder = bed.taker(&name, args)?;
    let first = holder.until(What::Held, SOON).await?;
    let mutex = bed.client().mutex("exited");
    let waiter = tokio::spawn(async move { mutex.lock().await });
    if bed.capability().waiters_visible {
        bed.until_waiting(&name, 1).await?;
    }
    holder.tell("exit")?;
    let hold = super::within(bound + SOON, "the grant", waiter).await???;
    ensure!(
        Some(hold.token().0) > first.token,
        "token {} after {first:?}",
        hold.token()
    );
    Ok(())
}

async fn a_stopped_holder_is_replaced_and_knows(bed: Bed) -> Check {
    let ttl = bed.fit(Duration::from_secs(1));
    let name = bed.name("stopped")?;
    let mut holder = bed.taker(&name, TakerArgs::ttl(ttl))?;
    let first = holder.until(What::Held, SOON).await?;
    let mut next = bed.taker(&name, TakerArgs::ttl(ttl))?;
    next.until(What::Waiting, SOON).await?;
    if bed.capability().waiters_visible {
        bed.until_waiting(&name, 1).await?;
    }
    let stopped = BootTime::now();
    holder.stop()?;
    // Read by the holder as soon as it goes on.
    holder.tell("check")?;
    let event = next.until(What::Held, ttl + SOON).await?;
    let took = BootTime::from_nanos(event.at).saturating_since(stopped);
    bed.note("replaced_ms", took.as_secs_f64() * 1e3);
    ensure!(
        event.token > first.token,
        "token {:?} after {:?}",
        event.token,
        first.token
    );
    ensure!(
        took <= ttl + Duration::from_millis(1500),
        "replaced after {took:?}"
    );
    holder.go_on()?;
    let lost = holder.until(What::Lost, SOON).await?;
    ensure_eq!(lost.valid, Some(false), "validity when the loss is told");
    if !holder
        .seen()
        .iter()
        .any(|event| event.event == What::Checked)
    {
        holder.until(What::Checked, SOON).await?;
    }
    let checks = holder
        .seen()
        .iter()
        .filter(|event| event.event == What::Checked);
    ensure!(
        checks.clone().all(|event| event.valid == Some(false)),
        "valid after it went on"
    );
    // It lets go late, and of nothing that is the next one's.
    holder.tell("release")?;
    let released = holder.until(What::Released, SOON).await?;
    ensure!(
        released.detail.is_some(),
        "a lost hold was released as if nothing had been"
    );
    next.tell("check")?;
    let check = next.until(What::Checked, SOON).await?;
    ensure_eq!(check.valid, Some(true), "validity of the next");
    let line = bed.line(&name).await?;
    ensure_eq!(line.holders.len(), 1, "holders");
    Ok(())
}

async fn a_short_stop_is_no_loss(bed: Bed) -> Check {
    let ttl = bed.fit(Duration::from_secs(4));
    let name = bed.name("stopped")?;
    let mut holder = bed.taker(&name, TakerArgs::ttl(ttl))?;
    holder.until(What::Held, SOON).await?;
    holder.stop()?;
    let pause = tokio::time::sleep(Duration::from_millis(500));
    let mutex = bed.client().mutex("stopped");
    let (busy, ()) = tokio::join!(mutex.lock_timeout(Duration::from_millis(400)), pause);
    ensure!(busy?.is_none(), "two holders");
    holder.tell("check")?;
    holder.go_on()?;
    let check = holder.until(What::Checked, SOON).await?;
    ensure_eq!(check.valid, Some(true), "validity after a short stop");
    let losses = holder
        .seen()
        .iter()
        .filter(|event| event.event == What::Lost);
    ensure_eq!(losses.count(), 0, "losses");
    holder.tell("release")?;
    let released = holder.until(What::Released, SOON).await?;
    ensure_eq!(released.detail, None, "the release");
    Ok(())
}
