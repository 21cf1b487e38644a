//! Bad input: refused within a second, with the right code and a message that helps, and nothing
//! is left behind.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use crate::contract;
use crate::support::*;

/// Refused with `expected`, in text and in JSON; the text has `word` in it.
#[track_caller]
fn refused<S: AsRef<OsStr>>(store: &Store, args: &[S], expected: i32, word: &str) {
    let output = finish_soon(store.palisade(args));
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(expected), "{output:?}");
    assert!(output.stdout.is_empty(), "{output:?}");
    assert!(
        text.starts_with("palisade: ") && text.contains(word),
        "{word:?} in {text}"
    );
    let mut command = store.palisade(&["--json"]);
    let output = finish_soon({
        command.args(args);
        command
    });
    assert_eq!(output.status.code(), Some(expected), "{output:?}");
    assert!(json_error(&output)["code"].is_string(), "{output:?}");
    assert!(
        json_error(&output)["message"]
            .as_str()
            .unwrap()
            .contains(word),
        "{output:?}"
    );
}

#[test]
fn names() {
    let store = Store::new();
    let long = "x".repeat(256);
    for (name, word) in [
        ("", "empty"),
        (&long, "256"),
        ("a\nb", "U+000A"),
        ("a\x1bb", "U+001B"),
    ] {
        refused(&store, &["run", name, "--", "true"], 2, word);
        refused(&store, &["show", name], 2, word);
        refused(&store, &["evict", name], 2, word);
    }
    let name = OsString::from_vec(b"a\xff".to_vec());
    let args = [
        OsStr::new("run"),
        &name,
        OsStr::new("--"),
        OsStr::new("true"),
    ];
    refused(&store, &args, 2, "UTF-8");
    assert_eq!(OsStr::from_bytes(b"a\xff"), name);
    store.assert_empty();
    assert_eq!(code(store.run(&"x".repeat(255), &[], "true")), Some(0));
}

#[test]
fn durations() {
    let store = Store::new();
    for flag in ["--ttl", "--wait", "--at-least"] {
        for (value, word) in [
            ("=-5s", "negative"),
            ("=5", "unit"),
            ("=", "--"),
            ("=5parsecs", "units"),
            ("=99999999999999999999s", "too large"),
            ("=999999999999999999d", "too large"),
        ] {
            let flag = format!("{flag}{value}");
            refused(&store, &["run", "x", &flag, "--", "true"], 2, word);
        }
        refused(&store, &["run", "x", flag, "-5s", "--", "true"], 2, "");
    }
    for short in ["0s", "1ms", "999ms"] {
        refused(&store, &["run", "x", "--ttl", short, "--", "true"], 2, "1s");
    }
    let url = format!("{}?ttl=900ms", store.url());
    refused(&store, &["run", "x", "--url", &url, "--", "true"], 78, "1s");
    let url = format!("{}?ttl=9000000d", store.url());
    refused(
        &store,
        &["run", "x", "--url", &url, "--", "true"],
        78,
        "ttl",
    );
    refused(
        &store,
        &["run", "x", "--ttl", "9000000d", "--", "true"],
        2,
        "ttl",
    );
    store.assert_empty();
}

#[test]
fn a_duration_may_have_a_fraction() {
    let store = Store::new();
    let args = ["--ttl", "1.5s", "--wait", "0.5m", "--at-least", "0.001s"];
    let output = finish(store.run("x", &args, "true"));
    assert_eq!(
        (output.status.code(), stderr(&output)),
        (Some(0), String::new())
    );
}

#[test]
fn a_ttl_that_the_engine_rounds_is_told_once() {
    let store = Store::new();
    // The embedded engine counts in milliseconds.
    let output = finish(store.run("x", &["--ttl", "2.0005s"], "true"));
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let said = stderr(&output);
    assert!(
        said.contains("2.001s") && said.contains("2.0005s"),
        "{said}"
    );
    assert_eq!(said.lines().count(), 1);
    let output = finish(store.run("x", &["--ttl", "2.0005s", "--json"], "true"));
    let first = stderr(&output).lines().next().unwrap().to_owned();
    contract::read(&first, contract::event("ttl_rounded"));
    let url = format!("{}?ttl=2.0005s", store.url());
    let output = finish(store.run("x", &["--url", &url], "true"));
    assert!(stderr(&output).contains("2.001s"), "{output:?}");
    let output = finish(store.run("x", &["--ttl", "2.0005s", "-q"], "true"));
    assert_eq!(stderr(&output), "");
}

#[test]
fn a_url_is_given_once() {
    let store = Store::new();
    for args in [
        &[
            "--url",
            "file:/dev/null/a",
            "run",
            "x",
            "--url",
            "file:/dev/null/b",
            "--",
            "true",
        ][..],
        &["--url=file:/dev/null/a", "ls", "--url=file:/dev/null/b"],
        &[
            "ls",
            "--url",
            "file:/dev/null/a",
            "--url",
            "file:/dev/null/b",
        ],
        &[
            "bench",
            "--engine-url",
            "file:/dev/null/a",
            "--url",
            "file:/dev/null/b",
        ],
    ] {
        refused(&store, args, 2, "twice");
    }
    // Those of the command are its own.
    let args = [
        "--url",
        &store.url(),
        "run",
        "x",
        "--",
        "true",
        "--url",
        "--url",
    ];
    assert_eq!(code(store.palisade(&args)), Some(0));
}

#[test]
fn what_flock_takes_gets_a_tip_that_works() {
    let store = Store::new();
    for (args, word) in [
        (&["run", "x", "true"][..], "palisade run NAME -- CMD"),
        (
            &["run", "x", "sh", "-c", "true"],
            "palisade run NAME -- CMD",
        ),
        (&["elect", "x", "true"], "palisade elect NAME -- CMD"),
        (&["run", "-n", "x", "--", "true"], "--no-wait"),
        (&["run", "-w", "5", "x", "--", "true"], "--wait 10s"),
        (&["run", "-s", "x", "--", "true"], "--shared"),
    ] {
        refused(&store, args, 2, word);
        let output = finish_soon(store.palisade(args));
        assert!(!stderr(&output).contains("to pass"), "{output:?}");
    }
    let cron = ["run", "-q", "--no-wait", "-E", "0", "x", "--", "true"];
    let _held = store.hold("x", &[]);
    let output = finish(store.palisade(&cron));
    assert_eq!(
        (output.status.code(), stderr(&output)),
        (Some(0), String::new())
    );
    let readme = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../README.md"));
    assert!(
        readme
            .unwrap()
            .contains("palisade run -q --no-wait -E 0 cron-cleanup --")
    );
}

#[test]
fn flags() {
    let store = Store::new();
    for permits in ["0/1", "2/1", "1", "1/4294967295", "-1/2", "x/y", ""] {
        let flag = format!("--permits={permits}");
        refused(&store, &["run", "x", &flag, "--", "true"], 2, "permits");
    }
    for (args, word) in [
        (
            &["run", "x", "--wait", "1s", "--no-wait", "--", "true"][..],
            "--no-wait",
        ),
        (
            &["run", "x", "--shared", "--permits", "1/2", "--", "true"],
            "--permits",
        ),
        (&["run", "x", "-E", "256", "--", "true"], "256"),
        (&["run", "x", "--frobnicate", "--", "true"], "--frobnicate"),
        (&["run", "x", "--"], "CMD"),
        (&["run", "x", "true"], "true"),
        (&["run"], "NAME"),
        (&["show"], "NAME"),
        (&["rnu", "x", "--", "true"], "'run'"),
        (&["lss"], "'ls'"),
        (&["shwo", "x"], "'show'"),
    ] {
        refused(&store, args, 2, word);
    }
    store.assert_empty();
}

#[test]
fn urls() {
    let store = Store::new();
    let file = store.path("regular");
    std::fs::write(&file, "").unwrap();
    let below = format!("file:{}/below", file.display());
    let unknown = format!("{}?tll=5s", store.url());
    for (url, word) in [
        ("fil:/x", "file"),
        ("rediss", "scheme"),
        ("bananas:", "file:"),
        ("", "scheme"),
        (&unknown, "ttl"),
        (&below, ""),
        ("file:%zz", "%25"),
        ("localhost:6379", "redis://localhost:6379"),
        ("db.example.org:5432", "postgres://db.example.org:5432"),
        ("localhost", "redis://localhost:6379"),
        ("redis://::1:6379", "[::1]:6379"),
        ("postgres://::1/db", "[::1]"),
        ("etcd://fe80::1:2379", "[::1]"),
        ("consul://::1:8500", "[::1]"),
    ] {
        refused(&store, &["--url", url, "run", "x", "--", "true"], 78, word);
        refused(&store, &["ls", "--url", url], 78, word);
    }
    let nowhere = [
        "--url",
        "file:/proc/palisade/locks",
        "run",
        "x",
        "--",
        "true",
    ];
    refused(&store, &nowhere, 78, "");
    store.assert_empty();
}

#[test]
fn secrets_are_not_repeated() {
    let store = Store::new();
    let url = "nosuch://me:hunter2@host/0?password=hunter2";
    for args in [
        &["--url", url, "ls"][..],
        &["ls", "--url", "file:/x?password=hunter2"],
        &[url, "ls"],
        &["ls", "x", url],
        &["show", "x", &format!("--urll={url}")],
    ] {
        for json in [&[][..], &["--json"]] {
            let output = finish_soon(store.palisade(&[json, args].concat()));
            assert!(!output.status.success());
            assert!(!stderr(&output).contains("hunter2"), "{output:?}");
        }
    }
}

#[test]
fn help_and_version() {
    let store = Store::new();
    let output = finish_soon(store.palisade(&["--version"]));
    assert_eq!(
        stdout(&output),
        format!("palisade {}\n", env!("CARGO_PKG_VERSION"))
    );
    for verb in ["run", "ls", "show", "evict"] {
        let output = finish_soon(store.palisade(&[verb, "--help"]));
        assert_eq!(output.status.code(), Some(0));
        let example = format!("palisade {verb} ");
        let text = stdout(&output);
        let (_, examples) = text.split_once("Example").unwrap();
        assert!(examples.contains(example.trim_end()), "{text}");
    }
    let output = finish_soon(palisade());
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(!store.path("store").exists(), "none of this opened a store");
}

#[test]
fn schemas() {
    let store = Store::new();
    let output = finish_soon(store.palisade(&["schema", "postgres", "--user", "app"]));
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let sql = String::from_utf8(output.stdout).unwrap();
    assert!(sql.contains("CREATE TABLE IF NOT EXISTS \"palisade\".line"));
    assert!(sql.contains("\nGRANT USAGE ON SCHEMA \"palisade\" TO \"app\";"));
    refused(
        &store,
        &["schema", "postgres", "--schema", "a;b"],
        78,
        "lower-case",
    );
    refused(&store, &["schema", "oracle"], 2, "postgres");
}
