//! Which waiters a look serves, and what an agent is recorded to hold.

use super::super::claim::Ask;
use super::super::owner::Owner;
use super::super::report::ClaimReport;
use super::super::ticket::LeaseStart;
#[cfg(feature = "memory")]
use super::super::url::Url;
use super::*;
#[cfg(feature = "memory")]
use crate::client::Client;

fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

fn names<const N: usize>(names: [&str; N]) -> BTreeSet<String> {
    names.map(str::to_owned).into()
}

fn validity(of: &str, ttl: Duration) -> Arc<Validity> {
    let sent = BootTime::now();
    Arc::new(Validity::new(name(of), LeaseStart { sent, ttl }, sent))
}

/// A lost hold ends by itself. So an agent that asks for the lock again is not in a circle with
/// itself, though the old place still exists.
#[test]
fn a_lost_hold_is_not_held() {
    let agent = Agents::new().named("a".into(), Vec::new(), false);
    let (lost, good) = (ClaimId::random(), ClaimId::random());
    agent.granted(lost, &validity("lost", Duration::ZERO));
    assert_eq!(agent.starts(), None);
    agent.granted(good, &validity("good", Duration::from_secs(60)));
    assert_eq!(agent.starts(), Some(names(["good"])));
    assert_eq!(agent.record(Duration::from_secs(60), true).holds, ["good"]);
    agent.left(good);
    assert_eq!(agent.starts(), None);
}

/// However many waiters are due, each look reads the lines of the one that started it.
#[cfg(feature = "memory")]
#[tokio::test]
async fn a_crowd_that_is_due_keeps_nobody_from_its_own_lines() {
    let mut url = Url::parse("memory:crowd-that-is-due").unwrap();
    let settings = url.take_settings().unwrap();
    let client = Client::new(crate::memory::open(url, &settings).unwrap(), &settings).unwrap();
    let mut holds = Vec::new();
    let crowd: Vec<String> = (0..LINES + 50).map(|at| format!("l{at:03}")).collect();
    for name in crowd.iter().map(String::as_str).chain(["z"]) {
        holds.push(client.mutex(name).lock().await.unwrap());
    }
    let agents = Agents::new();
    let due: Vec<Due<'_>> = crowd
        .iter()
        .map(|name| {
            Due::new(
                &agents.looks,
                ClaimId::random(),
                BTreeSet::from([name.clone()]),
            )
        })
        .collect();
    let own = names(["z"]);
    let look = agents.looks.look(client.engine(), &own).await.unwrap();
    assert!(look.lines.iter().any(|line| line.name == "z"));
    assert!(look.lines.len() > 1, "and serves others beside");
    drop(due);
    // A waiter that this look does not serve starts its own.
    let other = names(["l000", "l300"]);
    let look = agents.looks.look(client.engine(), &other).await.unwrap();
    assert_eq!(look.lines.len(), 2);
}

/// A circle of two clients, as seen when the leases of the other have `left` to run.
fn circle(left: Duration) -> Deadlock {
    let claim = |id: &str, client: &str| {
        let mut owner = Owner::here(client, None);
        owner.agent = Some(Agent {
            client: client.into(),
            name: "worker".into(),
            yields: true,
            ..Agent::default()
        });
        ClaimReport {
            owner: Some(owner),
            expires_in: Some(left),
            ..ClaimReport::new(id, Ask::Whole)
        }
    };
    let line = |name: &str, holder: &str, waiter: &str| LineReport {
        holders: vec![claim(&format!("{name}1"), holder)],
        waiters: vec![claim(&format!("{name}2"), waiter)],
        ..LineReport::empty(name)
    };
    let lines = [line("x", "own", "other"), line("y", "other", "own")];
    find(&lines).remove(0)
}

/// A server may be slow to end the claims of a crashed client: a claim that still exists does not
/// prove that its client lives.
#[test]
fn only_a_renewal_shows_that_others_live() {
    let (seen, second) = (BootTime::now(), Duration::from_secs(1));
    let suspect = Suspect::new(circle(10 * second), seen);
    for (after, left, live) in [
        (2, 8, false),
        (2, 9, true),
        (9, 1, false),
        (12, 0, false),
        (12, 1, true),
    ] {
        let look = Look {
            began: seen + after * second,
            ended: seen + after * second,
            starts: Arc::default(),
            lines: Arc::default(),
        };
        let now = circle(left * second);
        let told = suspect.all_live(&now, &look, "own", Duration::from_millis(1));
        assert_eq!(told, live, "{left} s left after {after} s");
    }
}
