//! The gateway itself: this test binary, started again. Whatever a test does to it, its output at
//! the end contains no token, no session secret and no password.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::Duration;

use palisade_gateway::{Audit, Config, Gateway, Limits, Metrics};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use crate::support::{LIMIT, SECRETS, TOKEN};

const URL: &str = "PALISADE_GATEWAY_TEST_URL";
const DRAIN: &str = "PALISADE_GATEWAY_TEST_DRAIN_MS";

/// A gateway that ends with its test.
pub(crate) struct Process {
    child: Child,
    /// Collects its stderr: the audit and everything else that it logs.
    log: Option<JoinHandle<String>>,
    pub(crate) addr: SocketAddr,
    /// Kept open to the end, because it may write more.
    _said: BufReader<ChildStdout>,
}

impl Process {
    pub(crate) fn start(url: &str) -> Self {
        Self::with(url, Duration::from_secs(60))
    }

    /// A gateway with this drain time.
    pub(crate) fn with(url: &str, drain: Duration) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "process::a_gateway", "--ignored", "--nocapture"])
            .env(URL, url)
            .env(DRAIN, drain.as_millis().to_string())
            // Its own process group, as a service has, so that it can be killed as a whole.
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut log = child.stderr.take().unwrap();
        let log = std::thread::spawn(move || {
            let mut text = Vec::new();
            let _ = log.read_to_end(&mut text);
            String::from_utf8_lossy(&text).into_owned()
        });
        let mut said = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        let addr = loop {
            line.clear();
            let length = said.read_line(&mut line).unwrap();
            assert!(length > 0, "it says where it listens");
            if let Some(addr) = line.trim_end().strip_prefix("listening at ") {
                break addr.parse().unwrap();
            }
        };
        Self {
            child,
            log: Some(log),
            addr,
            _said: said,
        }
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    /// Kills it, alone or with its whole group, and waits until it is gone.
    pub(crate) fn kill(&mut self, group: bool) {
        if group {
            kill_process_group(self.pid(), Signal::KILL).unwrap()
        } else {
            self.signal(Signal::KILL)
        }
        self.child.wait().unwrap();
    }

    /// The exit status if it has ended by itself.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let log = self.log.take().map(JoinHandle::join);
        let log = log.and_then(Result::ok).unwrap_or_default();
        if std::thread::panicking() {
            eprintln!("the gateway's log:\n{log}");
            return;
        }
        for secret in SECRETS.lock().iter().map(String::as_str).chain([TOKEN]) {
            assert!(!log.contains(secret), "a secret is in the log:\n{log}");
        }
    }
}

/// Not a test: [`Process::start`] starts this.
#[test]
#[ignore = "the gateway that other tests start"]
fn a_gateway() {
    let url = std::env::var(URL).unwrap();
    let drain: u64 = std::env::var(DRAIN).unwrap().parse().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        use tokio::signal::unix::{SignalKind, signal};
        let mut end = signal(SignalKind::terminate()).unwrap();
        let client = tokio::time::timeout(LIMIT, palisade::connect(&url));
        let client = client.await.unwrap().unwrap();
        let client = client.observed_by(palisade::layers::Metrics);
        let config = Config {
            listen: Some("127.0.0.1:0".parse().unwrap()),
            socket: None,
            access: None,
            token: Some(TOKEN.into()),
            tls: None,
            insecure: false,
            public_urls: Vec::new(),
            drain: Duration::from_millis(drain),
            limits: Limits::default(),
            audit: Audit::to(std::io::stderr()),
            metrics: Metrics::install().unwrap(),
            tracer: None,
        };
        let gateway = Gateway::bind(client.clone(), config).await.unwrap();
        println!("listening at {}", gateway.local_addr().unwrap());
        std::io::stdout().flush().unwrap();
        gateway
            .serve(async {
                end.recv().await;
            })
            .await;
        client.close().await;
    });
}
