//! The config file, and `config path|show`.

use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::contract;
use crate::redis::Redis;
use crate::support::*;

const FILE: &str = "xdg/palisade/config.toml";

/// palisade with nothing but these files and variables.
struct Home {
    store: Store,
}

impl Home {
    fn new() -> Self {
        let store = Store::new();
        Self { store }
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.store.path(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    fn palisade(&self, args: &(impl Words + ?Sized), variables: &[(&str, &str)]) -> Command {
        let mut command = palisade();
        command
            .args(args.words())
            .env_remove("PALISADE_CONFIG")
            .env("XDG_CONFIG_HOME", self.store.path("xdg"))
            .env("XDG_STATE_HOME", self.store.path("state"))
            .env("HOME", self.store.path("home"))
            .envs(variables.iter().copied());
        command
    }

    #[track_caller]
    fn soon(&self, args: &(impl Words + ?Sized)) -> Ran {
        finish_soon(self.palisade(args, &[]))
    }

    /// Value and origin of a setting, as `config show` has it.
    #[track_caller]
    fn shows(&self, args: &str, variables: &[(&str, &str)], key: &str) -> [String; 2] {
        let command = self.palisade(&format!("config show --json {args}"), variables);
        let shown = finish_soon(command).is(0).json(contract::CONFIG);
        let text = |part: &str| shown[key][part].as_str().unwrap_or("null").to_owned();
        ["value", "from"].map(text)
    }

    fn url(&self, name: &str) -> String {
        format!("file:{}", self.store.path(name).display())
    }
}

/// Refused as configuration, without repeating `hunter2`.
#[track_caller]
fn refused(output: &Ran, word: &str) {
    output.is(78).wrote("").says(word);
    assert!(!output.err().contains("hunter2"), "{output:?}");
}

#[test]
fn the_flag_beats_the_environment_beats_the_file_beats_the_default() {
    let home = Home::new();
    let default = home.url("state/palisade");
    assert_eq!(home.shows("", &[], "url"), [&default, "default"]);
    // Nobody knows where it is.
    let nowhere = [("XDG_STATE_HOME", ""), ("HOME", "")];
    assert_eq!(home.shows("", &nowhere, "url"), ["file:", "default"]);
    let (file, variable, flag) = (home.url("file"), home.url("variable"), home.url("flag"));
    home.write(FILE, &format!("url = '{file}'"));
    assert_eq!(home.shows("", &[], "url"), [&file, "file"]);
    let variables = [("PALISADE_URL", variable.as_str())];
    assert_eq!(
        home.shows("", &variables, "url"),
        [&variable, "environment"]
    );
    assert_eq!(
        home.shows(&format!("--url {flag}"), &variables, "url"),
        [&flag, "flag"]
    );
    // An empty variable is none.
    let empty = [("PALISADE_URL", ""), ("PALISADE_CONFIG", "")];
    assert_eq!(home.shows("", &empty, "url"), [&file, "file"]);
}

#[test]
fn the_first_file_that_exists_is_read() {
    let home = Home::new();
    let path = |variables: &[(&str, &str)]| {
        let output = finish_soon(home.palisade("config path --json", variables));
        let answer = output.json(contract::CONFIG_PATH);
        output.is(i32::from(answer["path"].is_null()));
        answer
    };
    let shown = |path: &str| home.store.path(path).display().to_string();
    let (user, third) = ("home/.config/palisade/config.toml", shown("third.toml"));
    let none = path(&[]);
    if !Path::new("/etc/palisade/config.toml").exists() {
        assert!(none["path"].is_null());
        let text = home.soon("config path").out();
        assert!(text.starts_with("no config file; looked for\n"), "{text}");
    }
    let system = "/etc/palisade/config.toml".to_owned();
    assert_eq!(
        none["searched"],
        Value::from(vec![shown(FILE), shown(user), system])
    );
    home.write(user, "");
    assert_eq!(path(&[])["path"], shown(user));
    home.write(FILE, "");
    assert_eq!(path(&[])["path"], shown(FILE));
    home.soon("config path")
        .wrote(&format!("{}\n", shown(FILE)));
    home.write("third.toml", "label = 'x'");
    let third = [("PALISADE_CONFIG", third.as_str())];
    assert_eq!(path(&third)["path"], third[0].1);
    assert_eq!(home.shows("", &third, "label"), ["x", "file"]);
}

#[test]
fn the_defaults_of_the_file_are_in_force() {
    let home = Home::new();
    let url = home.url("locks");
    let text = format!("url = '{url}'\nttl = '7s'\nwait = '100ms'\nlabel = 'a b'\n");
    home.write(FILE, &text);
    let hold = ["run", "x", "--", "sh", "-c", "echo ready; cat >/dev/null"];
    let mut held = Running::start(home.palisade(&hold, &[]));
    held.line();
    let lines = home.soon("ls --json").json(contract::LINES);
    let holder = &lines[0]["holders"][0];
    assert_eq!(holder["label"], "a b");
    assert!(
        holder["expires_in_ms"].as_u64().unwrap() <= 7000,
        "{holder}"
    );

    home.soon("run x -- echo no").is(75).says("within 100ms");
    // The command line has priority.
    home.soon("run x --no-wait -- echo no")
        .is(75)
        .says("x is held by ");
    let mut waits = Running::start(home.palisade("run x --wait forever -- echo mine", &[]));
    assert!(waits.stderr_line().contains("waiting for x"));
    held.close_stdin();
    assert_eq!(waits.line(), "mine");

    assert_eq!(home.shows("", &[], "ttl"), ["7s", "file"]);
    assert_eq!(home.shows("", &[], "wait"), ["100ms", "file"]);
    let other = format!("--url {url}?ttl=9s&label=other");
    assert_eq!(home.shows(&other, &[], "ttl"), ["9s", "url"]);
    assert_eq!(home.shows(&other, &[], "label"), ["other", "url"]);
}

#[test]
fn a_bad_file_is_refused_by_every_verb_that_reads_it() {
    let home = Home::new();
    for (text, word) in [
        ("urll = 'redis://me:hunter2@h'", "did you mean url?"),
        ("[profiles.x]\nurl = 'hunter2'", "unknown key profiles"),
        (
            "bananas = 'hunter2'",
            "it takes url, ttl, wait, label, for_correctness",
        ),
        ("url = 'file:'\nhunter2", "line 2 is not valid TOML"),
        ("url = 'a'\nurl = 'hunter2'", "line 2"),
        ("url = hunter2", "line 1"),
        ("ttl = 5", "ttl must be text"),
        ("ttl = 'hunter2'", "ttl: "),
        ("wait = 'hunter2'", "wait: "),
        ("url = ''", "url: it is empty"),
        (
            "for_correctness = 'yes'",
            "for_correctness must be true or false",
        ),
    ] {
        home.write(FILE, text);
        for args in [
            "ls",
            "run x -- true",
            "elect x -- true",
            "leader x",
            "config show",
            "fence check x 1",
        ] {
            refused(&home.soon(args), word);
            let output = home.soon(&format!("--json {args}"));
            refused(&output, "");
            output.error();
        }
    }
    assert!(!home.store.path("state").exists(), "nothing was opened");
}

#[test]
fn a_file_that_can_not_be_read_is_refused() {
    let home = Home::new();
    let path = |name: &str| home.store.path(name);
    std::fs::create_dir(path("folder")).unwrap();
    std::fs::write(path("bytes"), b"url = '\xff'").unwrap();
    std::fs::write(path("long"), "#".repeat(70_000)).unwrap();
    let fifo = Command::new("mkfifo").arg(path("fifo")).status().unwrap();
    assert!(fifo.success());
    let bytes = std::ffi::OsString::from_vec(b"/no/\xff".to_vec());
    for (file, expected, word) in [
        (path("missing"), 78, "does not exist"),
        (path("folder"), 78, "can't be read"),
        (path("bytes"), 78, "UTF-8"),
        (path("long"), 78, "64 KiB"),
        (bytes.into(), 78, "does not exist"),
        // Neither a FIFO without a writer nor an endless file makes it hang.
        (path("fifo"), 0, ""),
        ("/dev/null".into(), 0, ""),
        ("/dev/zero".into(), 78, ""),
    ] {
        let mut command = home.palisade("config path", &[]);
        command.env("PALISADE_CONFIG", &file);
        finish_soon(command).is(expected).says(word);
    }
}

#[test]
fn secrets_are_not_shown() {
    let home = Home::new();
    for url in [
        "redis://me:hunter2@host:1/0?password=hunter2",
        "nosuch://me:hunter2@host",
        "hunter2:x",
        "file:/x?password=hunter2",
    ] {
        home.write(FILE, &format!("url = '{url}'"));
        for args in ["config show", "config show --json"] {
            let output = home.soon(args);
            let all = output.out() + &output.err();
            assert!(!all.contains("hunter2"), "{all}");
        }
    }
    refused(&home.soon("config show --url file:/x?ttl=hunter2"), "ttl");
}

#[test]
fn a_ttl_of_the_file_that_no_engine_takes_is_configuration() {
    let home = Home::new();
    let url = home.url("locks");
    for ttl in ["10ms", "0s", "999ms", "9000000d"] {
        home.write(FILE, &format!("url = '{url}'\nttl = '{ttl}'"));
        for verb in ["run", "elect"] {
            refused(&home.soon(&format!("{verb} x -- echo no")), "ttl");
        }
    }
    home.write(FILE, &format!("url = '{url}'\nttl = '10ms'"));
    refused(&home.soon("ls"), "ttl");
}

#[test]
fn a_home_that_can_not_be_entered_matters_only_where_it_is_needed() {
    let home = Home::new();
    // A link to itself is inaccessible even to root.
    let away = home.store.path("away");
    std::os::unix::fs::symlink(&away, &away).unwrap();
    let url = home.url("locks");
    let palisade = |args: &str, variables: &[(&str, &str)]| {
        let mut command = home.palisade(args, variables);
        command.env("HOME", &away).env_remove("XDG_CONFIG_HOME");
        finish_soon(command)
    };
    let with_flag = format!("--url {url} run x -- true");
    palisade(&with_flag, &[]).is(0);
    palisade("run x -- true", &[("PALISADE_URL", &url)]).is(0);
    refused(&palisade("run x -- true", &[]), "can't be opened");
    // A file that PALISADE_CONFIG names must exist.
    let asked = away.join("config.toml");
    let asked = [("PALISADE_CONFIG", asked.to_str().unwrap())];
    refused(&palisade(&with_flag, &asked), "can't be opened");
}

#[test]
fn correctness_is_asked_for_by_a_flag_or_the_file() {
    let home = Home::new();
    let text = |more: &str| format!("url = '{}'\n{more}", home.url("locks"));
    home.write(FILE, &text(""));
    assert_eq!(home.shows("", &[], "for_correctness"), ["false", "default"]);
    home.soon("run x --for-correctness -- true").is(0);
    home.soon("elect x --for-correctness -- true").is(0);
    // An engine of class C, if one is available.
    let Some(redis) = Redis::start(&home.store) else {
        return;
    };
    let run = |args: &str| home.soon(&format!("run x --json --url {} {args} -- true", redis.url));
    let refusal = |output: Ran| {
        assert_eq!(output.is(77).error()["code"], "not_for_correctness");
    };
    run("").is(0);
    refusal(run("--for-correctness"));
    home.write(FILE, &text("for_correctness = true"));
    assert_eq!(home.shows("", &[], "for_correctness"), ["true", "file"]);
    refusal(run(""));
}

#[test]
fn a_password_that_others_can_read_is_told() {
    let home = Home::new();
    let show = |args: &str| {
        let output = home.soon(&format!("config show {args}"));
        assert!(!output.is(0).out().contains("hunter2"), "{output:?}");
        output.err()
    };
    let put = |url: &str, mode: u32| {
        home.write(FILE, &format!("url = '{url}'"));
        let mode = PermissionsExt::from_mode(mode);
        std::fs::set_permissions(home.store.path(FILE), mode).unwrap();
    };
    let url = "redis://me:hunter2@127.0.0.1:1";
    for exposed in [0o644, 0o640, 0o604] {
        put(url, exposed);
        assert!(show("").contains("chmod 600"), "{exposed:o}");
        contract::read(&show("--json"), contract::event("exposed_password"));
    }
    for (url, mode) in [(url, 0o600), ("redis://127.0.0.1:1", 0o644)] {
        put(url, mode);
        assert_eq!(show(""), "");
    }
}
