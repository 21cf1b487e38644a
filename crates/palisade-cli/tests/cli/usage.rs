//! Bad input: refused within a second, with the right code and a message that helps, and nothing
//! is left behind.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

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
    refused(&store, &["run", "x", "--url", &url, "--", "true"], 2, "1s");
    refused(
        &store,
        &["run", "x", "--ttl", "9000000d", "--", "true"],
        2,
        "ttl",
    );
    store.assert_empty();
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
        ("file:/proc/palisade/locks", ""),
        ("file:%zz", "%"),
    ] {
        refused(&store, &["--url", url, "run", "x", "--", "true"], 78, word);
        refused(&store, &["ls", "--url", url], 78, word);
    }
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
