//! Several gateways in front of one engine: new requests go to one that is alive.

use std::time::Duration;

use palisade::report::Scope;
use palisade_testkit::lab::launch::free_port;
use palisade_testkit::lab::launch::gateway::Gateway;
use palisade_testkit::lab::launch::proc::State;
use palisade_testkit::lab::trial::{cycle, soon, until};
use rustix::process::{Pid, Signal, kill_process};

use crate::House;

/// Two gateways, and a URL that names both.
fn pair(house: &House) -> (Gateway, Gateway, String) {
    let (one, two) = (
        house.gateway(&["--insecure"]),
        house.gateway(&["--insecure"]),
    );
    let url = format!(
        "http://{},{}?ttl=4s",
        one.node().address(),
        two.node().address()
    );
    (one, two, url)
}

#[tokio::test(flavor = "multi_thread")]
async fn two_gateways_exclude_each_other() {
    let house = House::new();
    let (one, two, _) = pair(&house);
    let client = async |gateway: &Gateway| {
        // A renewal, which would tell of the eviction too, is due after a third of it.
        let url = format!("http://{}?ttl=120s", gateway.node().address());
        palisade::connect(&url).await.unwrap()
    };
    let (first, second) = (client(&one).await, client(&two).await);
    let hold = first.mutex("x").lock().await.unwrap();
    assert!(second.mutex("x").try_lock().await.unwrap().is_none());
    // An operator at one gateway evicts a claim of the other.
    let name = hold.name().clone();
    let evict = second.evict(&name, palisade::Which::Holders, palisade::Eviction::Mark);
    let (evicted, loss) = tokio::join!(soon("the eviction", evict), async {
        let loss = soon("the loss", hold.lost()).await;
        drop(hold);
        loss
    });
    assert!(evicted.unwrap());
    assert_eq!(loss.reason, palisade::LossReason::Evicted);
    cycle(&second.mutex("x")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn claims_go_to_the_gateway_that_lives() {
    let house = House::new();
    let (one, two, url) = pair(&house);
    let client = palisade::connect(&url).await.unwrap();
    let blocked = house.outsider().await.mutex("x").lock().await.unwrap();
    let waits = {
        let client = client.clone();
        tokio::spawn(async move { client.mutex("x").lock().await })
    };
    let outsider = house.outsider().await;
    until("it waits", async || {
        let lines = outsider.survey(Scope::Prefix("x".into())).await.unwrap();
        lines.iter().any(|line| line.waiters.len() == 1)
    })
    .await;
    // Whichever gateway it uses, one after the other.
    for gateway in [&one, &two] {
        tokio::task::block_in_place(|| gateway.node().kill()).unwrap();
        cycle(&client.mutex("new")).await;
        tokio::task::block_in_place(|| gateway.node().restart()).unwrap();
    }
    assert!(!waits.is_finished(), "a waiter gave up");
    blocked.release().await.unwrap();
    // Its claim may have ended with its gateway; then it has retried.
    let hold = tokio::time::timeout(Duration::from_secs(30), waits).await;
    let hold = hold.expect("the lock").unwrap().unwrap();
    assert!(hold.is_valid());
    hold.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_that_drains_keeps_what_is_held_and_takes_nothing_new() {
    let house = House::new();
    let (one, other) = (house.gateway(&["--insecure"]), free_port());
    let url = format!("http://{},127.0.0.1:{other}?ttl=4s", one.node().address());
    let client = palisade::connect(&url).await.unwrap();
    let hold = client.mutex("held").lock().await.unwrap();
    let two = house.gateway_at(other, &["--insecure"]);
    let pid = one
        .node()
        .pid()
        .and_then(|pid| Pid::from_raw(pid.cast_signed()));
    kill_process(pid.unwrap(), Signal::TERM).unwrap();
    // The first renewal learns that the gateway drains.
    let lost = tokio::time::timeout(Duration::from_secs(3), hold.lost()).await;
    assert!(lost.is_err(), "lost with the drain: {lost:?}");
    let new = client.mutex("new").lock().await.unwrap();
    hold.release().await.unwrap();
    // The gateway has no claims left, and ends; the new one is at the other gateway.
    until("it has ended", async || one.node().state() == State::Dead).await;
    let lost = tokio::time::timeout(Duration::from_secs(6), new.lost()).await;
    assert!(lost.is_err(), "it was at the one that has ended: {lost:?}");
    new.release().await.unwrap();
    drop(two);
}
