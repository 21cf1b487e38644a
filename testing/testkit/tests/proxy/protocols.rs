//! Rules on the messages of each protocol.

use std::io::{Read, Write};
use std::net::TcpStream;

use palisade_testkit::lab::proxy::{Direction, Kind, Protocol, Proxy, to_client, to_engine};

use super::util::{LIMIT, Redis, connect, quiet, serve, until};

#[test]
fn resp_pushes_are_eaten_while_replies_pass() {
    let (_redis, proxy, mut asker) = Redis::asked();
    assert_eq!(asker.ask(&["NOISE"]), ">3");
    (0..6).for_each(|_| drop(asker.line().unwrap()));
    assert_eq!(asker.line().unwrap(), "+1 NOISE");
    let guard = proxy.inject(to_client().push().eat());
    for number in 2..=5 {
        assert_eq!(asker.ask(&["NOISE"]), format!("+{number} NOISE"));
    }
    assert_eq!(guard.hits(), 4);
    let pushes = proxy.seen().into_iter().filter(|it| it.kind == Kind::Push);
    assert!(
        pushes
            .map(|it| it.label)
            .all(|label| label.as_deref() == Some("message"))
    );
}

/// Reads until the bytes end with `end`.
fn read_until(stream: &mut TcpStream, end: &[u8]) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut byte = [0];
    while !bytes.ends_with(end) {
        stream.read_exact(&mut byte).ok()?;
        bytes.push(byte[0]);
    }
    Some(bytes)
}

fn http_server() -> std::net::SocketAddr {
    serve(|mut stream| {
        let mut number = 0;
        while let Some(head) = read_until(&mut stream, b"\r\n\r\n") {
            number += 1;
            let reply = if head.starts_with(b"GET /watch") {
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n\
                         3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"
                    .to_owned()
            } else {
                format!("HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n{number}")
            };
            stream.write_all(reply.as_bytes()).unwrap();
        }
    })
}

fn get(stream: &mut TcpStream, path: &str) {
    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
}

#[test]
fn an_http_reply_is_eaten_whole() {
    let proxy = Proxy::start(http_server(), Protocol::Http1).unwrap();
    let mut stream = connect(proxy.addr());
    let reply = proxy.inject(to_client().label("GET /v1/kv/a?cas=0").once().eat());
    let watch = proxy.inject(
        to_client()
            .label("GET /watch")
            .kind(Kind::Reply)
            .once()
            .eat(),
    );
    get(&mut stream, "/v1/kv/a?cas=0");
    assert!(reply.fired_within(LIMIT));
    get(&mut stream, "/watch");
    assert!(watch.fired_within(LIMIT));
    get(&mut stream, "/v1/kv/b");
    let came = read_until(&mut stream, b"\r\n\r\n3").unwrap();
    assert!(
        came.starts_with(b"HTTP/1.1 200 OK\r\nContent-Length: 1"),
        "the third reply only"
    );
    assert_eq!(proxy.passed(Direction::ToEngine, "GET /v1/kv/a?cas=0"), 1);
}

#[test]
fn a_watch_is_cut_between_two_events() {
    let proxy = Proxy::start(http_server(), Protocol::Http1).unwrap();
    let _cut = proxy.inject(
        to_client()
            .label("GET /watch")
            .containing("two")
            .cut_before(),
    );
    let mut stream = connect(proxy.addr());
    get(&mut stream, "/watch");
    let mut came = String::new();
    stream.read_to_string(&mut came).unwrap();
    assert!(came.ends_with("\r\n\r\n3\r\none\r\n"), "{came}");
}

pub(super) fn packet(parts: &[&[u8]]) -> Vec<u8> {
    let body = parts.concat();
    [&(body.len() as u32).to_be_bytes(), &body[..]].concat()
}

pub(super) fn read_packet(stream: &mut TcpStream) -> Option<Vec<u8>> {
    let mut length = [0; 4];
    stream.read_exact(&mut length).ok()?;
    let mut body = vec![0; u32::from_be_bytes(length) as usize];
    stream.read_exact(&mut body).ok()?;
    Some(body)
}

#[test]
fn a_zookeeper_watch_is_lost_and_a_create_cut_off() {
    // Answers with the xid and a count; a watch event precedes each reply.
    let addr = serve(|mut stream| {
        let hello = read_packet(&mut stream).unwrap();
        stream.write_all(&packet(&[&hello])).unwrap();
        let mut count = 0u8;
        while let Some(request) = read_packet(&mut stream) {
            count += 1;
            if request[..4] != (-2i32).to_be_bytes() {
                stream
                    .write_all(&packet(&[&(-1i32).to_be_bytes(), b"event"]))
                    .unwrap();
            }
            stream
                .write_all(&packet(&[&request[..4], &[count]]))
                .unwrap();
        }
    });
    let proxy = Proxy::start(addr, Protocol::ZooKeeper).unwrap();
    let watches = proxy.inject(to_client().push().label("watch").eat());
    let cut = proxy.inject(to_client().label("create2 8").cut_before());
    let mut stream = connect(proxy.addr());
    let request = |xid: i32, opcode: i32| packet(&[&xid.to_be_bytes(), &opcode.to_be_bytes()]);
    stream.write_all(&packet(&[b"hello"])).unwrap();
    assert_eq!(read_packet(&mut stream).unwrap(), b"hello");
    for (xid, opcode) in [(7, 15), (-2, 11)] {
        stream.write_all(&request(xid, opcode)).unwrap();
        assert_eq!(read_packet(&mut stream).unwrap()[..4], xid.to_be_bytes());
    }
    stream.write_all(&request(8, 15)).unwrap();
    assert_eq!(read_packet(&mut stream), None);
    assert_eq!((watches.hits(), cut.hits()), (2, 1));
    assert_eq!(proxy.passed(Direction::ToEngine, "create2 8"), 1);
}

#[test]
fn a_postgres_notification_is_lost_and_its_query_answered() {
    let message = |kind: u8, body: &[u8]| {
        let length = (body.len() as u32 + 4).to_be_bytes();
        [&[kind][..], &length, body].concat()
    };
    let addr = serve(move |mut stream| {
        let mut request = [0; 8];
        stream.read_exact(&mut request).unwrap();
        stream.write_all(b"N").unwrap();
        let mut startup = [0; 9];
        stream.read_exact(&mut startup).unwrap();
        stream.write_all(&message(b'R', &[0; 4])).unwrap();
        stream.write_all(&message(b'Z', b"I")).unwrap();
        let mut query = [0; 6];
        while stream.read_exact(&mut query).is_ok() {
            stream.write_all(&message(b'A', b"note")).unwrap();
            stream.write_all(&message(b'Z', b"I")).unwrap();
        }
    });
    let proxy = Proxy::start(addr, Protocol::Postgres).unwrap();
    let notes = proxy.inject(to_client().push().eat());
    let queries = proxy.inject(to_engine().label("Query").nth(2).eat());
    let mut stream = connect(proxy.addr());
    stream.write_all(b"\0\0\0\x08\x04\xd2\x16\x2f").unwrap();
    let mut byte = [0];
    stream.read_exact(&mut byte).unwrap();
    assert_eq!(&byte, b"N");
    stream.write_all(b"\0\0\0\x09\0\x03\0\0\0").unwrap();
    let mut came = [0; 15];
    stream.read_exact(&mut came).unwrap();
    stream.write_all(&message(b'Q', b"\0")).unwrap();
    let mut ready = [0; 6];
    stream.read_exact(&mut ready).unwrap();
    assert_eq!(ready, *message(b'Z', b"I"));
    stream.write_all(&message(b'Q', b"\0")).unwrap();
    assert!(queries.fired_within(LIMIT));
    assert!(quiet(&stream));
    until("the log", || notes.hits() == 1);
}
