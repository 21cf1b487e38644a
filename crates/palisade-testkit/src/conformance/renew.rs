//! What `Engine::renew` promises.

use std::time::Duration;

use palisade::core::claim::{Ask, Claim};
use palisade::core::clock::BootTime;
use palisade::core::engine::{Eviction, Renewal};
use palisade::core::ticket::Lease;

use super::bed::{enter_on, granted_on};
use super::failure::{ensure, ensure_eq, inside};
use super::{Bed, Check, Failure, SOON, cases, needs, within};

cases! { pub(super) CASES, "renew";
    "A lease that lives is re-armed to its full ttl." => [
        renewed_lease_outlives_its_ttl,
        waiting_claim_is_renewed_too,
        many_leases_are_answered_in_order,
    ],
    "A lease that ended, or whose ticket is another incarnation, is lost and stays lost: renewing never re-creates anything." => [
        ended_lease_is_lost_and_stays_lost,
        left_lease_is_lost,
        late_renewal_leaves_the_next_holder_alone,
        another_incarnation_is_lost,
    ],
    "A ticket marked for eviction answers [`Renewal::Evicted`] and is not extended." => [
        marked_ticket_is_not_extended,
    ],
    "An outcome that is not known is [`Renewal::Unknown`], for that lease alone." => [
        cut_off_engine_is_unknown if needs::outage,
    ],
    "An answer that takes longer than `within` is of no use. An engine behind a connection gives up on it by then and connects anew, so that the next try can still be in time." => [
        dead_connection_costs_one_renewal if needs::network,
    ],
}

async fn renewed_lease_outlives_its_ttl(bed: Bed) -> Check {
    let name = bed.name("renewed")?;
    let ttl = bed.short_ttl();
    let held = bed
        .enter(Claim {
            ttl,
            ..bed.claim(&name, Ask::Whole)
        })
        .await?;
    let end = held.armed.sent + held.armed.ttl * 2;
    let mut last = held.armed.sent;
    while !end.has_passed() {
        tokio::time::sleep(held.armed.ttl / 4).await;
        let before = BootTime::now();
        let armed = inside!(bed.renew(&held).await?, Renewal::Held(armed) => armed, "a living lease is held");
        ensure_eq!(armed.ttl, held.armed.ttl, "the ttl after a renewal");
        ensure!(
            armed.sent >= before && armed.sent <= BootTime::now(),
            "armed at another time"
        );
        ensure!(armed.sent > last, "armed no later than before");
        last = armed.sent;
        bed.is_busy(&name, Ask::Whole).await?;
    }
    let line = bed.line(&name).await?;
    ensure_eq!(line.holders[0].sequence, Some(held.sequence()), "the count");
    Ok(())
}

async fn waiting_claim_is_renewed_too(bed: Bed) -> Check {
    let name = bed.name("renewed")?;
    let first = bed.hold(&name, Ask::Whole).await?;
    let ttl = bed.short_ttl();
    let next = bed
        .enter(Claim {
            ttl,
            ..bed.claim(&name, Ask::Whole)
        })
        .await?;
    let end = next.armed.sent + next.armed.ttl * 2;
    while !end.has_passed() {
        tokio::time::sleep(next.armed.ttl / 4).await;
        inside!(bed.renew(&next).await?, Renewal::Held(_) => (), "a waiting lease lives on");
    }
    bed.engine().leave(first.ticket).await?;
    bed.granted(&next).await?;
    Ok(())
}

async fn many_leases_are_answered_in_order(bed: Bed) -> Check {
    let mut all = Vec::new();
    for index in 0..6 {
        all.push(
            bed.hold(&bed.name(&format!("many-{index}"))?, Ask::Whole)
                .await?,
        );
    }
    all[0].must_own_lease()?;
    for gone in [1, 4] {
        bed.engine().leave(all[gone].ticket.clone()).await?;
    }
    let leases: Vec<Lease> = all.iter().map(|seated| seated.lease()).collect();
    let answers = bed.engine().renew(leases, Duration::from_secs(2)).await;
    let held: Vec<bool> = answers
        .iter()
        .map(|a| matches!(a, Renewal::Held(_)))
        .collect();
    ensure_eq!(
        held,
        [true, false, true, true, false, true],
        "who is held of {answers:?}"
    );
    let lost = answers
        .iter()
        .filter(|a| matches!(a, Renewal::Lost))
        .count();
    ensure_eq!(lost, 2, "how many are lost of {answers:?}");
    ensure!(
        bed.engine()
            .renew(Vec::new(), Duration::from_secs(2))
            .await
            .is_empty(),
        "answers to no question"
    );
    Ok(())
}

async fn ended_lease_is_lost_and_stays_lost(bed: Bed) -> Check {
    let name = bed.name("ended")?;
    let ttl = bed.short_ttl();
    let held = bed
        .enter(Claim {
            ttl,
            ..bed.claim(&name, Ask::Whole)
        })
        .await?;
    held.must_own_lease()?;
    let end = async {
        while !(held.armed.sent + held.armed.ttl).has_passed()
            || !bed.line(&name).await?.holders.is_empty()
        {
            tokio::time::sleep(held.armed.ttl / 20).await;
        }
        Ok::<_, Failure>(())
    };
    within(held.armed.ttl + SOON, "the end of the lease", end).await??;
    for _ in 0..3 {
        inside!(bed.renew(&held).await?, Renewal::Lost => (), "a lease that ended is lost");
    }
    bed.until_empty(&name).await?;
    bed.hold(&name, Ask::Whole).await?;
    Ok(())
}

async fn left_lease_is_lost(bed: Bed) -> Check {
    let name = bed.name("left")?;
    let held = bed.hold(&name, Ask::Whole).await?;
    held.must_own_lease()?;
    bed.engine().leave(held.ticket.clone()).await?;
    inside!(bed.renew(&held).await?, Renewal::Lost => (), "a lease that was left is lost");
    bed.until_empty(&name).await
}

async fn late_renewal_leaves_the_next_holder_alone(bed: Bed) -> Check {
    let name = bed.name("takeover")?;
    let held = bed.hold(&name, Ask::Whole).await?;
    held.must_own_lease()?;
    bed.engine().leave(held.ticket.clone()).await?;
    let other = bed.other_client().await?;
    let ttl = bed.short_ttl();
    let next = enter_on(
        other.engine(),
        Claim {
            ttl,
            ..bed.claim(&name, Ask::Whole)
        },
    )
    .await?;
    let waiting = bed.queue(&name, Ask::Whole).await?;
    inside!(bed.renew(&held).await?, Renewal::Lost => (), "a lease that was left is lost");
    let line = bed.line(&name).await?;
    ensure_eq!(line.holders.len(), 1, "holders");
    ensure_eq!(
        line.holders[0].id,
        next.ticket.claim.to_string(),
        "the holder"
    );
    // Nor was the next one's lease extended.
    granted_on(bed.engine(), &waiting.ticket, next.armed.ttl + SOON).await?;
    Ok(())
}

async fn another_incarnation_is_lost(bed: Bed) -> Check {
    let name = bed.name("incarnation")?;
    let held = bed.hold(&name, Ask::Whole).await?;
    held.must_own_lease()?;
    let mut wrong = held.clone();
    wrong.ticket.sequence += 1;
    inside!(bed.renew(&wrong).await?, Renewal::Lost => (), "another incarnation is lost");
    inside!(bed.renew(&held).await?, Renewal::Held(_) => (), "the right one is held");
    Ok(())
}

async fn marked_ticket_is_not_extended(bed: Bed) -> Check {
    let name = bed.name("marked")?;
    let ttl = bed.short_ttl();
    let held = bed
        .enter(Claim {
            ttl,
            ..bed.claim(&name, Ask::Whole)
        })
        .await?;
    held.must_own_lease()?;
    let next = bed.queue(&name, Ask::Whole).await?;
    let id = held.ticket.claim.to_string();
    ensure!(
        bed.engine().evict(name, id, Eviction::Mark).await?,
        "the holder is there"
    );
    let granted = async {
        let engine = bed.engine();
        let mut wait = std::pin::pin!(granted_on(engine, &next.ticket, SOON * 2));
        loop {
            tokio::select! {
                granted = &mut wait => return granted,
                () = tokio::time::sleep(held.armed.ttl / 4) => match bed.renew(&held).await? {
                    Renewal::Evicted | Renewal::Lost | Renewal::Revoked(_) => {}
                    other => return Err(Failure::new(format!("a marked lease is {other:?}"))),
                },
            }
        }
    };
    inside!(bed.renew(&held).await?, Renewal::Evicted => (), "a marked lease is evicted");
    within(
        held.armed.ttl + SOON,
        "the end of the marked lease",
        granted,
    )
    .await??;
    Ok(())
}

async fn cut_off_engine_is_unknown(bed: Bed) -> Check {
    let held = bed.hold(&bed.name("cut")?, Ask::Whole).await?;
    let Some(outage) = bed.site().outage.clone() else {
        return Err(Failure::not_applicable("nothing that could be cut off"));
    };
    outage.begin();
    let answer = within(SOON * 2, "an answer", bed.renew(&held)).await;
    outage.end();
    inside!(answer??, Renewal::Unknown(_) => Ok(()), "not known")
}

async fn dead_connection_costs_one_renewal(bed: Bed) -> Check {
    // Long enough for a busy machine, and shorter than the timeout of a request.
    const WITHIN: Duration = Duration::from_millis(700);
    let (proxies, client) = bed.proxied_client().await?;
    let held = enter_on(client.engine(), bed.claim(&bed.name("dead")?, Ask::Whole)).await?;
    let renew = async || {
        let start = BootTime::now();
        let renewal = client.engine().renew(vec![held.lease()], WITHIN);
        let mut answers = within(SOON * 2, "an answer", renewal).await?;
        let took = BootTime::now().saturating_since(start);
        // Half of it again is for a busy machine; a request's timeout is 2 s.
        ensure!(took < WITHIN * 3 / 2, "answered after {took:?}");
        ensure_eq!(answers.len(), 1, "answers");
        Ok::<_, Failure>(answers.remove(0))
    };
    inside!(renew().await?, Renewal::Held(_) => (), "a living lease is held");
    proxies.silence();
    inside!(renew().await?, Renewal::Unknown(_) => (), "a dead connection is unknown");
    inside!(renew().await?, Renewal::Held(_) => Ok(()), "a new connection renews")
}
