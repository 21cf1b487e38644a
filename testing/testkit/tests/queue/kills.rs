//! Consumers that die, or are stopped past their leases: real processes.
//!
//! Eight consumers handle messages while two of them are killed each second: none is lost, and with
//! effect and `done` as one step each effect happens once. In the control, with two steps, effects
//! happen twice, which proves that the trial can detect it.

use std::collections::{BTreeMap, HashMap};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use palisade::BootTime;
use palisade::config::redis;
use palisade::queue::{Draft, Queue};
use palisade_testkit::lab::consumer::Effect;
use rustix::process::{Pid, Signal, kill_process};

use crate::{Fixture, LONG, SOON, cases, is_full, running, soon, until};

cases! {
    killed_consumers_lose_nothing_and_one_step_happens_once,
    killed_consumers_repeat_effects_without_one_step,
    one_of_a_key_at_a_time_also_across_a_kill,
    a_consumer_stopped_past_its_lease_is_replaced_and_its_done_refused,
}

const CONSUMERS: usize = 8;

/// A consumer that is killed when it is dropped.
struct Consumer(Child);

impl Consumer {
    fn start(fx: &Fixture, queue: &Queue, effect: Effect, target: &str, millis: u64) -> Self {
        let child = Command::new(env!("CARGO_BIN_EXE_palisade-testkit"))
            .args([
                "consume",
                &fx.url,
                queue.name().as_str(),
                effect.word(),
                target,
            ])
            .arg(millis.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        Self(child.unwrap())
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.0)
    }

    /// Kills it; returns a time when it was still alive.
    fn kill(mut self) -> BootTime {
        assert!(
            self.0.try_wait().unwrap().is_none(),
            "a consumer ended by itself"
        );
        let at = BootTime::now();
        self.0.kill().unwrap();
        self.0.wait().unwrap();
        at
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        let stdout = self.0.stdout.as_mut().unwrap();
        // Only one line at a time is sent, so nothing is read ahead.
        BufReader::with_capacity(1, stdout)
            .read_line(&mut line)
            .unwrap();
        line.trim().to_owned()
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Where effects are written.
async fn target(fx: &Fixture) -> String {
    match fx.store {
        "postgres" => {
            let url = running("postgres").unwrap().url();
            let url = url.split('?').next().unwrap().to_owned();
            let client = database(&url).await;
            let table = "CREATE TABLE IF NOT EXISTS effect (queue text, id text)";
            // Two processes that create it concurrently may both find that it does not exist.
            let _ = client.batch_execute(table).await;
            url
        }
        "redis" => running("redis").unwrap().url().to_owned(),
        _ => {
            let folder = fx.path("effects");
            std::fs::create_dir_all(&folder).unwrap();
            folder.display().to_string()
        }
    }
}

async fn database(url: &str) -> tokio_postgres::Client {
    let connected = tokio_postgres::connect(url, tokio_postgres::NoTls).await;
    let (client, connection) = connected.unwrap();
    tokio::spawn(connection);
    client
}

/// How often each message had its effect.
async fn effects(
    fx: &Fixture,
    queue: &Queue,
    effect: Effect,
    target: &str,
) -> BTreeMap<String, usize> {
    let mut count = BTreeMap::new();
    let mut add = |id: String| *count.entry(id).or_default() += 1;
    match fx.store {
        "postgres" => {
            let client = database(target).await;
            let sql = "SELECT id FROM effect WHERE queue = $1";
            let rows = client.query(sql, &[&queue.name().as_str()]).await.unwrap();
            rows.iter().for_each(|row| add(row.get(0)));
            let delete = "DELETE FROM effect WHERE queue = $1";
            client
                .execute(delete, &[&queue.name().as_str()])
                .await
                .unwrap();
        }
        "redis" => {
            let client = redis::Client::open(target).unwrap();
            // All of them in one reply take longer than half a second, which is the default.
            let config = redis::AsyncConnectionConfig::new().set_response_timeout(Some(LONG));
            let connect = client.get_multiplexed_async_connection_with_config(&config);
            let mut connection = connect.await.unwrap();
            let mut all = redis::cmd("HGETALL");
            all.arg(format!("effects of {}", queue.name()));
            let all: HashMap<String, usize> = all.query_async(&mut connection).await.unwrap();
            for (id, times) in all {
                (0..times).for_each(|_| add(id.clone()));
            }
        }
        _ if effect == Effect::OneStep => {
            let fence = palisade::fence::FileFence::open(Path::new(target).join("fenced")).unwrap();
            for id in ids(messages(fx, effect).0) {
                let name = palisade::Name::new(&id).unwrap();
                let kept = palisade::fence::Fence::read(&fence, &name).await.unwrap();
                if kept.is_some_and(|kept| kept.data == id.as_bytes()) {
                    add(id);
                }
            }
        }
        _ => {
            let lines = std::fs::read_to_string(Path::new(target).join("effects")).unwrap();
            lines.lines().for_each(|line| add(line.to_owned()));
        }
    }
    count
}

/// How many messages, and how long the work takes, so that consumers are killed during it.
fn messages(fx: &Fixture, effect: Effect) -> (usize, u64) {
    match (is_full(), effect) {
        (false, _) => (300, 60),
        (true, Effect::TwoSteps) => (2_000, 20),
        // A fenced file is synced for each message.
        (true, _) if fx.store == "file" => (100_000, 0),
        (true, _) => (100_000, 1),
    }
}

fn ids(count: usize) -> impl Iterator<Item = String> {
    (0..count).map(|number| format!("m{number}"))
}

/// Lets consumers handle messages while they are killed, until nothing is left.
async fn under_kills(fx: &Fixture, effect: Effect) -> BTreeMap<String, usize> {
    // A separate queue, whose name identifies its effects.
    let queue = fx.client().await.queue(format!("work {}", effect.word()));
    let target = target(fx).await;
    let (count, millis) = messages(fx, effect);
    let all: Vec<String> = ids(count).collect();
    for some in all.chunks(1000) {
        let drafts = some.iter().map(|id| Draft::new(id.as_str()).id(id));
        queue.push_all(drafts).await.unwrap();
    }
    let start = || Consumer::start(fx, &queue, effect, &target, millis);
    let mut consumers: Vec<Consumer> = (0..CONSUMERS).map(|_| start()).collect();
    let mut kills = 0;
    let longest = if is_full() { LONG * 6 } else { SOON };
    let end = BootTime::now() + longest;
    loop {
        tokio::time::sleep(Duration::from_millis(500)).await;
        let report = queue.report().await.unwrap().unwrap();
        assert_eq!(report.dead, 0, "killed too often: {report:?}");
        if report.total() == 0 {
            break;
        }
        assert!(!end.has_passed(), "not done within {longest:?}: {report:?}");
        let victim = rand::random_range(0..CONSUMERS);
        consumers.swap_remove(victim).kill();
        kills += 1;
        consumers.push(start());
    }
    assert!(kills >= 3, "only {kills} were killed");
    drop(consumers);
    let effects = effects(fx, &queue, effect, &target).await;
    eprintln!(
        "{} {}: {count} messages, {kills} consumers killed, {} effects",
        fx.store,
        effect.word(),
        effects.values().sum::<usize>()
    );
    let lost: Vec<&String> = all.iter().filter(|id| !effects.contains_key(*id)).collect();
    assert!(lost.is_empty(), "lost: {lost:?}");
    effects
}

async fn killed_consumers_lose_nothing_and_one_step_happens_once(fx: Fixture) {
    let effects = under_kills(&fx, Effect::OneStep).await;
    let twice: Vec<_> = effects.iter().filter(|(_, count)| **count != 1).collect();
    assert!(twice.is_empty(), "more than once: {twice:?}");
}

/// The control: if no effect happened twice here, the case above could not detect it.
async fn killed_consumers_repeat_effects_without_one_step(fx: Fixture) {
    let effects = under_kills(&fx, Effect::TwoSteps).await;
    assert!(
        effects.values().any(|count| *count > 1),
        "none happened twice"
    );
}

async fn one_of_a_key_at_a_time_also_across_a_kill(fx: Fixture) {
    const KEYS: usize = 4;
    let each = if is_full() { 200 } else { 20 };
    let queue = fx.queue().await;
    let folder = fx.path("order-of-keys");
    std::fs::create_dir_all(&folder).unwrap();
    let folder = folder.display().to_string();
    for number in 0..each {
        let drafts = (0..KEYS).map(|key| Draft::new(format!("{number}")).key(format!("k{key}")));
        queue.push_all(drafts).await.unwrap();
    }
    let start = || Consumer::start(&fx, &queue, Effect::Order, &folder, 40);
    let mut consumers: Vec<Consumer> = (0..6).map(|_| start()).collect();
    let mut killed: HashMap<i32, BootTime> = HashMap::new();
    until_empty(&queue, async || {
        let victim = consumers.swap_remove(rand::random_range(0..consumers.len()));
        killed.insert(victim.pid().as_raw_pid(), victim.kill());
        consumers.push(start());
    })
    .await;
    drop(consumers);
    let notes = std::fs::read_to_string(Path::new(&folder).join("order")).unwrap();
    for key in 0..KEYS {
        check_order(&notes, &format!("k{key}"), each, &killed);
    }
}

/// Calls `each_time` every half second until the queue is empty.
async fn until_empty(queue: &Queue, mut each_time: impl AsyncFnMut()) {
    let work = async {
        loop {
            tokio::time::sleep(Duration::from_millis(500)).await;
            let report = queue.report().await.unwrap().unwrap();
            assert_eq!(report.dead, 0, "{report:?}");
            if report.total() == 0 {
                return;
            }
            each_time().await;
        }
    };
    let longest = if is_full() { LONG * 2 } else { SOON };
    let done = tokio::time::timeout(longest, work).await;
    done.unwrap_or_else(|_| panic!("not empty within {longest:?}"));
}

/// Each message of a key begins after the one before it has ended, and no two are handled at once.
fn check_order(notes: &str, key: &str, each: usize, killed: &HashMap<i32, BootTime>) {
    // Which process handles which message of the key, in the order of the clock.
    let mut events: Vec<(BootTime, &str, usize, i32)> = Vec::new();
    for line in notes.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        if words[1] == key {
            let at = BootTime::from_nanos(words[4].parse().unwrap());
            events.push((
                at,
                words[0],
                words[2].parse().unwrap(),
                words[3].parse().unwrap(),
            ));
        }
    }
    events.sort_unstable();
    let (mut ended, mut at_it): (usize, Option<(usize, i32)>) = (0, None);
    for (at, what, number, pid) in events {
        if what == "end" {
            assert_eq!(at_it, Some((number, pid)), "{key}: {pid} ended {number}");
            (ended, at_it) = (number + 1, None);
            continue;
        }
        if let Some((other, holder)) = at_it {
            let died = killed.get(&holder).copied();
            let died = died.unwrap_or(BootTime::NEVER);
            assert!(
                died <= at,
                "{key}: {pid} began {number} while {holder} was at {other}"
            );
        }
        // A message is repeated if its consumer died before its `done`.
        assert!(
            number == ended || number + 1 == ended,
            "{key}: {number} begins when {ended} have ended"
        );
        at_it = Some((number, pid));
    }
    assert_eq!(ended, each, "{key}");
}

async fn a_consumer_stopped_past_its_lease_is_replaced_and_its_done_refused(fx: Fixture) {
    let queue = fx.queue().await;
    queue.push(Draft::new("x").key("k")).await.unwrap();
    queue.push(Draft::new("y").key("k")).await.unwrap();
    let mut consumer = Consumer::start(&fx, &queue, Effect::Hold, "-", 0);
    let (mut consumer, claimed) = soon(
        "a claim",
        tokio::task::spawn_blocking(move || {
            let claimed = consumer.line();
            (consumer, claimed)
        }),
    )
    .await
    .unwrap();
    let token: u64 = claimed.strip_prefix("claimed ").unwrap().parse().unwrap();
    kill_process(consumer.pid(), Signal::STOP).unwrap();
    let message = soon("the end of its lease", queue.next()).await.unwrap();
    assert_eq!(message.body(), b"x");
    assert!(message.token().0 > token);
    kill_process(consumer.pid(), Signal::CONT).unwrap();
    consumer
        .0
        .stdin
        .as_mut()
        .unwrap()
        .write_all(b"go\n")
        .unwrap();
    let said = tokio::task::spawn_blocking(move || consumer.line());
    let said = soon("its late done", said).await.unwrap();
    assert_eq!(said, "lost valid=false");
    assert!(message.is_valid(), "the other goes on");
    message.done().await.unwrap();
    let next = soon("the next", queue.next()).await.unwrap();
    assert_eq!(next.body(), b"y");
    next.done().await.unwrap();
    until("it is empty", async || {
        queue.report().await.unwrap().unwrap().total() == 0
    })
    .await;
}
