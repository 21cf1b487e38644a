//! What happens to locks when the server's data or clock has changed.

use std::time::Duration;

use palisade::{ErrorKind, LossReason};

use super::support::{Server, fails, line, mutex, soon, until, until_one_waits};

const TTL: Duration = Duration::from_millis(900);

#[tokio::test]
async fn flushed_and_deleted_locks_are_lost_and_tokens_rise() {
    let server = need!(Server::start());
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

/// The server dies and comes back without data, while one client holds and another waits: the
/// holder is told, the waiter starts over and is granted, and its token is greater.
#[tokio::test]
async fn a_server_that_comes_back_empty_has_lost_the_locks_and_no_token_falls() {
    let server = need!(Server::with(&["--appendonly", "no"]));
    let (one, two) = (
        server.direct_client("").await,
        server.direct_client("").await,
    );
    // Long enough that the hold outlives the restart, so that the renewal reports the loss.
    let ttl = Duration::from_secs(6);
    let hold = mutex(&one, "forgotten", ttl).lock().await.unwrap();
    let next = mutex(&two, "forgotten", ttl);
    let waiter = tokio::spawn(async move { next.lock().await });
    until_one_waits(&one, "forgotten").await;
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
    // The old holder's release is late, and does not affect the new one.
    assert!(hold.release().await.is_err());
    assert_eq!(
        server.ask(&["GET", "palisade:forgotten"]),
        next.claim().to_string()
    );
    next.release().await.unwrap();
}

/// The last token is ahead of the clock, as after a clock was set back: tokens continue from there,
/// both on an idle line and for waiters.
#[tokio::test]
async fn tokens_rise_when_the_clock_was_set_back() {
    let server = need!(Server::start());
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
        until_one_waits(&client, "back").await;
        hold.release().await.unwrap();
        let next = soon("the next", waiter).await.unwrap().unwrap();
        assert_eq!(next.token().0, ahead + step + 1);
        next.release().await.unwrap();
    }
}

/// A leave grants the first waiter whose lease is valid, in the same step.
#[tokio::test]
async fn a_waiter_whose_lease_has_ended_is_passed_over() {
    let server = need!(Server::start());
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

const DAYS: std::ops::RangeInclusive<i64> = 6 * 86_400_000..=7 * 86_400_000;

/// Only the user's key and its records are kept, and for days, not for ever.
#[tokio::test]
async fn what_is_kept_beside_a_key_is_forgotten_after_days() {
    let server = need!(Server::start());
    let client = server.direct_client("").await;
    let lasts = |key: &str| server.ask(&["PTTL", key]).parse::<i64>().unwrap();
    let state = "{palisade:idle}:palisade";
    let hold = mutex(&client, "idle", TTL).lock().await.unwrap();
    assert!(DAYS.contains(&lasts(state)), "{}", lasts(state));
    // As after days of holding: a renewal extends the expiry.
    server.ask(&["PEXPIRE", state, "5000"]);
    until("a renewal", async || DAYS.contains(&lasts(state))).await;
    hold.release().await.unwrap();
    assert_eq!(server.ask(&["EXISTS", "palisade:idle"]), "0");
    assert!(DAYS.contains(&lasts(state)), "{}", lasts(state));

    // With readers, permits and waiters there are more keys.
    let readers = client.rwlock("idle").ttl(TTL);
    let (read, _other) = (readers.read().await.unwrap(), readers.read().await.unwrap());
    let next = mutex(&client, "idle", TTL);
    let waiter = tokio::spawn(async move { next.lock().await });
    until_one_waits(&client, "idle").await;
    let keys = server.ask(&["KEYS", "{palisade:idle}:palisade*"]);
    assert_eq!(keys.lines().count(), 5, "{keys}");
    for key in keys.lines() {
        assert!(DAYS.contains(&lasts(key)), "{key}: {}", lasts(key));
        server.ask(&["PEXPIRE", key, "5000"]);
    }
    until("renewals", async || {
        keys.lines().all(|key| DAYS.contains(&lasts(key)))
    })
    .await;
    waiter.abort();
    assert!(read.is_valid());
}

/// Records of earlier releases, which have no version, are understood: a lock that is held in them
/// is not free, and tokens continue from there.
#[tokio::test]
async fn state_without_a_version_is_read() {
    let server = need!(Server::start());
    let client = server.direct_client("").await;
    let holder = format!("{:032x}", 7);
    let token = 4_000_000_000_000_000_u64;
    let state = "{palisade:old}:palisade";
    let lock = mutex(&client, "old", Duration::from_secs(30));
    let owner = r#"{"owner":"them","host":"h","pid":1,"since":0}"#;
    let record = format!("0 0 {token} 30000 0 {holder} {owner}");
    server.ask(&["SET", "palisade:old", &holder, "PX", "30000"]);
    let stored = format!("{token} 0 1 0 0 0 0 {holder}\n{record}");
    server.ask(&["SET", state, &stored]);
    assert!(lock.try_lock().await.unwrap().is_none());
    let shown = line(&client, "old").await.unwrap();
    assert_eq!(shown.holders[0].id, holder);
    assert_eq!(shown.holders[0].sequence, Some(token));
    // The key decides: without it nobody holds.
    server.ask(&["DEL", "palisade:old"]);
    let hold = lock.lock().await.unwrap();
    assert_eq!(hold.token().0, token + 1);
    hold.release().await.unwrap();
    assert_eq!(server.ask(&["GET", state]), format!("v2 {}", token + 1));
    // An idle record of an earlier release.
    server.ask(&["SET", state, &token.to_string()]);
    let hold = lock.lock().await.unwrap();
    assert_eq!(hold.token().0, token + 1);
    hold.release().await.unwrap();
}

/// Records of a newer palisade are used if they declare themselves compatible. Otherwise they are
/// refused with advice, and the lock is not acquired.
#[tokio::test]
async fn state_of_a_newer_version_is_read_or_refused() {
    let server = need!(Server::start());
    let client = server.direct_client("").await;
    let state = "{palisade:new}:palisade";
    let lock = mutex(&client, "new", TTL);
    let holder = format!("{:032x}", 7);
    let record = format!("0 0 5 30000 0 {holder} {{}}");
    server.ask(&["SET", "palisade:new", &holder, "PX", "30000"]);
    server.ask(&[
        "SET",
        state,
        &format!("v2.3 5 0 1 0 0 0 0 {holder} more words\n{record}"),
    ]);
    assert!(lock.try_lock().await.unwrap().is_none());
    assert_eq!(line(&client, "new").await.unwrap().holders[0].id, holder);
    server.ask(&["DEL", "palisade:new"]);
    for other in ["v3 5", "v30 5 0 1 0", "v3.1 something else"] {
        server.ask(&["SET", state, other]);
        let error = fails(lock.try_lock().await, ErrorKind::Unusable);
        assert!(error.message().contains("newer"), "{error}");
        assert_eq!(server.ask(&["EXISTS", "palisade:new"]), "0");
        assert_eq!(server.ask(&["GET", state]), other);
    }
    server.ask(&["SET", state, "nonsense"]);
    let error = fails(lock.try_lock().await, ErrorKind::Unusable);
    assert!(error.message().contains(":palisade"), "{error}");
}
