//! What `Engine::renew` promises.

use std::time::Duration;

use palisade::engine::Ask::Whole;
use palisade::engine::{Lease, Renewal};
use palisade::{BootTime, Eviction};

use super::fixture::assert_is;
use super::{Fixture, SOON, cases, needs, within};

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

async fn renewed_lease_outlives_its_ttl(fx: Fixture) {
    let line = fx.line("renewed");
    let held = line.brief().held(Whole).await;
    let end = held.armed.sent + held.armed.ttl * 2;
    let mut last = held.armed.sent;
    while !end.has_passed() {
        tokio::time::sleep(held.armed.ttl / 4).await;
        let before = BootTime::now();
        let renewal = held.renew().await;
        let Renewal::Held(armed) = renewal else {
            panic!("a living lease is {renewal:?}");
        };
        let (granted, ttl) = (fx.granted(fx.short_ttl()), armed.ttl);
        assert!(granted.contains(&ttl), "{ttl:?} after a renewal");
        let asked = before..=BootTime::now();
        assert!(asked.contains(&armed.sent), "armed at another time");
        assert!(armed.sent > last, "armed no later than before");
        last = armed.sent;
        line.busy(Whole).await;
    }
    assert_eq!(
        line.shown().await.holders[0].sequence,
        Some(held.sequence())
    );
}

async fn waiting_claim_is_renewed_too(fx: Fixture) {
    let line = fx.line("renewed");
    let first = line.held(Whole).await;
    let next = line.brief().waiting(Whole).await;
    let end = next.armed.sent + next.armed.ttl * 2;
    while !end.has_passed() {
        tokio::time::sleep(next.armed.ttl / 4).await;
        assert_is!(next.renew().await, Renewal::Held(_));
    }
    first.leave().await;
    next.granted().await;
}

async fn many_leases_are_answered_in_order(fx: Fixture) {
    let mut all = Vec::new();
    for index in 0..6 {
        all.push(fx.line(&format!("many-{index}")).held(Whole).await);
    }
    all[0].must_own_lease();
    for gone in [1, 4] {
        all[gone].leave().await;
    }
    let leases: Vec<Lease> = all.iter().map(|seat| seat.lease()).collect();
    let answers = fx.engine().renew(leases, Duration::from_secs(2)).await;
    let shown = answers.iter().map(|answer| match answer {
        Renewal::Held(_) => "held",
        Renewal::Lost => "lost",
        _ => "other",
    });
    let expected = ["held", "lost", "held", "held", "lost", "held"];
    assert_eq!(shown.collect::<Vec<_>>(), expected, "{answers:?}");
    let none = fx.engine().renew(Vec::new(), Duration::from_secs(2)).await;
    assert!(none.is_empty(), "answers to no question");
}

async fn ended_lease_is_lost_and_stays_lost(fx: Fixture) {
    let line = fx.line("ended");
    let held = line.brief().held(Whole).await;
    held.must_own_lease();
    let end = async {
        while !held.ends().has_passed() || line.length().await.0 > 0 {
            tokio::time::sleep(held.armed.ttl / 20).await;
        }
    };
    within(held.after_its_end(), "the end of the lease", end).await;
    for _ in 0..3 {
        assert_is!(held.renew().await, Renewal::Lost);
    }
    line.until_empty().await;
    line.held(Whole).await;
}

async fn left_lease_is_lost(fx: Fixture) {
    let line = fx.line("left");
    let held = line.held(Whole).await;
    held.must_own_lease();
    held.leave().await;
    assert_is!(held.renew().await, Renewal::Lost);
    line.until_empty().await;
}

async fn late_renewal_leaves_the_next_holder_alone(fx: Fixture) {
    let line = fx.line("takeover");
    let held = line.held(Whole).await;
    held.must_own_lease();
    held.leave().await;
    let other = fx.other_client().await;
    let next = fx.line_on(&other, "takeover").brief().held(Whole).await;
    let waiting = line.waiting(Whole).await;
    assert_is!(held.renew().await, Renewal::Lost);
    assert_eq!(line.ids().await.0, [next.id()]);
    // The next one's lease was not extended either.
    waiting.granted_within(next.after_its_end()).await;
}

async fn another_incarnation_is_lost(fx: Fixture) {
    let held = fx.line("incarnation").held(Whole).await;
    held.must_own_lease();
    assert_is!(held.another_incarnation().renew().await, Renewal::Lost);
    assert_is!(held.renew().await, Renewal::Held(_));
}

async fn marked_ticket_is_not_extended(fx: Fixture) {
    let line = fx.line("marked");
    let held = line.brief().held(Whole).await;
    held.must_own_lease();
    let next = line.waiting(Whole).await;
    assert!(held.evict(Eviction::Mark).await, "the holder is there");
    assert_is!(held.renew().await, Renewal::Evicted);
    let mut granted = std::pin::pin!(next.granted_within(held.after_its_end()));
    loop {
        tokio::select! {
            _ = &mut granted => return,
            () = tokio::time::sleep(held.armed.ttl / 4) => assert_is!(
                held.renew().await,
                Renewal::Evicted | Renewal::Lost | Renewal::Revoked(_)
            ),
        }
    }
}

async fn cut_off_engine_is_unknown(fx: Fixture) {
    let held = fx.line("cut").held(Whole).await;
    let cut_off = fx.site().cut_off.clone().unwrap();
    cut_off.begin();
    let answer = tokio::time::timeout(SOON * 2, held.renew()).await;
    cut_off.end();
    assert_is!(answer.expect("an answer"), Renewal::Unknown(_));
}

async fn dead_connection_costs_one_renewal(fx: Fixture) {
    // Long enough for a busy machine, and shorter than the timeout of a request.
    const WITHIN: Duration = Duration::from_millis(700);
    let (proxies, client) = fx.proxied_client().await;
    let held = fx.line_on(&client, "dead").held(Whole).await;
    let renew = async || {
        let start = BootTime::now();
        let renewal = client.engine().renew(vec![held.lease()], WITHIN);
        let mut answers = within(SOON * 2, "an answer", renewal).await;
        let took = BootTime::now().saturating_since(start);
        // What exceeds `WITHIN` allows for a busy machine; a request's timeout is 2 s.
        assert!(
            took < Duration::from_millis(1_900),
            "answered after {took:?}"
        );
        assert_eq!(answers.len(), 1, "answers");
        answers.remove(0)
    };
    assert_is!(renew().await, Renewal::Held(_));
    // An engine with several connections may have been making one: that one is not silent.
    for tries in 1.. {
        proxies.silence();
        match renew().await {
            Renewal::Unknown(_) => break,
            other if tries < 10 => assert_is!(other, Renewal::Held(_)),
            other => panic!("silence costs nothing: {other:?}"),
        }
    }
    assert_is!(renew().await, Renewal::Held(_));
}
