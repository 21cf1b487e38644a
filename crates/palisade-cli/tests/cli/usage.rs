//! Bad input: refused within a second, with the right code and a message that helps, and nothing
//! is left behind.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

use crate::contract;
use crate::support::*;

/// Refused with `expected`, in text and in JSON; the message has `word` in it.
#[track_caller]
fn refused(store: &Store, args: &(impl Words + ?Sized), expected: i32, word: &str) {
    let output = store.soon(args);
    output.is(expected).wrote("").says(word);
    assert!(output.err().starts_with("palisade: "), "{output:?}");
    let mut json = args.words();
    json.insert(0, "--json".into());
    let error = store.soon(&json).is(expected).error();
    assert!(
        error["message"].as_str().unwrap().contains(word),
        "{word:?} in {error}"
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
    let bytes = OsString::from_vec(b"a\xff".to_vec());
    let args = ["run".into(), bytes, "--".into(), "true".into()];
    refused(&store, &args, 2, "UTF-8");
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
            ("=0x5s", ""),
            ("=99999999999999999999s", "too large"),
            ("=999999999999999999d", "too large"),
            (" -5s", ""),
        ] {
            refused(&store, &format!("run x {flag}{value} -- true"), 2, word);
        }
    }
    let url = store.url();
    for (args, expected, word) in [
        ("--ttl 0s", 2, "1s"),
        ("--ttl 1ms", 2, "1s"),
        ("--ttl 999ms", 2, "1s"),
        ("--ttl 9000000d", 2, "ttl"),
        ("--url URL?ttl=900ms", 78, "1s"),
        ("--url URL?ttl=9000000d", 78, "ttl"),
    ] {
        let args = format!("run x {args} -- true").replace("URL", &url);
        refused(&store, &args, expected, word);
    }
    store.assert_empty();
    let fractions = "run x --ttl 1.5s --wait 0.5m --at-least 0.001s -- true";
    store.ran(fractions).is(0).silent();
    let spaced = [
        "run", "x", "--ttl", "30 s", "--wait", " 1m 30 s", "--", "true",
    ];
    store.ran(&spaced).is(0).silent();
}

/// No time is too long to be added to another: it is refused, or as good as for ever.
#[test]
fn the_longest_times() {
    let store = Store::new();
    store.ran("queue push q --body x").is(0);
    let held = store.hold("held", &[]);
    let bounded = [
        "run x --ttl TIME -- true",
        "elect x --ttl TIME -- true",
        "acquire x --ttl TIME",
        "queue push q --body x --delay TIME",
        "queue work q --drain --ttl TIME -- true",
        "queue work q --drain --backoff-max TIME -- true",
    ];
    let free = [
        "run x --wait TIME -- true",
        "run x --deadlock-after TIME -- true",
        "queue work q --drain --backoff TIME -- true",
    ];
    let in_urls = ["timeout", "connect_timeout"];
    // The most that is a time, what does not fit into nanoseconds, and what is a time of the system
    // only until something is added.
    for time in [
        "18446744073709551615s",
        "18446744074s",
        "9223372036854775807s",
        "36500000d",
    ] {
        for args in bounded {
            let output = store.soon(&args.replace("TIME", time));
            assert!(!output.err().contains("panicked"), "{output:?}");
            output.is(2).wrote("").says("must be");
        }
        for args in free {
            let output = store.soon(&args.replace("TIME", time));
            output.is(0).silent();
        }
        for option in in_urls {
            let url = format!("{}?{option}={time}", store.url());
            for args in ["run x -- true", "ls", "doctor", "show held"] {
                store.soon(&format!("--url {url} {args}")).is(0).silent();
            }
            // Nobody listens there.
            let url = format!("redis://127.0.0.1:1?{option}={time}");
            store
                .soon(&format!("--url {url} run x --no-wait -- true"))
                .is(69);
        }
        let url = format!("{}?ttl={time}", store.url());
        store.soon(&format!("--url {url} ls")).is(78);
        let config = store.path("config.toml");
        for (key, expected) in [("ttl", 78), ("wait", 0)] {
            std::fs::write(&config, format!("{key} = '{time}'")).unwrap();
            let mut command = store.palisade("run x -- true");
            command.env("PALISADE_CONFIG", &config);
            let output = finish_soon(command);
            assert!(
                !output.is(expected).err().contains("panicked"),
                "{output:?}"
            );
        }
        // These last until they are ended.
        for args in [
            "run held --wait TIME -- true",
            "run x --at-least TIME -- echo",
            "serve --no-port --drain TIME --socket SOCKET",
        ] {
            let socket = store.path("run/gateway.sock");
            let args = args.replace("TIME", time);
            let args = args.replace("SOCKET", socket.to_str().unwrap());
            let mut running = Running::start(store.palisade(&args));
            match &*args {
                run if run.starts_with("run x") => assert_eq!(running.line(), ""),
                _ => assert_ne!(running.stderr_line(), ""),
            }
            if args.starts_with("run x") {
                until("it keeps the lock", || {
                    store.ran("show x").is(0).out().contains("held")
                });
            }
            running.signal("TERM");
            let expected = match &*args {
                run if run.starts_with("run held") => 143,
                _ => 0,
            };
            let output = running.end();
            assert!(!output.err().contains("panicked"), "{output:?}");
            output.is(expected);
        }
    }
    drop(held);
    store.assert_empty();
}

#[test]
fn a_ttl_that_the_engine_rounds_is_told_once() {
    let store = Store::new();
    // The embedded engine counts in milliseconds.
    let output = store.ran("run x --ttl 2.0005s -- true");
    output.is(0).says("2.001s").says("2.0005s");
    assert_eq!(output.err().lines().count(), 1);
    let output = store.ran("run x --ttl 2.0005s --json -- true").err();
    contract::read(
        output.lines().next().unwrap(),
        contract::event("ttl_rounded"),
    );
    let url = format!("run x --url {}?ttl=2.0005s -- true", store.url());
    store.ran(&url).says("2.001s");
    store.ran("run x --ttl 2.0005s -q -- true").silent();
}

#[test]
fn a_url_is_given_once() {
    let store = Store::new();
    let (a, b) = ("file:/dev/null/a", "file:/dev/null/b");
    for args in [
        format!("--url {a} run x --url {b} -- true"),
        format!("--url={a} ls --url={b}"),
        format!("ls --url {a} --url {b}"),
        format!("bench --engine-url {a} --url {b}"),
    ] {
        refused(&store, &args, 2, "twice");
    }
    // Those of the command are its own.
    store
        .ran(&format!("--url {} run x -- true --url --url", store.url()))
        .is(0);
}

#[test]
fn what_flock_takes_gets_a_tip_that_works() {
    let store = Store::new();
    for (args, word) in [
        ("run x true", "palisade run NAME -- CMD"),
        ("run x sh -c true", "palisade run NAME -- CMD"),
        ("elect x true", "palisade elect NAME -- CMD"),
        ("run -n x -- true", "--no-wait"),
        ("run -w 5 x -- true", "--wait 10s"),
        ("run -s x -- true", "--shared"),
        ("run -x x -- true", "a lock is exclusive"),
    ] {
        refused(&store, args, 2, word);
        assert!(!store.soon(args).err().contains("to pass"), "{args}");
    }
    let _held = store.hold("x", &[]);
    store.ran("run -q --no-wait -E 0 x -- true").is(0).silent();
    let readme = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../README.md"));
    assert!(
        readme
            .unwrap()
            .contains("palisade run -q --no-wait -E 0 cron-cleanup --")
    );
}

/// What people type who know other tools.
#[test]
fn words_of_other_tools_get_a_tip_that_works() {
    let store = Store::new();
    for (args, word) in [
        ("lock x", "palisade run NAME"),
        ("unlock x", "palisade release NAME"),
        ("pop q", "palisade queue work NAME"),
        ("push q", "palisade queue push NAME"),
        ("list", "palisade ls"),
        ("status x", "palisade show NAME"),
        ("--url file:x lock x", "palisade run NAME"),
        ("queue pop q", "palisade queue work NAME -- CMD"),
        ("queue add q", "palisade queue push NAME"),
        ("queue rm q", "palisade queue drop NAME"),
        ("queue drp q", "'drop'"),
        ("evcit x", "'evict'"),
    ] {
        store.soon(args).is(2).wrote("").says(word);
    }
    for args in [
        "queue pop q",
        "queue dump q",
        "queue crop q x",
        "unlock x",
        "exit x",
        "edit x",
    ] {
        let said = store.soon(args).is(2).err();
        let near = said.contains("'evict'") || said.contains("'deadlocks'");
        assert!(
            !near && (!said.contains("'drop'") || args.contains("crop")),
            "{said}"
        );
    }
    for args in ["queue --json", "--json config", "--json fence", "--json"] {
        let error = store.soon(args).is(2).error();
        let message = error["message"].as_str().unwrap();
        let lists = message.contains("--help lists them") || message.contains("[subcommands: ");
        assert!(lists, "{error}");
    }
    store.assert_empty();
}

/// A name that starts with a dash goes behind `--`, for every verb, and every tip says so.
#[test]
fn names_that_start_with_a_dash() {
    let store = Store::new();
    for name in ["-x", "--url", "-", "--json"] {
        let run = [
            "run",
            "--",
            name,
            "--",
            "sh",
            "-c",
            "echo $PALISADE_LOCK; palisade show -- $1",
        ];
        let mut command = store.palisade(&run);
        let bin = std::path::Path::new(env!("CARGO_BIN_EXE_palisade"))
            .parent()
            .unwrap();
        command
            .args(["sh", name])
            .env("PATH", format!("{}:/usr/bin:/bin", bin.display()));
        if name == "-" {
            // It is no option.
            store.ran("run - -- true").is(0);
            continue;
        }
        let said = finish(command).is(0).out();
        assert!(said.starts_with(&format!("{name}\nNAME")), "{said}");
        for args in [
            format!("elect -- {name} -- true"),
            format!("run --no-wait --ttl 5s -- {name} -- true"),
            format!("queue push --body x -- {name}"),
            format!("queue work --drain -- {name} -- true"),
        ] {
            store.ran(&args).is(0);
        }
        store.ran(&format!("show -- {name}")).is(1);
        store.ran(&format!("evict -- {name}")).is(1);
        let tip = format!("palisade run -- {name} -- CMD");
        if name == "-x" {
            refused(&store, "run -x -- true", 2, &tip);
            refused(&store, "run -x", 2, &tip);
            refused(&store, "show -x", 2, "-- -x");
        }
    }
    // A forgotten name is not made up from the command.
    for args in [
        "run -- ./a -- b",
        "elect -- ./a",
        "run -- -x",
        "run -- -x true",
    ] {
        refused(&store, args, 2, "NAME");
    }
    store.assert_empty();
}

/// Values that are wrong, and what is said about them: what to write, not what a parser found.
#[test]
fn values_that_are_wrong_are_explained() {
    let store = Store::new();
    let long = "x".repeat(120);
    let socket = format!(
        "serve --no-port --socket {}/{long}",
        store.path("run").display()
    );
    for (args, code, word) in [
        ("run x --ttl -5s -- true", 2, "can't be negative"),
        ("run x --wait=-5s -- true", 2, "can't be negative"),
        ("acquire x --pid me", 2, "a whole number"),
        ("release x --pid=", 2, "--pid"),
        ("queue show q --limit 18446744073709551616", 2, "too large"),
        ("queue show q --limit many", 2, "a whole number"),
        ("run x -E many -- true", 2, "a whole number"),
        ("serve --listen :7420", 2, "127.0.0.1:7420"),
        ("serve --listen 7420", 2, "127.0.0.1:7420"),
        ("serve --listen localhost:7420", 2, "127.0.0.1:7420"),
        ("serve --no-port --max-claims 0", 2, "above 0"),
        ("serve --no-port --max-sessions many", 2, "a whole number"),
        (&socket, 78, "107 bytes"),
        (
            "schema postgres --fence t --key a,b,a",
            2,
            "a is there twice",
        ),
    ] {
        if args.contains("--ttl -5s") {
            // A tip, which is for people.
            store.soon(args).is(code).says(word);
        } else {
            refused(&store, args, code, word);
        }
    }
    for args in [
        "run x -E -1 -- true",
        "acquire x --pid -1",
        "fence check x -1",
    ] {
        store.soon(args).is(2).says("can't be negative");
    }
    for (args, code, word) in [
        (&["run", "x", "--", ""][..], 127, "the command is empty"),
        (
            &["queue", "push", "q", "--body", "x", "--id", ""],
            2,
            "--id: ",
        ),
        (
            &["queue", "push", "q", "--body", "x", "--key", "a\nb"],
            2,
            "--key: ",
        ),
        (&["serve", "token", ""], 2, "empty"),
        (&["schema", "postgres", "--user", ""], 2, "--user"),
    ] {
        let ran = store.soon(args).is(code).err();
        assert!(ran.contains(word), "{word:?} in {ran}");
    }
    store.assert_empty();
}

/// Nothing that is asked for is ignored.
#[test]
fn options_that_could_have_no_effect_are_refused() {
    let store = Store::new();
    for (args, word) in [
        ("demo --fast --url file:x", "omit --url"),
        ("--url=file:x demo --fast", "omit --url"),
        ("schema postgres --url postgres://h", "omit --url"),
        ("schema sqlite --fence t --user app", "omit --user"),
        ("schema sqlite --fence t --schema s", "--schema"),
        ("schema sqlite --user app", "--user"),
        ("schema postgres --fence t --schema s", "--schema"),
        ("schema postgres --key k", "--fence"),
        ("serve --no-port --listen 127.0.0.1:0", "--listen"),
        ("serve --no-port --tls-cert c --tls-key k", "--no-port"),
        ("serve token x --no-port", "--no-port"),
        ("serve --no-port token x", "token"),
        ("man run --out d", "--out"),
    ] {
        refused(&store, args, 2, word);
    }
    // The environment is for other verbs, too.
    store.ran("demo --fast --json").is(0);
    store.ran("schema postgres").is(0);
}

#[test]
fn flags() {
    let store = Store::new();
    let bad = "0/1,2/1,1,/,1/,/4,1/4294967295,1/4294967296,-1/2,+1/4,x/y,1/4/2,";
    for permits in bad.split(',') {
        refused(
            &store,
            &format!("run x --permits={permits} -- true"),
            2,
            "permits",
        );
    }
    let most = "run x --permits 4294967294/4294967294 -- true";
    store.ran(most).is(0);
    for (args, word) in [
        ("run x --wait 1s --no-wait -- true", "--no-wait"),
        ("run x --shared --permits 1/2 -- true", "--permits"),
        ("run x -E 256 -- true", "256"),
        ("run x --frobnicate -- true", "--frobnicate"),
        ("run x --", "CMD"),
        ("run x true", "true"),
        ("run", "NAME"),
        ("show", "NAME"),
        ("rnu x -- true", "'run'"),
        ("lss", "'ls'"),
        ("shwo x", "'show'"),
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
        ("file:/proc/palisade/locks", ""),
        ("localhost:6379", "redis://localhost:6379"),
        ("db.example.org:5432", "postgres://db.example.org:5432"),
        ("localhost", "redis://localhost:6379"),
        ("redis://::1:6379", "[::1]:6379"),
        ("postgres://::1/db", "[::1]"),
        ("etcd://fe80::1:2379", "[::1]"),
        ("consul://::1:8500", "[::1]"),
    ] {
        refused(&store, &["--url", url, "run", "x", "--", "true"], 78, word);
        if !url.contains("/proc/") {
            refused(&store, &["ls", "--url", url], 78, word);
        }
    }
    store.assert_empty();
}

#[test]
fn secrets_are_not_repeated() {
    let store = Store::new();
    let url = "nosuch://me:hunter2@host/0?password=hunter2";
    for args in [
        "--url URL ls",
        "ls --url file:/x?password=hunter2",
        "URL ls",
        "ls x URL",
        "show x --urll=URL",
    ] {
        for json in ["", "--json "] {
            let output = store.soon(&format!("{json}{args}").replace("URL", url));
            assert!(
                !output.status.success() && !output.err().contains("hunter2"),
                "{output:?}"
            );
        }
    }
}

#[test]
fn the_version_and_no_verb() {
    let store = Store::new();
    let version = format!("palisade {}\n", env!("CARGO_PKG_VERSION"));
    store.soon("--version").is(0).wrote(&version);
    store.soon("").is(2);
    assert!(!store.path("store").exists(), "none of this opened a store");
}

#[test]
fn schemas() {
    let store = Store::new();
    let sql = store.soon("schema postgres --user app").is(0).out();
    assert!(sql.contains("CREATE TABLE IF NOT EXISTS \"palisade\".line"));
    assert!(sql.contains("\nGRANT USAGE ON SCHEMA \"palisade\" TO \"app\";"));
    refused(&store, "schema postgres --schema a;b", 78, "lower-case");
    refused(&store, "schema oracle", 2, "postgres");
    let sql = store
        .soon("schema postgres --fence shop.stock --key tenant,sku --strict --user app")
        .is(0)
        .out();
    for part in [
        "BEFORE UPDATE ON \"shop\".\"stock\"",
        "NEW.fence <= OLD.fence_token",
        "m.\"tenant\" = NEW.\"tenant\" AND m.\"sku\" = NEW.\"sku\"",
        "TO \"app\"",
    ] {
        assert!(sql.contains(part), "{part} in {sql}");
    }
    let sql = store.soon("schema sqlite --fence stock").is(0).out();
    assert!(sql.contains("BEFORE DELETE ON \"stock\""), "{sql}");
    assert!(sql.starts_with(".bail on\n"), "{sql}");
    let plain = store.soon("schema sqlite --fence stock --json").is(0).out();
    assert!(!plain.contains(".bail"), "{plain}");
    refused(&store, "schema sqlite", 2, "--fence");
    refused(&store, "schema sqlite --fence a;b", 78, "letters");
    refused(&store, "schema postgres --strict", 2, "--fence");
}
