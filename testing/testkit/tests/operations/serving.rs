//! `palisade serve` and `palisade run` as processes of a test, on the test's own store.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

use palisade_testkit::lab::launch;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

/// The built command: `PALISADE_COMMAND`, or the one that was built with this test.
pub(crate) fn command() -> Command {
    let beside = || {
        let own = std::env::current_exe().unwrap();
        own.ancestors().nth(2).unwrap().join("palisade")
    };
    let program = std::env::var_os("PALISADE_COMMAND").map_or_else(beside, PathBuf::from);
    assert!(
        program.exists(),
        "build it first: cargo build -p palisade-cli --bin palisade"
    );
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        let name_shown = name.to_string_lossy();
        let ours = ["PALISADE_", "OTEL_", "TRACE"];
        if ours.iter().any(|prefix| name_shown.starts_with(prefix)) {
            command.env_remove(name);
        }
    }
    // The user who runs the tests may have a configuration.
    command
        .env("PALISADE_CONFIG", "/dev/null")
        .stdin(Stdio::null());
    command
}

/// The principals of the access file, each with a token generated for this test.
pub(crate) const PRINCIPALS: &[(&str, &str)] = &[
    ("operator", "use = [\"\"]\nsee = [\"\"]\noperate = [\"\"]"),
    ("viewer", "see = [\"\"]"),
    ("billing", "use = [\"billing/\"]\noperate = [\"billing/\"]"),
];

/// A store, and the gateway in front of it.
pub(crate) struct Served {
    pub(crate) dir: TempDir,
    pub(crate) port: u16,
    gateway: Option<Child>,
    tokens: Vec<String>,
    /// Variables of the gateway's environment.
    variables: Vec<(String, String)>,
}

impl Served {
    pub(crate) fn start() -> Self {
        Self::start_with(&[])
    }

    /// A gateway with these variables in its environment.
    pub(crate) fn start_with(variables: &[(&str, &str)]) -> Self {
        let variables = variables
            .iter()
            .map(|(name, value)| ((*name).into(), (*value).into()));
        let dir = TempDir::new().unwrap();
        let mut access = String::new();
        let mut tokens = Vec::new();
        for (name, rights) in PRINCIPALS {
            let made = command()
                .args(["--json", "serve", "token", name])
                .output()
                .unwrap();
            let made: Value = serde_json::from_slice(&made.stdout).unwrap();
            let hash = made["token_sha256"].as_str().unwrap();
            writeln!(
                access,
                "[[principal]]\nname = \"{name}\"\ntoken_sha256 = \"{hash}\"\n{rights}"
            )
            .unwrap();
            tokens.push(made["token"].as_str().unwrap().to_owned());
        }
        std::fs::write(dir.path().join("access.toml"), access).unwrap();
        let mut served = Self {
            dir,
            port: launch::free_port(),
            gateway: None,
            tokens,
            variables: variables.collect(),
        };
        served.serve();
        served
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The URL of the engine itself.
    pub(crate) fn url(&self) -> String {
        format!("file:{}", self.path("store").display())
    }

    pub(crate) fn token(&self, principal: &str) -> &str {
        let at = PRINCIPALS
            .iter()
            .position(|(name, _)| *name == principal)
            .unwrap();
        &self.tokens[at]
    }

    /// The URL of a page of the dashboard, without a token.
    pub(crate) fn page(&self, page: &str) -> String {
        format!("http://127.0.0.1:{}/#/{page}", self.port)
    }

    /// The URL of the dashboard with the token of a principal, as `serve` prints it.
    pub(crate) fn entry(&self, principal: &str) -> String {
        format!("http://127.0.0.1:{}/#{}", self.port, self.token(principal))
    }

    /// Starts the gateway, on the same port each time.
    pub(crate) fn serve(&mut self) {
        let mut serve = command();
        serve
            .args([
                "--json",
                "serve",
                "--drain",
                "100ms",
                "--url",
                &self.url(),
                "--listen",
            ])
            .arg(format!("127.0.0.1:{}", self.port))
            .args([Path::new("--access"), &self.path("access.toml")])
            .args([Path::new("--audit"), &self.path("audit.jsonl")])
            .args([Path::new("--socket"), &self.path("run/gateway.sock")])
            .envs(self.variables.iter().map(|(name, value)| (name, value)))
            .stderr(Stdio::piped());
        let mut child = serve.spawn().unwrap();
        let mut said = String::new();
        BufReader::new(child.stderr.take().unwrap())
            .read_line(&mut said)
            .unwrap();
        assert!(said.contains("serving"), "{said}");
        self.gateway = Some(child);
    }

    pub(crate) fn kill(&mut self) {
        let mut child = self.gateway.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Waits for the gateway to end by itself; returns its exit code.
    pub(crate) fn ended(&mut self) -> Option<i32> {
        ended(self.gateway.as_mut().unwrap())
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = self.gateway.as_ref().unwrap().id();
        kill_process(Pid::from_raw(pid.try_into().unwrap()).unwrap(), signal).unwrap();
    }

    /// The audit log.
    pub(crate) fn audit(&self) -> String {
        std::fs::read_to_string(self.path("audit.jsonl")).unwrap_or_default()
    }

    /// Sends a request to the gateway as a principal; returns the status and the body.
    pub(crate) fn ask(
        &self,
        principal: &str,
        method: &str,
        path: &str,
        more: &str,
        body: &str,
    ) -> (u16, String) {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(60)))
            .unwrap();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: 127.0.0.1:{}\r\nconnection: close\r\n\
             authorization: Bearer {}\r\ncontent-type: application/json\r\n{more}\
             content-length: {}\r\n\r\n{body}",
            self.port,
            self.token(principal),
            body.len()
        );
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let status = answer
            .split(' ')
            .nth(1)
            .and_then(|status| status.parse().ok())
            .unwrap();
        (status, answer.split_once("\r\n\r\n").unwrap().1.to_owned())
    }

    /// `palisade run NAME ARGS… -- sh -c SCRIPT` with a label, on the engine itself.
    pub(crate) fn run(&self, name: &str, label: &str, args: &[&str], script: &str) -> Run {
        let encoded: String = label.bytes().map(|byte| format!("%{byte:02X}")).collect();
        let mut run = command();
        run.args([
            "run",
            name,
            "--url",
            &format!("{}?label={encoded}", self.url()),
        ])
        .args(args)
        .args(["--", "sh", "-c", script]);
        // The script uses the same command, and the same locks.
        let path = std::env::var("PATH").unwrap_or_default();
        let own = Path::new(run.get_program()).parent().unwrap().display();
        run.env("PATH", format!("{own}:{path}"));
        run.env("PALISADE_URL", self.url());
        run.stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let mut child = run.spawn().unwrap();
        let stdin = child.stdin.take();
        Run { child, stdin }
    }

    /// Holds `name` until the result is told to end, or dropped.
    pub(crate) fn hold(&self, name: &str, label: &str, args: &[&str]) -> Run {
        self.run(name, label, args, "cat >/dev/null")
    }

    /// Holds `one`, and waits for `other` inside it once that is held.
    pub(crate) fn cross(&self, one: &str, other: &str) -> Run {
        let mark = |name: &str| self.path(&name.replace('/', "-")).display().to_string();
        let script = format!(
            "touch {}; until [ -e {} ]; do sleep 0.05; done; palisade run {other} -- true",
            mark(one),
            mark(other)
        );
        self.run(one, "transfer", &[], &script)
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if let Some(mut child) = self.gateway.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A `palisade run` that ends with its test.
pub(crate) struct Run {
    pub(crate) child: Child,
    stdin: Option<ChildStdin>,
}

impl Run {
    /// Lets the script end; returns its exit code.
    pub(crate) fn end(mut self) -> Option<i32> {
        self.stdin = None;
        self.child.wait().unwrap().code()
    }

    /// Waits for it to end by itself; returns its exit code.
    pub(crate) fn ended(&mut self) -> Option<i32> {
        ended(&mut self.child)
    }
}

fn ended(child: &mut Child) -> Option<i32> {
    let ended = || match child.try_wait().unwrap() {
        Some(status) => Ok(status.code()),
        None => Err("it still runs".to_owned()),
    };
    launch::until(Duration::from_secs(60), ended).unwrap()
}

impl Drop for Run {
    fn drop(&mut self) {
        self.stdin = None;
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
