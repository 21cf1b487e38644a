//! Curator and kazoo on the same path: each excludes palisade and is excluded by it. Also, which
//! combinations don't work.

use std::process::{Command, Stdio};

use palisade::Client;
use palisade::engine::Ask;
use palisade::report::Scope;
use palisade::{Name, Patience};
use palisade_testkit::lab::launch::{self, Running};
use palisade_testkit::lab::trial::{Servant, python, run};

use crate::util::{beside_others, soon, until};

const CURATOR: &str = include_str!("tools/Curator.java");
const KAZOO: &str = include_str!("tools/kazoo_tool.py");

/// Longer than acquiring a free lock takes, even on a busy machine.
const FREE: u64 = 10_000;

/// Long enough to be sure that a lock is not free.
const HELD: u64 = 300;

/// Another tool, which answers line by line.
struct Tool(Servant);

impl Tool {
    fn start(command: &mut Command) -> Self {
        let mut servant = Servant::start(command.stderr(Stdio::null()));
        assert_eq!(servant.answer(), "ready");
        Self(servant)
    }

    fn order(&mut self, verb: &str, path: &str, millis: u64) {
        self.0.tell(&format!("{verb} {path} {millis}"));
    }

    /// Whether the operation succeeds, or the lock is acquired in time.
    fn ask(&mut self, verb: &str, path: &str, millis: u64) -> bool {
        self.order(verb, path, millis);
        self.said()
    }

    fn said(&mut self) -> bool {
        self.0.says_yes()
    }
}

/// Curator from the distribution's jars; `None` if they are not available.
fn curator(running: &Running) -> Option<Tool> {
    let jars = launch::need_tool("curator")?;
    let folder = running.folder();
    std::fs::write(folder.join("Curator.java"), CURATOR).unwrap();
    let jars = jars.display().to_string();
    let compile = ["-cp", &jars, "-d", ".", "Curator.java"];
    let compiled = run(Command::new("javac").args(compile).current_dir(folder));
    compiled.unwrap_or_else(|why| panic!("javac: {why}"));
    let classpath = format!(".:{jars}");
    let java = [
        "-Xmx128m",
        "-XX:+UseSerialGC",
        "-XX:TieredStopAtLevel=1",
        "-cp",
    ];
    Some(Tool::start(
        Command::new("java")
            .args(java)
            .args([&classpath, "Curator"])
            .arg(running.nodes()[0].address())
            .current_dir(folder),
    ))
}

/// kazoo in its own virtual environment; `None` if it is not available.
fn kazoo(running: &Running) -> Option<Tool> {
    match python(running.folder(), "kazoo") {
        Ok(mut python) => {
            let program = python.args(["-u", "-c", KAZOO]);
            Some(Tool::start(program.arg(running.nodes()[0].address())))
        }
        Err(why) => {
            launch::skip("kazoo", &why);
            None
        }
    }
}

/// The number of claims in the line `path`.
async fn length(client: &Client, path: &str) -> usize {
    let scope = Scope::Line(Name::new(path).unwrap());
    let lines = client.survey(scope).await.unwrap();
    let count = |line: &palisade::report::LineReport| line.holders.len() + line.waiters.len();
    lines.iter().map(count).sum()
}

/// Each holds, and the other does not; each waits, and is served when the other releases. `verb` is
/// the tool's exclusive lock, `ask` what palisade takes.
async fn exclude_each_other(client: &Client, tool: &mut Tool, verb: &str, ask: Ask) {
    let path = format!("locks/{verb}-{}", ask.mode());
    let line = client.line(&path, ask);
    let acquire = async |patience| soon("an answer", line.acquire(patience)).await.unwrap();
    assert!(tool.ask(verb, &path, FREE));
    assert!(acquire(Patience::NoWait).await.is_none(), "two holders");
    let waiter = tokio::spawn({
        let line = line.clone();
        async move { line.acquire(Patience::Forever).await }
    });
    until("a waiter", async || length(client, &path).await == 2).await;
    assert!(!waiter.is_finished(), "two holders");
    assert!(tool.ask("unlock", &path, 0));
    let hold = soon("the grant", waiter).await.unwrap().unwrap().unwrap();
    assert!(!tool.ask(verb, &path, HELD), "two holders");
    // It waits in the same line, and is served when we release.
    tool.order(verb, &path, FREE);
    until("the tool to wait", async || {
        length(client, &path).await == 2
    })
    .await;
    let token = hold.token();
    hold.release().await.unwrap();
    assert!(tool.said(), "not served");
    assert!(tool.ask("unlock", &path, 0));
    let hold = acquire(Patience::Forever).await.unwrap();
    assert!(hold.token() > token, "tokens");
    hold.release().await.unwrap();
}

const PERMIT: Ask = Ask::Part {
    weight: 1,
    capacity: 3,
};

#[tokio::test(flavor = "multi_thread")]
async fn curators_mutex_and_ours_exclude_each_other() {
    let running = need!("zookeeper");
    let Some(mut tool) = curator(&running) else {
        return;
    };
    let client = beside_others(&running, "").await;
    for ask in [Ask::Whole, Ask::READ, PERMIT] {
        exclude_each_other(&client, &mut tool, "lock", ask).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn curators_read_write_lock_and_ours_exclude_each_other() {
    let running = need!("zookeeper");
    let Some(mut tool) = curator(&running) else {
        return;
    };
    let client = beside_others(&running, "&layout=readwrite").await;
    for ask in [Ask::Whole, Ask::READ, PERMIT] {
        exclude_each_other(&client, &mut tool, "write", ask).await;
    }
    // To us a reader of Curator takes the whole line; to Curator ours is a reader.
    exclude_each_other(&client, &mut tool, "read", Ask::Whole).await;
    let lock = client.rwlock("locks/shared");
    let hold = lock.read().await.unwrap();
    assert!(tool.ask("read", "locks/shared", FREE), "readers share");
    assert!(tool.ask("unlock", "locks/shared", 0));
    assert!(!tool.ask("write", "locks/shared", HELD), "two holders");
    hold.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn kazoos_lock_and_ours_exclude_each_other() {
    let running = need!("zookeeper");
    let Some(mut tool) = kazoo(&running) else {
        return;
    };
    let client = beside_others(&running, "").await;
    for ask in [Ask::Whole, Ask::READ, PERMIT] {
        exclude_each_other(&client, &mut tool, "lock", ask).await;
    }
    // Without `extra_lock_patterns` it does not see us, as the page says.
    let hold = client.mutex("locks/plain").lock().await.unwrap();
    assert!(tool.ask("plain", "locks/plain", FREE));
    assert!(hold.is_valid());
}

/// With Curator's mutex the names of its read-write lock sort last, as the page says.
#[tokio::test(flavor = "multi_thread")]
async fn the_read_write_layout_is_not_for_curators_mutex() {
    let running = need!("zookeeper");
    let Some(mut tool) = curator(&running) else {
        return;
    };
    let client = beside_others(&running, "&layout=readwrite").await;
    let hold = client.mutex("locks/mixed").lock().await.unwrap();
    assert!(tool.ask("lock", "locks/mixed", FREE));
    assert!(hold.is_valid(), "two holders, as expected");
}
