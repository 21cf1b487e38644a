//! The launcher on real engines: each starts, answers over its own protocol and leaves nothing
//! behind, however it ends. `verbs` tests stopping, killing and wiping.

#![allow(clippy::unwrap_used)]

#[macro_use]
extern crate palisade_testkit;

mod verbs;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use palisade_testkit::lab::launch::proc::{self, State};
use palisade_testkit::lab::launch::table::{ENGINES, Recipe};
use palisade_testkit::lab::launch::{self, Running, until, wire};

const SOON: Duration = Duration::from_secs(20);

/// Sends a request to one node that only the real engine answers.
fn ask(engine: &Running, port: u16) {
    let get = |path| wire::http(port, "GET", path, "").unwrap();
    let scheme = engine.url().split("://").next().unwrap();
    match scheme {
        "redis" | "redlock" | "redis+sentinel" | "redis+cluster" => {
            assert_eq!(wire::redis(port, &["PING"]).unwrap(), "PONG");
        }
        "etcd" => {
            let expected = if engine.name().starts_with("etcd35") {
                "3.5."
            } else {
                "3."
            };
            let (status, body) = get("/version");
            assert!(
                status == 200 && body.contains(&format!("etcdserver\":\"{expected}")),
                "{body}"
            );
            assert_eq!(get("/health").0, 200);
        }
        "zookeeper" => {
            let answer = wire::four_letters(port, "srvr").unwrap();
            assert!(answer.contains("Zookeeper version: 3."), "{answer}");
        }
        "consul" => {
            assert_eq!(get("/v1/kv/nothing").0, 404);
            assert_eq!(
                wire::http(port, "PUT", "/v1/kv/a", "b").unwrap().1.trim(),
                "true"
            );
        }
        "postgres" => {
            let url = format!("postgres://palisade@127.0.0.1:{port}/postgres");
            let psql = Command::new("psql")
                .args([&url, "-Atc", "SELECT 41 + 1"])
                .output()
                .unwrap();
            assert_eq!(
                String::from_utf8_lossy(&psql.stdout).trim(),
                "42",
                "{psql:?}"
            );
        }
        other => panic!("no request for {other}"),
    }
}

/// What a running engine has, to check afterwards that it is gone.
struct Traces {
    pids: Vec<u32>,
    ports: Vec<u16>,
    folder: PathBuf,
}

impl Traces {
    fn of(engine: &Running) -> Self {
        let nodes = engine.nodes();
        Self {
            pids: nodes
                .iter()
                .filter_map(|node| node.pid())
                .flat_map(proc::tree)
                .collect(),
            ports: nodes.iter().map(|node| node.port()).collect(),
            folder: engine.folder().to_owned(),
        }
    }

    fn left(&self) -> Result<(), String> {
        let alive = |pid: &&u32| proc::state(**pid) != State::Dead;
        let pids: Vec<&u32> = self.pids.iter().filter(alive).collect();
        let open = |port: &&u16| wire::connect(**port).is_ok();
        let ports: Vec<&u16> = self.ports.iter().filter(open).collect();
        if pids.is_empty() && ports.is_empty() && !self.folder.exists() {
            Ok(())
        } else {
            Err(format!(
                "left are {pids:?}, {ports:?}, {}",
                self.folder.display()
            ))
        }
    }
}

/// The number of shared memory segments that one of these processes created.
fn segments(of: &[u32]) -> usize {
    let list = std::fs::read_to_string("/proc/sysvipc/shm").unwrap_or_default();
    let maker = |line: &str| line.split_whitespace().nth(4)?.parse().ok();
    let makers = list.lines().filter_map(maker);
    makers.filter(|maker| of.contains(maker)).count()
}

/// Starts, asks and stops one engine.
fn round(name: &str) -> (Duration, Duration) {
    let begun = Instant::now();
    let engine = launch::start(name).unwrap();
    let started = begun.elapsed();
    for node in engine.nodes() {
        assert_eq!(node.state(), State::Running, "{node:?}");
        ask(&engine, node.port());
    }
    let traces = Traces::of(&engine);
    assert!(traces.folder.exists());
    drop(engine);
    traces.left().unwrap();
    assert_eq!(segments(&traces.pids), 0, "shared memory is left");
    (started, begun.elapsed())
}

/// Every engine, twice in a row.
#[test]
fn every_engine_starts_answers_and_leaves_nothing() {
    // The installation is not measured; what can't be installed is reported once.
    let had = |recipe: &&Recipe| recipe.fetch().is_ok() || launch::need(recipe.name).is_some();
    let engines: Vec<&Recipe> = ENGINES.iter().filter(had).collect();
    for pass in 1..=2 {
        let begun = Instant::now();
        let queue = parking_lot::Mutex::new(engines.iter());
        let work = || {
            while let Some(recipe) = { queue.lock().next() } {
                let (name, (started, whole)) = (recipe.name, round(recipe.name));
                println!("{name:<15} ready after {started:>8.1?}, gone after {whole:>8.1?}");
            }
        };
        // Two at a time: a start mostly waits.
        std::thread::scope(|scope| {
            let threads = [(); 2].map(|()| scope.spawn(work));
            for thread in threads {
                thread.join().unwrap();
            }
        });
        println!("all, pass {pass}: {:.1?}", begun.elapsed());
    }
}

/// Starts an engine through the command and kills the command with KILL.
#[test]
fn a_starter_that_is_killed_leaves_nothing() {
    for (name, stop_a_node) in [("redis5", false), ("postgres", true)] {
        let Some(spare) = launch::need(name) else {
            continue;
        };
        drop(spare);
        let mut up = Command::new(env!("CARGO_BIN_EXE_palisade-testkit"))
            .args(["up", name])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut traces = Traces {
            pids: vec![],
            ports: vec![],
            folder: PathBuf::new(),
        };
        for line in BufReader::new(up.stdout.take().unwrap()).lines() {
            let line = line.unwrap();
            let words: Vec<&str> = line.split_whitespace().collect();
            match words[..] {
                [_, "pid", pid, address] => {
                    traces.pids.extend(proc::tree(pid.parse().unwrap()));
                    traces
                        .ports
                        .push(address.rsplit(':').next().unwrap().parse().unwrap());
                }
                ["folder", folder] => {
                    traces.folder = folder.into();
                    break;
                }
                _ => {}
            }
        }
        assert!(
            traces.pids.len() >= 5 && traces.left().is_err(),
            "{:?}",
            traces.pids
        );
        assert_eq!(segments(&traces.pids), usize::from(name == "postgres"));
        if stop_a_node {
            // The main process is stopped and can't end the others.
            let pid = traces.pids[0].to_string();
            assert!(
                Command::new("kill")
                    .args(["-STOP", &pid])
                    .status()
                    .unwrap()
                    .success()
            );
        }
        up.kill().unwrap();
        up.wait().unwrap();
        until(SOON, || traces.left()).unwrap();
        assert_eq!(segments(&traces.pids), 0, "shared memory is left");
    }
}

#[test]
fn the_command_ends_with_its_input() {
    let spare = need!("redis");
    drop(spare);
    let up = Command::new(env!("CARGO_BIN_EXE_palisade-testkit"))
        .args(["up", "redis"])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&up.stdout).into_owned();
    assert!(
        up.status.success() && said.starts_with("redis://127.0.0.1:"),
        "{up:?}"
    );
    let folder = said
        .lines()
        .find_map(|line| line.strip_prefix("folder "))
        .unwrap();
    assert!(!Path::new(folder).exists());
}

#[test]
fn settings_reach_the_server_and_bad_ones_show_its_log() {
    let engine = need!("redis");
    drop(engine);
    let engine = launch::start_with("redis", &["--maxmemory", "3mb"]).unwrap();
    let limit = wire::redis(engine.nodes()[0].port(), &["CONFIG", "GET", "maxmemory"]).unwrap();
    assert_eq!(limit, "maxmemory\n3145728");
    let refused = launch::start_with("redis", &["--no-such-setting", "1"]).unwrap_err();
    let launch::Error::Failed(why) = refused else {
        panic!("{refused:?}")
    };
    assert!(
        why.starts_with("n0 has ended") && why.contains("no-such-setting"),
        "{why}"
    );
}

#[test]
fn an_unknown_engine_is_refused_by_name() {
    let refused = launch::start("redis6").unwrap_err();
    assert!(
        refused.to_string().contains("known are redis, redis5"),
        "{refused}"
    );
}

/// Without root and packages tests are skipped, with a reason in the expected place.
#[test]
fn what_cannot_be_had_is_skipped_or_fails() {
    let folder = tempfile::tempdir().unwrap();
    let rows = folder.path().join("skipped.jsonl");
    let run = |required: &str| {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "the_command_ends_with_its_input", "--nocapture"])
            .env("PALISADE_TEST_REDIS", folder.path().join("nothing"))
            .env("PALISADE_TEST_SKIPPED", &rows)
            .env("PALISADE_TEST_REQUIRE", required)
            .env_remove("CI")
            .output()
            .unwrap()
    };
    let skipped = run("");
    assert!(skipped.status.success(), "{skipped:?}");
    let row = std::fs::read_to_string(&rows).unwrap();
    let row: serde_json::Value = serde_json::from_str(row.trim_end()).unwrap();
    assert_eq!(
        (&row["test"], &row["engine"]),
        (&"the_command_ends_with_its_input".into(), &"redis".into())
    );
    assert!(row["why"].as_str().unwrap().contains("PALISADE_TEST_REDIS"));
    assert!(!run("1").status.success());
}
