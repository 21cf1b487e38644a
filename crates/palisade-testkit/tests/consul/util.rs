//! What the tests share: Consul's HTTP API, `consul lock`, and waiting with a deadline.

use std::future::Future;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use palisade::Client;
use palisade_testkit::launch::{self, Running, table, wire};
use serde_json::Value;

/// Far more than anything takes that is due at once.
pub(crate) const SOON: Duration = Duration::from_secs(10);

/// A client of the names that other tools use.
pub(crate) async fn beside_others(running: &Running) -> Client {
    let url = format!("{}?namespace=", running.url());
    palisade::connect(&url).await.unwrap()
}

/// Waits for `future`, and fails by name when it takes too long.
pub(crate) async fn soon<F: Future>(what: &str, future: F) -> F::Output {
    let done = tokio::time::timeout(SOON, future).await;
    done.unwrap_or_else(|_| panic!("{what} did not happen within {SOON:?}"))
}

/// Looks until `test` is true.
pub(crate) async fn until<F: Future<Output = bool>>(what: &str, mut test: impl FnMut() -> F) {
    let look = async {
        while !test().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    soon(what, look).await;
}

/// Reads from Consul's HTTP API.
pub(crate) fn get(running: &Running, path: &str) -> Value {
    let (status, answer) = wire::http(running.nodes()[0].port(), "GET", path, "").unwrap();
    match status {
        404 => Value::Null,
        200 => serde_json::from_str(&answer).unwrap(),
        _ => panic!("{path}: {status} {answer}"),
    }
}

/// The session that has a key locked.
pub(crate) fn holder(running: &Running, key: &str) -> Option<String> {
    let pair = get(running, &format!("/v1/kv/{key}?consistent"));
    Some(pair[0]["Session"].as_str()?.to_owned())
}

/// Destroys a session, as an operator does.
pub(crate) fn destroy(running: &Running, session: &str) {
    let path = format!("/v1/session/destroy/{session}");
    let (status, _) = wire::http(running.nodes()[0].port(), "PUT", &path, "").unwrap();
    assert_eq!(status, 200, "{path}");
}

/// A call of `consul lock` that is under way; ends when it is dropped.
pub(crate) struct ConsulLock {
    child: Child,
    lines: mpsc::Receiver<String>,
}

impl ConsulLock {
    pub(crate) fn start(running: &Running, arguments: &[&str]) -> Self {
        let program = table::recipe_of("consul").unwrap().installed().unwrap();
        let mut child = Command::new(program)
            .arg("lock")
            .arg(format!(
                "-http-addr=http://{}",
                running.nodes()[0].address()
            ))
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let (told, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in out.lines().map_while(Result::ok) {
                if told.send(line).is_err() {
                    break;
                }
            }
        });
        Self { child, lines }
    }

    /// Holds `prefix` until it is told to end; returns when it does.
    pub(crate) fn hold(running: &Running, arguments: &[&str], prefix: &str) -> Self {
        let command = ["-child-exit-code", prefix, "echo held; exec sleep 600"];
        let lock = Self::start(running, &[arguments, &command].concat());
        assert_eq!(lock.line(), "held");
        lock
    }

    /// The next line that its command prints.
    pub(crate) fn line(&self) -> String {
        self.lines
            .recv_timeout(SOON)
            .expect("a line of consul lock")
    }

    /// Whether its command has printed nothing so far.
    pub(crate) fn is_silent(&self) -> bool {
        self.lines.try_recv().is_err()
    }

    /// Waits for its end: whether its command was run.
    pub(crate) fn ended(mut self) -> bool {
        let end = Instant::now() + SOON;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.success();
            }
            assert!(Instant::now() < end, "consul lock does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Asks it to end, as Ctrl-C does, and waits for that.
    pub(crate) fn interrupt(self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
        self.ended();
    }
}

impl Drop for ConsulLock {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts an engine for a test, or says why not.
pub(crate) fn need(name: &str) -> Option<Running> {
    launch::need(name)
}
