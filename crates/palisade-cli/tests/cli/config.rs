//! The config file, and `config path|show`.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

use crate::contract;
use crate::redis::Redis;
use crate::support::*;

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

    fn palisade(&self, args: &[&str]) -> Command {
        let mut command = palisade();
        command
            .args(args)
            .env_remove("PALISADE_CONFIG")
            .env("XDG_CONFIG_HOME", self.store.path("xdg"))
            .env("XDG_STATE_HOME", self.store.path("state"))
            .env("HOME", self.store.path("home"));
        command
    }

    fn show(&self, args: &[&str], variables: &[(&str, &str)]) -> Value {
        let args = [&["config", "show", "--json"][..], args].concat();
        let mut command = self.palisade(&args);
        command.envs(variables.iter().copied());
        let output = finish_soon(command);
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        contract::read(&stdout(&output), contract::CONFIG)
    }

    fn url(&self, name: &str) -> String {
        format!("file:{}", self.store.path(name).display())
    }
}

/// Value and origin of a setting.
fn of(shown: &Value, key: &str) -> (String, String) {
    let text = |part: &str| shown[key][part].as_str().unwrap_or("null").to_owned();
    (text("value"), text("from"))
}

fn pair(value: &str, from: &str) -> (String, String) {
    (value.to_owned(), from.to_owned())
}

/// Refused as configuration, in text and in JSON, without repeating `hunter2`.
#[track_caller]
fn refused(output: &Output, word: &str) {
    assert_eq!(output.status.code(), Some(78), "{output:?}");
    assert!(output.stdout.is_empty(), "{output:?}");
    let text = stderr(output);
    assert!(text.contains(word), "{word:?} in {text}");
    assert!(!text.contains("hunter2"), "{text}");
}

#[test]
fn the_flag_beats_the_environment_beats_the_file_beats_the_default() {
    let home = Home::new();
    assert_eq!(of(&home.show(&[], &[]), "url"), pair("file:", "default"));
    home.write(
        "xdg/palisade/config.toml",
        &format!("url = '{}'", home.url("file")),
    );
    assert_eq!(
        of(&home.show(&[], &[]), "url"),
        pair(&home.url("file"), "file")
    );
    let variable = home.url("variable");
    let variables = [("PALISADE_URL", variable.as_str())];
    assert_eq!(
        of(&home.show(&[], &variables), "url"),
        pair(&variable, "environment")
    );
    let flag = home.url("flag");
    let shown = home.show(&["--url", &flag], &variables);
    assert_eq!(of(&shown, "url"), pair(&flag, "flag"));
    // An empty variable is none.
    let shown = home.show(&[], &[("PALISADE_URL", ""), ("PALISADE_CONFIG", "")]);
    assert_eq!(of(&shown, "url"), pair(&home.url("file"), "file"));
}

#[test]
fn the_first_file_that_exists_is_read() {
    let home = Home::new();
    let path = |home: &Home, variables: &[(&str, &str)]| {
        let mut command = home.palisade(&["config", "path", "--json"]);
        command.envs(variables.iter().copied());
        let output = finish_soon(command);
        let answer = contract::read(&stdout(&output), contract::CONFIG_PATH);
        let expected = i32::from(answer["path"].is_null());
        assert_eq!(output.status.code(), Some(expected), "{output:?}");
        answer
    };
    let (user, other) = (
        "home/.config/palisade/config.toml",
        "xdg/palisade/config.toml",
    );
    let none = path(&home, &[]);
    if !Path::new("/etc/palisade/config.toml").exists() {
        assert!(none["path"].is_null());
        let output = finish_soon(home.palisade(&["config", "path"]));
        assert!(stdout(&output).starts_with("no config file; looked for\n"));
    }
    let shown = |path: &str| home.store.path(path).display().to_string();
    assert_eq!(none["searched"][0], shown(other));
    assert_eq!(none["searched"][1], shown(user));
    assert_eq!(none["searched"][2], "/etc/palisade/config.toml");
    home.write(user, "");
    assert_eq!(path(&home, &[])["path"], shown(user));
    home.write(other, "");
    assert_eq!(path(&home, &[])["path"], shown(other));
    home.write("third.toml", "label = 'x'");
    let third = shown("third.toml");
    let third = [("PALISADE_CONFIG", third.as_str())];
    assert_eq!(path(&home, &third)["path"], third[0].1);
    assert_eq!(of(&home.show(&[], &third), "label"), pair("x", "file"));
    let output = finish_soon(home.palisade(&["config", "path"]));
    assert_eq!(stdout(&output), format!("{}\n", shown(other)));
}

#[test]
fn the_defaults_of_the_file_are_in_force() {
    let home = Home::new();
    let url = home.url("locks");
    let text = format!("url = '{url}'\nttl = '7s'\nwait = '100ms'\nlabel = 'a b'\n");
    home.write("xdg/palisade/config.toml", &text);
    let run = |args: &[&str], script: &str| {
        let args = [&["run", "x"][..], args, &["--", "sh", "-c", script]].concat();
        home.palisade(&args)
    };
    let mut held = Running::start(run(&[], "echo ready; cat >/dev/null"));
    held.line();
    let output = finish(home.palisade(&["ls", "--json"]));
    let lines = contract::read(&stdout(&output), contract::LINES);
    let holder = &lines[0]["holders"][0];
    assert_eq!(holder["label"], "a b");
    assert!(
        holder["expires_in_ms"].as_u64().unwrap() <= 7000,
        "{holder}"
    );

    let output = finish_soon(run(&[], "echo no"));
    assert_eq!(output.status.code(), Some(75), "{output:?}");
    assert!(stderr(&output).contains("within 100ms"), "{output:?}");
    // What is said on the command line comes first.
    let output = finish_soon(run(&["--no-wait"], "echo no"));
    assert!(
        stderr(&output).contains("held by someone else"),
        "{output:?}"
    );
    let mut waits = Running::start(run(&["--wait", "forever"], "echo mine"));
    assert!(waits.stderr_line().contains("waiting for x"));
    held.close_stdin();
    assert_eq!(waits.line(), "mine");

    let shown = home.show(&[], &[]);
    assert_eq!(of(&shown, "ttl"), pair("7s", "file"));
    assert_eq!(of(&shown, "wait"), pair("100ms", "file"));
    let other = format!("{url}?ttl=9s&label=other");
    let shown = home.show(&["--url", &other], &[]);
    assert_eq!(of(&shown, "ttl"), pair("9s", "url"));
    assert_eq!(of(&shown, "label"), pair("other", "url"));

    home.write(
        "xdg/palisade/config.toml",
        &format!("url = '{url}'\nttl = '10ms'"),
    );
    refused(&finish_soon(run(&[], "echo no")), "ttl");
    let output = finish_soon(home.palisade(&["ls"]));
    refused(&output, "ttl");
}

#[test]
fn a_bad_file_is_refused_by_every_verb_that_reads_it() {
    let home = Home::new();
    for (text, word) in [
        ("urll = 'redis://me:hunter2@h'", "did you mean url?"),
        ("[profiles.x]\nurl = 'hunter2'", "unknown key profiles"),
        ("url = 'file:'\nhunter2", "line 2 is not valid TOML"),
        ("ttl = 5", "ttl must be text"),
        ("ttl = 'hunter2'", "ttl: "),
        ("wait = 'hunter2'", "wait: "),
        ("url = ''", "url: it is empty"),
    ] {
        home.write("xdg/palisade/config.toml", text);
        for args in [
            &["ls"][..],
            &["run", "x", "--", "true"],
            &["elect", "x", "--", "true"],
            &["leader", "x"],
            &["config", "show"],
            &["fence", "check", "x", "1"],
        ] {
            refused(&finish_soon(home.palisade(args)), word);
            let json = [args[..1].to_vec(), vec!["--json"], args[1..].to_vec()].concat();
            let output = finish_soon(home.palisade(&json));
            refused(&output, "");
            contract::read(&stderr(&output), contract::ERROR);
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
    for (name, word) in [
        ("missing", "not there"),
        ("folder", "can't be read"),
        ("bytes", "UTF-8"),
        ("long", "64 KiB"),
    ] {
        let mut command = home.palisade(&["ls"]);
        command.env("PALISADE_CONFIG", path(name));
        refused(&finish_soon(command), word);
    }
    // Nothing hangs on a FIFO that nobody writes to, nor on what never ends.
    for (name, expected) in [
        (path("fifo"), 0),
        ("/dev/null".into(), 0),
        ("/dev/zero".into(), 78),
    ] {
        let mut command = home.palisade(&["config", "path"]);
        command.env("PALISADE_CONFIG", &name);
        let output = finish_soon(command);
        assert_eq!(output.status.code(), Some(expected), "{output:?}");
    }
    let mut command = home.palisade(&["config", "path"]);
    command.env("PALISADE_CONFIG", OsString::from_vec(b"/no/\xff".to_vec()));
    refused(&finish_soon(command), "not there");
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
        home.write("xdg/palisade/config.toml", &format!("url = '{url}'"));
        for args in [&["config", "show"][..], &["config", "show", "--json"]] {
            let output = finish_soon(home.palisade(args));
            let all = stdout(&output) + &stderr(&output);
            assert!(!all.contains("hunter2"), "{all}");
        }
    }
    let shown = finish_soon(home.palisade(&["config", "show", "--url", "file:/x?ttl=hunter2"]));
    refused(&shown, "ttl");
}

#[test]
fn a_ttl_of_the_file_that_no_engine_takes_is_configuration() {
    let home = Home::new();
    let url = home.url("locks");
    for ttl in ["10ms", "0s", "999ms", "9000000d"] {
        let text = format!("url = '{url}'\nttl = '{ttl}'");
        home.write("xdg/palisade/config.toml", &text);
        for verb in ["run", "elect"] {
            let output = finish_soon(home.palisade(&[verb, "x", "--", "echo", "no"]));
            refused(&output, "ttl");
        }
    }
}

#[test]
fn a_home_that_can_not_be_entered_matters_only_where_it_is_needed() {
    let home = Home::new();
    // A link to itself keeps root out too.
    let away = home.store.path("away");
    std::os::unix::fs::symlink(&away, &away).unwrap();
    let url = home.url("locks");
    let palisade = |args: &[&str], variables: &[(&str, &str)]| {
        let mut command = home.palisade(args);
        command.env("HOME", &away).env_remove("XDG_CONFIG_HOME");
        command.envs(variables.iter().copied());
        finish_soon(command)
    };
    let run = ["run", "x", "--", "true"];
    let with_flag = [&["--url", &url][..], &run].concat();
    assert_eq!(palisade(&with_flag, &[]).status.code(), Some(0));
    let with_variable = palisade(&run, &[("PALISADE_URL", &url)]);
    assert_eq!(with_variable.status.code(), Some(0), "{with_variable:?}");
    refused(&palisade(&run, &[]), "can't be opened");
    // One that was asked for must be there.
    let asked = away.join("config.toml");
    let asked = [("PALISADE_CONFIG", asked.to_str().unwrap())];
    refused(&palisade(&with_flag, &asked), "can't be opened");
}

#[test]
fn correctness_is_asked_for_by_a_flag_or_the_file() {
    let home = Home::new();
    let url = home.url("locks");
    let text = |more: &str| format!("url = '{url}'\n{more}");
    let run = |args: &[&str]| {
        let args = [&["run", "x"][..], args, &["--", "true"]].concat();
        finish_soon(home.palisade(&args))
    };
    home.write("xdg/palisade/config.toml", &text(""));
    assert_eq!(
        of(&home.show(&[], &[]), "for_correctness"),
        pair("false", "default")
    );
    assert_eq!(run(&["--for-correctness"]).status.code(), Some(0));
    let elect = ["elect", "x", "--for-correctness", "--", "true"];
    assert_eq!(finish_soon(home.palisade(&elect)).status.code(), Some(0));
    let refusal = |output: Output| {
        assert_eq!(output.status.code(), Some(77), "{output:?}");
        assert_eq!(
            json_error(&output)["code"],
            "not_for_correctness",
            "{output:?}"
        );
    };
    // One whose tokens depend on kept data, if there is one to ask.
    let Some(redis) = Redis::start(&home.store) else {
        return;
    };
    let url = redis.url.as_str();
    assert_eq!(run(&["--url", url]).status.code(), Some(0));
    refusal(run(&["--for-correctness", "--json", "--url", url]));
    home.write("xdg/palisade/config.toml", &text("for_correctness = true"));
    assert_eq!(
        of(&home.show(&[], &[]), "for_correctness"),
        pair("true", "file")
    );
    refusal(run(&["--json", "--url", url]));
    home.write("xdg/palisade/config.toml", &text("for_correctness = 'yes'"));
    refused(&run(&[]), "for_correctness must be true or false");
}

#[test]
fn a_password_that_others_can_read_is_told() {
    let home = Home::new();
    let file = "xdg/palisade/config.toml";
    let mode = |mode: u32| {
        let mode = std::os::unix::fs::PermissionsExt::from_mode(mode);
        std::fs::set_permissions(home.store.path(file), mode).unwrap();
    };
    let show = |args: &[&str]| {
        let args = [&["config", "show"][..], args].concat();
        let output = finish_soon(home.palisade(&args));
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        assert!(!stdout(&output).contains("hunter2"), "{output:?}");
        stderr(&output)
    };
    home.write(file, "url = 'redis://me:hunter2@127.0.0.1:1'");
    for exposed in [0o644, 0o640, 0o604] {
        mode(exposed);
        assert!(show(&[]).contains("chmod 600"), "{exposed:o}");
        contract::read(&show(&["--json"]), contract::event("exposed_password"));
    }
    mode(0o600);
    assert_eq!(show(&[]), "");
    // The embedded engine ignores a login, so that doctor has something to look at.
    home.write(file, "url = 'redis://127.0.0.1:1'");
    mode(0o644);
    assert_eq!(show(&[]), "");
}
