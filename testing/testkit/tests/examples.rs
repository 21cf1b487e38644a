//! The library's examples, each on the embedded engine if that suffices, and on the engine that it
//! is about. They check themselves; cargo has built them with this test.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use libtest_mimic::{Arguments, Completion, Failed, Trial};
use palisade_testkit::lab::launch;

const EMBEDDED: &str = "file";

/// Each example, and the engines that it runs on.
const EXAMPLES: &[(&str, &[&str])] = &[
    ("accounts", &[EMBEDDED, "postgres"]),
    ("charge_in_postgres", &["postgres"]),
    ("charge_once", &[EMBEDDED, "etcd", "postgres", "redis"]),
    ("crawler", &[EMBEDDED, "redis"]),
    ("cron", &[EMBEDDED, "postgres", "redis"]),
    ("lead", &[EMBEDDED, "consul", "etcd", "zookeeper"]),
    ("queue", &[EMBEDDED, "postgres", "redis"]),
    ("service", &[EMBEDDED, "postgres"]),
    ("settings", &[EMBEDDED, "etcd"]),
    ("ten_calls", &[EMBEDDED, "redis"]),
];

fn main() -> ExitCode {
    let listed: BTreeSet<_> = EXAMPLES
        .iter()
        .map(|(name, _)| (*name).to_owned())
        .collect();
    assert_eq!(listed, written(), "every example is in the list");
    let engines = |example: &'static str, engines: &'static [&str]| {
        engines.iter().map(move |engine| (example, *engine))
    };
    let trials = EXAMPLES.iter().flat_map(|(name, on)| engines(name, on));
    let trials = trials.map(|(example, engine)| {
        let name = format!("{example}/{engine}");
        Trial::ignorable_test(name, move || on(engine, &built(example)))
    });
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit_code()
}

/// The examples in their directory.
fn written() -> BTreeSet<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../crates/palisade/examples");
    let files = folder.read_dir().unwrap().map(|file| file.unwrap().path());
    let names = files.map(|file| file.file_stem().unwrap().to_string_lossy().into_owned());
    names.collect()
}

fn built(example: &str) -> PathBuf {
    let deps = std::env::current_exe().unwrap();
    let target = deps.parent().and_then(Path::parent).unwrap();
    target.join("examples").join(example)
}

fn on(engine: &str, example: &Path) -> Result<Completion, Failed> {
    if engine == EMBEDDED {
        let folder = tempfile::tempdir()?;
        return run(example, &format!("file:{}", folder.path().display()));
    }
    match launch::need(engine) {
        Some(running) => run(example, running.url()),
        None => Ok(Completion::ignored_with(format!("{engine} is not here"))),
    }
}

fn run(example: &Path, url: &str) -> Result<Completion, Failed> {
    let shown = example.display();
    let output = Command::new(example).env("PALISADE_URL", url).output();
    let output = output.map_err(|error| {
        format!(
            "{shown}: {error}; build it with `cargo build -p palisade --examples --all-features`"
        )
    })?;
    if output.status.success() {
        return Ok(Completion::Completed);
    }
    let (out, err) = (output.stdout, output.stderr);
    let said = [String::from_utf8_lossy(&out), String::from_utf8_lossy(&err)].concat();
    Err(format!("{shown}: {}\n{said}", output.status).into())
}
