//! Without a fault, the output equals the input, over real sockets, for every protocol.

use std::io::{Read, Write};

use palisade_testkit::lab::proxy::{Protocol, Proxy};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::util::{connect, echo};

const OPENINGS: &[&[u8]] = &[
    b"",
    b"*2\r\n$3\r\nGET\r\n$1\r\na\r\n",
    b"+OK\r\n>2\r\n",
    b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhe",
    b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0\0\0\x03\x01\x04\0\0\0\x01\x82",
    b"\0\0\0\x05hello\0\0\0\x08",
    b"\0\0\0\x08\x04\xd2\x16\x2f",
    b"\0\0\0\x09\0\x03\0\0\0Q\0\0\0\x05\0",
];

fn check(protocol: Protocol) {
    let proxy = Proxy::start(echo(), protocol).unwrap();
    let config = Config {
        failure_persistence: None,
        ..Config::with_cases(48)
    };
    let writes = prop::collection::vec(prop::collection::vec(any::<u8>(), 1..200), 0..12);
    let input = (prop::sample::select(OPENINGS.to_vec()), writes);
    let outcome = TestRunner::new(config).run(&input, |(opening, writes)| {
        let mut stream = connect(proxy.addr());
        let mut sent = opening.to_vec();
        // A separate write is usually received by a separate read.
        for part in opening.chunks(7) {
            stream.write_all(part).unwrap();
        }
        for write in writes {
            stream.write_all(&write).unwrap();
            sent.extend(write);
        }
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut came = Vec::new();
        stream.read_to_end(&mut came).unwrap();
        prop_assert_eq!(came, sent);
        Ok(())
    });
    outcome.unwrap();
}

#[test]
fn every_protocol_passes_unchanged() {
    std::thread::scope(|scope| {
        for protocol in [
            Protocol::Raw,
            Protocol::Resp,
            Protocol::Http1,
            Protocol::Grpc,
            Protocol::ZooKeeper,
            Protocol::Postgres,
        ] {
            scope.spawn(move || check(protocol));
        }
    });
}

#[test]
fn what_waits_for_the_rest_of_a_message_goes_on_when_the_connection_is_raw() {
    // The client's bytes look like the start of a long message; the engine's are not ZooKeeper's.
    let addr = super::util::serve(|mut stream| {
        stream.write_all(b"\xff\xff\xff\xff").unwrap();
        let mut byte = [0];
        while let Ok(1) = stream.read(&mut byte) {
            stream.write_all(&byte).unwrap();
        }
    });
    let proxy = Proxy::start(addr, Protocol::ZooKeeper).unwrap();
    let mut stream = connect(proxy.addr());
    stream.write_all(b"\0\0\x10\0partial").unwrap();
    let mut came = [0; 15];
    stream.read_exact(&mut came).unwrap();
    assert_eq!(&came, b"\xff\xff\xff\xff\0\0\x10\0partial");
}

#[test]
fn much_passes() {
    let proxy = Proxy::start(echo(), Protocol::Resp).unwrap();
    let mut stream = connect(proxy.addr());
    let request = b"*2\r\n$3\r\nGET\r\n$1\r\na\r\n".repeat(50_000);
    let mut writer = stream.try_clone().unwrap();
    let sent = request.clone();
    let writing = std::thread::spawn(move || {
        writer.write_all(&sent).unwrap();
        writer.shutdown(std::net::Shutdown::Write).unwrap();
    });
    let mut came = Vec::new();
    stream.read_to_end(&mut came).unwrap();
    writing.join().unwrap();
    assert!(came == request);
}
