//! The proxy in front of real servers, where they are installed.
//!
//! The servers of the other files frame as this crate reads; real ones show that it reads right.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};

use palisade_testkit::proxy::{Direction, Extent, Kind, Protocol, Proxy, to_client, to_engine};

use super::grpc::Client;
use super::util::{Asker, LIMIT, quiet, until};

struct Server {
    child: Child,
    addr: SocketAddr,
    _dir: tempfile::TempDir,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn installed(program: &str) -> bool {
    let there = Command::new(program)
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok();
    if !there {
        eprintln!("skipped: {program} is not installed");
    }
    there
}

fn free_addr() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
}

fn start(program: &str, arguments: impl Fn(SocketAddr, &str) -> Vec<String>) -> Option<Server> {
    if !installed(program) {
        return None;
    }
    let dir = tempfile::tempdir().unwrap();
    let addr = free_addr();
    let child = Command::new(program)
        .args(arguments(addr, dir.path().to_str().unwrap()))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let server = Server {
        child,
        addr,
        _dir: dir,
    };
    until("the server listens", || TcpStream::connect(addr).is_ok());
    Some(server)
}

fn redis() -> Option<Server> {
    start("redis-server", |addr, dir| {
        let port = addr.port().to_string();
        [
            "--port",
            &port,
            "--bind",
            "127.0.0.1",
            "--dir",
            dir,
            "--save",
            "",
        ]
        .map(String::from)
        .to_vec()
    })
}

#[test]
fn redis_loses_a_reply_and_the_next_one_is_the_next() {
    let Some(redis) = redis() else { return };
    let proxy = Proxy::start(redis.addr, Protocol::Resp).unwrap();
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
    let Some(redis) = redis() else { return };
    let proxy = Proxy::start(redis.addr, Protocol::Resp).unwrap();
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

fn etcd() -> Option<Server> {
    let peer = free_addr();
    start("etcd", |addr, dir| {
        let (client, peer) = (format!("http://{addr}"), format!("http://{peer}"));
        let cluster = format!("default={peer}");
        [
            ["--data-dir", dir],
            ["--listen-client-urls", &client],
            ["--advertise-client-urls", &client],
            ["--listen-peer-urls", &peer],
            ["--initial-advertise-peer-urls", &peer],
            ["--initial-cluster", &cluster],
        ]
        .concat()
        .into_iter()
        .map(String::from)
        .collect()
    })
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
    let Some(etcd) = etcd() else { return };
    let proxy = Proxy::start(etcd.addr, Protocol::Grpc).unwrap();
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
    assert!(
        proxy.seen().iter().all(|it| it.kind != Kind::Bytes),
        "all was understood"
    );
}

#[test]
fn etcd_loses_a_reply_and_has_applied_the_request() {
    let Some(etcd) = etcd() else { return };
    let proxy = Proxy::start(etcd.addr, Protocol::Grpc).unwrap();
    let mut client = Client::new(proxy.addr());
    let lost = proxy.inject(to_client().label(PUT).kind(Kind::Reply).once().eat());
    client.request(PUT, A_IS_B);
    assert!(lost.fired_within(LIMIT));
    let range = client.request(RANGE, A);
    let (id, reply) = client.payload();
    assert_eq!(id, range, "nothing of the first reply has come");
    // Key "a", created in the second revision of the store: by that very request.
    let created = b"\x0a\x01a\x10\x02\x18";
    assert!(reply.windows(6).any(|six| six == created), "{reply:?}");
    put(&mut client);
    assert!(
        proxy.seen().iter().all(|it| it.kind != Kind::Bytes),
        "all was understood"
    );
}
