//! What is matched, how often, and for how long.

use std::time::Duration;

use palisade_testkit::lab::proxy::{
    Direction, Extent, Protocol, Proxy, both_ways, to_client, to_engine,
};

use super::util::{Asker, LIMIT, Redis, quiet, until};

fn fates(seed: u64) -> Vec<u32> {
    let redis = Redis::start();
    let proxy = Proxy::seeded(redis.addr, Protocol::Resp, seed).unwrap();
    let _lossy = proxy.inject(to_engine().chance(0.5).eat());
    let mut asker = Asker::new(proxy.addr());
    (0..64).for_each(|_| asker.send(&["GET", "a"]));
    let asked = || {
        let seen = proxy.seen();
        let to_engine = seen.iter().filter(|it| it.direction == Direction::ToEngine);
        to_engine.map(|it| it.copies).collect::<Vec<_>>()
    };
    until("64 requests are seen", || asked().len() == 64);
    asked()
}

#[test]
fn the_same_seed_gives_the_same_faults() {
    let one = fates(7);
    assert_eq!(one, fates(7));
    assert_ne!(one, fates(8));
    let lost = one.iter().filter(|copies| **copies == 0).count();
    assert!((16..=48).contains(&lost), "{lost} of 64");
}

#[test]
fn the_nth_match_and_a_number_of_times() {
    let (redis, proxy, mut asker) = Redis::asked();
    let third = proxy.inject(to_engine().label("GET").nth(3).eat());
    let twice = proxy.inject(to_engine().label("SET").times(2).eat());
    for word in ["GET", "SET", "GET", "SET", "GET", "SET", "GET"] {
        asker.send(&[word]);
    }
    until("the last request", || redis.requests().len() == 4);
    assert_eq!(redis.requests(), ["GET", "GET", "SET", "GET"]);
    assert_eq!((third.hits(), twice.hits()), (1, 2));
    // Replies still carry the labels of their own requests.
    until("the last reply", || {
        proxy.passed(Direction::ToClient, "GET") == 3
    });
    assert_eq!(proxy.passed(Direction::ToClient, "SET"), 1);
}

#[test]
fn the_kth_message_of_the_nth_connection() {
    let (redis, proxy) = Redis::proxied();
    let guard = proxy.inject(to_engine().connection(2).message(2).eat());
    let mut first = Asker::new(proxy.addr());
    for (word, reply) in [("ONE", "+1 ONE"), ("TWO", "+2 TWO"), ("THREE", "+3 THREE")] {
        assert_eq!(first.ask(&[word]), reply);
    }
    let mut second = Asker::new(proxy.addr());
    assert_eq!(second.ask(&["ONE"]), "+4 ONE");
    second.send(&["TWO"]);
    assert_eq!(second.ask(&["THREE"]), "+5 THREE");
    assert_eq!(redis.requests(), ["ONE", "TWO", "THREE", "ONE", "THREE"]);
    assert_eq!(guard.hits(), 1);
}

#[test]
fn a_script_is_known_by_its_sha() {
    let (_redis, proxy, mut asker) = Redis::asked();
    let guard = proxy.inject(to_client().label_contains("beef").eat());
    assert_eq!(asker.ask(&["EVALSHA", "c0ffee", "0"]), "+1 EVALSHA");
    asker.send(&["EVALSHA", "beef", "0"]);
    assert_eq!(asker.ask(&["EVALSHA", "c0ffee", "0"]), "+3 EVALSHA");
    assert_eq!(guard.hits(), 1);
    assert_eq!(proxy.passed(Direction::ToEngine, "EVALSHA beef"), 1);
    assert_eq!(proxy.passed(Direction::ToClient, "EVALSHA beef"), 0);
}

#[test]
fn a_message_is_known_by_its_bytes() {
    let (_redis, proxy, mut asker) = Redis::asked();
    let guard = proxy.inject(both_ways().containing("secret").eat());
    asker.send(&["SET", "a", "secret"]);
    assert_eq!(asker.ask(&["SET", "a", "open"]), "+1 SET");
    assert_eq!(guard.hits(), 1);
}

#[test]
fn a_fault_ends_with_its_guard() {
    let (_redis, proxy, mut asker) = Redis::asked();
    let guard = proxy.inject(to_client().eat());
    asker.send(&["GET"]);
    assert!(guard.fired_within(LIMIT));
    drop(guard);
    assert_eq!(asker.ask(&["GET"]), "+2 GET");

    let guard = proxy.inject(to_engine().black_hole(Extent::Direction));
    asker.send(&["LOST"]);
    assert!(guard.fired_within(LIMIT));
    drop(guard);
    assert_eq!(asker.ask(&["GET"]), "+3 GET");

    let guard = proxy.inject(to_client().delay(Duration::from_secs(3600)));
    asker.send(&["GET"]);
    assert!(guard.fired_within(LIMIT));
    drop(guard);
    assert_eq!(asker.line().unwrap(), "+4 GET");
}

#[test]
fn rules_act_one_after_the_other() {
    let (_redis, proxy, mut asker) = Redis::asked();
    let _double = proxy.inject(to_engine().label("GET").duplicate());
    let eaten = proxy.inject(to_engine().label("GET").once().eat());
    let never = proxy.inject(to_engine().label("GET").times(1).cut_before());
    asker.send(&["GET"]);
    assert!(eaten.fired_within(LIMIT));
    assert_eq!(never.hits(), 0, "the message was gone");
    drop(never);
    assert_eq!(asker.ask(&["GET"]), "+1 GET");
    assert_eq!(asker.line().unwrap(), "+2 GET");
    assert!(quiet(&asker.stream));
}

#[tokio::test]
async fn the_first_hit_can_be_awaited() {
    let (redis, proxy, mut asker) = Redis::asked();
    let guard = proxy.inject(to_engine().label("SET").hold());
    asker.send(&["SET"]);
    tokio::time::timeout(LIMIT, guard.fired()).await.unwrap();
    assert_eq!(redis.requests(), [""; 0], "it is held");
    guard.release();
    assert_eq!(asker.line().unwrap(), "+1 SET");
    assert_eq!(guard.hits(), 1);
}
