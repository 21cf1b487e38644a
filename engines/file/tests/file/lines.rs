//! Lines, within one process.

use futures_util::StreamExt;
use palisade::engine::{Alarm, Amended, Amendment, Left};
use palisade::report::Scope;
use palisade::{ErrorKind, Eviction};

use super::*;

#[tokio::test]
async fn a_line_is_served_in_order_with_rising_counts() {
    let (_dir, engine) = store().await;
    let mut holder = hold(&engine, "a").await;
    let mut last = holder.sequence;
    let mut waiters = Vec::new();
    for _ in 0..5 {
        let (ticket, sequence) = enter(&engine, claim("a", Ask::Whole)).await;
        assert_eq!(sequence, None);
        waiters.push(ticket);
    }
    for waiter in waiters {
        let wait = pushed(&engine, &waiter);
        let leave = engine.leave(holder);
        let (place, left) = tokio::join!(wait, leave);
        assert_eq!(left.unwrap(), Left::Done);
        let Place::Held { sequence } = place else {
            panic!("{place:?}");
        };
        assert!(sequence > last);
        last = sequence;
        holder = Ticket { sequence, ..waiter };
    }
    assert_eq!(engine.leave(holder.clone()).await.unwrap(), Left::Done);
    assert_eq!(engine.leave(holder).await.unwrap(), Left::Absent);
    let lines = engine.survey(Scope::Prefix(String::new())).await.unwrap();
    assert_eq!(lines, []);
}

#[tokio::test]
async fn a_claim_that_does_not_queue_leaves_no_trace() {
    let (_dir, engine) = store().await;
    let held = hold(&engine, "a").await;
    let impatient = Claim {
        queue: false,
        ..claim("a", Ask::Whole)
    };
    let answer = engine.enter(Arc::new(impatient)).await.unwrap();
    assert!(matches!(answer, Entered::Busy));
    let lines = engine.survey(Scope::Line(held.name)).await.unwrap();
    assert_eq!((lines[0].holders.len(), lines[0].waiters.len()), (1, 0));
}

#[tokio::test]
async fn the_same_claim_has_one_place_and_one_that_was_left_has_none() {
    let (_dir, engine) = store().await;
    let same = claim("a", Ask::Whole);
    let first = enter(&engine, same.clone()).await;
    let again = enter(&engine, same).await;
    assert_eq!(first.1, again.1);
    let late = claim("a", Ask::Whole);
    let unknown = Ticket::own(late.name.clone(), late.id);
    assert_eq!(engine.leave(unknown).await.unwrap(), Left::Absent);
    let answer = engine.enter(Arc::new(late)).await.unwrap();
    assert!(matches!(answer, Entered::Busy));
    // Another incarnation is not left.
    let other = Ticket {
        sequence: first.0.sequence + 1,
        ..first.0.clone()
    };
    assert_eq!(engine.leave(other).await.unwrap(), Left::Absent);
    assert_eq!(engine.leave(first.0).await.unwrap(), Left::Done);
}

#[tokio::test]
async fn readers_and_permits_share_but_not_one_line() {
    let (_dir, engine) = store().await;
    let permit = |weight| Ask::Part {
        weight,
        capacity: 3,
    };
    assert!(enter(&engine, claim("r", Ask::READ)).await.1.is_some());
    assert!(enter(&engine, claim("r", Ask::READ)).await.1.is_some());
    assert!(enter(&engine, claim("r", Ask::Whole)).await.1.is_none());
    assert!(enter(&engine, claim("r", Ask::READ)).await.1.is_none());
    let error = engine
        .enter(Arc::new(claim("r", permit(1))))
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::CapacityMismatch);
    assert!(enter(&engine, claim("p", permit(2))).await.1.is_some());
    assert!(enter(&engine, claim("p", permit(2))).await.1.is_none());
    assert!(enter(&engine, claim("p", permit(1))).await.1.is_none());
}

#[tokio::test]
async fn a_lease_that_is_not_renewed_ends_and_stays_ended() {
    let (_dir, engine) = store().await;
    let short = Claim {
        ttl: Duration::from_millis(150),
        ..claim("a", Ask::Whole)
    };
    let (held, _) = enter(&engine, short).await;
    let (waiter, _) = enter(&engine, claim("a", Ask::Whole)).await;
    assert!(matches!(renew(&engine, &held).await, Renewal::Held(_)));
    let before = BootTime::now();
    let place = pushed(&engine, &waiter).await;
    assert!(matches!(place, Place::Held { .. }), "{place:?}");
    let waited = BootTime::now().saturating_since(before);
    assert!(waited >= Duration::from_millis(140), "{waited:?}");
    assert!(waited < Duration::from_secs(10), "{waited:?}");
    assert!(matches!(
        engine
            .renew(
                vec![Lease::in_a_test(&held), Lease::in_a_test(&waiter)],
                Duration::from_secs(2)
            )
            .await[..],
        [Renewal::Lost, Renewal::Held(_)]
    ));
    let until = BootTime::now();
    assert_eq!(engine.wait(held, until).await.unwrap(), Place::Gone);
}

#[tokio::test]
async fn a_hold_is_amended() {
    let (_dir, engine) = store().await;
    let writer = hold(&engine, "a").await;
    let (reader, sequence) = enter(&engine, claim("a", Ask::READ)).await;
    assert_eq!(sequence, None);
    let downgrade = engine.amend(writer.clone(), Amendment::Ask(Ask::READ));
    assert_eq!(downgrade.await.unwrap(), Amended::Done);
    assert!(matches!(pushed(&engine, &reader).await, Place::Held { .. }));
    let upgrade = || engine.amend(writer.clone(), Amendment::Ask(Ask::Whole));
    assert_eq!(upgrade().await.unwrap(), Amended::Busy);
    engine.leave(reader).await.unwrap();
    assert_eq!(upgrade().await.unwrap(), Amended::Done);
    let say = |value: &str| engine.amend(writer.clone(), Amendment::Value(value.into()));
    assert_eq!(say("first, and rather long").await.unwrap(), Amended::Done);
    assert_eq!(say("second").await.unwrap(), Amended::Done);
    let lines = engine
        .survey(Scope::Line(writer.name.clone()))
        .await
        .unwrap();
    let holder = &lines[0].holders[0];
    assert_eq!(holder.value.as_deref(), Some("second"));
    assert_eq!(holder.sequence, Some(writer.sequence));
    assert_eq!(holder.owner.as_ref().unwrap().owner, "tester");
    engine.leave(writer.clone()).await.unwrap();
    assert_eq!(say("third").await.unwrap(), Amended::Gone);
}

#[tokio::test]
async fn an_operator_marks_or_removes() {
    let (_dir, engine) = store().await;
    let mut alarms = engine.alarms();
    let held = hold(&engine, "a").await;
    let (waiter, _) = enter(&engine, claim("a", Ask::Whole)).await;
    let evict = |id: String, how| engine.evict(held.name.clone(), id, how);
    assert!(
        !evict(ClaimId::random().to_string(), Eviction::Mark)
            .await
            .unwrap()
    );
    assert!(!evict("not an id".into(), Eviction::Remove).await.unwrap());
    assert!(evict(held.claim.to_string(), Eviction::Mark).await.unwrap());
    assert_eq!(alarms.next().await, Some(Alarm::Lease(held.lease)));
    assert!(matches!(renew(&engine, &held).await, Renewal::Evicted));
    let wait = pushed(&engine, &waiter);
    let remove = evict(held.claim.to_string(), Eviction::Remove);
    let (place, removed) = tokio::join!(wait, remove);
    assert!(removed.unwrap());
    assert!(matches!(place, Place::Held { .. }), "{place:?}");
    assert!(matches!(renew(&engine, &held).await, Renewal::Lost));
}

#[tokio::test]
async fn a_waiter_that_is_removed_hears_of_it() {
    let (_dir, engine) = store().await;
    let held = hold(&engine, "a").await;
    let (waiter, _) = enter(&engine, claim("a", Ask::Whole)).await;
    let wait = pushed(&engine, &waiter);
    let remove = engine.evict(held.name, waiter.claim.to_string(), Eviction::Remove);
    let (place, removed) = tokio::join!(wait, remove);
    assert!(removed.unwrap());
    assert_eq!(place, Place::Gone);
}

#[tokio::test]
async fn a_watch_yields_for_its_scope_and_not_for_another() {
    let (_dir, engine) = store().await;
    let mut watch = engine.watch(Scope::Prefix("jobs/".into()));
    let mut other = engine.watch(Scope::Line(Name::new("elsewhere").unwrap()));
    watch.next().await.unwrap().unwrap();
    other.next().await.unwrap().unwrap();
    let (changed, held) = tokio::join!(watch.next(), hold(&engine, "jobs/a"));
    changed.unwrap().unwrap();
    let (changed, _) = tokio::join!(watch.next(), engine.leave(held));
    changed.unwrap().unwrap();
    let silence = tokio::time::timeout(Duration::from_millis(50), other.next()).await;
    assert!(silence.is_err());
}

#[tokio::test]
async fn a_survey_shows_its_namespace_and_prefix_only() {
    let (dir, engine) = store().await;
    let bare = try_open(dir.path(), "namespace=").await.unwrap();
    for name in ["jobs/a", "jobs/b", "jobs"] {
        hold(&engine, name).await;
    }
    hold(&bare, "jobs/a").await;
    let names = |lines: Vec<palisade::report::LineReport>| {
        lines.into_iter().map(|line| line.name).collect::<Vec<_>>()
    };
    let scope = Scope::Prefix("jobs/".into());
    let lines = engine.survey(scope.clone()).await.unwrap();
    assert_eq!(names(lines), ["jobs/a", "jobs/b"]);
    assert_eq!(names(bare.survey(scope).await.unwrap()), ["jobs/a"]);
    let lines = engine.survey(Scope::Prefix(String::new())).await.unwrap();
    assert_eq!(lines.len(), 3);
}

#[tokio::test]
async fn the_longest_names_and_values_fit() {
    let dir = tempfile::tempdir().unwrap();
    let namespace = "n".repeat(255);
    let engine = try_open(dir.path(), &format!("namespace={namespace}"))
        .await
        .unwrap();
    // Two that differ only where their files' names are cut.
    let long = "x".repeat(255);
    let other = format!("{}y", &long[1..]);
    let held = hold(&engine, &long).await;
    hold(&engine, &other).await;
    let value = "v".repeat(1 << 20);
    let mut tickets = Vec::new();
    for _ in 0..5 {
        let big = Claim {
            value: Some(value.clone()),
            ..claim("big", Ask::READ)
        };
        tickets.push(enter(&engine, big).await.0);
    }
    let lines = engine.survey(Scope::Prefix(String::new())).await.unwrap();
    let mut names: Vec<_> = lines.iter().map(|line| line.name.as_str()).collect();
    names.sort_unstable();
    assert_eq!(names, ["big", &long, &other]);
    let lines = engine.survey(Scope::Prefix("xx".into())).await.unwrap();
    assert_eq!(lines.len(), 2);
    let file = engine.key(&tickets[0]).unwrap();
    for ticket in tickets {
        assert_eq!(engine.leave(ticket).await.unwrap(), Left::Done);
    }
    assert!(std::fs::metadata(file).unwrap().len() < 40 << 20);
    assert_eq!(engine.leave(held).await.unwrap(), Left::Done);
}

#[tokio::test]
async fn a_line_can_be_read_with_cat_and_its_file_goes_with_the_last_client() {
    let (_dir, engine) = store().await;
    let held = hold(&engine, "jobs/nightly").await;
    let file = engine.key(&held).unwrap();
    assert!(file.ends_with("/lines/palisade,jobs%2fnightly"), "{file}");
    let text = std::fs::read_to_string(&file).unwrap();
    for word in ["jobs/nightly", "tester", &held.claim.to_string()] {
        assert!(text.contains(word), "{word}: {text}");
    }
    assert_eq!(engine.leave(held).await.unwrap(), Left::Done);
    drop(engine);
    assert!(!Path::new(&file).exists());
}

/// Other processes go by the file: a grant, another part and a mark are in it at once.
#[tokio::test]
async fn whatever_changes_in_a_line_is_in_its_file() {
    let (_dir, engine) = store().await;
    let held = hold(&engine, "a").await;
    let (next, _) = enter(&engine, claim("a", Ask::Whole)).await;
    let file = engine.key(&held).unwrap();
    // Part, sequence and flags in the line of a claim, in the body that the header names.
    let said = |ticket: &Ticket| {
        let text = std::fs::read_to_string(&file).unwrap();
        let head: Vec<&str> = text[..128].split(' ').collect();
        let number = |at: usize| usize::from_str_radix(head[at], 16).unwrap();
        let body = &text[number(6)..number(6) + number(8)];
        let id = ticket.claim.to_string();
        let line = body.lines().find(|line| line.starts_with(&id)).unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        [words[3], words[4], words[7]].map(str::to_owned)
    };
    assert_eq!(said(&next), ["0/0", "0", "0"]);
    engine.leave(held).await.unwrap();
    let Place::Held { sequence } = pushed(&engine, &next).await else {
        panic!("it is next");
    };
    let sequence = sequence.to_string();
    assert_eq!(said(&next), ["0/0", &sequence, "0"]);
    let downgrade = engine.amend(next.clone(), Amendment::Ask(Ask::READ));
    assert_eq!(downgrade.await.unwrap(), Amended::Done);
    assert_ne!(said(&next)[0], "0/0");
    let mark = engine.evict(next.name.clone(), next.claim.to_string(), Eviction::Mark);
    assert!(mark.await.unwrap());
    assert_eq!(said(&next)[1..], [sequence, "1".to_owned()]);
}

#[tokio::test]
async fn a_crowd_in_one_line_is_served_and_renewed() {
    let (_dir, engine) = store().await;
    let mut holder = hold(&engine, "crowd").await;
    let mut waiters = Vec::new();
    for _ in 0..CROWD {
        waiters.push(enter(&engine, claim("crowd", Ask::Whole)).await.0);
    }
    let leases: Vec<_> = waiters.iter().map(Lease::in_a_test).collect();
    let renewed = engine.renew(leases, Duration::from_secs(2)).await;
    let held = |renewal: &Renewal| matches!(renewal, Renewal::Held(_));
    assert!(renewed.iter().all(held), "{:?}", renewed[0]);
    for waiter in waiters.into_iter().take(50) {
        let (place, left) = tokio::join!(pushed(&engine, &waiter), engine.leave(holder));
        assert_eq!(left.unwrap(), Left::Done);
        let Place::Held { sequence } = place else {
            panic!("{place:?}");
        };
        holder = Ticket { sequence, ..waiter };
    }
}

/// As many wait in one line.
const CROWD: usize = 2000;

/// More lines than files may be open, held by one process.
#[tokio::test]
async fn many_names_are_held_and_renewed_with_few_open_files() {
    let (dir, engine) = store().await;
    let mut held = Vec::new();
    for name in 0..1500 {
        held.push(hold(&engine, &format!("name-{name}")).await);
    }
    let open_files = std::fs::read_dir("/proc/self/fd").unwrap().count();
    assert!(open_files < 1000, "{open_files}");
    let leases: Vec<_> = held.iter().map(Lease::in_a_test).collect();
    let renewed = engine.renew(leases, Duration::from_secs(2)).await;
    assert!(renewed.iter().all(|r| matches!(r, Renewal::Held(_))));
    // What is not in the line of another is not renewed either.
    for ticket in held {
        assert_eq!(engine.leave(ticket).await.unwrap(), Left::Done);
    }
    drop(engine);
    let left = std::fs::read_dir(dir.path().join("lines")).unwrap().count();
    assert_eq!(left, 0);
}

#[tokio::test]
async fn many_tombstones_are_swept_when_they_end() {
    let (_dir, engine) = store().await;
    let name = Name::new("a").unwrap();
    for _ in 0..500 {
        let unknown = Ticket::own(name.clone(), ClaimId::random());
        assert_eq!(engine.leave(unknown).await.unwrap(), Left::Absent);
    }
    hold(&engine, "a").await;
}
