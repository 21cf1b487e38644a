//! Replies without end, on every protocol: at the first connection, to a lock, to a survey.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use palisade::report::Scope;
use palisade::{Error, ErrorKind};
use palisade_testkit::lab::launch::apiserver::ApiServer;
use palisade_testkit::lab::launch::gateway::{Door, Gateway};
use palisade_testkit::lab::launch::{self, Running};

use crate::server::{Endless, Turncoat, flooding};

const MIB: u64 = 1 << 20;

/// Spaces, which JSON allows everywhere, in chunks of 256 bytes.
const HTTP: Endless = Endless(
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"100\r\n                                                                                                                                                                                                                                                                \r\n",
);
const ANNOUNCED: Endless = Endless(
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 999999999999\r\n\r\n",
    b"                ",
);
const BULK: Endless = Endless(b"$99999999999\r\n", b"0123456789abcdef");
const NESTED: Endless = Endless(b"*1\r\n", b"*1\r\n");
const LINE: Endless = Endless(b"+", b"0123456789abcdef");
/// A packet of two gigabytes.
const PACKET: Endless = Endless(b"\x7f\xff\xff\xff", b"0123456789abcdef");
/// A row of two gigabytes.
const ROW: Endless = Endless(b"D\x7f\xff\xff\xff", b"0123456789abcdef");

/// The most memory that this process had, since it was last asked, beyond what it has now.
struct Memory(u64);

impl Memory {
    fn now() -> Self {
        std::fs::write("/proc/self/clear_refs", "5").unwrap();
        Self(Self::read("VmRSS:"))
    }

    fn read(what: &str) -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(what));
        let kib = line.unwrap().trim().trim_end_matches(" kB");
        kib.parse::<u64>().unwrap() << 10
    }

    /// What it took beyond the beginning.
    fn taken(&self) -> u64 {
        Self::read("VmHWM:").saturating_sub(self.0)
    }
}

/// Awaits an error, which must come soon and take little memory.
async fn refused<T>(
    what: &str,
    most: u64,
    asked: impl Future<Output = palisade::Result<T>>,
) -> Error {
    let (memory, begun) = (Memory::now(), Instant::now());
    let answer = tokio::time::timeout(Duration::from_secs(20), asked).await;
    let (taken, took) = (memory.taken(), begun.elapsed());
    let error = answer.unwrap_or_else(|_| panic!("{what}: hangs")).err();
    let error = error.unwrap_or_else(|| panic!("{what}: succeeds"));
    println!("{what}: {} KiB, {took:.0?}: {error}", taken >> 10);
    assert!(taken < most, "{what}: takes {} MiB", taken / MIB);
    error
}

fn says(what: &str, error: &Error, words: &[&str]) {
    assert_eq!(error.kind(), ErrorKind::Unusable, "{what}: {error}");
    for word in words {
        assert!(error.message().contains(word), "{what}: {error}");
    }
}

/// One test, because all share the memory that is measured.
#[tokio::test(flavor = "multi_thread")]
async fn no_reply_takes_more_memory_than_it_may() {
    for (what, url, with) in [
        ("http", "http://HOST", HTTP),
        ("http, announced", "http://HOST", ANNOUNCED),
        ("consul", "consul://HOST", HTTP),
        ("redis", "redis://HOST", BULK),
        ("redis, nested", "redis://HOST", NESTED),
        ("redis, a line", "redis://HOST", LINE),
        ("zookeeper", "zookeeper://HOST", PACKET),
    ] {
        let at = flooding(with).await;
        let url = url.replace("HOST", &at.to_string());
        let error = refused(what, 48 * MIB, palisade::connect(&url)).await;
        match what {
            // The client library refuses so deep a nest by itself.
            "redis, nested" => assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}"),
            "zookeeper" => says(what, &error, &[]),
            _ => says(what, &error, &["4 MiB"]),
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let at = flooding(HTTP).await;
    let kubeconfig = folder.path().join("config");
    std::fs::write(
        &kubeconfig,
        crate::strangers::kubeconfig(&format!("http://{at}")),
    )
    .unwrap();
    let url = format!("kubernetes://x?kubeconfig={}", kubeconfig.display());
    let error = refused("kubernetes", 48 * MIB, palisade::connect(&url)).await;
    says("kubernetes", &error, &["4 MiB"]);
    let store = format!("file:{}/store", folder.path().display());
    // A gateway serves only those who call it by its name.
    let port = launch::free_port();
    let proxied = Turncoat::before(([127, 0, 0, 1], port).into(), HTTP).await;
    let public = format!("http://{}", proxied.address);
    let gateway = Gateway::start_at(port, &store, &["--public-url", &public]).unwrap();
    let url = gateway.url(Door::Port);
    let url = url.replace(&format!("127.0.0.1:{port}"), &proxied.address.to_string());
    asks("http", &url, &proxied).await;
    for (name, with) in [
        ("redis", BULK),
        ("redis", LINE),
        ("consul", HTTP),
        ("zookeeper", PACKET),
        ("postgres", ROW),
    ] {
        if let Some(running) = launch::need(name) {
            let running: Running = running;
            let at = running.nodes()[0].address().parse().unwrap();
            turns(name, running.url(), at, with).await;
        }
    }
    let server = ApiServer::start().unwrap();
    let proxied = Turncoat::before(server.address(), HTTP).await;
    let at = format!("http://{}", proxied.address);
    std::fs::write(&kubeconfig, crate::strangers::kubeconfig(&at)).unwrap();
    let namespace = server.url();
    let namespace = namespace.split_once('?').unwrap().0;
    let url = format!("{namespace}?kubeconfig={}", kubeconfig.display());
    asks("kubernetes", &url, &proxied).await;
}

/// A server behind a proxy that turns on its client while it is connected.
async fn turns(what: &str, url: &str, at: SocketAddr, with: Endless) {
    let proxied = Turncoat::before(at, with).await;
    let url = url.replace(&at.to_string(), &proxied.address.to_string());
    asks(what, &url, &proxied).await;
}

async fn asks(what: &str, url: &str, proxied: &Turncoat) {
    // A debug build takes seconds for 64 MiB.
    let joint = if url.contains('?') { '&' } else { '?' };
    let url = format!("{url}{joint}timeout=15s");
    let client = palisade::connect(&url).await.unwrap();
    let other = palisade::connect(&url).await.unwrap();
    proxied.turn();
    // Its replies are bounded by 64 MiB, whatever was asked, in a buffer that doubles.
    let most = if what == "postgres" { 200 } else { 48 };
    let lock = refused(what, most * MIB, client.mutex("x").try_lock()).await;
    let all = Scope::Prefix(String::new());
    let list = refused(what, 400 * MIB, other.survey(all)).await;
    // PostgreSQL's client library says that its connection broke; a session of ZooKeeper may meet
    // the flood before its caller does.
    if !matches!(what, "postgres" | "zookeeper") {
        says(what, &lock, &["4 MiB"]);
        says(what, &list, &["for one list", "--prefix"]);
    }
}
