//! Operations on the whole proxy, and their effects.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use palisade_testkit::lab::launch;
use palisade_testkit::lab::proxy::{Direction, Protocol, Proxy};
use parking_lot::Mutex;

use super::util::{Asker, Redis, connect, echo, quiet, serve, until};

#[test]
fn one_way_is_swallowed_and_the_other_goes_on() {
    let heard = Arc::new(Mutex::new(Vec::new()));
    let log = heard.clone();
    let addr = serve(move |stream| {
        let mut ticker = stream.try_clone().unwrap();
        std::thread::spawn(move || {
            while ticker.write_all(b".").is_ok() {
                std::thread::sleep(Duration::from_millis(2));
            }
        });
        let mut stream = stream;
        let mut byte = [0];
        while let Ok(1) = stream.read(&mut byte) {
            log.lock().push(byte[0]);
        }
        log.lock().push(b'!');
    });
    let proxy = Proxy::start(addr, Protocol::Raw).unwrap();
    let mut stream = connect(proxy.addr());
    stream.write_all(b"a").unwrap();
    until("the first byte", || heard.lock().len() == 1);
    proxy.blackhole(Direction::ToEngine);
    stream.write_all(b"b").unwrap();
    stream.read_exact(&mut [0; 50]).unwrap();
    let swallowed = || proxy.seen().iter().any(|it| it.copies == 0);
    until("the second byte", swallowed);
    assert_eq!(*heard.lock(), b"a");
    proxy.heal();
    stream.write_all(b"c").unwrap();
    until("the third byte", || *heard.lock() == b"ac");

    // The end of a stream is swallowed as well: to the engine the connection looks alive.
    proxy.blackhole(Direction::ToEngine);
    drop(stream);
    let ticks = proxy.seen().len();
    until("ticks after the end", || proxy.seen().len() > ticks + 10);
    assert_eq!(*heard.lock(), b"ac");
    proxy.heal();
    until("the end", || *heard.lock() == b"ac!");
}

#[test]
fn replies_are_swallowed_and_requests_go_on() {
    let (redis, proxy, mut asker) = Redis::asked();
    assert_eq!(asker.ask(&["GET"]), "+1 GET");
    proxy.blackhole(Direction::ToClient);
    asker.send(&["GET"]);
    asker.send(&["GET"]);
    until("the requests", || redis.requests().len() == 3);
    assert!(quiet(&asker.stream));
    let lost = || proxy.seen().iter().filter(|it| it.copies == 0).count() == 2;
    until("the replies", lost);
    proxy.heal();
    assert_eq!(asker.ask(&["GET"]), "+4 GET");
}

#[test]
fn all_connections_are_cut_and_new_ones_served() {
    let (_redis, proxy) = Redis::proxied();
    let mut askers: Vec<_> = (0..20).map(|_| Asker::new(proxy.addr())).collect();
    for asker in &mut askers {
        asker.ask(&["GET"]);
    }
    proxy.cut_all();
    for asker in &mut askers {
        assert_eq!(asker.line().unwrap_err().kind(), ErrorKind::UnexpectedEof);
    }
    assert_eq!(Asker::new(proxy.addr()).ask(&["GET"]), "+21 GET");
}

#[test]
fn new_connections_are_refused_until_healed() {
    let (_redis, proxy, mut asker) = Redis::asked();
    assert_eq!(asker.ask(&["GET"]), "+1 GET");
    for round in 0..3 {
        proxy.refuse();
        let error = TcpStream::connect(proxy.addr()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
        assert_eq!(asker.ask(&["GET"]), format!("+{} GET", 2 * round + 2));
        proxy.heal();
        let mut fresh = Asker::new(proxy.addr());
        assert_eq!(fresh.ask(&["GET"]), format!("+{} GET", 2 * round + 3));
    }
}

#[test]
fn an_engine_that_is_not_there_resets_the_client() {
    let addr = (Ipv4Addr::LOCALHOST, launch::free_port()).into();
    let proxy = Proxy::start(addr, Protocol::Raw).unwrap();
    let mut stream = connect(proxy.addr());
    let error = stream.read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

#[test]
fn a_dropped_proxy_leaves_nothing() {
    let proxy = Proxy::start(echo(), Protocol::Raw).unwrap();
    let addr = proxy.addr();
    let mut streams: Vec<_> = (0..10).map(|_| connect(addr)).collect();
    for stream in &mut streams {
        stream.write_all(b"x").unwrap();
        stream.read_exact(&mut [0]).unwrap();
    }
    drop(proxy);
    for stream in &mut streams {
        assert!(matches!(stream.read(&mut [0]), Ok(0) | Err(_)), "closed");
    }
    let error = TcpStream::connect(addr).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
    drop(streams);
    TcpListener::bind(addr).unwrap();
}

#[test]
fn a_half_closed_connection_still_answers() {
    let proxy = Proxy::start(echo(), Protocol::Raw).unwrap();
    let mut stream = connect(proxy.addr());
    stream.write_all(b"last words").unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let mut came = String::new();
    stream.read_to_string(&mut came).unwrap();
    assert_eq!(came, "last words");
}
