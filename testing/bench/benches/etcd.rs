//! What a lock on etcd costs, beside raw transactions and etcd's own v3lock in the same run.
//!
//! - sequential: lock + unlock, one after the other, beside two raw transactions and v3lock;
//! - parallel: 64 names at once, beside the raw transactions;
//! - contended: 8 clients on one name, grants per second, beside v3lock;
//! - pass: from the call of release to the grant of the one that waits; each holds for 10 ms and
//!   stays away until the other has the lock, as in `palisade bench`.
//!
//! `PALISADE_BENCH_ETCD=host:port` names a server; otherwise one is started, with its data in
//! memory. All sides take short turns on connections of the same kind, so that whatever else the
//! machine does hits all of them; the ratio is the median over the turns.

#![allow(clippy::unwrap_used)]

mod common;

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use palisade::Client;
use palisade::command::Baseline;
use prost::Message;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic_prost::ProstCodec;

use common::{
    SHORT, Server, Turns, answers, beside_raw, free_port, median, our_turn, pass, rate, ratio,
    raw_turn,
};

const PARALLEL: Turns = Turns(9, Duration::from_millis(400));
/// Long, because v3lock needs 100 ms for a grant of each: the ends of a turn count little.
const CONTENDED: Turns = Turns(5, Duration::from_millis(1500));

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let named = std::env::var("PALISADE_BENCH_ETCD").ok();
    let server = if named.is_none() { start() } else { None };
    let Some(host) = named.or_else(|| Some(server.as_ref()?.host.clone())) else {
        return println!("skipped: there is no etcd to start");
    };
    let url = format!("etcd://{host}");
    answers(&url).await;
    let raw = palisade::command::baseline(&url).await.unwrap().unwrap();
    sequential(&url, &host, &raw).await;
    beside_raw("64 names", 64, PARALLEL, &url, &raw).await;
    contended(&url, &host).await;
    pass(&url).await;
}

/// An etcd of our own.
fn start() -> Option<Server> {
    Server::start(|port, folder| {
        let (clients, peers) = (
            format!("http://127.0.0.1:{port}"),
            format!("http://127.0.0.1:{}", free_port()),
        );
        let mut etcd = Command::new("etcd");
        etcd.arg("--data-dir").arg(folder);
        for (option, value) in [
            ("--listen-client-urls", &clients),
            ("--advertise-client-urls", &clients),
            ("--listen-peer-urls", &peers),
            ("--initial-advertise-peer-urls", &peers),
            ("--initial-cluster", &format!("default={peers}")),
        ] {
            etcd.args([option, value]);
        }
        etcd
    })
}

/// etcd's own lock service.
#[derive(Clone)]
struct V3Lock {
    grpc: tonic::client::Grpc<Channel>,
    lease: i64,
}

#[derive(Clone, PartialEq, Message)]
struct LockRequest {
    #[prost(bytes = "vec", tag = "1")]
    name: Vec<u8>,
    #[prost(int64, tag = "2")]
    lease: i64,
}

/// Also the request to unlock, whose one field is the first.
#[derive(Clone, PartialEq, Message)]
struct LockResponse {
    #[prost(bytes = "vec", tag = "2")]
    key: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct UnlockRequest {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct GrantRequest {
    #[prost(int64, tag = "1")]
    ttl: i64,
}

#[derive(Clone, PartialEq, Message)]
struct GrantResponse {
    #[prost(int64, tag = "2")]
    id: i64,
}

#[derive(Clone, PartialEq, Message)]
struct Nothing {}

impl V3Lock {
    async fn connect(host: &str) -> Self {
        let endpoint = Endpoint::from_shared(format!("http://{host}")).unwrap();
        let channel = endpoint.tcp_nodelay(true).connect().await.unwrap();
        let mut this = Self {
            grpc: tonic::client::Grpc::new(channel),
            lease: 0,
        };
        let grant = GrantRequest { ttl: 3600 };
        let granted: GrantResponse = this.ask("/etcdserverpb.Lease/LeaseGrant", grant).await;
        this.lease = granted.id;
        this
    }

    async fn ask<Q, A>(&self, path: &'static str, message: Q) -> A
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        let mut grpc = self.grpc.clone();
        grpc.ready().await.unwrap();
        let path = PathAndQuery::from_static(path);
        let request = tonic::Request::new(message);
        let answer = grpc.unary(request, path, ProstCodec::<Q, A>::default());
        answer.await.unwrap().into_inner()
    }

    async fn cycle(&self, name: &str) {
        let lock = LockRequest {
            name: name.into(),
            lease: self.lease,
        };
        let locked: LockResponse = self.ask("/v3lockpb.Lock/Lock", lock).await;
        let unlock = UnlockRequest { key: locked.key };
        let _: Nothing = self.ask("/v3lockpb.Lock/Unlock", unlock).await;
    }
}

async fn sequential(url: &str, host: &str, raw: &Arc<dyn Baseline>) {
    let (clients, v3lock) = ([connect(url).await], V3Lock::connect(host).await);
    let (mut raws, mut ours, mut theirs) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..SHORT.0 {
        raws.push(raw_turn(raw, SHORT.1, 1).await);
        ours.push(our_turn(&clients, SHORT.1, 1, |_| "sequential".into()).await);
        let v3lock = v3lock.clone();
        let cycle = move |_| {
            let v3lock = v3lock.clone();
            async move { v3lock.cycle("v3/sequential").await }
        };
        theirs.push(rate(SHORT.1, 1, cycle).await);
    }
    println!(
        "sequential   {:7.0}/s   raw {:7.0}/s ({:.2})   v3lock {:7.0}/s ({:.2})",
        median(ours.clone()),
        median(raws.clone()),
        ratio(&ours, &raws),
        median(theirs.clone()),
        ratio(&ours, &theirs)
    );
}

async fn contended(url: &str, host: &str) {
    let (mut clients, mut servants) = (Vec::new(), Vec::new());
    for _ in 0..8 {
        clients.push(connect(url).await);
        servants.push(V3Lock::connect(host).await);
    }
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..CONTENDED.0 {
        ours.push(our_turn(&clients, CONTENDED.1, 8, |_| "contended".into()).await);
        let servants = servants.clone();
        let cycle = move |task: usize| {
            let v3lock = servants[task].clone();
            async move { v3lock.cycle("v3/contended").await }
        };
        theirs.push(rate(CONTENDED.1, 8, cycle).await);
    }
    println!(
        "8 contenders {:7.0}/s   v3lock {:5.0}/s ({:.1})",
        median(ours.clone()),
        median(theirs.clone()),
        ratio(&ours, &theirs)
    );
}

async fn connect(url: &str) -> Client {
    palisade::connect(url).await.unwrap()
}
