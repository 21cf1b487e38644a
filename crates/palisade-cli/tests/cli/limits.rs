//! Limits of the system, and inputs beyond all measure: a documented code, never a panic.

use std::fs::File;
use std::process::Stdio;

use crate::support::*;

#[test]
fn too_few_files_are_refused_with_71() {
    // With three the loader itself can't start; whoever runs the tests may leave us some.
    for files in 4..=40 {
        let store = Store::new();
        for args in [
            &["run", "x", "--", "true"][..],
            &["elect", "x", "--", "true"],
            &["ls"],
        ] {
            let limited = in_shell(&format!("ulimit -n {files}"), &store.palisade(args));
            let output = finish(limited);
            match (files, output.status.code()) {
                (..27, Some(71)) | (27..40, Some(0 | 71)) | (40, Some(0)) => {}
                _ => panic!("{files} {args:?} {output:?}"),
            }
            assert!(!stderr(&output).contains("panicked"), "{output:?}");
        }
    }
}

#[test]
fn a_limit_on_the_size_of_files_is_an_error_and_no_signal() {
    let store = Store::new();
    let output = finish(in_shell(
        "ulimit -f 0",
        &store.run("x", &["--no-wait"], "true"),
    ));
    let code = output.status.code();
    assert!(matches!(code, Some(70 | 78)), "{output:?}");
    assert!(stderr(&output).starts_with("palisade: "), "{output:?}");

    // An answer that can't be written.
    let file = File::create(store.path("out")).unwrap();
    let mut command = in_shell("ulimit -f 0", &store.palisade(&["--help"]));
    let output = command
        .stdout(file)
        .stderr(Stdio::piped())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(74), "{output:?}");
}

#[test]
fn the_command_gets_the_signal_of_that_limit_as_it_was() {
    let store = Store::new();
    let ignored = "grep SigIgn /proc/self/status";
    let without = std::process::Command::new("sh")
        .args(["-c", ignored])
        .output()
        .unwrap();
    let with = finish(store.run("x", &[], ignored));
    assert_eq!(stdout(&with), stdout(&without));
    let kept = "env --ignore-signal=XFSZ true 2>/dev/null || exit 0; \
                exec env --ignore-signal=XFSZ \"$@\"; true";
    let output = finish(in_shell(kept, &store.run("x", &[], ignored)));
    let mask = stdout(&output);
    let mask = mask.split_whitespace().last().unwrap_or("0").to_owned();
    let mask = u64::from_str_radix(&mask, 16).unwrap();
    assert_eq!(mask >> 24 & 1, 1, "{output:?}");
}

#[test]
fn an_answer_that_can_not_be_written_is_74() {
    let store = Store::new();
    for args in [
        &["--help"][..],
        &["--version"],
        &["run", "--help"],
        &["ls", "--help"],
        &["ls", "--json"],
        &["show", "x"],
        &["leader", "x"],
        &["config", "show"],
        &["completions", "bash"],
        &["man"],
        &["doctor"],
        &["guide", "--need", "permits"],
        &["schema", "postgres"],
    ] {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let mut command = store.palisade(args);
        let output = command
            .stdout(full)
            .stderr(Stdio::piped())
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(74), "{args:?} {output:?}");
        assert!(
            stderr(&output).contains("can't write the output"),
            "{output:?}"
        );
    }
}

#[test]
fn what_is_far_too_long_is_not_repeated() {
    let store = Store::new();
    let long = "x".repeat(65_000);
    let (file, label) = (
        format!("file:/{long}"),
        format!("file:/dev/null/a?{long}=1"),
    );
    for args in [
        &["ls", "--url", &file][..],
        &["run", "y", "--url", &file, "--", "true"],
        &["ls", "--url", &label],
        &["ls", &format!("--{long}")],
        &["ls", "a", &long],
        &[&long],
        &["run", "y", &format!("--ttl={long}"), "--", "true"],
        &["run", "y", "--ttl", &long, "--", "true"],
        &["run", &long, "--", "true"],
        &["run", "y", "--", &long],
    ] {
        for json in [&[][..], &["--json"]] {
            let output = finish(store.palisade(&[json, args].concat()));
            assert!(!output.status.success(), "{output:?}");
            assert!(
                output.stderr.len() < 1500,
                "{} of {:.40}",
                output.stderr.len(),
                args[0]
            );
        }
    }
    let mut command = palisade();
    command.env("PALISADE_CONFIG", format!("/{long}")).arg("ls");
    let output = finish(command);
    assert_eq!(output.status.code(), Some(78));
    assert!(output.stderr.len() < 1500);
}
