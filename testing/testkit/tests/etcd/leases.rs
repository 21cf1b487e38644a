//! One lease per client and ttl: shared, audited, and revoked at the end.

use std::sync::Arc;
use std::time::Duration;

use palisade::engine::{Ask, Entered, Lease, Left, Renewal, Settings, Ticket, Url};
use palisade::report::Scope;
use palisade::{Client, Eviction, Name, Patience};
use palisade_testkit::lab::launch::Running;
use palisade_testkit::spy::{Enters, Spy, Verb};
use serde_json::json;

use crate::util::{call, claim, is_empty, served, soon, until};

fn leases(running: &Running) -> usize {
    let list = call(running, "/v3/lease/leases", json!({}));
    list["leases"].as_array().map_or(0, Vec::len)
}

#[tokio::test(flavor = "multi_thread")]
async fn all_holds_of_a_ttl_share_one_lease_which_is_given_back() {
    let (running, client) = need!(served().await);
    let mut holds = Vec::new();
    for index in 0..50 {
        let mutex = client.mutex(format!("many-{index}"));
        holds.push(mutex.lock().await.unwrap());
    }
    assert_eq!(leases(&running), 1);
    let ttl = Duration::from_secs(60);
    // The mutex itself must be dropped, because it keeps the client alive.
    let long = {
        let mutex = client.mutex("long").ttl(ttl);
        mutex.lock().await.unwrap()
    };
    assert_eq!(leases(&running), 2);
    drop((holds, long));
    soon("the end", client.close()).await;
    assert_eq!(leases(&running), 0, "leases left behind");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hold_without_renewal_has_a_lease_of_its_own_which_is_given_back() {
    let (running, spy, client) = need!(spied().await);
    let ttl = Duration::from_secs(60);
    let kept = client.mutex("kept").ttl(ttl);
    let kept = kept.lock().await.unwrap();
    assert_eq!(leases(&running), 1);
    let line = |name: &str| {
        let line = client.line(name, Ask::Whole).ttl(ttl);
        line.unrenewed()
    };
    let hold = line("own").acquire(Patience::Forever).await.unwrap();
    let hold = hold.expect("a free line is held");
    assert_eq!(leases(&running), 2);
    assert!(hold.ticket().has_own_lease() && !kept.ticket().has_own_lease());
    // It is busy, and leaves nothing behind.
    let busy = line("kept").acquire(Patience::NoWait).await.unwrap();
    assert!(busy.is_none());
    assert_eq!(leases(&running), 2, "the lease of a claim without a place");
    hold.release().await.unwrap();
    assert_eq!(leases(&running), 1, "the lease of a hold that was released");
    // Dropped before the answer: its place and its lease are removed.
    spy.set_enters(Enters::Hang);
    let dropped = line("own");
    let lock = tokio::spawn(async move { dropped.acquire(Patience::Forever).await });
    soon("the enter", spy.applied(4)).await;
    assert_eq!(leases(&running), 2);
    lock.abort();
    until("the end of its lease", || async { leases(&running) == 1 }).await;
    // Evicted by force: the holder is told, and its lease ends when the hold is dropped.
    spy.set_enters(Enters::Answered);
    let hold = line("own").acquire(Patience::Forever).await.unwrap();
    let hold = hold.expect("a free line is held");
    let (name, id) = (hold.name().clone(), hold.claim().to_string());
    let taken = client.engine().evict(name, id, Eviction::Remove);
    assert!(taken.await.unwrap());
    assert!(hold.release().await.is_err(), "released what it had lost");
    assert_eq!(leases(&running), 1);
    assert!(kept.is_valid());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_own_lease_is_kept_alive_only_with_its_place() {
    let (running, client) = need!(served().await);
    let engine = client.engine();
    let name = Name::new("own").unwrap();
    let enter = || async {
        match engine.enter(claim("own", false)).await.unwrap() {
            Entered::In { ticket, .. } => ticket,
            Entered::Busy => panic!("no place"),
        }
    };
    let renew = async |ticket: &Ticket| {
        let lease = Lease::in_a_test(ticket);
        let within = Duration::from_secs(2);
        engine.renew(vec![lease], within).await.remove(0)
    };
    let evict =
        |ticket: &Ticket, eviction| engine.evict(name.clone(), ticket.claim.to_string(), eviction);
    let ticket = enter().await;
    assert!(matches!(renew(&ticket).await, Renewal::Held(_)));
    let other = Ticket {
        sequence: ticket.sequence + 1,
        ..ticket.clone()
    };
    assert!(matches!(renew(&other).await, Renewal::Lost));
    assert!(evict(&ticket, Eviction::Mark).await.unwrap());
    assert!(matches!(renew(&ticket).await, Renewal::Evicted));
    assert!(evict(&ticket, Eviction::Remove).await.unwrap());
    assert!(matches!(renew(&ticket).await, Renewal::Lost));
    assert!(matches!(engine.leave(ticket).await.unwrap(), Left::Absent));
    assert_eq!(leases(&running), 0);
    // Revoked by hand.
    let ticket = enter().await;
    let key = ticket.native.clone().unwrap();
    let lease = key.rsplit(['/', '-']).nth(1).unwrap();
    let lease = i64::from_str_radix(lease, 16).unwrap().to_string();
    call(&running, "/v3/lease/revoke", json!({ "ID": lease }));
    assert!(matches!(renew(&ticket).await, Renewal::Lost));
    assert!(matches!(engine.leave(ticket).await.unwrap(), Left::Absent));
}

/// A client whose requests can be delayed.
async fn spied() -> Option<(Running, Arc<Spy>, Client)> {
    let (running, plain) = served().await?;
    let spy = Arc::new(Spy::new(Arc::clone(plain.engine())));
    let settings: Settings = Url::parse(running.url()).unwrap().take_settings().unwrap();
    let client = Client::new(spy.clone(), &settings).unwrap();
    Some((running, spy, client))
}

#[tokio::test(flavor = "multi_thread")]
async fn an_enter_that_arrives_after_its_leave_is_removed_by_the_audit() {
    let (running, spy, client) = need!(spied().await);
    let ttl = Duration::from_secs(9);
    // The lease is registered, and every renewal of it also audits it.
    let kept = client.mutex("kept").ttl(ttl).lock().await.unwrap();
    spy.set_enters(Enters::Late);
    let mutex = client.mutex("late").ttl(ttl);
    let lock = tokio::spawn(async move { mutex.lock().await });
    soon("the enter", spy.called(Verb::Enter, 2)).await;
    lock.abort();
    soon("the leave", spy.called(Verb::Leave, 1)).await;
    soon("the background leave", client.close()).await;
    spy.deliver();
    soon("the late enter", spy.applied(2)).await;
    let observer = palisade::connect(running.url()).await.unwrap();
    // Its lease stays alive, so only the audit can remove it, if it has not done so already.
    until("an empty line", || is_empty(&observer, "late")).await;
    assert!(kept.is_valid(), "the audit took more than it should");
    kept.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_enter_on_a_key_that_was_used_before_is_left_when_it_is_dropped() {
    let (running, spy, client) = need!(spied().await);
    // No audit happens within the test.
    let ttl = Duration::from_secs(300);
    let mutex = client.mutex("dropped").ttl(ttl);
    mutex.lock().await.unwrap().release().await.unwrap();
    spy.set_enters(Enters::Hang);
    let lock = tokio::spawn(async move { mutex.lock().await });
    soon("the enter", spy.applied(2)).await;
    let observer = palisade::connect(running.url()).await.unwrap();
    let is_empty = || is_empty(&observer, "dropped");
    assert!(!is_empty().await, "the enter did not arrive");
    lock.abort();
    until("an empty line", is_empty).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn quick_locks_beside_audits_are_never_lost() {
    let (_running, client) = need!(served().await);
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..4 {
        let mutex = client.mutex(format!("quick-{task}"));
        // Audited three times in two seconds.
        let mutex = mutex.ttl(Duration::from_secs(2));
        tasks.spawn(async move {
            let end = std::time::Instant::now() + Duration::from_secs(4);
            while std::time::Instant::now() < end {
                mutex.lock().await.unwrap().release().await.unwrap();
            }
        });
    }
    soon("the rounds", tasks.join_all()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_are_used_again_and_marks_do_not_stay_on_them() {
    let (_running, client) = need!(served().await);
    let mutex = client.mutex("again");
    let first = mutex.lock().await.unwrap();
    let key = first.ticket().native.clone();
    // Marked and released before anyone noticed.
    let id = first.claim().to_string();
    let name = first.name().clone();
    let marked = client.engine().evict(name, id, Eviction::Mark);
    assert!(marked.await.unwrap());
    let _ = first.release().await;
    let mut last = 0;
    for _ in 0..20 {
        let hold = mutex.lock().await.unwrap();
        assert_eq!(hold.ticket().native, key, "a key of its own");
        assert!(hold.token().0 > last, "tokens");
        last = hold.token().0;
        let lines = client.survey(Scope::Line(hold.name().clone())).await;
        let shown = lines.unwrap()[0].holders[0].clone();
        assert_eq!(shown.id, hold.claim().to_string(), "whose it is");
        assert!(!shown.evicted, "marked by an earlier claim");
        hold.release().await.unwrap();
    }
    // Two concurrent holds have different keys.
    let (one, two) = (client.semaphore("two", 2), client.semaphore("two", 2));
    let (one, two) = (one.acquire().await.unwrap(), two.acquire().await.unwrap());
    assert_ne!(one.ticket().native, two.ticket().native);
}
