//! What is made of several holds, or of one in another guise: downgrades and upgrades, many locks
//! at once, any of many, re-entry, a leadership with its work.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use palisade::{Ask, BootTime, Kind, Patience};

use super::bed::held;
use super::failure::{ensure, ensure_eq, inside};
use super::{Bed, Check, SOON, cases, needs, within};

cases! { pub(super) CASES, "composed";
    "A writer may become a reader and a sole reader the writer, with nobody in between." => [
        a_downgrade_lets_readers_in if needs::shared,
        a_sole_reader_is_upgraded if needs::shared,
        a_reader_among_others_is_not_upgraded if needs::shared,
    ],
    "Several locks are taken all or none, whatever the order of their names." => [
        multi_lock_is_all_or_nothing,
        multi_locks_in_any_order_do_not_deadlock,
        a_multi_lock_given_up_leaves_no_claim,
    ],
    "Any of several locks is the first free one." => [
        lock_any_skips_the_locked,
        lock_any_waits_for_whichever_comes,
    ],
    "A reentrant lock is taken again by its own handle, and by no other." => [
        reentry_has_the_same_token,
    ],
    "A leader's work ends before another leads." => [
        lead_ends_its_work_on_loss,
        lead_resigns_after_its_work,
    ],
    "A lock is kept at least as long as it was asked for." => [
        at_least_is_kept,
    ],
}

async fn a_downgrade_lets_readers_in(bed: Bed) -> Check {
    let lock = bed.client().rwlock("changed");
    let other = bed.other_client().await?.rwlock("changed");
    let mut hold = lock.write().await?;
    let token = hold.token();
    let reading = other.clone();
    let reader = tokio::spawn(async move { reading.read().await });
    if bed.capability().waiters_visible {
        bed.until_waiting(&bed.name("changed")?, 1).await?;
    }
    hold.downgrade().await?;
    ensure_eq!(hold.token(), token, "the token");
    let reader = within(SOON, "the reader's grant", reader).await???;
    ensure!(
        hold.is_valid() && reader.is_valid(),
        "readers are not valid"
    );
    ensure!(
        other.try_write().await?.is_none(),
        "a writer beside readers"
    );
    Ok(())
}

async fn a_sole_reader_is_upgraded(bed: Bed) -> Check {
    let lock = bed.client().rwlock("changed");
    let mut hold = lock.read().await?;
    let token = hold.token();
    ensure!(hold.try_upgrade().await?, "a sole reader is not upgraded");
    ensure_eq!(hold.token(), token, "the token");
    ensure!(lock.try_read().await?.is_none(), "a reader beside a writer");
    hold.release().await?;
    held(lock.try_write().await?)?.release().await?;
    Ok(())
}

async fn a_reader_among_others_is_not_upgraded(bed: Bed) -> Check {
    let lock = bed.client().rwlock("changed");
    let mut hold = lock.read().await?;
    let other = bed.other_client().await?.rwlock("changed").read().await?;
    ensure!(!hold.try_upgrade().await?, "a writer beside a reader");
    ensure!(hold.is_valid() && other.is_valid(), "readers are not valid");
    let more = held(lock.try_read().await?)?;
    more.release().await?;
    other.release().await?;
    ensure!(hold.try_upgrade().await?, "a sole reader is not upgraded");
    Ok(())
}

async fn multi_lock_is_all_or_nothing(bed: Bed) -> Check {
    let client = bed.client();
    let other = bed.other_client().await?;
    let b = other.mutex("b").lock().await?;
    let all = client.multi_lock(["c", "a", "b", "a"]);
    ensure!(
        all.try_lock().await?.is_none(),
        "taken with one of them locked"
    );
    within(SOON, "the background releases", client.close()).await?;
    for name in ["a", "c"] {
        held(other.mutex(name).try_lock().await?)?.release().await?;
    }
    b.release().await?;
    let holds = inside!(all.try_lock().await?, Some(holds) => holds, "all are free");
    let names: Vec<&str> = holds
        .holds()
        .iter()
        .map(|hold| hold.name().as_str())
        .collect();
    ensure_eq!(names, ["a", "b", "c"], "the names");
    for name in ["a", "b", "c"] {
        ensure!(
            other.mutex(name).try_lock().await?.is_none(),
            "{name} is free"
        );
    }
    holds.release().await?;
    Ok(())
}

async fn multi_locks_in_any_order_do_not_deadlock(bed: Bed) -> Check {
    let mut tasks = tokio::task::JoinSet::new();
    for names in [["a", "b", "c"], ["c", "b", "a"], ["b", "c", "a"]] {
        let client = bed.other_client().await?;
        tasks.spawn(async move {
            for _ in 0..5 {
                client.multi_lock(names).lock().await?.release().await?;
            }
            Ok::<_, palisade::Error>(())
        });
    }
    while let Some(task) = within(SOON * 2, "a round", tasks.join_next()).await? {
        task??;
    }
    Ok(())
}

async fn a_multi_lock_given_up_leaves_no_claim(bed: Bed) -> Check {
    let client = bed.client();
    let c = bed.other_client().await?.mutex("c").lock().await?;
    let all = client.multi_lock(["a", "b", "c"]);
    let given_up = all.lock_timeout(Duration::from_millis(150));
    ensure!(
        within(SOON, "the timeout", given_up).await??.is_none(),
        "two holders"
    );
    let dropped = tokio::time::timeout(Duration::from_millis(100), all.lock()).await;
    ensure!(dropped.is_err(), "two holders");
    within(SOON, "the background leaves", client.close()).await?;
    for name in ["a", "b"] {
        bed.until_empty(&bed.name(name)?).await?;
    }
    let line = bed.line(c.name()).await?;
    ensure_eq!((line.holders.len(), line.waiters.len()), (1, 0), "the line");
    Ok(())
}

async fn lock_any_skips_the_locked(bed: Bed) -> Check {
    let client = bed.client();
    let other = bed.other_client().await?;
    let a = other.mutex("a").lock().await?;
    let hold = held(client.lock_any(["a", "b", "c"], Patience::NoWait).await?)?;
    ensure_eq!(hold.name().as_str(), "b", "the first free one");
    let next = held(other.lock_any(["a", "b", "c"], Patience::NoWait).await?)?;
    ensure_eq!(next.name().as_str(), "c", "the next free one");
    let none = client.lock_any(["a", "b", "c"], Patience::NoWait).await?;
    ensure!(none.is_none(), "two holders");
    for hold in [a, hold, next] {
        let line = bed.line(hold.name()).await?;
        ensure_eq!((line.holders.len(), line.waiters.len()), (1, 0), "the line");
        hold.release().await?;
    }
    Ok(())
}

async fn lock_any_waits_for_whichever_comes(bed: Bed) -> Check {
    let client = bed.client();
    let other = bed.other_client().await?;
    let (a, b) = (
        other.mutex("a").lock().await?,
        other.mutex("b").lock().await?,
    );
    let waiting = client.clone();
    let any = tokio::spawn(async move { waiting.lock_any(["a", "b"], Patience::Forever).await });
    if bed.capability().waiters_visible {
        bed.until_waiting(b.name(), 1).await?;
        bed.until_waiting(a.name(), 1).await?;
    }
    b.release().await?;
    let hold = held(within(SOON, "the grant", any).await???)?;
    ensure_eq!(hold.name().as_str(), "b", "the one that came free");
    within(SOON, "the background leaves", client.close()).await?;
    let line = bed.line(a.name()).await?;
    ensure_eq!(
        (line.holders.len(), line.waiters.len()),
        (1, 0),
        "the other line"
    );
    Ok(())
}

async fn reentry_has_the_same_token(bed: Bed) -> Check {
    let mine = bed.client().reentrant("again");
    let outer = mine.lock().await?;
    let inner = within(SOON, "the re-entry", mine.lock()).await??;
    ensure_eq!(outer.token(), inner.token(), "the token");
    ensure_eq!(inner.depth(), 2, "the depth");
    let stranger = bed.client().reentrant("again");
    ensure!(
        stranger.try_lock().await?.is_none(),
        "another handle re-entered"
    );
    inner.release().await?;
    ensure!(
        bed.client().mutex("again").try_lock().await?.is_none(),
        "released by the inner"
    );
    outer.release().await?;
    held(bed.client().mutex("again").try_lock().await?)?
        .release()
        .await?;
    Ok(())
}

/// Says when the future that owns it is dropped.
struct Ended(Arc<AtomicBool>);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

async fn lead_ends_its_work_on_loss(bed: Bed) -> Check {
    let (spy, client) = bed.spied_client().await?;
    let ttl = bed.short_ttl();
    let election = client.election("chair").ttl(ttl);
    let ended = Arc::new(AtomicBool::new(false));
    let work = Ended(Arc::clone(&ended));
    let lead = tokio::spawn(async move {
        let forever = |_| async move {
            let _work = work;
            std::future::pending::<()>().await
        };
        election.lead("one", forever).await
    });
    let name = bed.name("chair")?;
    bed.until(&name, "a leader", |line| line.holders.len() == 1)
        .await?;
    spy.lose_renewals(u32::MAX);
    let next = bed.client().election("chair");
    let next = within(ttl + SOON, "the next leader", next.campaign("two")).await??;
    if bed.capability().early_loss {
        ensure!(ended.load(Ordering::SeqCst), "two leaders at work");
    }
    let lost = within(SOON, "the end of the former leader", lead).await??;
    let error = inside!(lost, Err(error) => error, "an error");
    ensure_eq!(error.kind(), Kind::Lost, "the kind of {error}");
    next.resign().await?;
    Ok(())
}

async fn lead_resigns_after_its_work(bed: Bed) -> Check {
    let election = bed.client().election("chair");
    let other = bed.other_client().await?.election("chair");
    let seen = election
        .lead("one", |leadership| async move {
            let taken = other.try_campaign("two").await?.is_some();
            Ok::<_, palisade::Error>((taken, leadership.is_valid(), leadership))
        })
        .await??;
    ensure!(!seen.0, "two leaders");
    ensure!(seen.1, "a leader at work is not valid");
    ensure!(!seen.2.is_valid(), "a former leader is valid");
    ensure_eq!(election.leader().await?, None, "who leads after the work");
    Ok(())
}

async fn at_least_is_kept(bed: Bed) -> Check {
    let at_least = Duration::from_millis(400);
    let request = bed.client().line("kept", Ask::Whole).at_least(at_least);
    let start = BootTime::now();
    let hold = held(request.acquire(Patience::NoWait).await?)?;
    hold.release().await?;
    let took = BootTime::now().saturating_since(start);
    ensure!(took >= at_least, "released after {took:?}");
    // Dropped, it is kept in the background.
    let start = BootTime::now();
    drop(held(request.acquire(Patience::NoWait).await?)?);
    let other = bed.other_client().await?;
    let next = within(SOON, "the grant", other.mutex("kept").lock()).await??;
    let took = BootTime::now().saturating_since(start);
    ensure!(took >= at_least, "handed over after {took:?}");
    next.release().await?;
    Ok(())
}
