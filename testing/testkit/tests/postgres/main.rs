//! What is specific to PostgreSQL: other users of the same locks, poolers, users and its kinds of
//! failures. Each test starts the server that it needs.

#![allow(clippy::unwrap_used)]

#[macro_use]
extern crate palisade_testkit;

mod crowd;
mod far;
mod faults;
mod interop;
mod login;
mod plans;
mod pooled;
mod reach;
mod rights;
mod schema;
mod secure;
mod sessions;
mod standby;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use palisade::{BootTime, Client};
use palisade_testkit::lab::launch::{self, Running, wire};
use palisade_testkit::lab::trial::{SOON, fails, started, until};

fn server() -> Option<Running> {
    server_with(&[])
}

fn server_with(settings: &[&str]) -> Option<Running> {
    started("postgres", settings)
}

async fn connect(url: impl AsRef<str>) -> Client {
    palisade::connect(url.as_ref()).await.unwrap()
}

/// Why no lock can be acquired by a URL.
async fn refusal(url: &str) -> palisade::Error {
    match palisade::connect(url).await {
        Err(error) => error,
        Ok(client) => client.mutex("x").try_lock().await.unwrap_err(),
    }
}

/// How soon a session lock is let go of: far below its ttl of 12 s, after which the server ends the
/// session.
const LET_GO: Duration = Duration::from_secs(5);

async fn soon<T>(what: impl Future<Output = T>) -> T {
    let done = tokio::time::timeout(SOON, what).await;
    done.expect("it takes too long")
}

/// Checks repeatedly for `time`.
async fn throughout(time: Duration, check: impl Fn()) {
    let end = BootTime::now() + time;
    while !end.has_passed() {
        check();
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Returns when one session waits for an advisory lock.
async fn waits_for_a_lock(server: &Running) {
    let waits = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted";
    until("one waits at the server", async || {
        sql(server, waits) == ["1"]
    })
    .await;
}

/// The server's URL for session locks.
fn advisory(server: &Running) -> String {
    server.url().replacen("postgres:", "postgres+advisory:", 1)
}

/// Runs one statement as the owner, on the server itself.
fn sql(server: &Running, sql: &str) -> Vec<String> {
    let port = server.nodes().last().unwrap().port();
    wire::postgres(port, "palisade", sql).unwrap()
}

/// A session of the real `psql`.
struct Psql {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Psql {
    /// `None`, with the reason reported, if there is no psql.
    fn open(server: &Running) -> Option<Self> {
        let url = server.url();
        let started = Command::new("psql")
            .args(["-X", "-q", "-A", "-t", url])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let mut child = match started {
            Ok(child) => child,
            Err(error) => {
                launch::skip("psql", &error.to_string());
                return None;
            }
        };
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Some(Self {
            child,
            input,
            output,
        })
    }

    /// Sends statements, without waiting for an answer.
    fn send(&mut self, sql: &str) {
        writeln!(self.input, "{sql}").unwrap();
        self.input.flush().unwrap();
    }

    /// Sends statements; returns the rows of their answers.
    fn ask(&mut self, sql: &str) -> Vec<String> {
        self.send(sql);
        self.send("\\echo that-is-all");
        let mut rows = Vec::new();
        loop {
            let mut line = String::new();
            assert_ne!(self.output.read_line(&mut line).unwrap(), 0, "psql ended");
            match line.trim_end() {
                "that-is-all" => return rows,
                row => rows.push(row.to_owned()),
            }
        }
    }
}

impl Drop for Psql {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
