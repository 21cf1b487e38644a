//! What is specific to the embedded store: processes that start without a store, are killed during
//! a push, reboot, or find a full disk or a damaged file.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use palisade::queue::{Draft, Queue};
use palisade::{ErrorKind, Patience};
use palisade_testkit::lab::trial::cycle;

use crate::{Fixture, cases, is_full, soon};

cases! {
    twenty_processes_start_on_nothing,
    what_was_stored_survives_a_kill_at_any_moment,
    messages_survive_a_reboot,
    a_push_survives_a_power_cut,
    a_dead_consumer_is_noticed_at_once,
    a_full_disk_loses_nothing,
    a_damaged_file_is_told_and_left,
    a_deleted_file_begins_anew,
    files_are_for_their_owner_only,
}

fn producer(url: &str, prefix: &str, count: u64) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_palisade-testkit"));
    command.args(["produce", url, "work", prefix, &count.to_string()]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// The bodies of all messages in the queue, which must be distinct.
async fn drained(queue: &Queue) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    loop {
        let messages = queue.claim(500).await.unwrap();
        if messages.is_empty() {
            return all;
        }
        for message in &messages {
            let body = String::from_utf8(message.body().to_vec()).unwrap();
            assert!(all.insert(body), "twice: {message:?}");
        }
        assert!(queue.done_all(messages).await.unwrap().is_empty());
    }
}

async fn twenty_processes_start_on_nothing(fx: Fixture) {
    let children: Vec<_> = (0..20)
        .map(|number| producer(&fx.url, &format!("{number}-"), 3).spawn().unwrap())
        .collect();
    for child in children {
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
    }
    assert_eq!(drained(&fx.queue().await).await.len(), 60);
}

async fn what_was_stored_survives_a_kill_at_any_moment(fx: Fixture) {
    let rounds = if is_full() { 300 } else { 12 };
    let mut stored = BTreeSet::new();
    let mut maybe = BTreeSet::new();
    for round in 0..rounds {
        let prefix = format!("{round}-");
        let mut child = producer(&fx.url, &prefix, 1_000_000).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let first = lines.next().unwrap().unwrap();
        std::thread::sleep(Duration::from_micros(rand::random_range(0..40_000)));
        child.kill().unwrap();
        child.wait().unwrap();
        let told: Vec<String> = std::iter::once(first)
            .chain(lines.map_while(Result::ok))
            .collect();
        stored.extend(told.iter().map(|number| format!("{prefix}{number}")));
        maybe.insert(format!("{prefix}{}", told.len()));
    }
    let found = drained(&fx.queue().await).await;
    let lost: Vec<_> = stored.difference(&found).collect();
    assert!(lost.is_empty(), "lost: {lost:?}");
    let more: Vec<_> = found
        .difference(&stored)
        .filter(|id| !maybe.contains(*id))
        .collect();
    assert!(more.is_empty(), "nobody pushed {more:?}");
}

fn store(fx: &Fixture) -> PathBuf {
    fx.path("store")
}

fn database(fx: &Fixture) -> PathBuf {
    store(fx).join("queues/palisade,work.db")
}

async fn messages_survive_a_reboot(fx: Fixture) {
    let client = fx.client().await;
    let queue = client.queue("work").ttl(Duration::from_secs(3600));
    queue.push("claimed").await.unwrap();
    queue.push("ready").await.unwrap();
    queue
        .push(Draft::new("late").delay(Duration::from_secs(2)))
        .await
        .unwrap();
    let claimed = queue.next().await.unwrap();
    let token = claimed.token();
    // As after a power failure: nobody leaves.
    std::mem::forget(claimed);
    drop(queue);
    client.close().await;
    // A copy, because this process still has the store open, for the forgotten message.
    let copy = fx.path("copy");
    let copied = Command::new("cp")
        .arg("-r")
        .arg(store(&fx))
        .arg(&copy)
        .status();
    assert!(copied.unwrap().success());
    reboot(&copy);
    let url = format!("file:{}", copy.display());
    let queue = palisade::connect(&*url).await.unwrap().queue("work");
    // The lease was for an hour, but its consumer is gone with the boot.
    for body in ["claimed", "ready", "late"] {
        let message = soon("a message", queue.next()).await.unwrap();
        assert_eq!(message.body(), body.as_bytes());
        assert!(message.token() > token);
        message.done().await.unwrap();
    }
}

/// Brings a store into the state after a reboot.
fn reboot(store: &Path) {
    let text = std::fs::read_to_string(store.join("boot")).unwrap();
    let mut lines: Vec<_> = text.lines().collect();
    lines[1] = "00000000-0000-0000-0000-000000000000";
    std::fs::write(store.join("boot"), lines.join("\n")).unwrap();
    for left in ["procs", "leases", "lines"] {
        std::fs::remove_dir_all(store.join(left)).unwrap();
    }
    // The memory that processes share is gone as well.
    let shared = store.join("queues/palisade,work.db-shm");
    std::fs::remove_file(shared).unwrap();
}

/// The store is on a file system in a file. The content of that file when a push has returned is
/// what a disk would have after a power failure: unsynced data is only in memory.
async fn a_push_survives_a_power_cut(fx: Fixture) {
    let disk = fx.path("disk");
    let made = Command::new("mkfs.ext4")
        .args(["-q", "-F"])
        .arg(&disk)
        .arg("16M")
        .status();
    if !made.is_ok_and(|status| status.success()) {
        println!("skipped: no file system can be made");
        return;
    }
    let Some(mounted) = Disk::mount(fx.path("before"), &["-o", "loop,commit=300"], &disk) else {
        return;
    };
    let url = format!("file:{}?timeout=20s", mounted.0.join("store").display());
    let client = palisade::connect(&*url).await.unwrap();
    let queue = client.queue("work");
    let mut pushed = BTreeSet::new();
    for round in 0..5 {
        let (one, two) = (format!("{round} a"), format!("{round} b"));
        let (first, second) = tokio::join!(queue.push(one.as_str()), queue.push(two.as_str()));
        first.and(second).unwrap();
        pushed.extend([one, two]);
        let after = fx.path(&format!("disk-{round}"));
        std::fs::copy(&disk, &after).unwrap();
        let folder = fx.path(&format!("after-{round}"));
        let mounted = Disk::mount(folder, &["-o", "loop"], &after).unwrap();
        reboot(&mounted.0.join("store"));
        let url = format!("file:{}?timeout=20s", mounted.0.join("store").display());
        let survived = palisade::connect(&*url).await.unwrap();
        assert_eq!(
            drained(&survived.queue("work")).await,
            pushed,
            "round {round}"
        );
        survived.close().await;
    }
    drop(queue);
    client.close().await;
}

async fn a_dead_consumer_is_noticed_at_once(fx: Fixture) {
    let queue = fx.client().await.queue("work");
    queue.push("x").await.unwrap();
    let folder = fx.path("none");
    let mut child = Command::new(env!("CARGO_BIN_EXE_palisade-testkit"))
        .args([
            "consume",
            &fx.url,
            "work",
            "hold",
            &folder.display().to_string(),
            "0",
        ])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.next().unwrap().unwrap().starts_with("claimed"));
    // A consumer already waits for its message, for longer than its lease would last.
    let waits = tokio::spawn({
        let queue = queue.clone();
        async move {
            queue
                .next_within(Patience::For(Duration::from_secs(600)))
                .await
        }
    });
    tokio::time::sleep(Duration::from_millis(100)).await;
    child.kill().unwrap();
    let began = tokio::time::Instant::now();
    let message = soon("its message", waits).await.unwrap().unwrap().unwrap();
    eprintln!("a dead consumer's message after {:?}", began.elapsed());
    assert_eq!(message.attempt(), 2);
    message.done().await.unwrap();
    child.wait().unwrap();
}

/// How a small disk in memory is mounted.
const SMALL: [&str; 4] = ["-t", "tmpfs", "-o", "size=2m,mode=0700"];

/// A separate small file system, unmounted on drop.
struct Disk(PathBuf);

impl Disk {
    fn mount(at: PathBuf, options: &[&str], device: &Path) -> Option<Self> {
        std::fs::create_dir_all(&at).unwrap();
        let mut mount = Command::new("mount");
        mount.args(options).arg(device);
        let mounted = mount.arg(&at).status().is_ok_and(|status| status.success());
        if !mounted {
            println!("skipped: no file system can be mounted");
        }
        mounted.then_some(Self(at))
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

async fn a_full_disk_loses_nothing(fx: Fixture) {
    let Some(disk) = Disk::mount(fx.path("disk"), &SMALL, Path::new("none")) else {
        return;
    };
    let url = format!("file:{}/store", disk.0.display());
    let queue = palisade::connect(&*url).await.unwrap().queue("work");
    let mut stored = BTreeSet::new();
    let error = loop {
        let body = format!("{}{}", stored.len(), " ".repeat(20_000));
        match queue.push(body.clone()).await {
            Ok(_) => stored.insert(body),
            Err(error) => break error,
        };
        assert!(stored.len() < 1000);
    };
    assert_eq!(error.kind(), ErrorKind::Unusable, "{error:?}");
    assert!(error.to_string().contains("full"), "{error}");
    assert!(stored.len() > 10);
    // With more space all stored messages are there, and nothing else.
    let resized = Command::new("mount")
        .args(["-o", "remount,size=16m"])
        .arg(&disk.0)
        .status();
    assert!(resized.unwrap().success());
    assert_eq!(drained(&queue).await, stored);
    queue.push("more").await.unwrap();
    drop(queue);
}

async fn a_damaged_file_is_told_and_left(fx: Fixture) {
    let client = fx.client().await;
    for number in 0..50 {
        client
            .queue("work")
            .push(format!("{number}{}", " ".repeat(500)))
            .await
            .unwrap();
    }
    client.close().await;
    let path = database(&fx);
    let whole = std::fs::read(&path).unwrap();
    assert!(whole.len() > 20_000, "{} bytes", whole.len());
    let garbage: Vec<u8> = whole.iter().map(|byte| byte ^ 0x5a).collect();
    for bad in [&whole[..whole.len() / 2], &whole[..100], &[], &garbage] {
        std::fs::write(&path, bad).unwrap();
        let client = fx.client().await;
        let queue = client.queue("work");
        let refused = queue.push("x").await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Unusable, "{refused:?}");
        assert_eq!(
            queue.claim(1).await.unwrap_err().kind(),
            ErrorKind::Unusable
        );
        // Other queues and locks still work.
        client.queue("other").push("x").await.unwrap();
        cycle(&client.mutex("work")).await;
        client.close().await;
        assert!(std::fs::read(&path).unwrap() == *bad, "it is left as it is");
    }
    std::fs::write(&path, &whole).unwrap();
    assert_eq!(drained(&fx.queue().await).await.len(), 50);
}

async fn a_deleted_file_begins_anew(fx: Fixture) {
    let queue = fx.queue().await;
    queue.push("gone").await.unwrap();
    let message = queue.next().await.unwrap();
    let database = database(&fx);
    let folder = database.parent().unwrap();
    for file in std::fs::read_dir(folder).unwrap() {
        std::fs::remove_file(file.unwrap().path()).unwrap();
    }
    queue.push("new").await.unwrap();
    let lost = message.done().await.unwrap_err();
    assert_eq!(lost.kind(), ErrorKind::Lost);
    let message = queue.next().await.unwrap();
    assert_eq!(message.body(), b"new");
    message.done().await.unwrap();
}

async fn files_are_for_their_owner_only(fx: Fixture) {
    let queue = fx.queue().await;
    queue.push("x").await.unwrap();
    let database = database(&fx);
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(database.parent().unwrap()), 0o700);
    for file in std::fs::read_dir(database.parent().unwrap()).unwrap() {
        let path = file.unwrap().path();
        assert_eq!(mode(&path), 0o600, "{}", path.display());
    }
    drop(queue);
    let other = database.with_file_name("palisade,linked.db");
    std::os::unix::fs::symlink(&database, other).unwrap();
    let linked = fx
        .client()
        .await
        .queue("linked")
        .push("x")
        .await
        .unwrap_err();
    assert_eq!(linked.kind(), ErrorKind::Unusable, "{linked:?}");
}
