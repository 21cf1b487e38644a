//! Completeness: every `# Behavior` line has a case and every case's line still exists, every
//! scheme is tested, and a table with a missing cell reports it.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use palisade_testkit::conformance::{self, VERBS};
use palisade_testkit::engine::{EngineUnderTest, chosen};
use palisade_testkit::harness;
use palisade_testkit::lab::engines::ENGINES;
use palisade_testkit::report::{self, Row};

/// The `# Behavior` lines of each verb of the engine trait, as (verb, line).
fn promised() -> BTreeSet<(String, String)> {
    let trait_file =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../crates/palisade-core/src/core/engine.rs");
    let text = fs::read_to_string(trait_file).unwrap();
    let mut promised = BTreeSet::new();
    let mut lines: Vec<String> = Vec::new();
    let mut listing = false;
    for line in text.lines().map(str::trim) {
        if let Some(doc) = line.strip_prefix("///") {
            let doc = doc.strip_prefix(' ').unwrap_or(doc);
            match doc {
                "# Behavior" => listing = true,
                _ if doc.starts_with('#') || doc.is_empty() => listing = false,
                _ if !listing => {}
                _ => match doc.strip_prefix("- ") {
                    Some(first) => lines.push(first.to_owned()),
                    None => match lines.last_mut() {
                        Some(last) => *last = format!("{last} {}", doc.trim()),
                        None => panic!("{doc:?} goes on from nothing"),
                    },
                },
            }
            continue;
        }
        listing = false;
        if let Some(verb) = line
            .strip_prefix("fn ")
            .and_then(|rest| rest.split('(').next())
        {
            promised.extend(lines.drain(..).map(|line| (verb.to_owned(), line)));
        }
    }
    promised
}

#[test]
fn every_promise_of_the_trait_has_a_case_and_every_case_a_promise() {
    let cases = conformance::all();
    let of_verbs = cases.iter().filter(|case| VERBS.contains(&case.group()));
    let tested: BTreeSet<(String, String)> = of_verbs
        .map(|case| (case.group().to_owned(), case.behavior.to_owned()))
        .collect();
    let promised = promised();
    assert!(
        promised.len() > 20,
        "the trait's lines were not found: {promised:?}"
    );
    let untested: Vec<_> = promised.difference(&tested).collect();
    assert!(
        untested.is_empty(),
        "promised but not tested: {untested:#?}"
    );
    let stale: Vec<_> = tested.difference(&promised).collect();
    assert!(stale.is_empty(), "tested but not promised: {stale:#?}");
}

#[test]
fn every_case_has_a_name_of_its_own() {
    let cases = conformance::all();
    let names: BTreeSet<&str> = cases.iter().map(|case| case.name).collect();
    assert_eq!(names.len(), cases.len());
    assert!(cases.len() >= 60, "{} cases", cases.len());
}

#[test]
fn every_engine_is_under_test() {
    let names: BTreeSet<&str> = ENGINES.iter().map(|engine| engine.name).collect();
    // An engine may have a second scheme for the same thing with TLS.
    let runs = |scheme: &str| {
        names
            .iter()
            .any(|name| name.split('-').next() == Some(scheme))
    };
    let is_run = |card: &palisade::engine::EngineInfo| card.schemes.iter().any(|s| runs(s));
    let without: Vec<_> = palisade::command::registry()
        .into_iter()
        .filter(|card| !is_run(card))
        .map(|card| card.name)
        .collect();
    assert!(
        without.is_empty(),
        "engines that no trial runs on: {without:?}"
    );
}

#[test]
fn engines_are_chosen_by_name() {
    let names = |engines: Vec<EngineUnderTest>| engines.iter().map(|s| s.name).collect::<Vec<_>>();
    assert_eq!(
        names(chosen(ENGINES, Some("file, memory")).unwrap()),
        ["file", "memory"]
    );
    let default = names(chosen(ENGINES, None).unwrap());
    assert!(default.contains(&"memory") && default.contains(&"file"));
    let why = chosen(ENGINES, Some("redsi")).unwrap_err();
    assert!(why.contains("redsi") && why.contains("memory"), "{why}");
}

/// A full report of two engines.
fn full() -> Vec<Row> {
    let cases = conformance::all();
    let rows = ["memory", "file"].into_iter().flat_map(|engine| {
        cases.iter().map(move |case| Row {
            engine: engine.to_owned(),
            case: case.name.to_owned(),
            behavior: case.behavior.to_owned(),
            result: "ok".to_owned(),
            why: None,
            millis: 1,
            notes: Vec::new(),
        })
    });
    rows.collect()
}

#[test]
fn a_hole_in_the_table_is_found() {
    let cases = conformance::all();
    let required = ["memory".to_owned(), "file".to_owned()];
    let mut rows = full();
    let whole = report::table(&rows, &required, &cases);
    assert_eq!((whole.failed, whole.missing), (0, 0), "{}", whole.text);
    let engines = chosen(ENGINES, Some("memory,file")).unwrap();
    assert!(harness::missing(&engines, &cases, &rows).is_empty());

    let gone = rows.remove(3);
    let holed = report::table(&rows, &required, &cases);
    assert_eq!((holed.failed, holed.missing), (0, 1));
    assert!(holed.text.contains("MISSING"));
    let missing = harness::missing(&engines, &cases, &rows);
    assert_eq!(missing, [format!("{}::{}", gone.engine, gone.case)]);

    // For an engine that never ran, all cells are missing.
    let absent = report::table(&rows, &["etcd".to_owned()], &cases);
    assert_eq!(absent.missing, cases.len() + 1);
}

#[test]
fn the_command_prints_the_table_and_fails_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("report");
    let mut rows = full();
    rows[0].result = "n/a".into();
    rows[0].why = Some("because".into());
    let write = |rows: &[Row]| {
        let lines: Vec<String> = rows
            .iter()
            .map(|row| serde_json::to_string(row).unwrap())
            .collect();
        fs::write(&path, lines.join("\n")).unwrap();
    };
    let table = |engines: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_palisade-testkit"));
        let output = command
            .arg("table")
            .arg(&path)
            .args(["--require", engines])
            .output()
            .unwrap();
        (
            output.status.code(),
            String::from_utf8(output.stdout).unwrap(),
        )
    };
    write(&rows);
    let (code, text) = table("memory,file");
    assert_eq!(code, Some(0), "{text}");
    assert!(
        text.contains("n/a 1: because") && text.contains("memory: "),
        "{text}"
    );
    assert_eq!(table("memory,etcd").0, Some(1));
    rows[5].result = "FAIL".into();
    rows[5].why = Some("it broke".into());
    write(&rows);
    let (code, text) = table("memory,file");
    assert_eq!(code, Some(1));
    assert!(text.contains("FAIL") && text.contains("it broke"), "{text}");
}
