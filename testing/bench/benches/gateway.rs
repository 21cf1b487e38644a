//! The figures of a gateway's limits, in front of a real Redis, in one run:
//!
//! - memory: 10,000 waiting requests, above the idle gateway;
//! - slow: the p99 of others while 2,000 connections have sent half a head;
//! - series: how many metric series 2,000 names make;
//! - speed: lock and release by 64 tasks, beside the same engine directly.
//!
//! The gateway is a process of its own: this program, started again.

#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use palisade_gateway::{Audit, Config, Gateway, Limits, Metrics};
use palisade_testkit::lab::launch;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

const URL: &str = "PALISADE_GATEWAY_BENCH_URL";
const TOKEN: &str = "a-token-of-the-benchmark";
const WAITING: usize = 10_000;
const SLOW: usize = 2_000;
const NAMES: usize = 2_000;
const TASKS: usize = 64;

fn main() {
    raise_file_limit();
    if let Ok(url) = std::env::var(URL) {
        return serve(&url);
    }
    let Some(server) = launch::need("redis") else {
        return;
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let url = server.url();
    // Those that are named, or all.
    let named: Vec<String> = std::env::args().skip(1).collect();
    let wanted = |what: &str| {
        let mut names = named
            .iter()
            .filter(|name| !name.starts_with('-'))
            .peekable();
        names.peek().is_none() || names.any(|name| name == what)
    };
    let ok = runtime.block_on(async {
        let mut ok = true;
        // Each with a gateway that has done nothing before.
        if wanted("speed") {
            ok &= speed(&Served::start(url), url).await;
        }
        if wanted("slow") {
            ok &= slow(&Served::start(url)).await;
        }
        if wanted("series") {
            ok &= series(&Served::start(url)).await;
        }
        if wanted("memory") {
            ok &= memory(&Served::start(url), url).await;
        }
        ok
    });
    std::process::exit(i32::from(!ok));
}

fn raise_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let current = maximum;
    setrlimit(Resource::Nofile, Rlimit { current, maximum }).unwrap();
}

/// The gateway's process.
fn serve(url: &str) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let metrics = Metrics::install().unwrap();
        let client = palisade::connect(url).await.unwrap();
        let client = client.observed_by(palisade::layers::Metrics);
        let config = Config {
            listen: Some("127.0.0.1:0".parse().unwrap()),
            socket: None,
            access: None,
            token: Some(TOKEN.into()),
            tls: None,
            insecure: false,
            public_urls: Vec::new(),
            drain: Duration::ZERO,
            limits: Limits {
                claims: 2 * WAITING,
                ..Limits::default()
            },
            audit: Audit::to(std::io::sink()),
            metrics,
            tracer: None,
        };
        let gateway = Gateway::bind(client, config).await.unwrap();
        println!("{}", gateway.local_addr().unwrap());
        std::io::stdout().flush().unwrap();
        gateway.serve(std::future::pending()).await;
    });
}

struct Served {
    child: Child,
    addr: SocketAddr,
}

impl Served {
    fn start(url: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .env(URL, url)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut said = BufReader::new(child.stdout.take().unwrap());
        said.read_line(&mut line).unwrap();
        let addr = line.trim().parse().unwrap();
        Self { child, addr }
    }

    /// What it has in memory, in KiB.
    fn memory(&self) -> u64 {
        let path = format!("/proc/{}/status", self.child.id());
        let status = std::fs::read_to_string(path).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
        kib.unwrap().trim().parse().unwrap()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A connection that is used again and again.
struct Connection {
    stream: TcpStream,
    addr: SocketAddr,
    secret: String,
    read: Vec<u8>,
}

impl Connection {
    async fn bare(addr: SocketAddr) -> Self {
        let connection = Self {
            stream: TcpStream::connect(addr).await.unwrap(),
            addr,
            secret: String::new(),
            read: Vec::new(),
        };
        connection.stream.set_nodelay(true).unwrap();
        connection
    }

    /// One with a session.
    async fn open(addr: SocketAddr, ttl: &str) -> Self {
        let mut connection = Self::bare(addr).await;
        let (status, opened) = connection.post("/v1/sessions", &json!({"ttl": ttl})).await;
        assert_eq!(status, 201, "{opened}");
        connection.secret = opened["secret"].as_str().unwrap().to_owned();
        connection
    }

    fn head(&self, method: &str, path: &str, length: usize) -> String {
        let session = match self.secret.as_str() {
            "" => String::new(),
            secret => format!("palisade-session: {secret}\r\n"),
        };
        format!(
            "{method} {path} HTTP/1.1\r\nhost: {}\r\nauthorization: Bearer {TOKEN}\r\n\
             content-type: application/json\r\n{session}content-length: {length}\r\n\r\n",
            self.addr
        )
    }

    async fn send(&mut self, path: &str, body: &Value) {
        let body = body.to_string();
        let head = self.head("POST", path, body.len());
        let bytes = [head.as_bytes(), body.as_bytes()].concat();
        self.stream.write_all(&bytes).await.unwrap();
    }

    async fn post(&mut self, path: &str, body: &Value) -> (u16, Value) {
        self.send(path, body).await;
        let (status, text) = self.answer().await;
        (status, serde_json::from_str(&text).unwrap())
    }

    async fn get(&mut self, path: &str) -> (u16, String) {
        let head = self.head("GET", path, 0);
        self.stream.write_all(head.as_bytes()).await.unwrap();
        self.answer().await
    }

    /// The next answer, by its length.
    async fn answer(&mut self) -> (u16, String) {
        loop {
            if let Some(end) = self.read.windows(4).position(|four| four == b"\r\n\r\n") {
                let head = String::from_utf8_lossy(&self.read[..end]).to_ascii_lowercase();
                let mut lines = head.lines();
                let length = lines.find_map(|line| line.strip_prefix("content-length: "));
                let whole = end + 4 + length.unwrap().parse::<usize>().unwrap();
                if self.read.len() >= whole {
                    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
                    let body = String::from_utf8_lossy(&self.read[end + 4..whole]).into_owned();
                    self.read.drain(..whole);
                    return (status, body);
                }
            }
            assert!(self.stream.read_buf(&mut self.read).await.unwrap() > 0);
        }
    }
}

fn judge(what: &str, figures: &str, ok: bool) -> bool {
    println!("{what:7} {figures} {}", if ok { "ok" } else { "NOT MET" });
    ok
}

/// Lock and release by many tasks, each on a name of its own, both in turns.
async fn speed(served: &Served, url: &str) -> bool {
    let client = palisade::connect(url).await.unwrap();
    let mut connections = Vec::new();
    for _ in 0..TASKS {
        connections.push(Connection::open(served.addr, "30s").await);
    }
    let (mut direct, mut through) = (Vec::new(), Vec::new());
    for _ in 0..5 {
        let until = Instant::now() + Duration::from_secs(2);
        let mut tasks = JoinSet::new();
        for task in 0..TASKS {
            let mutex = client.mutex(format!("direct/{task}"));
            tasks.spawn(async move {
                let mut count = 0u64;
                while Instant::now() < until {
                    let hold = mutex.lock().await.unwrap();
                    hold.release().await.unwrap();
                    count += 1;
                }
                count
            });
        }
        direct.push(tasks.join_all().await.iter().sum::<u64>());
        let until = Instant::now() + Duration::from_secs(2);
        let mut tasks = JoinSet::new();
        for (task, mut connection) in connections.drain(..).enumerate() {
            tasks.spawn(async move {
                let mut count = 0u64;
                let name = format!("through/{task}");
                while Instant::now() < until {
                    let id = format!("{:032x}", rand::random::<u128>());
                    let claim = json!({"name": name, "id": id});
                    let (status, held) = connection.post("/v1/claims", &claim).await;
                    assert_eq!(status, 200, "{held}");
                    let release = json!({"id": id});
                    let (status, _) = connection.post("/v1/claims/release", &release).await;
                    assert_eq!(status, 200);
                    count += 1;
                }
                (count, connection)
            });
        }
        let mut sum = 0;
        for (count, connection) in tasks.join_all().await {
            sum += count;
            connections.push(connection);
        }
        through.push(sum);
    }
    direct.sort_unstable();
    through.sort_unstable();
    let (direct, through) = (direct[2] / 2, through[2] / 2);
    let ratio = through as f64 / direct as f64;
    let figures = format!("{through}/s through, {direct}/s directly, ratio {ratio:.2} (0.40)");
    judge("speed", &figures, ratio >= 0.4)
}

async fn p99(connection: &mut Connection) -> Duration {
    let mut times = Vec::new();
    for _ in 0..2_000 {
        let id = format!("{:032x}", rand::random::<u128>());
        let claim = json!({"name": "slow", "id": id});
        let begin = Instant::now();
        let (status, held) = connection.post("/v1/claims", &claim).await;
        times.push(begin.elapsed());
        assert_eq!(status, 200, "{held}");
        connection
            .post("/v1/claims/release", &json!({"id": id}))
            .await;
    }
    times.sort_unstable();
    times[times.len() * 99 / 100]
}

/// Connections that have sent half a head, renewed as the gateway closes them.
async fn slow(served: &Served) -> bool {
    let mut connection = Connection::open(served.addr, "30s").await;
    p99(&mut connection).await;
    let before = p99(&mut connection).await;
    let mut slow = JoinSet::new();
    for _ in 0..SLOW {
        let addr = served.addr;
        slow.spawn(async move {
            loop {
                let mut stream = TcpStream::connect(addr).await.unwrap();
                let half = b"POST /v1/claims HTTP/1.1\r\nhost: ";
                stream.write_all(half).await.unwrap();
                let _ = stream.read(&mut [0; 1]).await;
            }
        });
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    let beside = p99(&mut connection).await;
    slow.shutdown().await;
    let ratio = beside.as_secs_f64() / before.as_secs_f64();
    let figures = format!("p99 {before:?} alone, {beside:?} beside {SLOW} slow, {ratio:.2}× (2)");
    judge("slow", &figures, ratio <= 2.0)
}

async fn series(served: &Served) -> bool {
    let mut connection = Connection::open(served.addr, "30s").await;
    for at in 0..NAMES {
        let name = format!("series/{at}");
        for mode in ["exclusive", "shared"] {
            let id = format!("{mode}{at}");
            let claim = json!({"name": name, "id": id, "mode": mode});
            connection.post("/v1/claims", &claim).await;
            connection
                .post("/v1/claims/release", &json!({"id": id}))
                .await;
        }
        connection.get(&format!("/v1/{at}")).await;
    }
    let (_, text) = connection.get("/metrics").await;
    let series = text.lines().filter(|line| !line.starts_with('#')).count();
    let figures = format!("{series} after {NAMES} names (500)");
    judge("series", &figures, series <= 500)
}

/// Requests that wait for names that somebody holds.
async fn memory(served: &Served, url: &str) -> bool {
    let client = palisade::connect(url).await.unwrap();
    let mut holds = Vec::new();
    for at in 0..100 {
        let held = client.mutex(format!("held/{at}")).lock().await;
        holds.push(held.unwrap());
    }
    let session = Connection::open(served.addr, "150s").await;
    let before = served.memory();
    let mut waiting = Vec::new();
    for at in 0..WAITING {
        let mut connection = Connection::bare(served.addr).await;
        connection.secret.clone_from(&session.secret);
        let name = format!("held/{}", at % 100);
        let claim = json!({"name": name, "id": at.to_string(), "wait": "50s", "queue": true});
        connection.send("/v1/claims", &claim).await;
        waiting.push(connection);
    }
    // All are there, and some have been for a while.
    let mut claims = 0;
    let began = Instant::now();
    while claims < WAITING && began.elapsed() < Duration::from_secs(30) {
        // Idle connections are closed after a while.
        let mut connection = Connection::bare(served.addr).await;
        let (_, text) = connection.get("/metrics").await;
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix("palisade_gateway_claims "));
        claims = line.unwrap().parse().unwrap();
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    tokio::time::sleep(Duration::from_secs(3)).await;
    let after = served.memory();
    let mib = (after - before) as f64 / 1024.0;
    let figures = format!(
        "{claims} waiting requests: {mib:.0} MiB above {:.0} MiB idle (160)",
        before as f64 / 1024.0
    );
    judge("memory", &figures, mib <= 160.0 && claims >= WAITING)
}
