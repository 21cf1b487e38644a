//! A gateway that dies, is stopped or loses answers: nobody relies on a lock that another has, and
//! a repeated request takes one place.

use std::net::SocketAddr;
use std::time::Duration;

use palisade::report::Scope;
use palisade::{BootTime, LossReason, Outcome};
use palisade_testkit::conformance::Verdict;
use palisade_testkit::engine::EngineUnderTest;
use palisade_testkit::harness;
use palisade_testkit::lab::engines::severable_gateway;
use palisade_testkit::lab::launch::free_port;
use palisade_testkit::lab::launch::gateway::{Door, Gateway};
use palisade_testkit::lab::proxy::{Protocol, Proxy, to_client};
use palisade_testkit::lab::trial::{cycle, soon, until};

use crate::{House, with};

const TTL: Duration = Duration::from_secs(4);

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_gateway_leaves_nobody_believing_too_long() {
    let house = House::new();
    let gateway = house.gateway(&[]);
    let url = with(&gateway.url(Door::Socket), "ttl=4s");
    let client = palisade::connect(&url).await.unwrap();
    let hold = client.mutex("x").lock().await.unwrap();
    let outsider = house.outsider().await;
    let next = tokio::spawn(async move {
        let next = outsider.mutex("x").lock().await.unwrap();
        (BootTime::now(), next)
    });
    tokio::task::block_in_place(|| gateway.node().kill()).unwrap();
    // The loss is not known yet, so it still counts as held.
    assert!(hold.is_valid(), "lost with the gateway");
    let loss = soon("the loss", hold.lost()).await;
    let told = BootTime::now();
    assert_eq!(loss.reason, LossReason::Expired);
    let (granted, next) = soon("the next", next).await.unwrap();
    assert!(told < granted, "told after the next was granted");
    assert!(next.token() > hold.token());
    // After its restart it does not know the session, and the client creates another.
    tokio::task::block_in_place(|| gateway.node().restart()).unwrap();
    cycle(&client.mutex("y")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_that_knows_no_session_is_no_loss_before_the_deadline() {
    let house = House::new();
    let gateway = house.gateway(&[]);
    let url = with(&gateway.url(Door::Socket), "ttl=6s");
    let client = palisade::connect(&url).await.unwrap();
    let hold = client.mutex("x").lock().await.unwrap();
    let deadline = hold.deadline();
    // Faster than a renewal is due: the restarted gateway answers `no_session`.
    tokio::task::block_in_place(|| gateway.node().restart()).unwrap();
    let loss = soon("the loss", hold.lost()).await;
    assert_eq!(loss.reason, LossReason::Expired, "{loss}");
    assert!(deadline.has_passed(), "lost before its deadline");
}

/// The conformance cases that need an engine which can be cut off.
#[test]
fn a_stopped_gateway_is_unreachable_and_a_renewal_unknown() {
    for (door, case) in [
        (Door::Socket, "wait/cut_off_engine_is_unreachable"),
        (Door::Port, "renew/cut_off_engine_is_unknown"),
    ] {
        let engine = EngineUnderTest::new("gateway", || Err("not started".into()));
        let site = severable_gateway(door).unwrap();
        assert_eq!(harness::try_case(engine, site, case), Verdict::Ok, "{case}");
    }
}

/// A gateway whose clients connect through a proxy, by the proxy's address.
fn proxied(house: &House, ttl: &str) -> (Gateway, Proxy, String) {
    let port = free_port();
    let at = SocketAddr::from(([127, 0, 0, 1], port));
    let proxy = Proxy::start(at, Protocol::Http1).unwrap();
    let public = format!("http://{}", proxy.addr());
    let gateway = house.gateway_at(port, &["--public-url", &public]);
    let token = gateway.url(Door::Port);
    let token = token.split_once('?').unwrap().1;
    let url = with(&with(&public, token), &format!("ttl={ttl}"));
    (gateway, proxy, url)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_is_eaten_is_asked_for_again_and_is_one_place() {
    let house = House::new();
    // Longer than the test waits, so that a place that was left behind would be noticed.
    let (_gateway, proxy, url) = proxied(&house, "60s");
    let client = palisade::connect(&with(&url, "timeout=1s")).await.unwrap();
    cycle(&client.mutex("warm")).await;
    let outsider = house.outsider().await;
    for name in ["one", "two", "three"] {
        let eaten = proxy.inject(to_client().containing("valid_ms").once().eat());
        let hold = soon("the lock", client.mutex(name).lock()).await.unwrap();
        assert_eq!(eaten.hits(), 1, "nothing was eaten");
        let lines = outsider.survey(Scope::Line(hold.name().clone())).await;
        let line = lines.unwrap().remove(0);
        assert_eq!((line.holders.len(), line.waiters.len()), (1, 0), "{line:?}");
        assert_eq!(line.holders[0].id, hold.claim().to_string());
        hold.release().await.unwrap();
    }
    // A claim that does not wait reports this, and its place is left.
    let eaten = proxy.inject(to_client().containing("valid_ms").once().eat());
    let tried = soon("an answer", client.mutex("four").try_lock()).await;
    let error = tried.unwrap_err();
    assert_eq!(error.outcome(), Outcome::MaybeApplied, "{error}");
    assert_eq!(eaten.hits(), 1);
    until("nothing is left", async || {
        let lines = outsider.survey(Scope::Prefix(String::new())).await;
        lines.unwrap().is_empty()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_falls_silent_costs_no_lock() {
    let house = House::new();
    let (_gateway, proxy, url) = proxied(&house, "4s");
    let client = palisade::connect(&url).await.unwrap();
    let hold = client.mutex("kept").lock().await.unwrap();
    for _ in 0..2 {
        // Existing connections pass nothing any more; new ones do.
        proxy.silence();
        let lost = tokio::time::timeout(TTL * 3 / 2, hold.lost()).await;
        assert!(lost.is_err(), "{lost:?}");
    }
    hold.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_balancer_that_cuts_connections_costs_no_lock() {
    let house = House::new();
    let (_gateway, proxy, url) = proxied(&house, "4s");
    let client = palisade::connect(&url).await.unwrap();
    let hold = client.mutex("kept").lock().await.unwrap();
    let waits = {
        let client = client.clone();
        tokio::spawn(async move { client.mutex("kept").lock().await.unwrap() })
    };
    let end = BootTime::now() + TTL * 2;
    while !end.has_passed() {
        tokio::time::sleep(Duration::from_millis(300)).await;
        proxy.cut_all();
    }
    assert!(hold.is_valid(), "lost");
    hold.release().await.unwrap();
    let next = soon("the next", waits).await.unwrap();
    next.release().await.unwrap();
}
