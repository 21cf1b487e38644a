//! Until when a hold is valid, and what moves that.

use crate::support::{Fault, Faulty, ms, until};
use palisade::BootTime;

/// The deadline counts from before the request was sent, not from its answer.
#[tokio::test]
async fn the_deadline_counts_from_before_the_request() {
    let (engine, client) = Faulty::client(ms(2_000)).await;
    engine.enter.set([Fault::Late(ms(1_000))], Fault::Pass);
    // A renewal is due as soon as the late answer arrives.
    engine.renew.set([], Fault::Hang);
    let before = BootTime::now();
    let hold = client.mutex("x").lock().await.unwrap();
    // The ttl less the margin is 1.8 s. Counted from the answer it would end a second later.
    let counted = hold.deadline().saturating_since(before);
    assert!(counted < ms(1_800 + 900), "{counted:?}");
}

/// A renewal counts from before it was sent, too.
#[tokio::test]
async fn the_deadline_of_a_renewal_counts_from_before_the_request() {
    let (engine, client) = Faulty::client(ms(3_000)).await;
    engine.renew.set([Fault::Late(ms(500))], Fault::Hang);
    let hold = client.mutex("x").lock().await.unwrap();
    let first = hold.deadline();
    until(async || hold.deadline() != first).await;
    // Now is when the answer came: the margin is 300 ms, and the answer took 500 ms.
    assert!(
        hold.remaining() < ms(3_000 - 300 - 400),
        "{:?}",
        hold.remaining()
    );
}

#[tokio::test]
async fn renewal_comes_back_after_the_engine_was_away_for_most_of_the_ttl() {
    let (engine, client) = Faulty::client(ms(3_000)).await;
    engine.renew.set([], Fault::Refuse);
    let hold = client.mutex("x").lock().await.unwrap();
    let first = hold.deadline();
    let away_until = BootTime::from_nanos(first.as_nanos() - ms(700).as_nanos() as u64);
    tokio::time::sleep(away_until.remaining()).await;
    engine.renew.set([], Fault::Pass);
    until(async || !(hold.deadline() <= first && hold.is_valid())).await;
    assert!(hold.is_valid(), "the engine was back in time");
    hold.release().await.unwrap();
}
