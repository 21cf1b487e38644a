//! The proxy in front of real engines, if they are installed.
//!
//! The servers of the other files frame as this crate parses; real ones show that it parses
//! correctly.

use std::io::Write;
use std::net::{Ipv4Addr, TcpStream};

use palisade_testkit::lab::launch::{self, Running, table, wire};
use palisade_testkit::lab::proxy::{
    Direction, Extent, Kind, Protocol, Proxy, both_ways, to_client, to_engine,
};

use super::grpc::Client;
use super::protocols::{packet, read_packet};
use super::util::{Asker, LIMIT, connect, quiet, until};

/// The engine with a proxy in front, if its programs are installed. Installs nothing.
fn behind(name: &str, protocol: Protocol) -> Option<(Running, Proxy)> {
    if let Err(why) = table::recipe_of(name).unwrap().installed() {
        launch::skip(name, &why);
        return None;
    }
    let engine = launch::need(name)?;
    let addr = (Ipv4Addr::LOCALHOST, engine.nodes()[0].port());
    let proxy = Proxy::start(addr.into(), protocol).unwrap();
    Some((engine, proxy))
}

/// Whether no connection had to be treated as raw.
fn all_understood(proxy: &Proxy) -> bool {
    proxy.seen().iter().all(|it| it.kind != Kind::Bytes)
}

#[test]
fn redis_loses_a_reply_and_the_next_one_is_the_next() {
    let (_redis, proxy) = need!(behind("redis", Protocol::Resp));
    let mut asker = Asker::new(proxy.addr());
    assert_eq!(asker.ask(&["INCR", "n"]), ":1");
    let eaten = proxy.inject(to_client().label("INCR").once().eat());
    asker.send(&["INCR", "n"]);
    assert!(eaten.fired_within(LIMIT));
    assert!(quiet(&asker.stream));
    assert_eq!(asker.ask(&["INCR", "n"]), ":3");
    let script = "return 7";
    let twice = proxy.inject(to_engine().label("EVAL return 7").once().duplicate());
    assert_eq!(asker.ask(&["EVAL", script, "0"]), ":7");
    assert_eq!(asker.line().unwrap(), ":7");
    assert_eq!(twice.hits(), 1);
}

#[test]
fn redis_loses_pushed_messages_in_both_versions_of_the_protocol() {
    let (_redis, proxy) = need!(behind("redis", Protocol::Resp));
    for version in ["2", "3"] {
        let mut listener = Asker::new(proxy.addr());
        listener.send(&["HELLO", version]);
        listener.send(&["SUBSCRIBE", "a", "b"]);
        let confirmed = || {
            let seen = proxy.seen();
            seen.iter()
                .filter(|it| it.label.as_deref() == Some("subscribe"))
                .count()
                == 2
        };
        until("the subscriptions", confirmed);
        let eaten = proxy.inject(to_client().push().label("message").eat());
        let mut speaker = Asker::new(proxy.addr());
        assert_eq!(speaker.ask(&["PUBLISH", "a", "lost"]), ":1");
        assert!(eaten.fired_within(LIMIT));
        drop(eaten);
        assert_eq!(speaker.ask(&["PUBLISH", "b", "kept"]), ":1");
        while listener.line().unwrap() != "message" {}
        let rest: Vec<_> = (0..4).map(|_| listener.line().unwrap()).collect();
        assert_eq!(rest, ["$1", "b", "$4", "kept"]);
        listener.send(&["PING"]);
        until("the reply to PING", || {
            proxy.passed(Direction::ToClient, "PING") == 1
        });
        drop(listener);
        proxy.forget();
    }
}

const PUT: &str = "/etcdserverpb.KV/Put";
const RANGE: &str = "/etcdserverpb.KV/Range";
const WATCH: &str = "/etcdserverpb.Watch/Watch";
/// Protobuf: key "a", value "b".
const A_IS_B: &[u8] = b"\x0a\x01a\x12\x01b";
/// Protobuf: key "a", alone or as the key of a watch.
const A: &[u8] = b"\x0a\x01a";
const WATCH_A: &[u8] = b"\x0a\x03\x0a\x01a";

fn put(client: &mut Client) {
    let id = client.request(PUT, A_IS_B);
    assert_eq!(client.payload().0, id);
}

#[test]
fn etcd_goes_on_without_one_stream() {
    let (_etcd, proxy) = need!(behind("etcd", Protocol::Grpc));
    let mut client = Client::new(proxy.addr());
    put(&mut client);
    let lost = proxy.inject(to_engine().label(WATCH).black_hole(Extent::Stream));
    client.request(WATCH, WATCH_A);
    (0..5).for_each(|_| put(&mut client));
    assert_eq!(lost.hits(), 1);
    assert_eq!(proxy.passed(Direction::ToEngine, WATCH), 0);
    drop(lost);
    let watch = client.request(WATCH, WATCH_A);
    assert_eq!(client.payload().0, watch);
    assert!(all_understood(&proxy));
}

#[test]
fn etcd_loses_a_reply_and_has_applied_the_request() {
    let (_etcd, proxy) = need!(behind("etcd", Protocol::Grpc));
    let mut client = Client::new(proxy.addr());
    let lost = proxy.inject(to_client().label(PUT).kind(Kind::Reply).once().eat());
    client.request(PUT, A_IS_B);
    assert!(lost.fired_within(LIMIT));
    let range = client.request(RANGE, A);
    let (id, reply) = client.payload();
    assert_eq!(id, range, "nothing of the first reply has come");
    // Key "a", created in the second revision of the store, which is that request.
    let created = b"\x0a\x01a\x10\x02\x18";
    assert!(reply.windows(6).any(|six| six == created), "{reply:?}");
    put(&mut client);
    assert!(all_understood(&proxy));
}

#[test]
fn consul_has_applied_what_it_never_confirmed() {
    let (consul, proxy) = need!(behind("consul", Protocol::Http1));
    let cut = proxy.inject(to_client().label("PUT /v1/kv/a").cut_before());
    wire::http(proxy.addr().port(), "PUT", "/v1/kv/a", "b").unwrap_err();
    assert_eq!(cut.hits(), 1);
    let port = consul.nodes()[0].port();
    assert_eq!(
        wire::http(port, "GET", "/v1/kv/a?raw", "").unwrap(),
        (200, "b".to_owned())
    );
    assert!(all_understood(&proxy));
}

#[test]
fn postgres_loses_a_row() {
    let (_postgres, proxy) = need!(behind("postgres", Protocol::Postgres));
    let eaten = proxy.inject(to_client().label("DataRow").nth(2).eat());
    let port = proxy.addr().port();
    let rows = wire::postgres(port, "palisade", "select generate_series(1, 3)").unwrap();
    assert_eq!(rows, ["1", "3"]);
    assert_eq!(eaten.hits(), 1);
    assert!(all_understood(&proxy));
}

/// A ZooKeeper request about the node `/a`.
fn about_a(xid: i32, opcode: i32, rest: &[u8]) -> Vec<u8> {
    let path = b"\0\0\0\x02/a";
    packet(&[&xid.to_be_bytes(), &opcode.to_be_bytes(), path, rest])
}

/// The xid and the error of the next reply.
fn reply(stream: &mut TcpStream) -> (i32, i32) {
    let packet = read_packet(stream).unwrap();
    let number = |at: usize| i32::from_be_bytes(packet[at..at + 4].try_into().unwrap());
    (number(0), number(12))
}

#[test]
fn zookeeper_loses_a_reply_and_a_watch() {
    const EXISTS: i32 = 3;
    const CREATE: i32 = 1;
    const NO_NODE: i32 = -101;
    let (_zookeeper, proxy) = need!(behind("zookeeper", Protocol::ZooKeeper));
    let mut stream = connect(proxy.addr());
    // Version, last zxid, a timeout of 4 s, no session yet, its password, not read-only.
    let timeout = 4000i32.to_be_bytes();
    let hello = [
        &[0; 12][..],
        &timeout,
        &[0; 8],
        &16i32.to_be_bytes(),
        &[0; 17],
    ]
    .concat();
    stream.write_all(&packet(&[&hello])).unwrap();
    read_packet(&mut stream).unwrap();
    stream.write_all(&about_a(1, EXISTS, &[1])).unwrap();
    assert_eq!(reply(&mut stream), (1, NO_NODE));

    let lost = proxy.inject(both_ways().label("create 2").kind(Kind::Reply).eat());
    let watch = proxy.inject(to_client().push().eat());
    // No data, one ACL (all to anyone in the world), no flags.
    let acl = b"\0\0\0\x01\0\0\0\x1f\0\0\0\x05world\0\0\0\x06anyone";
    let create = [&[0; 4][..], acl, &[0; 4]].concat();
    stream.write_all(&about_a(2, CREATE, &create)).unwrap();
    stream.write_all(&about_a(3, EXISTS, &[0])).unwrap();
    assert_eq!(reply(&mut stream), (3, 0), "it is there");
    assert_eq!((lost.hits(), watch.hits()), (1, 1));
    assert!(all_understood(&proxy));
}
