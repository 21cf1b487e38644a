//! `ApiServer`: a fake kube-apiserver that supports Leases, on a loopback port.
//!
//! It answers as real ones do (`store` has the rules, which were measured), over HTTP, to this and
//! to other processes. It can be made to fail as they do: an update that is applied and not
//! answered, 429, silence, watches that end. It runs in a thread of the test and ends with its
//! handle.

mod fault;
mod serve;
mod store;

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

pub use fault::{Fault, Grant, Rule};
use hyper::Method;
use hyper::header::HeaderValue;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use self::store::Store;
use super::until;
use crate::engine::{CutOff, Outage, Outages};

/// Whether it answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Serving,
    /// Connections stay open, and nothing is answered.
    Frozen,
    /// Nobody listens.
    Down,
    /// Ended for good.
    Ended,
}

struct State {
    store: Mutex<Store>,
    /// Notified at every request that may have changed something.
    changed: Notify,
    mode: watch::Sender<Mode>,
    rules: Mutex<Vec<Rule>>,
    grants: Mutex<Vec<Grant>>,
    counts: Mutex<HashMap<String, u64>>,
    /// Incremented to end the watches of an earlier epoch.
    epoch: AtomicU64,
    /// How far its clock is ahead, in seconds.
    ahead: Mutex<i64>,
    tls: Option<TlsAcceptor>,
}

impl State {
    fn count(&self, method: &Method) {
        *self.counts.lock().entry(method.to_string()).or_default() += 1;
    }

    fn fault(&self, method: &Method, path: &str, body: &[u8]) -> Option<Fault> {
        let mut rules = self.rules.lock();
        let rule = rules
            .iter_mut()
            .find(|rule| rule.concerns(method, path, body))?;
        rule.left -= 1;
        Some(rule.fault.clone())
    }

    fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    fn date(&self) -> Option<HeaderValue> {
        let ahead = *self.ahead.lock();
        if ahead == 0 {
            return None;
        }
        let shift = Duration::from_secs(ahead.unsigned_abs());
        let now = std::time::SystemTime::now();
        let time = if ahead > 0 { now + shift } else { now - shift };
        HeaderValue::from_str(&httpdate::fmt_http_date(time)).ok()
    }
}

/// See the module documentation.
pub struct ApiServer {
    state: Arc<State>,
    address: SocketAddr,
    folder: tempfile::TempDir,
    thread: Option<std::thread::JoinHandle<()>>,
}

/// The Kubernetes namespace that it has.
pub const NAMESPACE: &str = "default";

impl ApiServer {
    /// Starts it on a free port.
    ///
    /// # Errors
    /// A message if there is no port or no directory available.
    pub fn start() -> Result<Self, String> {
        Self::serving(None)
    }

    /// As [`ApiServer::start`], with TLS by certificates of
    /// [`certificates`](crate::lab::trial::certificates) in this directory. A client with a
    /// certificate of that authority has the token [`CERTIFICATE`].
    ///
    /// # Errors
    /// As [`ApiServer::start`], and if the certificates can't be used.
    pub fn start_tls(certificates: &Path) -> Result<Self, String> {
        let server = Self::serving(Some(acceptor(certificates)?))?;
        let ca = certificates.join("ca.pem");
        let config = std::fs::read_to_string(server.kubeconfig());
        let config = config.map_err(|error| error.to_string())?;
        let secure = format!(
            "https://{}\n    certificate-authority: {}",
            server.address,
            ca.display()
        );
        let config = config.replace(&format!("http://{}", server.address), &secure);
        std::fs::write(server.kubeconfig(), config).map_err(|error| error.to_string())?;
        Ok(server)
    }

    fn serving(tls: Option<TlsAcceptor>) -> Result<Self, String> {
        let failed = |error: std::io::Error| error.to_string();
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, super::ports::free()?));
        let state = Arc::new(State {
            store: Mutex::new(Store::new(NAMESPACE)),
            changed: Notify::new(),
            mode: watch::channel(Mode::Serving).0,
            rules: Mutex::default(),
            grants: Mutex::default(),
            counts: Mutex::default(),
            epoch: AtomicU64::new(0),
            ahead: Mutex::default(),
            tls,
        });
        let served = Arc::clone(&state);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        let runtime = runtime.map_err(failed)?;
        let thread = std::thread::spawn(move || runtime.block_on(listen(served, address)));
        let folder = tempfile::Builder::new()
            .prefix("palisade-apiserver-")
            .tempdir();
        let server = Self {
            state,
            address,
            folder: folder.map_err(failed)?,
            thread: Some(thread),
        };
        server.write_kubeconfig("config", "");
        server.answers()?;
        Ok(server)
    }

    fn answers(&self) -> Result<(), String> {
        until(Duration::from_secs(10), || {
            super::wire::connect(self.address.port()).map(drop)
        })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Its URL for palisade.
    pub fn url(&self) -> String {
        self.url_with(&self.kubeconfig())
    }

    /// The same with another kubeconfig.
    pub fn url_with(&self, kubeconfig: &Path) -> String {
        format!(
            "kubernetes://{NAMESPACE}?kubeconfig={}",
            kubeconfig.display()
        )
    }

    /// A kubeconfig without credentials.
    pub fn kubeconfig(&self) -> PathBuf {
        self.folder.path().join("config")
    }

    /// A directory that lives as long as the server.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Writes a kubeconfig whose user is `user`, as YAML on one line (`{token: x}`).
    ///
    /// # Panics
    /// If it can't be written.
    pub fn write_kubeconfig(&self, name: &str, user: &str) -> PathBuf {
        let path = self.folder.path().join(name);
        let user = if user.is_empty() { "{}" } else { user };
        let text = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: here\nclusters:\n- name: here\n  cluster:\n    server: http://{}\ncontexts:\n- name: here\n  context:\n    cluster: here\n    user: me\n    namespace: {NAMESPACE}\nusers:\n- name: me\n  user: {user}\n",
            self.address
        );
        if let Err(error) = std::fs::write(&path, text) {
            panic!("{}: {error}", path.display());
        }
        path
    }

    /// Injects a fault from now on, until [`ApiServer::heal`].
    pub fn inject(&self, rule: Rule) {
        self.state.rules.lock().push(rule);
    }

    /// Ends all faults; returns how many injections were still pending.
    pub fn heal(&self) -> usize {
        let rules = std::mem::take(&mut *self.state.rules.lock());
        let left = rules.iter().filter(|rule| rule.left < usize::MAX);
        left.map(|rule| rule.left).sum()
    }

    /// Requires one of these tokens; with an empty list everything is allowed.
    pub fn grant(&self, grants: Vec<Grant>) {
        *self.state.grants.lock() = grants;
    }

    /// Sets how many seconds its clock is ahead.
    pub fn set_clock_ahead(&self, seconds: i64) {
        *self.state.ahead.lock() = seconds;
    }

    /// Marks the namespace as being deleted.
    pub fn terminate_namespace(&self) {
        self.state.store.lock().terminating = true;
    }

    /// Stops answering, or answers again.
    pub fn freeze(&self, frozen: bool) {
        let mode = if frozen { Mode::Frozen } else { Mode::Serving };
        self.state.mode.send_replace(mode);
        self.state.changed.notify_waiters();
    }

    /// Ends all watches, as the server does from time to time.
    pub fn end_watches(&self) {
        self.state.epoch.fetch_add(1, Ordering::AcqRel);
        self.state.changed.notify_waiters();
    }

    /// As after a restart: watches end, and no earlier version can be watched from.
    pub fn forget_history(&self) {
        let mut store = self.state.store.lock();
        store.oldest = store.version + 2;
        // The watch cache begins later than the last write.
        store.tick();
        store.tick();
        drop(store);
        self.end_watches();
    }

    /// How many requests of this method were received.
    pub fn requests(&self, method: &str) -> u64 {
        self.state.counts.lock().get(method).copied().unwrap_or(0)
    }

    /// The current Lease of that name.
    pub fn lease(&self, name: &str) -> Option<Value> {
        let answer = self.state.store.lock().get(name);
        (answer.code == 200).then_some(answer.body)
    }

    /// The names of all Leases.
    pub fn leases(&self) -> Vec<String> {
        let store = self.state.store.lock();
        let names = store
            .all()
            .map(|lease| lease["metadata"]["name"].as_str().unwrap_or(""));
        names.map(str::to_owned).collect()
    }

    /// Changes a Lease directly, as `kubectl edit` does.
    ///
    /// # Panics
    /// If there is no such Lease, or the result is invalid.
    pub fn edit(&self, name: &str, edit: impl FnOnce(&mut Value)) {
        let mut store = self.state.store.lock();
        let mut lease = store.get(name).body;
        edit(&mut lease);
        let written = store.replace(NAMESPACE, name, lease.to_string().as_bytes());
        assert_eq!(written.code, 200, "{}", written.body);
        drop(store);
        self.state.changed.notify_waiters();
    }

    /// Deletes a Lease, as `kubectl delete` does.
    pub fn delete(&self, name: &str) {
        let deleted = self.state.store.lock().delete(name, b"{}");
        assert_eq!(deleted.code, 200, "{}", deleted.body);
        self.state.changed.notify_waiters();
    }

    /// Sends one request by hand: returns status, headers and body.
    ///
    /// # Panics
    /// When there is no answer.
    pub fn ask(&self, method: &str, path: &str, body: &Value) -> (u16, String, Value) {
        self.ask_as(None, "application/json", method, path, body)
    }

    /// The same with a token and a media type.
    ///
    /// # Panics
    /// When there is no answer.
    pub fn ask_as(
        &self,
        token: Option<&str>,
        media: &str,
        method: &str,
        path: &str,
        body: &Value,
    ) -> (u16, String, Value) {
        use std::io::{Read, Write};
        let body = if body.is_null() {
            String::new()
        } else {
            body.to_string()
        };
        let token = token.map_or(String::new(), |t| format!("Authorization: Bearer {t}\r\n"));
        let request = format!(
            "{method} {path} HTTP/1.0\r\nHost: x\r\nContent-Type: {media}\r\n{token}Content-Length: {}\r\n\r\n{body}",
            body.len()
        );
        let talk = || -> std::io::Result<String> {
            let mut stream = std::net::TcpStream::connect(self.address)?;
            stream.set_read_timeout(Some(Duration::from_secs(20)))?;
            stream.write_all(request.as_bytes())?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer)?;
            Ok(answer)
        };
        let answer = talk().unwrap_or_else(|error| panic!("{method} {path}: {error}"));
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
        let code = head.split(' ').nth(1).and_then(|code| code.parse().ok());
        let json = serde_json::from_str(body).unwrap_or_else(|_| json!(body));
        (code.unwrap_or(0), head.to_lowercase(), json)
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        self.state.mode.send_replace(Mode::Ended);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl CutOff for ApiServer {
    fn begin(&self) {
        self.freeze(true);
    }

    fn end(&self) {
        self.freeze(false);
    }
}

/// Clients can't tell a stopped server from a partitioned one, nor a killed one from one that
/// refuses connections. Its data is in etcd in reality, and is kept.
impl Outages for ApiServer {
    fn can(&self, _: Outage) -> bool {
        true
    }

    fn begin(&self, outage: Outage) -> Result<(), String> {
        let mode = match outage {
            Outage::Stop | Outage::Blackhole => Mode::Frozen,
            Outage::Kill | Outage::Cut => Mode::Down,
        };
        self.state.mode.send_replace(mode);
        Ok(())
    }

    fn end(&self, _: Outage) -> Result<(), String> {
        self.state.mode.send_replace(Mode::Serving);
        self.state.changed.notify_waiters();
        self.answers()
    }
}

/// Listens unless it is down.
async fn listen(state: Arc<State>, address: SocketAddr) {
    let mut mode = state.mode.subscribe();
    loop {
        let up = |mode: &Mode| *mode != Mode::Down;
        let now = mode.wait_for(up).await.map(|mode| *mode);
        if matches!(now, Ok(Mode::Ended) | Err(_)) {
            return;
        }
        let Ok(listener) = TcpListener::bind(address).await else {
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        // Dropped with all connections when the server goes down.
        let mut connections = JoinSet::new();
        loop {
            tokio::select! {
                accepted = listener.accept() => if let Ok((stream, _)) = accepted {
                    connections.spawn(connection(Arc::clone(&state), stream));
                },
                _ = connections.join_next(), if !connections.is_empty() => {}
                down = mode.wait_for(|mode| matches!(mode, Mode::Down | Mode::Ended)) => {
                    drop(down);
                    break;
                }
            }
        }
    }
}

async fn connection(state: Arc<State>, stream: TcpStream) {
    let _ = stream.set_nodelay(true);
    let Some(tls) = state.tls.clone() else {
        return requests(state, stream, false).await;
    };
    if let Ok(stream) = tls.accept(stream).await {
        let shown = stream.get_ref().1.peer_certificates().is_some();
        requests(state, stream, shown).await;
    }
}

async fn requests<S>(state: Arc<State>, stream: S, certified: bool)
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + 'static,
{
    let service = service_fn(move |request| serve::serve(Arc::clone(&state), request, certified));
    let served = hyper::server::conn::http1::Builder::new();
    // A broken connection only concerns its client.
    let _ = served.serve_connection(TokioIo::new(stream), service).await;
}

/// The token of a client with a certificate.
pub const CERTIFICATE: &str = "by certificate";

fn acceptor(folder: &Path) -> Result<TlsAcceptor, String> {
    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer};
    let pem = |name: &str| CertificateDer::from_pem_file(folder.join(name));
    let failed = |error: &dyn std::fmt::Display| error.to_string();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut roots = rustls::RootCertStore::empty();
    roots
        .add(pem("ca.pem").map_err(|e| failed(&e))?)
        .map_err(|e| failed(&e))?;
    let verifier = rustls::server::WebPkiClientVerifier::builder_with_provider(
        Arc::new(roots),
        Arc::clone(&provider),
    );
    let verifier = verifier
        .allow_unauthenticated()
        .build()
        .map_err(|e| failed(&e))?;
    let key = PrivateKeyDer::from_pem_file(folder.join("server.key")).map_err(|e| failed(&e))?;
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| failed(&e))?
        .with_client_cert_verifier(verifier)
        .with_single_cert(vec![pem("server.pem").map_err(|e| failed(&e))?], key);
    Ok(TlsAcceptor::from(Arc::new(config.map_err(|e| failed(&e))?)))
}
