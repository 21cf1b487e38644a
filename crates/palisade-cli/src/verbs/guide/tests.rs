//! The choice among engines that are made up, so that it does not depend on what is built.

use std::time::Duration;

use palisade::engine::{Permits, TtlRange};
use palisade::{Capability, Guarantee};

use super::*;

const SERVER: Capability = {
    let mut server = Capability::FULL;
    server.class = Guarantee::Consensus;
    server.shared = false;
    server.permits = Permits::Slots;
    server.resize = false;
    server.fair = false;
    server.waiters_visible = false;
    server.ttl = TtlRange {
        min: Duration::from_secs(15),
        max: Duration::from_secs(20),
        step: Duration::from_secs(1),
    };
    server
};

fn info(name: &'static str, example: &'static str, capability: Capability) -> EngineInfo {
    EngineInfo {
        name,
        schemes: &[],
        needs: "something",
        example,
        capability,
        options: &[],
    }
}

fn registry() -> Vec<EngineInfo> {
    let mut local = SERVER;
    (local.class, local.shared) = (Guarantee::Durable, true);
    local.permits = Permits::Weighted;
    let mut timed = SERVER;
    timed.class = Guarantee::Timed;
    vec![
        info("redis", "redis://localhost", timed),
        info("file", "file:", local),
        info("etcd", "etcd://localhost?x=y", SERVER),
    ]
}

fn chosen(needs: &[&str], have: &[&'static str]) -> Option<Advice> {
    let needs: Vec<_> = needs.iter().map(|word| parse_need(word).unwrap()).collect();
    decide(&needs, have, &registry()).advice
}

#[track_caller]
fn assert_chosen(needs: &[&str], have: &[&'static str], expected: Option<&str>) {
    let chosen = chosen(needs, have).map(|advice| advice.engine);
    assert_eq!(chosen, expected, "{needs:?} {have:?}");
}

#[test]
fn the_engine_that_is_there_and_fits_is_chosen() {
    assert_chosen(&["efficiency"], &[], Some("file"));
    assert_chosen(&["efficiency"], &["redis"], Some("redis"));
    assert_chosen(&["correctness"], &["redis"], Some("file"));
    assert_chosen(&["correctness"], &["redis", "etcd"], Some("etcd"));
    assert_chosen(&["read-write"], &["etcd"], Some("file"));
    assert_chosen(&["correctness", "many-machines"], &["redis"], None);
    assert_chosen(&["correctness", "many-machines"], &[], Some("etcd"));
    assert_chosen(&["weighted-permits", "many-machines"], &[], None);
}

#[test]
fn the_ttl_is_one_that_the_engine_takes() {
    for (need, url, ttl_ms) in [
        ("election", "etcd://localhost?x=y&ttl=15s", 15_000),
        ("efficiency", "etcd://localhost?x=y", 20_000),
    ] {
        let etcd = chosen(&[need], &["etcd"]).unwrap();
        assert_eq!((etcd.url.as_str(), etcd.ttl_ms), (url, ttl_ms));
    }
}

#[test]
fn others_are_told_why() {
    let needs = [parse_need("correctness").unwrap()];
    let answer = decide(&needs, &["redis", "consul"], &registry());
    assert_eq!(answer.lacking, ["consul"]);
    let other = |engine: &str| {
        answer
            .others
            .iter()
            .find(|other| other.engine == engine)
            .unwrap()
    };
    let (redis, etcd) = (other("redis"), other("etcd"));
    assert!(!redis.fits && redis.why[0].contains("class C"), "{redis:?}");
    assert!(etcd.fits && etcd.why[0].contains("would need"), "{etcd:?}");
}

#[test]
fn every_engine_of_this_build_is_known() {
    for info in palisade::command::registry() {
        assert_eq!(parse_have(info.name), Ok(info.name));
    }
}
