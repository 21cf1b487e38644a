//! `Entry`, for code that acquires on behalf of others: one claim, from its enter to its end.

use std::sync::mpsc;

use crate::support::{Fault, Faulty, LEFT, SOON, ms, until, within};
use palisade::engine::{Ask, ClaimId, Entry, Progress};
use palisade::report::{Owner, Scope};
use palisade::{Client, Eviction, LossReason, Name, Which};

fn entry(client: &Client, name: &str) -> Entry {
    let owner = Owner::here("test", None);
    let line = client.line(name, Ask::Whole);
    line.entry(ClaimId::random(), owner, true).unwrap()
}

/// It left a deadline without a lease, at which the keeper looped for ever with its mutex held.
#[tokio::test]
async fn entering_again_after_a_success_changes_nothing() {
    let (engine, client) = Faulty::client(ms(400)).await;
    let mut twice = entry(&client, "x");
    for _ in 0..3 {
        assert!(matches!(twice.enter().await.unwrap(), Progress::Held));
        tokio::time::sleep(ms(20)).await;
    }
    assert_eq!(engine.in_line("x").await, 1);
    let before = twice.deadline_reader();
    let hold = twice.into_hold().unwrap().unwrap();
    assert_eq!(before(), hold.deadline(), "one validity, whoever reads it");
    let renewals = engine.renew.calls();
    until(async || engine.renew.calls() >= renewals + 4).await;
    assert!(hold.is_valid());
    hold.release().await.unwrap();
    // Past all deadlines the keeper still answers. It is asked on a thread that may hang.
    tokio::time::sleep(ms(500)).await;
    let (done, answers) = mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let locked = runtime.block_on(client.mutex("y").lock());
        done.send(locked.is_ok()).unwrap();
    });
    assert_eq!(answers.recv_timeout(SOON), Ok(true));
}

/// A waiting entry that asks again while the engine is away keeps its place.
#[tokio::test]
async fn an_error_on_entering_again_keeps_the_place() {
    let (engine, client) = Faulty::client(ms(900)).await;
    let hold = client.mutex("x").lock().await.unwrap();
    let mut waits = entry(&client, "x");
    assert!(matches!(waits.enter().await.unwrap(), Progress::Waiting));
    engine.enter.set([Fault::Refuse], Fault::Pass);
    waits.enter().await.unwrap_err();
    let renewals = engine.renew.calls();
    until(async || engine.renew.calls() >= renewals + 6).await;
    assert!(matches!(waits.enter().await.unwrap(), Progress::Waiting));
    hold.release().await.unwrap();
    within(SOON, async {
        while !matches!(waits.wait().await.unwrap(), Progress::Held) {}
    })
    .await;
    assert_eq!(engine.in_line("x").await, 1);
}

/// What was lost stays lost: the same id must not take a second place.
#[tokio::test]
async fn an_entry_that_was_lost_stays_lost() {
    let (engine, client) = Faulty::client(LEFT).await;
    let mut gone = entry(&client, "x");
    assert!(matches!(gone.enter().await.unwrap(), Progress::Held));
    let name = Name::new("x").unwrap();
    let evicted = client.evict(&name, Which::Holders, Eviction::Remove);
    assert!(evicted.await.unwrap());
    let lost = gone.loss_reader();
    until(async || lost().is_some()).await;
    let enters = engine.enter.calls();
    assert!(matches!(
        gone.enter().await.unwrap(),
        Progress::Lost(loss) if loss.reason == LossReason::Taken
    ));
    assert_eq!(engine.enter.calls(), enters);
    let lines = client.survey(Scope::Line(name)).await.unwrap();
    assert_eq!(lines, []);
}
