//! What a client promises before and around its locks.

use std::sync::Arc;
use std::time::Duration;

use palisade::core::capability::Class;
use palisade::core::claim::Ask;
use palisade::core::report::{LineReport, Scope, Severity};
use palisade::{Client, Kind, Patience, Tokens};

use super::bed::held;
use super::failure::{ensure, ensure_eq, inside};
use super::{Bed, Check, SOON, cases, needs, within};
use crate::wrap::Spy;

cases! { pub(super) CASES, "client";
    "What can't work is refused before anything is asked of the engine." => [
        a_ttl_out_of_range_is_refused,
        a_bad_name_is_refused,
        an_unknown_option_is_refused,
        what_the_engine_lacks_is_unsupported,
        a_resize_that_cant_work_is_refused,
    ],
    "A resize is felt by those who wait." => [
        resize_grants_who_waits if needs::resize,
    ],
    "`for_correctness` is refused on class C and on dangerous settings, with the reason, and \
     granted otherwise." => [
        correctness_goes_by_the_class_and_the_checkup,
    ],
    "The engine says what it is, without secrets." => [
        describe_is_scheme_and_host,
        check_answers,
    ],
    "An eviction tells the owner first, and removes when it has let go or its lease has ended." => [
        evict_waits_for_the_owner,
        evict_ends_with_the_lease,
        evict_by_id_takes_a_waiter,
        evict_of_nothing_is_false,
    ],
    "A client that is dropped leaves nothing behind, and others go on." => [
        dropped_clients_leave_nothing,
    ],
}

/// Whether `ask` is refused as unsupported before any request is made.
pub(super) async fn is_refused(bed: &Bed, ask: Ask) -> Check {
    let (spy, client) = bed.spied_client().await?;
    refuses(&client, &spy, ask).await
}

async fn refuses(client: &Client, spy: &Spy, ask: Ask) -> Check {
    for patience in [Patience::NoWait, Patience::For(SOON), Patience::Forever] {
        let line = client.line("refused", ask);
        let answer = within(SOON, "the refusal", line.acquire(patience)).await?;
        let error = inside!(answer, Err(error) => error, "a refusal of {ask:?}");
        ensure_eq!(error.kind(), Kind::Unsupported, "the kind of {error}");
        ensure!(error.message().len() > 10, "no reason in {error}");
    }
    ensure_eq!(spy.total(), 0, "requests made");
    Ok(())
}

async fn a_ttl_out_of_range_is_refused(bed: Bed) -> Check {
    let (spy, client) = bed.spied_client().await?;
    let range = bed.capability().ttl;
    for ttl in [
        Duration::ZERO,
        range.min / 2,
        range.max + Duration::from_secs(1),
    ] {
        let tried = client.mutex("ttl").ttl(ttl).try_lock().await;
        let error = inside!(tried, Err(error) => error, "{ttl:?}: an error");
        ensure_eq!(error.kind(), Kind::InvalidArgument, "the kind of {error}");
    }
    ensure_eq!(spy.total(), 0, "requests made");
    for ttl in [range.min, range.max] {
        let tried = client.mutex("ttl").ttl(ttl).try_lock().await;
        // The shortest may be over before anything can be done with it.
        if let Err(error) = tried {
            ensure_eq!(error.kind(), Kind::Lost, "the kind of {error}");
        }
    }
    Ok(())
}

async fn a_resize_that_cant_work_is_refused(bed: Bed) -> Check {
    let (spy, client) = bed.spied_client().await?;
    for (name, capacity, kind) in [
        ("resized", 0, Kind::InvalidArgument),
        ("resized", u32::MAX, Kind::InvalidArgument),
        ("", 2, Kind::InvalidName),
    ] {
        let answer = client.resize(name, capacity).await;
        let error = inside!(answer, Err(error) => error, "an error");
        ensure_eq!(error.kind(), kind, "the kind of {error}");
    }
    if !bed.capability().resize {
        let answer = client.resize("resized", 2).await;
        let error = inside!(answer, Err(error) => error, "an error");
        ensure_eq!(error.kind(), Kind::Unsupported, "the kind of {error}");
    }
    ensure_eq!(spy.total(), 0, "requests made");
    Ok(())
}

async fn resize_grants_who_waits(bed: Bed) -> Check {
    let client = bed.client();
    ensure!(
        !client.resize("permits", 2).await?,
        "permits of an empty line"
    );
    let semaphore = client.semaphore("permits", 1);
    let first = semaphore.acquire().await?;
    let waiting = semaphore.clone();
    let waiter = tokio::spawn(async move { waiting.acquire().await });
    let queued = |line: &LineReport| line.waiters.len() == 1;
    if bed.capability().waiters_visible {
        bed.until(&bed.name("permits")?, "the waiter", queued)
            .await?;
    }
    ensure!(
        bed.other_client().await?.resize("permits", 2).await?,
        "permits there"
    );
    let second = within(SOON, "the grant", waiter).await???;
    ensure!(first.is_valid() && second.is_valid(), "a hold was lost");
    first.release().await?;
    second.release().await?;
    Ok(())
}

async fn a_bad_name_is_refused(bed: Bed) -> Check {
    let client = bed.client();
    for name in ["", "a\nb", "a\0b", &"x".repeat(256)] {
        for refused in [
            client.mutex(name).lock().await.err(),
            client.rwlock(name).try_read().await.err(),
            client.semaphore(name, 2).try_acquire().await.err(),
            client.election(name).leader().await.err(),
            client.multi_lock([name, "b"]).try_lock().await.err(),
        ] {
            let error = inside!(refused, Some(error) => error, "{name:?} was taken");
            ensure_eq!(error.kind(), Kind::InvalidName, "the kind of {error}");
        }
    }
    Ok(())
}

async fn an_unknown_option_is_refused(bed: Bed) -> Check {
    let refused = bed
        .client_of(&bed.url_with("nosuchoption", "hunter2"))
        .await;
    let error = inside!(refused.err(), Some(error) => error, "an error");
    ensure_eq!(error.kind(), Kind::Config, "the kind of {error}");
    let shown = format!("{error} {error:?}");
    ensure!(shown.contains("nosuchoption"), "{shown} does not name it");
    ensure!(!shown.contains("hunter2"), "the value is shown");
    Ok(())
}

/// On an engine that lacks nothing, a wrapper takes it away.
async fn what_the_engine_lacks_is_unsupported(bed: Bed) -> Check {
    let mut poor = bed.capability();
    poor.shared = false;
    poor.permits = palisade::Permits::Slots;
    let spy = Arc::new(Spy::with_capability(Arc::clone(bed.engine()), poor));
    let client = Client::new(spy.clone(), &bed.settings()?)?;
    refuses(&client, &spy, Ask::READ).await?;
    refuses(&client, &spy, super::permits(2, 3)).await?;
    let mut poorer = poor;
    poorer.permits = palisade::Permits::None;
    let spy = Arc::new(Spy::with_capability(Arc::clone(bed.engine()), poorer));
    let client = Client::new(spy.clone(), &bed.settings()?)?;
    refuses(&client, &spy, super::permits(1, 3)).await?;
    held(client.mutex("refused").try_lock().await?)?
        .release()
        .await?;
    Ok(())
}

async fn correctness_goes_by_the_class_and_the_checkup(bed: Bed) -> Check {
    let capability = bed.capability();
    let fit = capability.class != Class::C && capability.tokens != Tokens::None;
    let findings = bed.client().check().await?.findings;
    let danger = findings
        .into_iter()
        .find(|finding| finding.severity == Severity::Danger);
    match bed.client().for_correctness().await {
        Ok(client) => {
            ensure!(fit, "class {} passes for correctness", capability.class);
            ensure!(danger.is_none(), "passes for correctness with {danger:?}");
            held(client.mutex("correct").try_lock().await?)?
                .release()
                .await?;
        }
        Err(error) => {
            ensure_eq!(error.kind(), Kind::NotForCorrectness, "the kind of {error}");
            if fit {
                let danger = inside!(danger, Some(danger) => danger, "a reason for {error}");
                ensure!(
                    error.message().contains(&danger.message)
                        && error.message().contains(&danger.remedy),
                    "{danger:?} is not in {error}"
                );
            }
        }
    }
    held(
        bed.client()
            .for_efficiency()
            .mutex("fast")
            .try_lock()
            .await?,
    )?
    .release()
    .await?;
    Ok(())
}

async fn describe_is_scheme_and_host(bed: Bed) -> Check {
    let shown = bed.client().describe();
    let scheme = bed.url().split(':').next().unwrap_or_default();
    ensure!(
        shown.starts_with(scheme),
        "{shown} does not begin with {scheme}"
    );
    ensure!(
        !shown.contains("namespace") && !shown.contains('?'),
        "{shown} shows options"
    );
    let debug = format!("{:?}", bed.client());
    ensure!(debug.contains(&shown), "{debug} does not show {shown}");
    Ok(())
}

async fn check_answers(bed: Bed) -> Check {
    for finding in within(SOON, "the findings", bed.client().check())
        .await??
        .findings
    {
        ensure!(
            !finding.code.is_empty() && !finding.message.is_empty(),
            "{finding:?}"
        );
        ensure!(!finding.remedy.is_empty(), "no remedy in {finding:?}");
    }
    Ok(())
}

async fn evict_waits_for_the_owner(bed: Bed) -> Check {
    let owner = bed.other_client().await?;
    let hold = owner.mutex("evicted").ttl(bed.long_ttl()).lock().await?;
    let name = hold.name().clone();
    let operator = bed.client();
    let line = name.clone();
    let evict = tokio::spawn(async move {
        operator
            .evict(&line, palisade::Which::Holders, palisade::Eviction::Mark)
            .await
    });
    within(SOON, "the loss", hold.lost()).await?;
    ensure_eq!(
        bed.line(&name).await?.holders.len(),
        1,
        "holders before it let go"
    );
    ensure!(!evict.is_finished(), "the eviction did not wait");
    drop(hold);
    ensure!(
        within(SOON, "the eviction", evict).await???,
        "a holder to evict"
    );
    bed.until_empty(&name).await
}

async fn evict_ends_with_the_lease(bed: Bed) -> Check {
    let owner = bed.other_client().await?;
    let ttl = bed.fit(bed.short_ttl() * 2);
    let hold = owner.mutex("evicted").ttl(ttl).lock().await?;
    let name = hold.name().clone();
    // The owner keeps it, lost or not, and is not waited for beyond its lease.
    let evict = bed.client();
    ensure!(
        within(
            ttl + SOON,
            "the eviction",
            evict.evict(&name, palisade::Which::Holders, palisade::Eviction::Mark)
        )
        .await??,
        "a holder"
    );
    ensure!(!hold.is_valid(), "an evicted hold is valid");
    bed.until_empty(&name).await
}

async fn evict_by_id_takes_a_waiter(bed: Bed) -> Check {
    if !bed.capability().waiters_visible {
        return Err(super::Failure::not_applicable("waiters are not visible"));
    }
    let name = bed.name("evicted")?;
    let hold = bed.client().mutex("evicted").lock().await?;
    let mutex = bed.other_client().await?.mutex("evicted");
    let waiter = tokio::spawn(async move { mutex.lock().await });
    bed.until_waiting(&name, 1).await?;
    let id = bed.line(&name).await?.waiters[0].id.clone();
    let operator = bed.client();
    let evict = operator.evict(&name, palisade::Which::Claim(&id), palisade::Eviction::Mark);
    ensure!(
        within(SOON, "the eviction", evict).await??,
        "a waiter to evict"
    );
    let ended = within(SOON, "the waiter's end", waiter).await??;
    let error = inside!(ended, Err(error) => error, "an error");
    ensure_eq!(error.kind(), Kind::Lost, "the kind of {error}");
    ensure!(hold.is_valid(), "the holder was touched");
    Ok(())
}

async fn evict_of_nothing_is_false(bed: Bed) -> Check {
    let (client, name) = (bed.client(), bed.name("nothing")?);
    for force in [false, true] {
        ensure!(
            !client
                .evict(
                    &name,
                    palisade::Which::Holders,
                    if force {
                        palisade::Eviction::Remove
                    } else {
                        palisade::Eviction::Mark
                    }
                )
                .await?,
            "nobody is there"
        );
        ensure!(
            !client
                .evict(
                    &name,
                    palisade::Which::Claim("0"),
                    if force {
                        palisade::Eviction::Remove
                    } else {
                        palisade::Eviction::Mark
                    }
                )
                .await?,
            "nobody is there"
        );
    }
    Ok(())
}

async fn dropped_clients_leave_nothing(bed: Bed) -> Check {
    for round in 0..10 {
        let client = bed.other_client().await?;
        let hold = client.mutex(format!("round-{round}")).lock().await?;
        drop(client);
        drop(hold);
    }
    let empty = async {
        loop {
            let lines = bed.client().survey(Scope::Prefix("round-".into())).await?;
            if lines.is_empty() {
                return Ok::<_, super::Failure>(());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    within(SOON, "the release of all", empty).await?
}
