//! System limits and oversized inputs: a documented exit code, never a panic.

use std::fs::File;
use std::process::{Command, Stdio};

use crate::support::*;

/// Runs it with a stdout that can't be written.
fn into(file: File, mut command: Command) -> Ran {
    Ran(command
        .stdout(file)
        .stderr(Stdio::piped())
        .output()
        .unwrap())
}

#[test]
fn too_few_files_are_refused_with_71() {
    // With three the loader itself can't start; the test runner may leave us some.
    for files in 4..=40 {
        let store = Store::new();
        for args in ["run x -- true", "elect x -- true", "ls"] {
            let output = finish(in_shell(
                &format!("ulimit -n {files}"),
                &store.palisade(args),
            ));
            match (files, output.status.code()) {
                (..27, Some(71)) | (27..40, Some(0 | 71)) | (40, Some(0)) => {}
                _ => panic!("{files} {args:?} {output:?}"),
            }
            assert!(!output.err().contains("panicked"), "{output:?}");
        }
    }
}

#[test]
fn a_limit_on_the_size_of_files_is_an_error_and_no_signal() {
    let store = Store::new();
    let run = store.run("x", &["--no-wait"], "true");
    let output = finish(in_shell("ulimit -f 0", &run));
    let code = output.status.code();
    assert!(matches!(code, Some(70 | 78)), "{output:?}");
    assert!(output.err().starts_with("palisade: "), "{output:?}");
    // An answer that can't be written.
    let file = File::create(store.path("out")).unwrap();
    into(file, in_shell("ulimit -f 0", &store.palisade("--help"))).is(74);
}

#[test]
fn the_command_gets_the_signal_of_that_limit_as_it_was() {
    let store = Store::new();
    let ignored = "grep SigIgn /proc/self/status";
    let mut without = Command::new("sh");
    without.args(["-c", ignored]);
    let with = finish(store.run("x", &[], ignored));
    with.wrote(&finish(without).out());
    let kept = "env --ignore-signal=XFSZ true 2>/dev/null || exit 0; \
                exec env --ignore-signal=XFSZ \"$@\"; true";
    let output = finish(in_shell(kept, &store.run("x", &[], ignored)));
    let mask = output.out();
    let mask = mask.split_whitespace().last().unwrap_or("0");
    let mask = u64::from_str_radix(mask, 16).unwrap();
    assert_eq!(mask >> 24 & 1, 1, "{output:?}");
}

#[test]
fn an_answer_that_can_not_be_written_is_74() {
    let store = Store::new();
    for args in [
        "--help",
        "--version",
        "run --help",
        "ls --help",
        "ls --json",
        "show x",
        "leader x",
        "config show",
        "completions bash",
        "man",
        "doctor",
        "guide --need permits",
        "schema postgres",
    ] {
        let full = File::options().write(true).open("/dev/full").unwrap();
        into(full, store.palisade(args))
            .is(74)
            .says("can't write the output");
    }
}

#[test]
fn what_is_far_too_long_is_not_repeated() {
    let store = Store::new();
    let long = "x".repeat(65_000);
    for args in [
        "ls --url file:/LONG",
        "run y --url file:/LONG -- true",
        "ls --url file:/dev/null/a?LONG=1",
        "ls --LONG",
        "ls a LONG",
        "LONG",
        "run y --ttl=LONG -- true",
        "run y --ttl LONG -- true",
        "run LONG -- true",
        "run y -- LONG",
    ] {
        for json in ["", "--json "] {
            let output = store.ran(&format!("{json}{args}").replace("LONG", &long));
            assert!(!output.status.success(), "{args}");
            assert!(
                output.stderr.len() < 1500,
                "{args}: {}",
                output.stderr.len()
            );
        }
    }
    let mut command = palisade();
    command.env("PALISADE_CONFIG", format!("/{long}")).arg("ls");
    assert!(finish(command).is(78).stderr.len() < 1500);
}
