//! The actions on a message.

use std::io::{ErrorKind, Read, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use palisade_testkit::lab::proxy::{Direction, Extent, Protocol, Proxy, to_client, to_engine};
use parking_lot::Mutex;

use super::util::{Asker, LIMIT, Redis, connect, echo, quiet, serve, until};

#[test]
fn an_eaten_reply_is_eaten_exactly_once() {
    let (redis, proxy, mut asker) = Redis::asked();
    let guard = proxy.inject(to_client().label("GET").once().eat());
    asker.send(&["GET", "a"]);
    assert!(guard.fired_within(LIMIT));
    assert!(quiet(&asker.stream));
    assert_eq!(redis.requests(), ["GET"], "the request has arrived, once");
    assert_eq!(asker.ask(&["GET", "b"]), "+2 GET");
    assert_eq!(guard.hits(), 1);
    assert_eq!(proxy.passed(Direction::ToEngine, "GET"), 2);
    assert_eq!(proxy.passed(Direction::ToClient, "GET"), 1);
}

#[test]
fn a_duplicate_is_made_exactly_once() {
    let (redis, proxy, mut asker) = Redis::asked();
    let guard = proxy.inject(to_engine().label("INCR").once().duplicate());
    assert_eq!(asker.ask(&["INCR", "a"]), "+1 INCR");
    assert_eq!(asker.line().unwrap(), "+2 INCR");
    assert_eq!(asker.ask(&["INCR", "a"]), "+3 INCR");
    assert!(quiet(&asker.stream));
    assert_eq!(redis.requests().len(), 3);
    assert_eq!(guard.hits(), 1);
    assert_eq!(
        proxy.passed(Direction::ToClient, "INCR"),
        3,
        "replies keep their labels"
    );
}

#[test]
fn a_cut_after_byte_n_delivers_exactly_n_bytes() {
    for n in [0, 1, 9, 10, 11, 99, 100] {
        let proxy = Proxy::start(echo(), Protocol::Raw).unwrap();
        let guard = proxy.inject(to_client().byte(n).cut_after());
        let mut stream = connect(proxy.addr());
        let sent: Vec<u8> = (0..100).collect();
        stream.write_all(&sent).unwrap();
        let mut came = Vec::new();
        stream.read_to_end(&mut came).unwrap();
        assert_eq!(came, sent[..n as usize]);
        assert_eq!(guard.hits(), 1);
    }
}

#[test]
fn a_cut_in_the_middle_of_a_message() {
    let (_redis, proxy, mut asker) = Redis::asked();
    let _guard = proxy.inject(to_client().connection(1).byte(10).cut_before());
    assert_eq!(asker.ask(&["GET"]), "+1 GET"); // 8 bytes with the end of the line
    asker.send(&["GET"]);
    assert_eq!(asker.line().unwrap(), "+2");
    assert_eq!(asker.line().unwrap_err().kind(), ErrorKind::UnexpectedEof);
    assert_eq!(Asker::new(proxy.addr()).ask(&["GET"]), "+3 GET");
}

#[test]
fn cut_before_and_cut_after_a_message() {
    let (redis, proxy, mut asker) = Redis::asked();
    let before = proxy.inject(to_engine().label("BEFORE").cut_before());
    let after = proxy.inject(to_engine().label("AFTER").cut_after());
    asker.send(&["BEFORE"]);
    assert!(asker.line().is_err());
    let mut asker = Asker::new(proxy.addr());
    asker.send(&["AFTER"]);
    assert!(asker.line().is_err());
    until("the second request", || redis.requests() == ["AFTER"]);
    assert_eq!((before.hits(), after.hits()), (1, 1));
}

#[test]
fn a_reset_is_seen_on_both_sides() {
    let errors = Arc::new(Mutex::new(Vec::new()));
    let log = errors.clone();
    let addr = serve(move |mut stream| {
        if let Err(error) = stream.read(&mut [0; 64]) {
            log.lock().push(error.kind());
        }
    });
    let proxy = Proxy::start(addr, Protocol::Raw).unwrap();
    let _guard = proxy.inject(to_engine().reset());
    let mut stream = connect(proxy.addr());
    stream.write_all(b"hello").unwrap();
    let error = stream.read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    until("the engine's error", || !errors.lock().is_empty());
    assert_eq!(*errors.lock(), [ErrorKind::ConnectionReset]);
}

#[test]
fn a_delay_counts_from_arrival() {
    let (_redis, proxy) = Redis::proxied();
    let by = Duration::from_millis(300);
    let guard = proxy.inject(to_engine().delay_jitter(by, Duration::from_millis(50)));
    let mut asker = Asker::new(proxy.addr());
    let start = Instant::now();
    (0..8).for_each(|_| asker.send(&["GET"]));
    for number in 1..=8 {
        assert_eq!(asker.line().unwrap(), format!("+{number} GET"));
        assert!(start.elapsed() >= by, "{:?}", start.elapsed());
    }
    assert!(
        start.elapsed() < by * 8 / 2,
        "side by side: {:?}",
        start.elapsed()
    );
    assert_eq!(guard.hits(), 8);
}

#[test]
fn a_trickle_is_slow_and_complete() {
    let proxy = Proxy::start(echo(), Protocol::Raw).unwrap();
    let every = Duration::from_millis(10);
    let _guard = proxy.inject(to_client().trickle(5, every));
    let mut stream = connect(proxy.addr());
    let start = Instant::now();
    stream.write_all(&[7; 100]).unwrap();
    let mut came = [0; 100];
    stream.read_exact(&mut came).unwrap();
    assert_eq!(came, [7; 100]);
    assert!(start.elapsed() >= every * 19, "{:?}", start.elapsed());
}

#[test]
fn a_corrupted_byte_differs_in_one_bit() {
    let proxy = Proxy::seeded(echo(), Protocol::Raw, 3).unwrap();
    let guard = proxy.inject(to_client().byte(41).corrupt());
    let mut stream = connect(proxy.addr());
    stream.write_all(&[0; 100]).unwrap();
    let mut came = [0; 100];
    stream.read_exact(&mut came).unwrap();
    let bits: Vec<_> = came.iter().map(|byte: &u8| byte.count_ones()).collect();
    assert_eq!((bits[41], bits.iter().sum::<u32>()), (1, 1));
    assert_eq!(guard.hits(), 1);
}

#[test]
fn a_held_reply_keeps_its_place() {
    let (redis, proxy, mut asker) = Redis::asked();
    let guard = proxy.inject(to_client().label("SLOW").hold());
    asker.send(&["SLOW"]);
    asker.send(&["FAST"]);
    assert!(guard.fired_within(LIMIT));
    until("both requests", || redis.requests().len() == 2);
    assert!(quiet(&asker.stream));
    guard.release();
    assert_eq!(asker.line().unwrap(), "+1 SLOW");
    assert_eq!(asker.line().unwrap(), "+2 FAST");
    assert_eq!(asker.ask(&["SLOW"]), "+3 SLOW", "released for good");
}

#[test]
fn a_black_hole_can_swallow_a_whole_connection() {
    let (_redis, proxy) = Redis::proxied();
    let mut other = Asker::new(proxy.addr());
    assert_eq!(other.ask(&["GET"]), "+1 GET");
    let guard = proxy.inject(to_client().connection(2).black_hole(Extent::Connection));
    let mut asker = Asker::new(proxy.addr());
    asker.send(&["GET"]);
    assert!(guard.fired_within(LIMIT));
    asker.send(&["GET"]);
    assert!(quiet(&asker.stream));
    assert_eq!(
        other.ask(&["GET"]),
        "+3 GET",
        "the second request never arrived"
    );
    assert_eq!(guard.hits(), 1);
}
