//! What the tests share: etcd's JSON gateway, etcdctl, and waiting with a deadline.

use std::future::Future;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use palisade::Client;
use palisade_testkit::launch::{self, Running, wire};
use serde_json::{Value, json};

/// Far more than anything takes that is due at once.
pub(crate) const SOON: Duration = Duration::from_secs(10);

/// A client of the names that other tools use.
pub(crate) async fn beside_others(running: &Running) -> Client {
    palisade::connect(&format!("{}?namespace=", running.url()))
        .await
        .unwrap()
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

/// A call of etcd's JSON gateway.
pub(crate) fn call(running: &Running, path: &str, body: Value) -> Value {
    let port = running.nodes()[0].port();
    let (status, answer) = wire::http(port, "POST", path, &body.to_string()).unwrap();
    assert_eq!(status, 200, "{path}: {answer}");
    serde_json::from_str(&answer).unwrap()
}

/// Whether a transaction with this condition is applied.
pub(crate) fn applies(running: &Running, key: &[u8], create_revision: i64) -> bool {
    let compare = json!({
        "key": base64(key), "target": "CREATE", "result": "EQUAL",
        "create_revision": create_revision.to_string(),
    });
    let put = json!({ "request_put": { "key": base64(b"user/data"), "value": base64(b"x") } });
    let txn = json!({ "compare": [compare], "success": [put] });
    call(running, "/v3/kv/txn", txn)["succeeded"] == json!(true)
}

pub(crate) fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let get = |at: usize| u32::from(chunk.get(at).copied().unwrap_or(0));
        let bits = get(0) << 16 | get(1) << 8 | get(2);
        for digit in 0..4 {
            let at = (bits >> (18 - 6 * digit)) & 63;
            let shown = digit <= chunk.len() as u32;
            text.push(if shown {
                DIGITS[at as usize] as char
            } else {
                '='
            });
        }
    }
    text
}

/// A call of etcdctl that is under way; ends when it is dropped.
pub(crate) struct Ctl {
    child: Child,
    lines: mpsc::Receiver<String>,
}

impl Ctl {
    /// `None` when there is no etcdctl here.
    pub(crate) fn start(running: &Running, arguments: &[&str]) -> Option<Self> {
        let mut child = Command::new(launch::need_tool("etcdctl")?)
            .env("ETCDCTL_API", "3")
            .arg(format!("--endpoints={}", running.nodes()[0].address()))
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
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
        Some(Self { child, lines })
    }

    /// Runs it to its end.
    pub(crate) fn run(running: &Running, arguments: &[&str]) -> Option<()> {
        let mut ctl = Self::start(running, arguments)?;
        assert!(ctl.child.wait().unwrap().success(), "etcdctl {arguments:?}");
        Some(())
    }

    /// The next line that it prints.
    pub(crate) fn line(&self) -> String {
        self.lines.recv_timeout(SOON).expect("a line of etcdctl")
    }

    /// Whether it has printed nothing so far.
    pub(crate) fn is_silent(&self) -> bool {
        self.lines.try_recv().is_err()
    }

    /// Asks it to end, as Ctrl-C does, and waits for that.
    pub(crate) fn interrupt(mut self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
        let end = Instant::now() + SOON;
        while self.child.try_wait().unwrap().is_none() {
            assert!(Instant::now() < end, "etcdctl does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Ctl {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
