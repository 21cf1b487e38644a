//! What the election promises.

use futures_util::StreamExt;
use palisade::Leader;

use super::failure::{ensure, ensure_eq, inside};
use super::{Bed, Check, Failure, SOON, cases, needs, within};

cases! { pub(super) CASES, "election";
    "One leads at a time, and every later leader has a greater token." => [
        one_leads_at_a_time,
        terms_rise if needs::tokens,
        a_campaign_waits_for_its_turn,
        campaign_timeout_is_none_in_time,
    ],
    "Everyone sees who leads and what it stands for." => [
        nobody_leads_at_first,
        the_leader_is_seen_by_all,
        proclaim_replaces_the_value,
        a_former_leader_can_not_proclaim,
    ],
    "An observer is told of every change that lasts." => [
        observe_shows_changes,
        observe_begins_with_now,
    ],
}

async fn one_leads_at_a_time(bed: Bed) -> Check {
    let election = bed.client().election("chair");
    let other = bed.other_client().await?.election("chair");
    let leads = election.campaign("one").await?;
    ensure!(other.try_campaign("two").await?.is_none(), "two leaders");
    leads.resign().await?;
    let leads = inside!(other.try_campaign("two").await?, Some(leads) => leads, "leads");
    ensure!(election.try_campaign("one").await?.is_none(), "two leaders");
    leads.resign().await?;
    Ok(())
}

async fn terms_rise(bed: Bed) -> Check {
    let other = bed.other_client().await?.election("chair");
    let mine = bed.client().election("chair");
    let mut last = None;
    for election in [&mine, &other, &mine, &other] {
        let leads = election.campaign("x").await?;
        let token = leads.hold().token();
        let leader = inside!(mine.leader().await?, Some(leader) => leader, "a leader");
        ensure_eq!(leader.token, token, "the token shown");
        ensure!(Some(token) > last, "term {token} after {last:?}");
        last = Some(token);
        leads.resign().await?;
    }
    Ok(())
}

async fn a_campaign_waits_for_its_turn(bed: Bed) -> Check {
    let election = bed.client().election("chair");
    let other = bed.other_client().await?.election("chair");
    let leads = election.campaign("one").await?;
    let campaign = tokio::spawn(async move { other.campaign("two").await });
    if bed.capability().waiters_visible {
        bed.until_waiting(&bed.name("chair")?, 1).await?;
    }
    let leader = inside!(election.leader().await?, Some(leader) => leader, "a leader");
    ensure_eq!(leader.value.as_deref(), Some("one"), "who leads");
    // Dropping resigns.
    drop(leads);
    let _leads = within(SOON, "the next leader", campaign).await???;
    let leader = inside!(election.leader().await?, Some(leader) => leader, "a leader");
    ensure_eq!(leader.value.as_deref(), Some("two"), "who leads");
    Ok(())
}

async fn campaign_timeout_is_none_in_time(bed: Bed) -> Check {
    let election = bed.client().election("chair");
    let _leads = election.campaign("one").await?;
    let campaign = election.campaign_timeout("two", std::time::Duration::from_millis(150));
    ensure!(
        within(SOON, "the timeout", campaign).await??.is_none(),
        "two leaders"
    );
    Ok(())
}

async fn nobody_leads_at_first(bed: Bed) -> Check {
    let election = bed.client().election("chair");
    ensure_eq!(election.leader().await?, None, "who leads");
    election.campaign("one").await?.resign().await?;
    ensure_eq!(
        election.leader().await?,
        None,
        "who leads after a resignation"
    );
    Ok(())
}

async fn the_leader_is_seen_by_all(bed: Bed) -> Check {
    let election = bed.client().election("chair");
    let other = bed.other_client().await?;
    let value = "10.0.0.7:8080 ünïcode";
    let leads = election.campaign(value).await?;
    let leader =
        inside!(other.election("chair").leader().await?, Some(leader) => leader, "a leader");
    ensure_eq!(leader.value.as_deref(), Some(value), "the value");
    ensure_eq!(leader.token, leads.hold().token(), "the token");
    let owner = inside!(leader.owner, Some(owner) => owner, "an owner");
    ensure_eq!(owner.owner, bed.client().owner(), "the owner");
    ensure_eq!(owner.pid, std::process::id(), "the process");
    Ok(())
}

async fn proclaim_replaces_the_value(bed: Bed) -> Check {
    let election = bed.client().election("chair");
    let leads = election.campaign("one").await?;
    let token = leads.hold().token();
    leads.proclaim("other").await?;
    let leader = inside!(election.leader().await?, Some(leader) => leader, "a leader");
    ensure_eq!(leader.value.as_deref(), Some("other"), "the value");
    ensure_eq!(leader.token, token, "the token");
    ensure!(leads.hold().is_valid(), "the hold is valid");
    Ok(())
}

async fn a_former_leader_can_not_proclaim(bed: Bed) -> Check {
    let name = bed.name("chair")?;
    let election = bed.client().election("chair");
    let other = bed.other_client().await?;
    let leads = election.campaign("one").await?;
    ensure!(
        other
            .evict(&name, palisade::Which::Holders, palisade::Eviction::Remove)
            .await?,
        "a leader to evict"
    );
    let _next = other.election("chair").campaign("two").await?;
    let late = leads.proclaim("late").await;
    let error = inside!(late, Err(error) => error, "an error");
    ensure_eq!(error.kind(), palisade::Kind::Lost, "the kind of {error}");
    let leader = inside!(election.leader().await?, Some(leader) => leader, "a leader");
    ensure_eq!(leader.value.as_deref(), Some("two"), "the value");
    Ok(())
}

async fn observe_shows_changes(bed: Bed) -> Check {
    let other = bed.other_client().await?.election("chair");
    let mut seen = std::pin::pin!(other.observe());
    let mut next = async |what: &str| -> Result<Option<Leader>, Failure> {
        match within(SOON, what, seen.next()).await? {
            Some(seen) => Ok(seen?),
            None => Err(Failure::new("the observation ended")),
        }
    };
    ensure_eq!(next("the first look").await?, None, "nobody leads");
    let leads = bed.client().election("chair").campaign("one").await?;
    let value = next("the leader").await?.and_then(|leader| leader.value);
    ensure_eq!(value.as_deref(), Some("one"), "who leads");
    leads.proclaim("other").await?;
    let value = next("the new value").await?.and_then(|leader| leader.value);
    ensure_eq!(value.as_deref(), Some("other"), "who leads");
    leads.resign().await?;
    ensure_eq!(next("the resignation").await?, None, "nobody leads");
    Ok(())
}

async fn observe_begins_with_now(bed: Bed) -> Check {
    let election = bed.client().election("chair");
    let _leads = election.campaign("one").await?;
    let mut seen = std::pin::pin!(election.observe());
    let first = inside!(within(SOON, "a look", seen.next()).await?, Some(seen) => seen?, "a look");
    ensure_eq!(
        first.and_then(|leader| leader.value).as_deref(),
        Some("one"),
        "who leads"
    );
    Ok(())
}
