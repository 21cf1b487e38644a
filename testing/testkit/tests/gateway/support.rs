//! Engines to put a gateway in front of, and a client that computes how long it may rely on a
//! claim.

use std::net::SocketAddr;
use std::time::Duration;

use palisade::report::Scope;
use palisade::{BootTime, Client, Name};
use palisade_testkit::lab::launch::{self, Running, wire};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Far more than anything here takes; only a failing test reaches it.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

pub(crate) const TOKEN: &str = "a-token-of-the-tests-0123456789abcdef";

/// The secrets that must not be in any log.
pub(crate) static SECRETS: Mutex<Vec<String>> = Mutex::new(Vec::new());

pub(crate) fn full() -> bool {
    std::env::var_os("PALISADE_TEST_FULL").is_some()
}

/// An engine, and its URLs for a gateway and for others.
pub(crate) struct Site {
    /// The URL for the gateway.
    pub(crate) url: String,
    /// The URL for direct clients.
    pub(crate) direct: String,
    pub(crate) running: Option<Running>,
    _dir: Option<TempDir>,
}

impl Site {
    pub(crate) fn file() -> Self {
        let dir = TempDir::new().unwrap();
        let direct = format!("file:{}", dir.path().join("store").display());
        Self {
            url: format!("{direct}?ends_with=lease"),
            direct,
            running: None,
            _dir: Some(dir),
        }
    }

    /// The test's own server; `None` if it is not available.
    pub(crate) fn served(name: &str) -> Option<Self> {
        let running = launch::need(name)?;
        Some(Self {
            url: running.url().to_owned(),
            direct: running.url().to_owned(),
            running: Some(running),
            _dir: None,
        })
    }

    /// A Redis that requires a password, which is in the URL.
    pub(crate) fn guarded() -> Option<Self> {
        let password = format!("{:032x}", rand::random::<u128>());
        let running = launch::need("redis")?;
        let set = ["CONFIG", "SET", "requirepass", &password];
        wire::redis(running.nodes()[0].port(), &set).unwrap();
        let url = running
            .url()
            .replacen("redis://", &format!("redis://:{password}@"), 1);
        SECRETS.lock().push(password);
        Some(Self {
            direct: url.clone(),
            url,
            running: Some(running),
            _dir: None,
        })
    }

    /// A client that does not use the gateway.
    pub(crate) async fn outsider(&self) -> Client {
        palisade::connect(&self.direct).await.unwrap()
    }
}

/// The number of holders and waiters that the engine shows.
pub(crate) async fn line(client: &Client, name: &str) -> (usize, usize) {
    let scope = Scope::Line(Name::new(name).unwrap());
    let lines = client.survey(scope).await.unwrap();
    lines
        .first()
        .map_or((0, 0), |line| (line.holders.len(), line.waiters.len()))
}

/// Waits until the line has this many holders and waiters.
pub(crate) async fn until_line(client: &Client, name: &str, wanted: (usize, usize)) {
    let until = BootTime::now() + LIMIT;
    loop {
        let found = line(client, name).await;
        if found == wanted {
            return;
        }
        assert!(!until.has_passed(), "{name}: {found:?}, not {wanted:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// A reply.
#[derive(Debug, Clone)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) json: Value,
    /// The time before the request was sent.
    pub(crate) sent: BootTime,
}

impl Reply {
    #[track_caller]
    pub(crate) fn is(self, status: u16) -> Self {
        assert_eq!(self.status, status, "{} {}", self.head, self.json);
        self
    }

    pub(crate) fn code(&self) -> &str {
        self.json["code"].as_str().unwrap_or_default()
    }

    /// Until when the client may rely on a claim, according to an answer about it.
    pub(crate) fn believed(&self) -> BootTime {
        believed(self.sent, &self.json)
    }
}

/// Until when the client may rely on the claim in `answer`, to a request that was sent at `sent`.
pub(crate) fn believed(sent: BootTime, answer: &Value) -> BootTime {
    match (answer["state"].as_str(), answer["valid_ms"].as_u64()) {
        (Some("held"), Some(valid)) => sent + Duration::from_millis(valid),
        _ => BootTime::PAST,
    }
}

/// How a gateway is reached: the address to connect to, and its `Host`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wire {
    to: SocketAddr,
    host: SocketAddr,
}

impl Wire {
    /// Through a proxy, whose address is not the gateway's.
    pub(crate) fn through(proxy: SocketAddr, host: SocketAddr) -> Self {
        Self { to: proxy, host }
    }
}

impl From<SocketAddr> for Wire {
    fn from(addr: SocketAddr) -> Self {
        Self {
            to: addr,
            host: addr,
        }
    }
}

/// A client's session.
#[derive(Debug, Clone)]
pub(crate) struct Session {
    pub(crate) wire: Wire,
    pub(crate) secret: String,
}

impl Session {
    pub(crate) async fn open(addr: SocketAddr, ttl: Duration) -> Self {
        let ttl = json!({"ttl": format!("{}ms", ttl.as_millis())});
        let opened = ask(addr, "POST", "/v1/sessions", None, &ttl).await;
        let opened = opened.unwrap().is(201);
        let secret = opened.json["secret"].as_str().unwrap().to_owned();
        SECRETS.lock().push(secret.clone());
        let wire = addr.into();
        Self { wire, secret }
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> std::io::Result<Reply> {
        ask(self.wire, "POST", path, Some(&self.secret), body).await
    }

    /// Claims, and queues if necessary.
    pub(crate) async fn claim(&self, name: &str, id: &str, wait: &str) -> std::io::Result<Reply> {
        let body = json!({"name": name, "id": id, "wait": wait, "queue": true});
        self.post("/v1/claims", &body).await
    }

    pub(crate) async fn release(&self, id: &str) -> std::io::Result<Reply> {
        self.post("/v1/claims/release", &json!({"id": id})).await
    }

    pub(crate) async fn keep_alive(&self, ids: &[&str]) -> std::io::Result<Reply> {
        let body = json!({"claims": ids});
        self.post("/v1/sessions/keepalive", &body).await
    }
}

pub(crate) async fn ask(
    wire: impl Into<Wire>,
    method: &str,
    path: &str,
    secret: Option<&str>,
    body: &Value,
) -> std::io::Result<Reply> {
    ask_within(LIMIT, wire.into(), method, path, secret, body).await
}

/// Sends a request; an error if there is no complete answer within `limit`.
pub(crate) async fn ask_within(
    limit: Duration,
    wire: Wire,
    method: &str,
    path: &str,
    secret: Option<&str>,
    body: &Value,
) -> std::io::Result<Reply> {
    let sent = BootTime::now();
    let bytes = request(wire.host, method, path, secret, body);
    let exchange = async {
        let mut stream = TcpStream::connect(wire.to).await?;
        stream.write_all(&bytes).await?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await?;
        Ok::<_, std::io::Error>(answer)
    };
    let answer = tokio::time::timeout(limit, exchange).await;
    let answer = answer.map_err(|_| std::io::ErrorKind::TimedOut)??;
    parse(sent, &answer).ok_or_else(|| std::io::ErrorKind::UnexpectedEof.into())
}

/// The complete answer to a GET, as text.
pub(crate) async fn text_of(addr: SocketAddr, path: &str) -> String {
    let mut stream = TcpStream::connect(addr).await.unwrap();
    let bytes = request(addr, "GET", path, None, &Value::Null);
    stream.write_all(&bytes).await.unwrap();
    let mut answer = String::new();
    let read = tokio::time::timeout(LIMIT, stream.read_to_string(&mut answer)).await;
    read.unwrap().unwrap();
    answer
}

pub(crate) fn request(
    host: impl std::fmt::Display,
    method: &str,
    path: &str,
    secret: Option<&str>,
    body: &Value,
) -> Vec<u8> {
    let body = match method {
        "POST" => body.to_string(),
        _ => String::new(),
    };
    let secret = secret.map_or_else(String::new, |secret| {
        format!("palisade-session: {secret}\r\n")
    });
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\
         authorization: Bearer {TOKEN}\r\ncontent-type: application/json\r\n{secret}\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    head.into_bytes()
}

pub(crate) fn parse(sent: BootTime, answer: &[u8]) -> Option<Reply> {
    let text = String::from_utf8_lossy(answer);
    let (head, body) = text.split_once("\r\n\r\n")?;
    Some(Reply {
        status: head.split(' ').nth(1)?.parse().ok()?,
        head: head.to_ascii_lowercase(),
        json: serde_json::from_str(body.trim()).ok()?,
        sent,
    })
}
