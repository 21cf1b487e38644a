//! Every metric has the same name in the code, in `docs/observability.md`, and in the queries of
//! `deploy/`.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use palisade_testkit::lab::pages::{pages, root};

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap()
}

/// The words that start with `palisade_` and consist of characters of a metric. The series of a
/// histogram count as the histogram.
fn metrics(text: &str) -> BTreeSet<String> {
    let end = |rest: &str| rest.find(|c: char| !c.is_ascii_lowercase() && c != '_');
    text.match_indices("palisade_")
        .map(|(at, _)| &text[at..])
        .map(|rest| &rest[..end(rest).unwrap_or(rest.len())])
        .map(|name| {
            let histogram = ["_bucket", "_sum", "_count"];
            let histogram = histogram.into_iter().find_map(|end| name.strip_suffix(end));
            histogram.unwrap_or(name).to_owned()
        })
        .collect()
}

/// The names between the backticks of the table's first column.
fn documented() -> BTreeSet<String> {
    let page = read("docs/observability.md");
    let rows = page.lines().filter(|line| line.starts_with("| `palisade_"));
    rows.flat_map(|row| metrics(row.split('|').nth(1).unwrap()))
        .collect()
}

/// The names of metrics that the sources record, as quoted text.
fn recorded() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for source in [
        "crates/palisade-core/src/layers/metrics.rs",
        "crates/palisade-gateway/src/routes/mod.rs",
        "crates/palisade-gateway/src/routes/operate.rs",
    ] {
        let text = read(source);
        let quoted = text.split('"').skip(1).step_by(2);
        found.extend(
            quoted
                .filter(|name| name.starts_with("palisade_"))
                .flat_map(metrics),
        );
    }
    found
}

#[test]
fn the_page_lists_what_is_recorded_and_nothing_else() {
    assert_eq!(documented(), recorded());
}

/// What an exporter prints beside the figures.
#[test]
fn every_metric_is_described() {
    let mut described = BTreeSet::new();
    for source in [
        "crates/palisade-core/src/layers/metrics.rs",
        "crates/palisade-gateway/src/metrics.rs",
    ] {
        let text = read(source);
        let calls = text.split("describe_").skip(1);
        described.extend(calls.filter_map(|call| {
            let (_, arguments) = call.split_once("!(")?;
            let name = arguments
                .trim_start()
                .strip_prefix('"')?
                .split('"')
                .next()?;
            name.starts_with("palisade_").then(|| name.to_owned())
        }));
    }
    assert_eq!(described, recorded());
}

/// The names of metrics on a page; `palisade_testkit` and the like are crates and switches.
fn named_on(page: &str) -> BTreeSet<String> {
    let crates = [
        "palisade_",
        "palisade_core",
        "palisade_docs",
        "palisade_gateway",
        "palisade_kit",
        "palisade_known_bad",
        "palisade_shuttle",
        "palisade_testkit",
    ];
    let mut names = metrics(page);
    names.retain(|name| !crates.contains(&name.as_str()));
    names
}

#[test]
fn every_page_and_every_file_of_deploy_names_metrics_that_there_are() {
    let known = documented();
    let mut files = pages(&root());
    for folder in ["deploy", "deploy/kubernetes"] {
        let entries = fs::read_dir(root().join(folder)).unwrap();
        let entries = entries.map(|entry| Path::new(folder).join(entry.unwrap().file_name()));
        files.extend(entries.filter(|path| root().join(path).is_file()));
    }
    for file in files {
        let named = named_on(&read(&file.display().to_string()));
        let unknown: Vec<_> = named.difference(&known).collect();
        assert!(unknown.is_empty(), "{} names {unknown:?}", file.display());
    }
}

#[test]
fn rules_and_dashboards_ask_for_metrics_that_there_are() {
    let known = documented();
    for file in [
        "deploy/prometheus-rules.yml",
        "deploy/prometheus-rules-test.yml",
        "deploy/grafana-dashboard.json",
        "crates/palisade-gateway/src/dashboard/metrics.js",
    ] {
        let asked = metrics(&read(file));
        assert!(!asked.is_empty(), "{file} asks for nothing");
        let unknown: Vec<_> = asked.difference(&known).collect();
        assert!(unknown.is_empty(), "{file} asks for {unknown:?}");
    }
    // Grafana's dashboard shows all of them.
    let shown = metrics(&read("deploy/grafana-dashboard.json"));
    assert_eq!(shown, known);
}
