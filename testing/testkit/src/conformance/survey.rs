//! What `Engine::survey` and `Engine::watch` promise.

use futures_util::StreamExt;
use palisade::engine::Ask::{self, Whole};
use palisade::engine::Claim;
use palisade::report::{Owner, Scope};

use super::fixture::free;
use super::{Fixture, cases, needs, soon};

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

async fn holders_first_then_waiters(fx: Fixture) {
    let line = fx.line("order");
    let held = line.held(Whole).await;
    let mut waiting = Vec::new();
    for _ in 0..4 {
        waiting.push(line.waiting(Whole).await.id());
    }
    let shown = line.shown().await;
    assert_eq!(shown.name, line.name.as_str());
    assert_eq!(shown.capacity, None);
    assert_eq!(line.ids().await, (vec![held.id()], waiting));
}

async fn readers_and_writers_are_shown_in_order(fx: Fixture) {
    let line = fx.line("order");
    let mut expected = Vec::new();
    for ask in [Ask::READ, Ask::READ, Whole, Ask::READ, Whole] {
        let seat = line.enter(line.claim(ask)).await;
        expected.push((seat.id(), ask));
    }
    assert_eq!(line.length().await, (2, 3));
    let line = line.shown().await;
    let all = line.holders.into_iter().chain(line.waiters);
    let shown: Vec<_> = all.map(|claim| (claim.id, claim.ask)).collect();
    assert_eq!(shown, expected);
}

async fn owner_is_shown_as_it_was_given(fx: Fixture) {
    let line = fx.line("owner");
    let mut owner = Owner::here("somebody \"else\"", Some("a label, ünïcode".into()));
    owner.traceparent = Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".into());
    let claim = Claim {
        owner: owner.clone(),
        ..line.claim(Whole)
    };
    line.enter(claim).await;
    let holder = line.shown().await.holders.remove(0);
    // A gateway adds this field.
    owner.principal = holder
        .owner
        .as_ref()
        .and_then(|owner| owner.principal.clone());
    assert_eq!(holder.owner.as_ref(), Some(&owner));
    assert!(!holder.evicted, "nobody evicts it");
    if let Some(expires_in) = holder.expires_in {
        let fresh = fx.long_ttl() / 2..=fx.long_ttl();
        assert!(fresh.contains(&expires_in), "{expires_in:?}");
    }
}

async fn ended_lease_is_not_shown(fx: Fixture) {
    let line = fx.line("ended");
    let held = line.brief().held(Whole).await;
    held.must_own_lease();
    assert_eq!(line.length().await, (1, 0));
    tokio::time::sleep(held.ends().remaining()).await;
    line.until_empty().await;
}

async fn empty_line_is_not_shown(fx: Fixture) {
    let line = fx.line("empty");
    line.held(Whole).await.leave().await;
    for scope in [Scope::Line(line.name), Scope::Prefix(String::new())] {
        let lines = fx.engine().survey(scope).await.unwrap();
        assert!(lines.is_empty(), "shown: {lines:?}");
    }
}

async fn shown(fx: &Fixture, prefix: &str) -> Vec<String> {
    let lines = fx.engine().survey(Scope::Prefix(prefix.into())).await;
    let mut names: Vec<String> = lines.unwrap().into_iter().map(|line| line.name).collect();
    names.sort();
    names
}

async fn prefix_shows_what_begins_so(fx: Fixture) {
    for name in ["job/a", "job/b", "jobs", "other"] {
        fx.line(name).held(Whole).await;
    }
    assert_eq!(shown(&fx, "job/").await, ["job/a", "job/b"]);
    assert_eq!(shown(&fx, "job").await, ["job/a", "job/b", "jobs"]);
    assert_eq!(shown(&fx, "").await.len(), 4, "all of them");
    assert_eq!(shown(&fx, "job/a/").await.len(), 0, "none of them");
    assert_eq!(fx.line("job/a").length().await, (1, 0));
}

async fn odd_names_come_back_as_they_went_in(fx: Fixture) {
    let odd =
        "a/b|a//b|/|.|..|{x}|a:b|a b|%2F|%|*|?|[a]|a\\b|ünïcode/🔒|a#b|a&b=c|'|\"|UPPER|upper|_|-";
    let mut names: Vec<&str> = odd.split('|').collect();
    for name in &names {
        fx.line(name).held(Whole).await;
    }
    names.sort_unstable();
    assert_eq!(shown(&fx, "").await, names);
    for name in names {
        fx.line(name).busy(Whole).await;
    }
}

async fn long_names_are_told_apart(fx: Fixture) {
    let longest = fx.longest_name();
    let long = "x".repeat(longest - 1);
    let two_bytes = "é".repeat(longest / 2);
    let mut names = [format!("{long}1"), format!("{long}2"), two_bytes];
    for name in &names {
        fx.line(name).held(Whole).await;
    }
    names.sort_unstable();
    assert_eq!(shown(&fx, "").await, names);
}

async fn namespaces_are_apart(fx: Fixture) {
    let line = fx.line("apart");
    line.held(Whole).await;
    let other = fx.client_of(&fx.site().fresh_url()).await.unwrap();
    let _hold = free(other.mutex("apart").try_lock().await);
    assert_eq!(line.length().await, (1, 0));
    let there = other.survey(Scope::Prefix(String::new())).await.unwrap();
    assert_eq!(there.len(), 1, "lines there");
}

async fn watch_tells_of_changes(fx: Fixture) {
    let line = fx.line("watched");
    let mut changes = fx.engine().watch(Scope::Line(line.name.clone()));
    let mut next = async |what: &str| {
        let change = soon(what, changes.next()).await;
        change.expect("the watch ended").unwrap();
    };
    // A watch may start with a hint, so accept any number of hints until each change is seen.
    let enter = async {
        let seat = line.held(Whole).await;
        while line.length().await.0 == 0 {
            tokio::task::yield_now().await;
        }
        seat
    };
    let (seat, ()) = tokio::join!(enter, next("a hint of the enter"));
    tokio::join!(seat.leave(), next("a hint of the leave"));
}

async fn watch_tells_of_changes_by_another_client(fx: Fixture) {
    let other = fx.other_client().await;
    let mut changes = fx.engine().watch(Scope::Prefix("w".into()));
    // Each round must be reported: the hints of one round are drained before the next one begins.
    for round in 0..3 {
        let name = format!("watched-{round}");
        let mutex = other.mutex(&name);
        let told = async {
            loop {
                let change = changes.next().await;
                change.expect("the watch ended").unwrap();
                if fx.line(&name).length().await.0 > 0 {
                    return;
                }
            }
        };
        let (hold, ()) = tokio::join!(mutex.lock(), soon("a hint", told));
        hold.unwrap().release().await.unwrap();
    }
}
