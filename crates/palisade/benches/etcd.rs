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

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use palisade::command::Baseline;
use palisade::{BootTime, Client};
use prost::Message;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic_prost::ProstCodec;

/// How many turns each side has, and how long one is.
struct Turns(usize, Duration);

const SEQUENTIAL: Turns = Turns(31, Duration::from_millis(150));
const PARALLEL: Turns = Turns(9, Duration::from_millis(400));
/// Long, because v3lock needs 100 ms for a grant of each: the ends of a turn count little.
const CONTENDED: Turns = Turns(5, Duration::from_millis(1500));

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let (server, host) = match std::env::var("PALISADE_BENCH_ETCD") {
        Ok(host) => (None, host),
        Err(_) => match Server::start() {
            Some(server) => {
                let host = server.host.clone();
                (Some(server), host)
            }
            None => return println!("skipped: there is no etcd to start"),
        },
    };
    let url = format!("etcd://{host}");
    let end = Instant::now() + Duration::from_secs(10);
    while palisade::connect(&url).await.is_err() {
        assert!(Instant::now() < end, "no etcd at {host}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let raw = palisade::command::baseline(&url).await.unwrap().unwrap();
    sequential(&url, &host, &*raw).await;
    parallel(&url, &raw).await;
    contended(&url, &host).await;
    pass(&url).await;
    drop(server);
}

/// An etcd of our own.
struct Server {
    child: Child,
    host: String,
    _data: tempfile::TempDir,
}

impl Server {
    fn start() -> Option<Self> {
        let port = || {
            TcpListener::bind("127.0.0.1:0")
                .unwrap()
                .local_addr()
                .unwrap()
                .port()
        };
        let (client, peer) = (port(), port());
        let data = tempfile::tempdir_in("/dev/shm")
            .or_else(|_| tempfile::tempdir())
            .unwrap();
        let host = format!("127.0.0.1:{client}");
        let (clients, peers) = (format!("http://{host}"), format!("http://127.0.0.1:{peer}"));
        let child = Command::new("etcd")
            .arg("--data-dir")
            .arg(data.path())
            .args([
                "--listen-client-urls",
                &clients,
                "--advertise-client-urls",
                &clients,
            ])
            .args([
                "--listen-peer-urls",
                &peers,
                "--initial-advertise-peer-urls",
                &peers,
            ])
            .args(["--initial-cluster", &format!("default={peers}")])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        Some(Self {
            child: child.ok()?,
            host,
            _data: data,
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
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

/// How often per second `cycle` is done in one round.
async fn rate<F: Future<Output = ()>>(mut cycle: impl FnMut() -> F) -> f64 {
    let (start, mut done) = (Instant::now(), 0);
    while start.elapsed() < SEQUENTIAL.1 {
        cycle().await;
        done += 1;
    }
    f64::from(done) / start.elapsed().as_secs_f64()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The median of what each turn of ours was to the other side's next to it.
fn ratio(ours: &[f64], theirs: &[f64]) -> f64 {
    median(ours.iter().zip(theirs).map(|(a, b)| a / b).collect())
}

async fn sequential(url: &str, host: &str, raw: &dyn Baseline) {
    let client = palisade::connect(url).await.unwrap();
    let (mutex, v3lock) = (client.mutex("sequential"), V3Lock::connect(host).await);
    let (mut raws, mut ours, mut theirs) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..SEQUENTIAL.0 {
        raws.push(rate(async || raw.cycle("sequential".into()).await.unwrap()).await);
        ours.push(rate(async || mutex.lock().await.unwrap().release().await.unwrap()).await);
        theirs.push(rate(async || v3lock.cycle("v3/sequential").await).await);
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

/// Cycles per second of many tasks at once.
async fn many<F: Future<Output = ()> + Send + 'static>(
    turn: Duration,
    tasks: usize,
    cycle: impl Fn(usize) -> F + Send + Sync + 'static,
) -> f64 {
    let (cycle, done) = (Arc::new(cycle), Arc::new(AtomicU32::new(0)));
    let start = Instant::now();
    let mut set = tokio::task::JoinSet::new();
    for task in 0..tasks {
        let (cycle, done) = (Arc::clone(&cycle), Arc::clone(&done));
        set.spawn(async move {
            while start.elapsed() < turn {
                cycle(task).await;
                done.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    set.join_all().await;
    f64::from(done.load(Ordering::Relaxed)) / start.elapsed().as_secs_f64()
}

async fn parallel(url: &str, raw: &Arc<dyn Baseline>) {
    let client = palisade::connect(url).await.unwrap();
    let (mut raws, mut ours) = (Vec::new(), Vec::new());
    for _ in 0..PARALLEL.0 {
        let baseline = Arc::clone(raw);
        let cycle = move |task| {
            let cycle = baseline.cycle(format!("parallel-{task}"));
            async move { cycle.await.unwrap() }
        };
        raws.push(many(PARALLEL.1, 64, cycle).await);
        let client = client.clone();
        let cycle = move |task: usize| {
            let mutex = client.mutex(format!("parallel-{task}"));
            async move { mutex.lock().await.unwrap().release().await.unwrap() }
        };
        ours.push(many(PARALLEL.1, 64, cycle).await);
    }
    println!(
        "64 names     {:7.0}/s   raw {:7.0}/s ({:.2})",
        median(ours.clone()),
        median(raws.clone()),
        ratio(&ours, &raws)
    );
}

async fn contended(url: &str, host: &str) {
    let mut clients = Vec::new();
    let mut servants = Vec::new();
    for _ in 0..8 {
        clients.push(palisade::connect(url).await.unwrap());
        servants.push(V3Lock::connect(host).await);
    }
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..CONTENDED.0 {
        let clients: Vec<Client> = clients.clone();
        let cycle = move |task: usize| {
            let mutex = clients[task].mutex("contended");
            async move { mutex.lock().await.unwrap().release().await.unwrap() }
        };
        ours.push(many(CONTENDED.1, 8, cycle).await);
        let servants = servants.clone();
        let cycle = move |task: usize| {
            let v3lock = servants[task].clone();
            async move { v3lock.cycle("v3/contended").await }
        };
        theirs.push(many(CONTENDED.1, 8, cycle).await);
    }
    println!(
        "8 contenders {:7.0}/s   v3lock {:5.0}/s ({:.1})",
        median(ours.clone()),
        median(theirs.clone()),
        ratio(&ours, &theirs)
    );
}

async fn pass(url: &str) {
    const PASSES: usize = 200;
    let released = Arc::new(parking_lot::Mutex::new(None));
    // Told at every grant.
    let granted = Arc::new(tokio::sync::watch::channel(0).0);
    let times = Arc::new(parking_lot::Mutex::new(Vec::new()));
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..2 {
        let client = palisade::connect(url).await.unwrap();
        let (released, times) = (Arc::clone(&released), Arc::clone(&times));
        let granted = Arc::clone(&granted);
        tasks.spawn(async move {
            let mutex = client.mutex("pass");
            let mut others = granted.subscribe();
            for round in 0..PASSES {
                let hold = mutex.lock().await.unwrap();
                if let Some(at) = released.lock().take() {
                    times.lock().push(BootTime::now().saturating_since(at));
                }
                granted.send_modify(|grants| *grants += 1);
                let this = *others.borrow_and_update();
                tokio::time::sleep(Duration::from_millis(10)).await;
                *released.lock() = Some(BootTime::now());
                hold.release().await.unwrap();
                // At the end the other may have had its last.
                if round + 1 < PASSES {
                    others.wait_for(|grants| *grants > this).await.unwrap();
                }
            }
        });
    }
    tasks.join_all().await;
    let mut times = times.lock().clone();
    times.sort_unstable();
    let (p50, p99) = (times[times.len() / 2], times[times.len() * 99 / 100]);
    println!(
        "pass         p50 {p50:.2?}   p99 {p99:.2?}   ({} passes)",
        times.len()
    );
}
