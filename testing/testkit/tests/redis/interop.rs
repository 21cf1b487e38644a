//! Other tools' locks on the same key: redis-py's `Lock`, node-redlock and rslock, both ways, also
//! while readers hold. A tool in another language is a small program that reads commands from its
//! stdin.

use std::collections::HashMap;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use palisade_testkit::lab::launch;
use palisade_testkit::lab::trial::{Servant, python, run};
use rslock::{Lock, LockManager};

use super::support::{Server, line, soon, until_one_waits};

const PYTHON: &str = r#"
import sys, redis
client = redis.Redis(port=int(sys.argv[1]))
locks = {}
for order in sys.stdin:
    verb, name, ttl = order.split()
    if verb == "lock":
        lock = client.lock(name, timeout=int(ttl) / 1000)
        got = lock.acquire(blocking=False)
        if got: locks[name] = lock
        print("yes" if got else "no", flush=True)
    else:
        locks.pop(name).release()
        print("yes", flush=True)
"#;

const NODE: &str = r#"
const { default: Redlock } = require("redlock");
const Client = require("ioredis");
const redlock = new Redlock([new Client(Number(process.argv[2]))], { retryCount: 0 });
redlock.on("error", () => {});
const locks = {};
const lines = require("readline").createInterface({ input: process.stdin });
lines.on("close", () => process.exit(0));
lines.on("line", async (order) => {
  const [verb, name, ttl] = order.split(" ");
  try {
    if (verb === "lock") locks[name] = await redlock.acquire([name], Number(ttl));
    else await locks[name].release();
    console.log("yes");
  } catch (error) { console.log("no"); }
});
"#;

/// Another tool.
enum Tool {
    Program(Servant),
    Rslock(LockManager, HashMap<String, Lock>),
}

impl Tool {
    /// Whether it can `lock`, or `unlock`, a name.
    async fn ask(&mut self, verb: &str, name: &str, ttl: u64) -> bool {
        match self {
            Self::Program(program) => {
                program.tell(&format!("{verb} {name} {ttl}"));
                program.says_yes()
            }
            Self::Rslock(manager, locks) if verb == "lock" => {
                let lock = manager.lock(name, Duration::from_millis(ttl)).await.ok();
                let got = lock.is_some();
                locks.extend(lock.map(|lock| (name.to_owned(), lock)));
                got
            }
            Self::Rslock(manager, locks) => {
                manager.unlock(&locks.remove(name).unwrap()).await;
                true
            }
        }
    }
}

fn redis_py(folder: &Path, port: u16) -> Result<Tool, String> {
    let mut python = python(folder, "redis")?;
    let program = python.args(["-u", "-c", PYTHON]).arg(port.to_string());
    Ok(Tool::Program(Servant::start(program)))
}

fn node_redlock(folder: &Path, port: u16) -> Result<Tool, String> {
    let packages = ["redlock@5.0.0-beta.2", "ioredis@5"];
    let npm = [
        "install",
        "--silent",
        "--no-audit",
        "--no-fund",
        "--prefix",
        ".",
    ];
    run(Command::new("npm")
        .args(npm)
        .args(packages)
        .current_dir(folder))?;
    std::fs::write(folder.join("tool.js"), NODE).map_err(|error| error.to_string())?;
    Ok(Tool::Program(Servant::start(
        Command::new("node")
            .arg("tool.js")
            .arg(port.to_string())
            .current_dir(folder),
    )))
}

fn rslock(_: &Path, port: u16) -> Result<Tool, String> {
    let mut manager = LockManager::new(vec![format!("redis://127.0.0.1:{port}")]);
    manager.set_retry(1, Duration::from_millis(1));
    Ok(Tool::Rslock(manager, HashMap::new()))
}

type Install = fn(&Path, u16) -> Result<Tool, String>;

async fn exclude_each_other(name: &str, install: Install) {
    let server = need!(Server::start());
    let folder = tempfile::tempdir().unwrap();
    let mut tool = match install(folder.path(), server.port()) {
        Ok(tool) => tool,
        Err(why) => return launch::skip(name, &why),
    };
    let client = server.direct_client("namespace=").await;

    // Ours first: exclusive, readers, permits.
    let hold = client.mutex("job").lock().await.unwrap();
    assert!(
        !tool.ask("lock", "job", 5000).await,
        "{name} takes what we hold"
    );
    assert_eq!(server.ask(&["GET", "job"]), hold.claim().to_string());
    hold.release().await.unwrap();
    assert!(
        tool.ask("lock", "job", 60_000).await,
        "{name} finds it free after our release"
    );

    // Theirs first: none of ours is granted, the holder is shown, and our wait ends with their
    // lock.
    assert!(client.mutex("job").try_lock().await.unwrap().is_none());
    assert!(client.rwlock("job").try_read().await.unwrap().is_none());
    let shown = line(&client, "job").await.unwrap();
    assert_eq!(
        (shown.holders.len(), shown.holders[0].owner.as_ref()),
        (1, None)
    );
    let waiting = client.mutex("job");
    let waiter = tokio::spawn(async move { waiting.lock().await });
    until_one_waits(&client, "job").await;
    assert!(tool.ask("unlock", "job", 0).await);
    let hold = soon("the grant", waiter).await.unwrap().unwrap();
    assert!(
        !tool.ask("lock", "job", 5000).await,
        "{name} takes what our waiter was granted"
    );
    hold.release().await.unwrap();

    // While readers hold, until the last one releases.
    let lock = client.rwlock("shared");
    let (one, two) = (lock.read().await.unwrap(), lock.read().await.unwrap());
    assert!(
        !tool.ask("lock", "shared", 5000).await,
        "{name} takes what two readers hold"
    );
    one.release().await.unwrap();
    assert!(
        !tool.ask("lock", "shared", 5000).await,
        "{name} takes what a reader holds"
    );
    two.release().await.unwrap();
    assert!(
        tool.ask("lock", "shared", 1000).await,
        "{name} finds it free after the last reader"
    );
    // Their lock expires by its own ttl, without a notification.
    let read = soon("our turn", lock.read()).await.unwrap();
    read.release().await.unwrap();
}

#[tokio::test]
async fn redis_py_and_palisade_exclude_each_other() {
    exclude_each_other("redis-py", redis_py).await;
}

#[tokio::test]
async fn node_redlock_and_palisade_exclude_each_other() {
    exclude_each_other("node-redlock", node_redlock).await;
}

#[tokio::test]
async fn rslock_and_palisade_exclude_each_other() {
    exclude_each_other("rslock", rslock).await;
}
