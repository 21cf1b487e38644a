//! Waiting: a hand-over is not delayed by etcd's 100 ms sync loop, and a claim whose lease has
//! ended is not granted.

use std::time::{Duration, Instant};

use palisade::BootTime;
use palisade::engine::{Entered, Place};
use serde_json::json;

use crate::util::{call, claim, served, soon};

#[tokio::test(flavor = "multi_thread")]
async fn a_hand_over_does_not_wait_for_the_sync_loop() {
    let running = need!("etcd");
    // A watch that starts in the past is served ten times a second: two contenders would get about
    // twenty grants a second, and with the re-check alone two.
    const GRANTS: u32 = 60;
    let mut each = Vec::new();
    // The quickest of several rounds, because a busy machine slows some of them down.
    while each.len() < 5 && each.iter().all(|each| *each >= Duration::from_millis(25)) {
        let start = Instant::now();
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..2 {
            let client = palisade::connect(running.url()).await.unwrap();
            tasks.spawn(async move {
                let mutex = client.mutex("quick");
                for _ in 0..GRANTS / 2 {
                    mutex.lock().await.unwrap().release().await.unwrap();
                }
            });
        }
        soon("all grants", tasks.join_all()).await;
        each.push(start.elapsed() / GRANTS);
    }
    let best = each.last().unwrap();
    assert!(
        *best < Duration::from_millis(25),
        "{each:?} from grant to grant"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_whose_lease_died_is_never_granted() {
    let (running, client) = need!(served().await);
    let hold = client.mutex("line").lock().await.unwrap();
    // Nobody renews this one's lease: it has another ttl than the hold's.
    let other = palisade::connect(running.url()).await.unwrap();
    let entered = other.engine().enter(claim("line", true)).await;
    let Entered::In { ticket, place, .. } = entered.unwrap() else {
        panic!("no place")
    };
    assert_eq!(place, Place::Waiting);
    // Its last look would find it gone too.
    let far = BootTime::now() + Duration::from_secs(60);
    let (engine, lease) = (other.engine().clone(), ticket.lease.0.to_string());
    let wait = tokio::spawn(async move { engine.wait(ticket, far).await });
    call(&running, "/v3/lease/revoke", json!({ "ID": lease }));
    hold.release().await.unwrap();
    let place = soon("the end of the wait", wait).await.unwrap().unwrap();
    assert_eq!(place, Place::Gone, "granted without a lease (etcd #11456)");
}
