//! Votes: who is granted if servers are down, slow or taken by others, and what is left behind.

use std::time::{Duration, Instant};

use palisade::engine::{Ask, Lease, Place, Renewal};
use palisade::{BootTime, ErrorKind, Eviction, Patience};
use palisade_testkit::lab::proxy::{both_ways, to_client};
use palisade_testkit::lab::trial::{Crew, enter};

use super::support::{FRESH, Five, soon, until};

/// How much longer than the bound a busy machine may take.
const BUSY: Duration = Duration::from_secs(1);

/// The longest ttl: far above the time in which votes must be withdrawn, so that none expires.
const LONG: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread")]
async fn two_of_five_may_stop_and_three_are_refused_in_time() {
    let Some(five) = Five::start() else { return };
    let client = five.client(FRESH).await;
    let first = client.mutex("job").lock().await.unwrap();
    let token = first.token();
    first.release().await.unwrap();
    for stopped in [3, 4] {
        five.running.nodes()[stopped].stop().unwrap();
    }
    let hold = soon("a grant", client.mutex("job").lock()).await.unwrap();
    assert!(hold.token() > token);
    soon("the release", hold.release()).await.unwrap();

    five.running.nodes()[2].stop().unwrap();
    // With the default ttl of 30 s a server has 300 ms to answer.
    let start = Instant::now();
    let refused = client.mutex("job").try_lock().await.unwrap_err();
    let took = start.elapsed();
    assert_eq!(refused.kind(), ErrorKind::Unreachable, "{refused}");
    assert!(
        took < Duration::from_millis(600) + BUSY,
        "refused after {took:?}"
    );
    println!("refused after {took:?}: {refused}");
    assert_eq!(five.having("job").len(), 0, "votes are left behind");

    for stopped in [2, 3, 4] {
        five.running.nodes()[stopped].cont().unwrap();
    }
    until("a grant by all", async || {
        matches!(client.mutex("job").try_lock().await, Ok(Some(_)))
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_server_does_not_slow_the_grant() {
    let Some(five) = Five::start() else { return };
    let slow = Duration::from_millis(500);
    let _slow = five.proxies[4].inject(both_ways().delay(slow));
    let client = five.proxied(FRESH).await;
    let mut times = Vec::new();
    for _ in 0..5 {
        let start = Instant::now();
        let hold = client.mutex("job").ttl(LONG).lock().await.unwrap();
        hold.release().await.unwrap();
        times.push(start.elapsed());
    }
    times.sort_unstable();
    println!("lock and release beside a slow server: {times:?}");
    assert!(times[2] < slow / 2, "{times:?}");
    // Nor does it keep a vote once it has caught up.
    until("no vote left", async || five.having("job").is_empty()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_try_that_fails_leaves_nothing_behind() {
    let Some(five) = Five::start() else { return };
    let client = five.client(FRESH).await;
    five.occupy("job", &[0, 2, 4]);
    assert!(client.mutex("job").try_lock().await.unwrap().is_none());
    assert_eq!(five.having("job"), [0, 2, 4], "only the other tool's");
    five.free("job", &[0]);
    let mutex = client.mutex("job").ttl(LONG);
    let hold = mutex.try_lock().await.unwrap().unwrap();
    assert_eq!(five.having("job").len(), 5);
    hold.release().await.unwrap();
    until("the votes' end", async || five.having("job") == [2, 4]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn contenders_who_split_the_votes_leave_no_keys() {
    let Some(five) = Five::start() else { return };
    let crew = Crew::start(&five.url(FRESH), 8, LONG, Duration::from_secs(20)).await;
    crew.grants(100).await;
    crew.end().await;
    let keys = |node| five.ask(node, &["KEYS", "*"]);
    until("no votes left", async || {
        let keys: Vec<String> = (0..5).map(keys).collect();
        let locks = keys.iter().flat_map(|keys| keys.lines());
        locks.filter(|key| !key.contains(":palisade")).count() == 0
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_try_leaves_nothing_behind() {
    let Some(five) = Five::start() else { return };
    let client = five.proxied(FRESH).await;
    for round in 0..40u64 {
        let mutex = client.mutex("job").ttl(LONG);
        let limit = Duration::from_micros(round * 40);
        let _ = tokio::time::timeout(limit, mutex.lock()).await;
    }
    client.flush().await;
    until("no votes left", async || five.having("job").is_empty()).await;
    let hold = soon("a grant", client.mutex("job").lock()).await.unwrap();
    hold.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_majority_is_told_and_a_lost_minority_is_not() {
    let Some(five) = Five::start() else { return };
    let client = five.client(FRESH).await;
    let mutex = client.mutex("job").ttl(Duration::from_secs(3));
    let hold = mutex.lock().await.unwrap();
    until("all votes", async || five.having("job").len() == 5).await;
    five.free("job", &[0, 1]);
    let kept = tokio::time::timeout(Duration::from_secs(3), hold.lost()).await;
    assert!(kept.is_err() && hold.is_valid(), "three of five have it");
    assert_eq!(five.having("job"), [2, 3, 4], "nothing is re-created");
    five.free("job", &[2]);
    soon("the loss", hold.lost()).await;
    assert!(!hold.is_valid());
}

#[tokio::test(flavor = "multi_thread")]
async fn permits_are_the_same_on_a_majority() {
    let Some(five) = Five::start() else { return };
    let clients = [five.client(FRESH).await, five.client(FRESH).await];
    let mut holds = Vec::new();
    for at in 0..3 {
        let permits = clients[at % 2].semaphore("pool", 3);
        holds.push(permits.try_acquire().await.unwrap().unwrap());
    }
    // Five servers that only count, each majority for itself, could grant more.
    for client in &clients {
        assert!(
            client
                .semaphore("pool", 3)
                .try_acquire()
                .await
                .unwrap()
                .is_none()
        );
        assert!(client.mutex("pool").try_lock().await.unwrap().is_none());
    }
    holds.pop().unwrap().release().await.unwrap();
    let again = soon("a permit", clients[0].semaphore("pool", 3).acquire()).await;
    holds.push(again.unwrap());
}

/// How many scripts one server runs while `crowd` tasks of one client are granted `ask`.
async fn scripts_for(five: &Five, crowd: u64, ask: Ask) -> u64 {
    let client = five.client(FRESH).await;
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..crowd {
        let line = client.line("job", ask);
        tasks.spawn(async move {
            let hold = line.acquire(Patience::Forever).await.unwrap().unwrap();
            hold.release().await.unwrap();
        });
    }
    soon("all of them", tasks.join_all()).await;
    five.scripts_run(0)
}

/// The cost of each grant is about the same, however many tasks of one client wait.
#[tokio::test(flavor = "multi_thread")]
async fn a_crowd_of_one_client_takes_turns() {
    const CROWD: u64 = 300;
    let Some(five) = Five::start() else { return };
    // A vote and its withdrawal for each, and some that came too early. If all tasks tried by
    // themselves, it would be half as much again on an idle machine, and far more on a busy one.
    let scripts = scripts_for(&five, CROWD, Ask::Whole).await;
    assert!(
        scripts < 8 * CROWD / 3,
        "{scripts} scripts for {CROWD} grants"
    );
}

/// The same for permits: a task that finds none left has checked for all of its client.
#[tokio::test(flavor = "multi_thread")]
async fn a_crowd_of_one_client_takes_turns_for_permits() {
    const CROWD: u64 = 300;
    let Some(five) = Five::start() else { return };
    let ask = Ask::Part {
        weight: 1,
        capacity: 3,
    };
    let scripts = scripts_for(&five, CROWD, ask).await;
    assert!(
        scripts < 8 * CROWD / 3,
        "{scripts} scripts for {CROWD} permits"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_that_is_just_trying_is_evicted() {
    let Some(five) = Five::start() else { return };
    let client = five.proxied(FRESH).await;
    let _hold = client.mutex("job").ttl(LONG).lock().await.unwrap();
    // Its answers are late: it has no vote, and is still trying.
    let late = Duration::from_millis(50);
    let _late: Vec<_> = five
        .proxies
        .iter()
        .map(|p| p.inject(to_client().delay(late)))
        .collect();
    for eviction in [Eviction::Mark, Eviction::Remove] {
        let (ticket, place) = enter(&client, "job", LONG).await;
        assert_eq!(place, Place::Waiting);
        let before = five.scripts_run(0);
        let (waits, asked) = (client.clone(), ticket.clone());
        let end = BootTime::now() + LONG;
        let waits = tokio::spawn(async move { waits.engine().wait(asked, end).await });
        until("its try", async || five.scripts_run(0) > before).await;
        let (name, id) = (ticket.name.clone(), ticket.claim.to_string());
        let evicted = client.engine().evict(name, id, eviction).await;
        assert!(evicted.unwrap(), "{eviction:?}: it is there");
        if eviction == Eviction::Remove {
            let place = soon("the answer", waits).await.unwrap().unwrap();
            assert_eq!(place, Place::Gone);
        } else {
            let renewed = client
                .engine()
                .renew(vec![Lease::in_a_test(&ticket)], LONG)
                .await;
            assert!(matches!(renewed[..], [Renewal::Evicted]), "{renewed:?}");
            client.engine().leave(ticket).await.unwrap();
        }
    }
}
