//! What `Engine::survey` and `Engine::watch` promise.

use futures_util::StreamExt;
use palisade::core::claim::{Ask, Claim};
use palisade::core::owner::Owner;
use palisade::core::report::Scope;

use super::failure::{ensure, ensure_eq};
use super::{Bed, Check, SOON, cases, needs, within};

cases! { pub(super) CASES, "survey";
    "Holders first, then waiters in the order in which they will be served." => [
        holders_first_then_waiters if needs::fair,
        readers_and_writers_are_shown_in_order if needs::fair_shared,
        owner_is_shown_as_it_was_given,
    ],
    "Shows no claim whose lease has ended." => [
        ended_lease_is_not_shown,
    ],
    "An empty line is not shown." => [
        empty_line_is_not_shown,
    ],
}

cases! { pub(super) MORE, "scope";
    "A scope shows the lines that it names, and no other." => [
        prefix_shows_what_begins_so,
        odd_names_come_back_as_they_went_in,
        long_names_are_told_apart,
        namespaces_are_apart,
    ],
    "A watch yields after every change that a survey of its scope could show." => [
        watch_tells_of_changes,
        watch_tells_of_changes_by_another_client,
    ],
}

async fn holders_first_then_waiters(bed: Bed) -> Check {
    let name = bed.name("order")?;
    let held = bed.hold(&name, Ask::Whole).await?;
    let mut expected = Vec::new();
    for _ in 0..4 {
        let next = bed.queue(&name, Ask::Whole).await?;
        expected.push(next.ticket.claim.to_string());
    }
    let line = bed.line(&name).await?;
    ensure_eq!(line.name, name.as_str(), "the name");
    ensure_eq!(line.capacity, None, "the capacity");
    ensure_eq!(line.holders.len(), 1, "holders");
    ensure_eq!(
        line.holders[0].id,
        held.ticket.claim.to_string(),
        "the holder"
    );
    let shown: Vec<String> = line.waiters.into_iter().map(|waiter| waiter.id).collect();
    ensure_eq!(shown, expected, "the waiters");
    Ok(())
}

async fn readers_and_writers_are_shown_in_order(bed: Bed) -> Check {
    let name = bed.name("order")?;
    let mut expected = Vec::new();
    for ask in [Ask::READ, Ask::READ, Ask::Whole, Ask::READ, Ask::Whole] {
        let seated = bed.enter(bed.claim(&name, ask)).await?;
        expected.push((seated.ticket.claim.to_string(), ask));
    }
    let line = bed.line(&name).await?;
    ensure_eq!((line.holders.len(), line.waiters.len()), (2, 3), "the line");
    let all = line.holders.into_iter().chain(line.waiters);
    let shown: Vec<_> = all.map(|claim| (claim.id, claim.ask)).collect();
    ensure_eq!(shown, expected, "the line");
    Ok(())
}

async fn owner_is_shown_as_it_was_given(bed: Bed) -> Check {
    let name = bed.name("owner")?;
    let mut owner = Owner::here("somebody \"else\"", Some("a label, ünïcode".into()));
    owner.traceparent = Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".into());
    let claim = Claim {
        owner: owner.clone(),
        ..bed.claim(&name, Ask::Whole)
    };
    bed.enter(claim).await?;
    let line = bed.line(&name).await?;
    ensure_eq!(line.holders[0].owner.as_ref(), Some(&owner), "the owner");
    ensure!(!line.holders[0].evicted, "nobody evicts it");
    if let Some(expires_in) = line.holders[0].expires_in {
        ensure!(
            expires_in <= bed.long_ttl(),
            "{expires_in:?} is more than the ttl"
        );
        ensure!(
            expires_in >= bed.long_ttl() / 2,
            "{expires_in:?} of a fresh lease"
        );
    }
    Ok(())
}

async fn ended_lease_is_not_shown(bed: Bed) -> Check {
    let name = bed.name("ended")?;
    let ttl = bed.short_ttl();
    let held = bed
        .enter(Claim {
            ttl,
            ..bed.claim(&name, Ask::Whole)
        })
        .await?;
    held.must_own_lease()?;
    ensure_eq!(bed.line(&name).await?.holders.len(), 1, "holders");
    tokio::time::sleep((held.armed.sent + held.armed.ttl).remaining()).await;
    bed.until_empty(&name).await
}

async fn empty_line_is_not_shown(bed: Bed) -> Check {
    let name = bed.name("empty")?;
    let held = bed.hold(&name, Ask::Whole).await?;
    bed.engine().leave(held.ticket).await?;
    for scope in [Scope::Line(name), Scope::Prefix(String::new())] {
        let lines = bed.engine().survey(scope).await?;
        ensure!(lines.is_empty(), "shown: {lines:?}");
    }
    Ok(())
}

async fn shown(bed: &Bed, prefix: &str) -> palisade::Result<Vec<String>> {
    let lines = bed.engine().survey(Scope::Prefix(prefix.into())).await?;
    let mut names: Vec<String> = lines.into_iter().map(|line| line.name).collect();
    names.sort();
    Ok(names)
}

async fn prefix_shows_what_begins_so(bed: Bed) -> Check {
    for name in ["job/a", "job/b", "jobs", "other"] {
        bed.hold(&bed.name(name)?, Ask::Whole).await?;
    }
    ensure_eq!(shown(&bed, "job/").await?, ["job/a", "job/b"], "job/");
    ensure_eq!(shown(&bed, "job").await?, ["job/a", "job/b", "jobs"], "job");
    ensure_eq!(shown(&bed, "").await?.len(), 4, "all of them");
    ensure_eq!(shown(&bed, "job/a/").await?.len(), 0, "none of them");
    let one = bed.engine().survey(Scope::Line(bed.name("job/a")?)).await?;
    ensure_eq!(one.len(), 1, "one line");
    Ok(())
}

async fn odd_names_come_back_as_they_went_in(bed: Bed) -> Check {
    let mut names = [
        "a/b",
        "a//b",
        "/",
        ".",
        "..",
        "{x}",
        "a:b",
        "a b",
        "%2F",
        "%",
        "*",
        "?",
        "[a]",
        "a\\b",
        "ünïcode/🔒",
        "a#b",
        "a&b=c",
        "'",
        "\"",
        "UPPER",
        "upper",
        "_",
        "-",
    ];
    for name in names {
        bed.hold(&bed.name(name)?, Ask::Whole).await?;
    }
    names.sort_unstable();
    ensure_eq!(shown(&bed, "").await?, names, "the names");
    for name in names {
        bed.is_busy(&bed.name(name)?, Ask::Whole).await?;
    }
    Ok(())
}

async fn long_names_are_told_apart(bed: Bed) -> Check {
    let one = bed.name(&format!("{}1", "x".repeat(254)))?;
    let two = bed.name(&format!("{}2", "x".repeat(254)))?;
    let wide = bed.name(&"é".repeat(127))?;
    for name in [&one, &two, &wide] {
        bed.hold(name, Ask::Whole).await?;
    }
    let mut names = [one.as_str(), two.as_str(), wide.as_str()];
    names.sort_unstable();
    ensure_eq!(shown(&bed, "").await?, names, "the names");
    Ok(())
}

async fn namespaces_are_apart(bed: Bed) -> Check {
    let name = bed.name("apart")?;
    bed.hold(&name, Ask::Whole).await?;
    let url = bed.site().url.clone();
    let joint = if url.contains('?') { '&' } else { '?' };
    let apart = format!("{url}{joint}namespace=u{:016x}", rand::random::<u64>());
    let other = bed.client_of(&apart).await?;
    let hold = other.mutex("apart").try_lock().await?;
    ensure!(hold.is_some(), "the same name in another namespace is busy");
    ensure_eq!(bed.line(&name).await?.holders.len(), 1, "holders here");
    let there = other.survey(Scope::Prefix(String::new())).await?;
    ensure_eq!(there.len(), 1, "lines there");
    Ok(())
}

async fn watch_tells_of_changes(bed: Bed) -> Check {
    let name = bed.name("watched")?;
    let mut changes = bed.engine().watch(Scope::Line(name.clone()));
    let mut next = async |what: &str| match within(SOON, what, changes.next()).await? {
        Some(change) => Ok::<_, super::Failure>(change?),
        None => Err(super::Failure::new("the watch ended")),
    };
    // A watch may begin with a hint, so look for each change with as many as it takes.
    let enter = async {
        let seated = bed.hold(&name, Ask::Whole).await?;
        while bed.line(&name).await?.holders.is_empty() {
            tokio::task::yield_now().await;
        }
        Ok::<_, super::Failure>(seated)
    };
    let (seated, told) = tokio::join!(enter, next("a hint of the enter"));
    told?;
    let leave = bed.engine().leave(seated?.ticket);
    let (left, told) = tokio::join!(leave, next("a hint of the leave"));
    left?;
    told
}

async fn watch_tells_of_changes_by_another_client(bed: Bed) -> Check {
    let other = bed.other_client().await?;
    let mut changes = bed.engine().watch(Scope::Prefix("w".into()));
    // Each round must be told of: hints of one round are drained before the next one begins.
    for round in 0..3 {
        let name = format!("watched-{round}");
        let mutex = other.mutex(&name);
        let told = async {
            loop {
                match changes.next().await {
                    Some(change) => change?,
                    None => return Err(super::Failure::new("the watch ended")),
                }
                if !bed.line(&bed.name(&name)?).await?.holders.is_empty() {
                    return Ok(());
                }
            }
        };
        let (hold, told) = tokio::join!(mutex.lock(), within(SOON, "a hint", told));
        told??;
        hold?.release().await?;
    }
    Ok(())
}
