//! What is left of locks when the server's data or its clock are not what they were.

use std::time::Duration;

use palisade::LossReason;

use super::support::{Server, line, mutex, soon, until};

const TTL: Duration = Duration::from_millis(900);

#[tokio::test]
async fn flushed_and_deleted_locks_are_lost_and_tokens_rise() {
    let Some(server) = Server::start() else {
        return;
    };
    let client = server.direct_client("").await;
    for command in [&["FLUSHALL"][..], &["DEL", "palisade:gone"]] {
        let hold = mutex(&client, "gone", TTL).lock().await.unwrap();
        let other = server.direct_client("").await;
        let next = mutex(&other, "gone", TTL);
        let waiter = tokio::spawn(async move { next.lock().await });
        server.ask(command);
        assert_eq!(
            soon("the loss", hold.lost()).await.reason,
            LossReason::Taken
        );
        let next = soon("the next", waiter).await.unwrap().unwrap();
        assert!(
            next.token() > hold.token(),
            "{} after {}",
            next.token(),
            hold.token()
        );
        next.release().await.unwrap();
    }
}

/// The server dies and comes back with nothing, while one holds and another waits: the holder is
/// told, the waiter starts over and is granted, and the token is greater.
#[tokio::test]
async fn a_server_that_comes_back_empty_has_lost_the_locks_and_no_token_falls() {
    let Some(server) = Server::with(&["--appendonly", "no"]) else {
        return;
    };
    let (one, two) = (
        server.direct_client("").await,
        server.direct_client("").await,
    );
    // Long enough that the hold outlives the restart, so that it is the renewal that tells.
    let ttl = Duration::from_secs(6);
    let hold = mutex(&one, "forgotten", ttl).lock().await.unwrap();
    let next = mutex(&two, "forgotten", ttl);
    let waiter = tokio::spawn(async move { next.lock().await });
    until("a waiter", async || {
        line(&one, "forgotten")
            .await
            .is_some_and(|line| line.waiters.len() == 1)
    })
    .await;
    server.running.nodes()[0].restart().unwrap();
    assert_eq!(server.ask(&["DBSIZE"]), "0");
    let told = async { soon("the loss", hold.lost()).await };
    let granted = async { soon("the next", waiter).await.unwrap().unwrap() };
    let (loss, next) = tokio::join!(told, granted);
    // On a slow machine the deadline may come first.
    assert!(
        matches!(loss.reason, LossReason::Taken | LossReason::Expired),
        "{loss:?}"
    );
    assert!(!hold.is_valid());
    assert!(next.token() > hold.token(), "{next:?} after {hold:?}");
    // The old holder's release is late, and leaves the new one alone.
    assert!(hold.release().await.is_err());
    assert_eq!(
        server.ask(&["GET", "palisade:forgotten"]),
        next.claim().to_string()
    );
    next.release().await.unwrap();
}

/// The last token is ahead of the clock, as after a clock that was set back: tokens go on from
/// there, for those who find the line idle and for those who waited.
#[tokio::test]
async fn tokens_rise_when_the_clock_was_set_back() {
    let Some(server) = Server::start() else {
        return;
    };
    let client = server.direct_client("").await;
    let lock = mutex(&client, "back", Duration::from_secs(30));
    let before = lock.lock().await.unwrap();
    let ahead = before.token().0 + 3_600_000_000;
    before.release().await.unwrap();
    server.ask(&["SET", "{palisade:back}:palisade", &ahead.to_string()]);
    for step in [1, 3] {
        let hold = lock.lock().await.unwrap();
        assert_eq!(hold.token().0, ahead + step);
        let next = mutex(&client, "back", Duration::from_secs(30));
        let waiter = tokio::spawn(async move { next.lock().await });
        until("a waiter", async || {
            line(&client, "back")
                .await
                .is_some_and(|line| line.waiters.len() == 1)
        })
        .await;
        hold.release().await.unwrap();
        let next = soon("the next", waiter).await.unwrap().unwrap();
        assert_eq!(next.token().0, ahead + step + 1);
        next.release().await.unwrap();
    }
}

/// Whoever leaves grants to the first whose lease lasts, in the same step.
#[tokio::test]
async fn a_waiter_whose_lease_has_ended_is_passed_over() {
    let Some(server) = Server::start() else {
        return;
    };
    let client = server.direct_client("").await;
    let ttl = Duration::from_secs(60);
    let hold = mutex(&client, "ended", ttl).lock().await.unwrap();
    let mut waiters = Vec::new();
    for count in 1..=2 {
        let next = mutex(&client, "ended", ttl);
        waiters.push(tokio::spawn(async move { next.lock().await.unwrap() }));
        until("a waiter", async || {
            let line = line(&client, "ended").await;
            line.is_some_and(|line| line.waiters.len() == count)
        })
        .await;
    }
    let waiting = line(&client, "ended").await.unwrap().waiters;
    let leases = "{palisade:ended}:palisade:leases";
    assert_eq!(
        server.ask(&["ZADD", leases, "XX", "CH", "1", &waiting[0].id]),
        "1"
    );
    hold.release().await.unwrap();
    assert_eq!(server.ask(&["GET", "palisade:ended"]), waiting[1].id);
    waiters.into_iter().for_each(|waiter| waiter.abort());
}
