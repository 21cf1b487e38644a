//! A real gateway on a free loopback port, and a small client for it.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use palisade::BootTime;
use palisade_gateway::{Audit, Config, Gateway, Limits, Metrics};
use parking_lot::Mutex;
use serde_json::Value;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Far more than anything here takes; a test that needs it has failed.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);

/// The token of the port.
pub(crate) const TOKEN: &str = "a-token-of-the-tests-0123456789abcdef";

/// What the audit wrote.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Log {
    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.0.lock().clone()).unwrap()
    }
}

/// A gateway that ends with its test.
pub(crate) struct Served {
    pub(crate) addr: SocketAddr,
    pub(crate) log: Log,
    pub(crate) engine: palisade::Client,
    pub(crate) end: Option<oneshot::Sender<()>>,
    pub(crate) task: JoinHandle<()>,
    pub(crate) dir: TempDir,
}

/// How a gateway of a test differs from the usual one.
#[derive(Default)]
pub(crate) struct With {
    pub(crate) url: Option<String>,
    pub(crate) access: Option<String>,
    pub(crate) limits: Option<Limits>,
    pub(crate) drain: Option<Duration>,
    pub(crate) tls: Option<(PathBuf, PathBuf)>,
}

pub(crate) async fn serve() -> Served {
    serve_with(With::default()).await
}

pub(crate) async fn serve_with(with: With) -> Served {
    let dir = TempDir::new().unwrap();
    let url = with.url.unwrap_or_else(|| {
        format!(
            "file:{}?ends_with=lease",
            dir.path().join("store").display()
        )
    });
    let engine = palisade::connect(&url).await.unwrap();
    let log = Log::default();
    let access = with.access.map(|text| {
        let path = dir.path().join("access.toml");
        std::fs::write(&path, text).unwrap();
        path
    });
    let config = Config {
        listen: Some("127.0.0.1:0".parse().unwrap()),
        socket: Some(dir.path().join("run/gateway.sock")),
        token: Some(TOKEN.into()),
        access,
        tls: with.tls,
        insecure: false,
        public_urls: Vec::new(),
        drain: with.drain.unwrap_or(Duration::from_secs(60)),
        limits: with.limits.unwrap_or_default(),
        audit: Audit::to(log.clone()),
        metrics: Metrics::default(),
        tracer: None,
    };
    let gateway = Gateway::bind(engine.clone(), config).await.unwrap();
    let addr = gateway.local_addr().unwrap();
    let (end, ended) = oneshot::channel();
    let task = tokio::spawn(gateway.serve(async {
        let _ = ended.await;
    }));
    Served {
        addr,
        log,
        engine,
        end: Some(end),
        task,
        dir,
    }
}

/// What came back.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) json: Value,
}

impl Reply {
    #[track_caller]
    pub(crate) fn is(self, status: u16) -> Value {
        assert_eq!(self.status, status, "{} {}", self.head, self.json);
        self.json
    }

    /// A problem with this code.
    #[track_caller]
    pub(crate) fn refuses(self, status: u16, code: &str) -> Value {
        assert_eq!(
            (self.status, self.json["code"].as_str()),
            (status, Some(code)),
            "{self:?}"
        );
        assert!(
            self.head.contains("application/problem+json"),
            "{}",
            self.head
        );
        assert!(!self.json["detail"].as_str().unwrap().is_empty());
        self.json
    }
}

/// A request, in parts that a test can change.
pub(crate) struct Ask<'a> {
    pub(crate) method: &'a str,
    pub(crate) path: &'a str,
    pub(crate) headers: Vec<(&'a str, String)>,
    pub(crate) body: String,
}

impl<'a> Ask<'a> {
    pub(crate) fn new(method: &'a str, path: &'a str, body: &str) -> Self {
        let mut ask = Self {
            method,
            path,
            headers: vec![("authorization", format!("Bearer {TOKEN}"))],
            body: body.into(),
        };
        if method == "POST" {
            ask.headers
                .push(("content-type", "application/json".into()));
        }
        ask
    }

    pub(crate) fn post(path: &'a str, body: &Value) -> Self {
        Self::new("POST", path, &body.to_string())
    }

    pub(crate) fn get(path: &'a str) -> Self {
        Self::new("GET", path, "")
    }

    /// Replaces a header; an empty value removes it.
    pub(crate) fn with(mut self, name: &'a str, value: &str) -> Self {
        self.headers.retain(|(known, _)| *known != name);
        if !value.is_empty() {
            self.headers.push((name, value.to_owned()));
        }
        self
    }

    pub(crate) fn session(self, secret: &str) -> Self {
        self.with("palisade-session", secret)
    }

    pub(crate) fn bytes(&self, addr: SocketAddr) -> Vec<u8> {
        let mut text = format!(
            "{} {} HTTP/1.1\r\nconnection: close\r\n",
            self.method, self.path
        );
        if !self.headers.iter().any(|(name, _)| *name == "host") {
            text += &format!("host: {addr}\r\n");
        }
        for (name, value) in &self.headers {
            text += &format!("{name}: {value}\r\n");
        }
        text += &format!("content-length: {}\r\n\r\n{}", self.body.len(), self.body);
        text.into_bytes()
    }

    pub(crate) async fn send(self, addr: SocketAddr) -> Reply {
        let stream = TcpStream::connect(addr).await.unwrap();
        exchange(stream, &self.bytes(addr)).await
    }
}

pub(crate) async fn exchange(
    mut stream: impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
    bytes: &[u8],
) -> Reply {
    // The server may have answered, and closed, before it has read everything.
    let _ = stream.write_all(bytes).await;
    let mut answer = Vec::new();
    let read = tokio::time::timeout(LIMIT, stream.read_to_end(&mut answer));
    let _ = read.await.expect("an answer in time");
    parse(&answer)
}

pub(crate) fn parse(answer: &[u8]) -> Reply {
    let text = String::from_utf8_lossy(answer);
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    let status = head
        .split(' ')
        .nth(1)
        .and_then(|status| status.parse().ok());
    Reply {
        status: status.unwrap_or(0),
        head: head.to_ascii_lowercase(),
        json: serde_json::from_str(body.trim()).unwrap_or(Value::Null),
    }
}

pub(crate) async fn read_until(stream: &mut TcpStream, seen: &mut Vec<u8>, text: &str) {
    let read = async {
        while !String::from_utf8_lossy(seen).contains(text) {
            assert!(
                stream.read_buf(seen).await.unwrap() > 0,
                "{}",
                String::from_utf8_lossy(seen)
            );
        }
    };
    tokio::time::timeout(LIMIT, read)
        .await
        .unwrap_or_else(|_| panic!("{text}"));
}

impl Served {
    /// Opens a session; returns its secret.
    pub(crate) async fn session(&self, ttl: &str) -> String {
        let ask = Ask::post("/v1/sessions", &serde_json::json!({"ttl": ttl}));
        let opened = ask.send(self.addr).await.is(201);
        opened["secret"].as_str().unwrap().to_owned()
    }

    pub(crate) async fn post(&self, path: &str, secret: &str, body: &Value) -> Reply {
        Ask::post(path, body).session(secret).send(self.addr).await
    }

    /// The line as the engine shows it.
    pub(crate) async fn line(&self, name: &str) -> (usize, usize) {
        let name = palisade::Name::new(name).unwrap();
        let scope = palisade::report::Scope::Line(name);
        let lines = self.engine.survey(scope).await.unwrap();
        lines
            .first()
            .map_or((0, 0), |line| (line.holders.len(), line.waiters.len()))
    }

    /// Waits until the line has so many holders and waiters.
    pub(crate) async fn until_line(&self, name: &str, wanted: (usize, usize)) {
        let until = BootTime::now() + LIMIT;
        while self.line(name).await != wanted {
            assert!(
                !until.has_passed(),
                "{name}: {:?}, not {wanted:?}",
                self.line(name).await
            );
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Waits until the audit says this.
    pub(crate) async fn until_logged(&self, text: &str) {
        let until = BootTime::now() + LIMIT;
        while !self.log.text().contains(text) {
            assert!(!until.has_passed(), "{text} in {}", self.log.text());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}
