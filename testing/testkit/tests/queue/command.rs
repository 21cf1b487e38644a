//! `palisade queue` on every store: its use in scripts, and workers that are killed, stopped and
//! drained. What is the same on all stores is tested with the command itself.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStderr, ChildStdout, Command, Stdio};
use std::time::Duration;

use palisade::queue::{Draft, MessageState};
use palisade_testkit::lab::launch::gateway;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal};
use serde_json::Value;

use crate::{Fixture, cases, soon};

cases! {
    messages_come_on_stdin_and_the_exit_code_decides,
    a_dead_letter_is_listed_retried_and_dropped,
    a_killed_worker_has_ended_its_commands_before_another_has_their_messages,
    a_stopped_worker_has_ended_its_command_before_another_has_its_message,
    the_first_signal_drains_and_the_second_gives_back,
    commands_run_side_by_side_but_never_two_of_a_key,
}

fn palisade(fx: &Fixture, args: &[&str]) -> Command {
    let mut command = Command::new(gateway::command().unwrap());
    let command_line = command.arg("queue").args(args);
    command_line.env("PALISADE_URL", &fx.url);
    command_line.env("PALISADE_CONFIG", "/dev/null");
    command_line.stdin(Stdio::null());
    command
}

/// Runs it to its end: returns its exit code, stdout and stderr.
fn ran(fx: &Fixture, args: &[&str], stdin: &str) -> (Option<i32>, String, String) {
    let mut command = palisade(fx, args);
    let (out, err) = (Stdio::piped(), Stdio::piped());
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(out)
        .stderr(err)
        .spawn()
        .unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(stdin.as_bytes())
        .unwrap();
    let output = child.wait_with_output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (
        output.status.code(),
        text(output.stdout),
        text(output.stderr),
    )
}

/// A worker whose commands are a line of shell; killed when it is dropped.
struct Worker {
    child: Child,
    out: BufReader<ChildStdout>,
    err: BufReader<ChildStderr>,
}

impl Worker {
    fn start(fx: &Fixture, options: &[&str], script: &str) -> Self {
        let mut command = palisade(fx, &["work", "work"]);
        command.args(options).args(["--", "sh", "-c", script]);
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        end_at_last(&child);
        let out = BufReader::new(child.stdout.take().unwrap());
        let err = BufReader::new(child.stderr.take().unwrap());
        Self { child, out, err }
    }

    /// The next line that a command prints.
    fn line(&mut self) -> String {
        line(&mut self.out)
    }

    /// Waits until palisade prints this text.
    fn says(&mut self, text: &str) {
        loop {
            let line = line(&mut self.err);
            assert_ne!(line, "", "it never said {text:?}");
            if line.contains(text) {
                return;
            }
        }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Waits for its end, and returns its exit code.
    fn code(mut self) -> Option<i32> {
        let _ = self.out.read_to_string(&mut String::new());
        self.child.wait().unwrap().code()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Kills a process that has not ended after far more time than any test takes, so that a reader of
/// its output sees an end.
fn end_at_last(child: &Child) {
    let process = pidfd_open(Pid::from_child(child), PidfdFlags::empty()).unwrap();
    std::thread::spawn(move || {
        let mut ended = [PollFd::new(&process, PollFlags::IN)];
        let limit = Timespec::try_from(Duration::from_secs(90)).unwrap();
        if poll(&mut ended, Some(&limit)) == Ok(0) {
            let _ = pidfd_send_signal(&process, Signal::KILL);
        }
    });
}

fn line(from: &mut impl BufRead) -> String {
    let mut line = String::new();
    from.read_line(&mut line).unwrap();
    line.trim_end().to_owned()
}

async fn messages_come_on_stdin_and_the_exit_code_decides(fx: Fixture) {
    let push = |args: &[&str], body: &str| ran(&fx, &[&["push", "work"], args].concat(), body);
    let named = ["--id", "one", "--key", "k"];
    assert_eq!(
        push(&named, "hello"),
        (Some(0), "one\n".into(), String::new())
    );
    let (code, out, err) = push(&named, "hello");
    assert_eq!((code, &*out), (Some(0), "one\n"));
    assert!(err.contains("one was pushed before"), "{err}");
    std::fs::write(fx.path("body"), "from a file").unwrap();
    let file = fx.path("body").display().to_string();
    let (code, out, _) = push(&[&file, "--key", "k"], "");
    assert_eq!(code, Some(0));
    let second = out.trim_end();
    assert!(second.starts_with('@'), "{second}");
    let (code, ..) = push(&["--delay", "1h", "--id", "later"], "");
    assert_eq!(code, Some(0));
    let script = r#"printf '%s|' "$(cat)" "$PALISADE_QUEUE" "$PALISADE_MESSAGE" \
        "$PALISADE_MESSAGE_KEY" "$PALISADE_ATTEMPT"; echo; [ "$PALISADE_TOKEN" -gt 0 ]"#;
    let work = ["work", "work", "--drain", "--", "sh", "-c", script];
    let (code, out, err) = ran(&fx, &work, "");
    let expected = format!("hello|work|one|k|1|\nfrom a file|work|{second}|k|1|\n");
    assert_eq!(out, expected, "{err}");
    assert_eq!(code, Some(1), "one is left: {err}");
    assert!(
        err.contains("messages are left in work: 1 delayed"),
        "{err}"
    );
    let queue = fx.queue().await;
    let report = queue.report().await.unwrap().unwrap();
    assert_eq!((report.total(), report.delayed), (1, 1));
    assert_eq!(ran(&fx, &["retry", "work", "later"], "").0, Some(0));
    assert_eq!(ran(&fx, &work, "").0, Some(0), "nothing is left");
}

async fn a_dead_letter_is_listed_retried_and_dropped(fx: Fixture) {
    let queue = fx.queue().await;
    queue
        .push(Draft::new("x").id("bad").key("k"))
        .await
        .unwrap();
    queue
        .push(Draft::new("y").id("behind").key("k"))
        .await
        .unwrap();
    let no_pause = ["--attempts", "2", "--backoff", "0s"];
    let work = |script: &str| {
        let args = [
            &["work", "work", "--drain"],
            &no_pause[..],
            &["--", "sh", "-c", script],
        ];
        ran(&fx, &args.concat(), "")
    };
    let (code, _, err) = work("exit 3");
    assert_eq!(code, Some(1), "{err}");
    assert!(
        err.contains("message bad failed (exit code 3), now a dead letter"),
        "{err}"
    );
    assert!(err.contains("1 blocked, 1 dead"), "{err}");
    let json = |args: &[&str]| -> Value {
        let (code, out, err) = ran(&fx, &[args, &["--json"]].concat(), "");
        assert_eq!(code, Some(0), "{err}");
        serde_json::from_str(&out).unwrap()
    };
    let dead = json(&["show", "work", "--dead"]);
    let dead = dead.as_array().unwrap();
    assert_eq!(dead.len(), 1);
    let told = (&dead[0]["id"], &dead[0]["attempts"], &dead[0]["why"]);
    assert_eq!(told, (&"bad".into(), &2.into(), &"exit code 3".into()));
    assert_eq!(json(&["show", "work", "behind"])["body"], "y");
    let listed = json(&["ls"]);
    assert_eq!(
        (&listed[0]["dead"], &listed[0]["blocked"]),
        (&1.into(), &1.into())
    );
    assert_eq!(json(&["retry", "work", "--dead"])["retried"], 1);
    assert_eq!(work("kill -9 $$").0, Some(1));
    let dead = json(&["show", "work", "--dead"]);
    assert_eq!(dead[0]["why"], "ended by signal 9");
    assert_eq!(json(&["drop", "work", "bad"])["dropped"], 1);
    let (code, _, err) = work(r#"[ "$(cat)" = y ]"#);
    assert_eq!(code, Some(0), "{err}");
    assert_eq!(ran(&fx, &["drop", "work", "--all"], "").0, Some(1));
}

/// Ignores requests to end, and so does its child in a separate session.
const STUBBORN: &str = "trap '' TERM HUP; setsid sh -c \"trap '' TERM HUP; while :; do sleep 0.05; done\" & \
     echo $$ $!; while :; do sleep 0.05; done";

/// Prints which of these processes are still alive: a killed one has an entry until its parent
/// reaps it.
fn left(pids: &[String]) -> String {
    let pids = pids.join(" ");
    format!(
        "for pid in {pids}; do case $(cut -d ' ' -f 3 /proc/$pid/stat 2>/dev/null) in \
         ''|Z|X) ;; *) echo alive $pid;; esac; done; echo next"
    )
}

async fn a_killed_worker_has_ended_its_commands_before_another_has_their_messages(fx: Fixture) {
    let queue = fx.queue().await;
    for body in ["1", "2", "3"] {
        queue.push(body).await.unwrap();
    }
    let mut worker = Worker::start(&fx, &["--ttl", "2s", "--parallel", "3"], STUBBORN);
    let pids = [worker.line(), worker.line(), worker.line()];
    worker.signal(Signal::KILL);
    let mut next = Worker::start(&fx, &["--ttl", "2s"], &left(&pids));
    for _ in 0..3 {
        assert_eq!(next.line(), "next");
    }
    next.signal(Signal::TERM);
    assert_eq!(next.code(), Some(0));
    soon("all is done", async {
        assert_eq!(queue.report().await.unwrap().unwrap().total(), 0);
    })
    .await;
}

async fn a_stopped_worker_has_ended_its_command_before_another_has_its_message(fx: Fixture) {
    let queue = fx.queue().await;
    queue.push(Draft::new("x").id("it")).await.unwrap();
    let mut worker = Worker::start(&fx, &["--ttl", "2s"], STUBBORN);
    let pids = [worker.line()];
    worker.signal(Signal::STOP);
    let mut next = Worker::start(&fx, &["--ttl", "2s"], &left(&pids));
    assert_eq!(next.line(), "next");
    worker.signal(Signal::CONT);
    worker.says("lost message it");
    for worker in [worker, next] {
        worker.signal(Signal::TERM);
        assert_eq!(worker.code(), Some(0));
    }
    assert_eq!(queue.report().await.unwrap().unwrap().total(), 0);
}

async fn the_first_signal_drains_and_the_second_gives_back(fx: Fixture) {
    let queue = fx.queue().await;
    for id in ["first", "second"] {
        queue.push(Draft::new("x").id(id)).await.unwrap();
    }
    let gate = fx.path("gate");
    let script = format!(
        "echo $PALISADE_MESSAGE; while [ ! -e {} ]; do sleep 0.02; done; echo ended",
        gate.display()
    );
    let mut worker = Worker::start(&fx, &[], &script);
    assert_eq!(worker.line(), "first");
    worker.signal(Signal::TERM);
    worker.says("1 command still runs");
    std::fs::write(&gate, "").unwrap();
    assert_eq!(worker.line(), "ended");
    assert_eq!(worker.code(), Some(0));
    std::fs::remove_file(&gate).unwrap();
    let mut worker = Worker::start(&fx, &[], &script);
    assert_eq!(worker.line(), "second");
    worker.signal(Signal::TERM);
    worker.says("1 command still runs");
    worker.signal(Signal::TERM);
    assert_eq!(worker.code(), Some(128 + 15));
    let left = queue.list(false, 10).await.unwrap();
    assert_eq!(left.len(), 1);
    let told = (&*left[0].id, left[0].state, left[0].attempts);
    assert_eq!(told, ("second", MessageState::Ready, 0));
}

async fn commands_run_side_by_side_but_never_two_of_a_key(fx: Fixture) {
    let queue = fx.queue().await;
    for body in ["1", "2"] {
        let drafts = ["a", "b", "c"].map(|key| Draft::new(body).key(key));
        queue.push_all(drafts).await.unwrap();
    }
    let folder = fx.path("at-once");
    std::fs::create_dir(&folder).unwrap();
    // Each message waits for the two others of its round.
    let script = format!(
        "cd {}; n=$(cat); mkdir busy-$PALISADE_MESSAGE_KEY || echo two of a key; \
         : >$n-$PALISADE_MESSAGE_KEY; \
         while [ $(ls | grep -c ^$n-) -lt 3 ]; do sleep 0.02; done; \
         rmdir busy-$PALISADE_MESSAGE_KEY; echo $n",
        folder.display()
    );
    let work = [
        "work",
        "work",
        "--drain",
        "--parallel",
        "3",
        "--",
        "sh",
        "-c",
        &script,
    ];
    let worked = tokio::task::spawn_blocking({
        let fx = Fixture {
            store: fx.store,
            url: fx.url.clone(),
            folder: std::sync::Arc::clone(&fx.folder),
        };
        let work = work.map(str::to_owned);
        move || ran(&fx, &work.each_ref().map(String::as_str), "")
    });
    let (code, out, err) = soon("three at once", worked).await.unwrap();
    assert_eq!(code, Some(0), "{err}");
    assert_eq!(out, "1\n1\n1\n2\n2\n2\n", "{err}");
    assert!(Path::new(&folder).join("2-c").exists());
}
