//! With a terminal: the child reads it, Ctrl-C and Ctrl-Z work, colours are shown. `script`
//! provides the terminal and types what it reads from its stdin.

use std::io::Write;
use std::process::{Child, ChildStdin, Command, Stdio};

use crate::support::*;

/// A terminal with something running in it.
pub(crate) struct Session {
    process: Child,
    keys: ChildStdin,
    screen: Pipe,
}

impl Session {
    /// Runs a line of shell.
    pub(crate) fn start(store: &Store, line: &str) -> Self {
        let mut process = Command::new("script")
            .args(["-qefc", line, "/dev/null"])
            .env("PALISADE", env!("CARGO_BIN_EXE_palisade"))
            .env("PALISADE_URL", store.url())
            .env("PALISADE_CONFIG", "/dev/null")
            .env("SHELL", "/bin/sh")
            .env("TERM", "xterm")
            .env_remove("NO_COLOR")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Self {
            keys: process.stdin.take().unwrap(),
            screen: Pipe::of(process.stdout.take().unwrap()),
            process,
        }
    }

    pub(crate) fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
        self.keys.flush().unwrap();
    }

    /// Waits until `text` is on the screen, and answers with everything up to it.
    #[track_caller]
    pub(crate) fn see(&mut self, text: &str) -> String {
        let seen = self.screen.see(text);
        assert!(seen.ends_with(text), "{text:?} did not come: {seen:?}");
        seen
    }

    /// Presses keys and waits for what they bring to the screen, one pair after the other.
    #[track_caller]
    fn dialog(&mut self, steps: &[(&str, &str)]) {
        for (keys, text) in steps {
            self.press(keys);
            self.see(text);
        }
    }

    /// What came to the screen since.
    pub(crate) fn more(&mut self) -> Vec<u8> {
        self.screen.more()
    }

    pub(crate) fn code(mut self) -> Option<i32> {
        let mut code = None;
        until("the session ends", || {
            code = self.process.try_wait().unwrap();
            code.is_some()
        });
        code.unwrap().code()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn the_child_reads_the_terminal_and_palisade_takes_it_back() {
    let store = Store::new();
    let line = "$PALISADE run x -- sh -c 'echo ready; read a; echo got-$a'; read b; echo then-$b";
    let mut session = Session::start(&store, line);
    session.see("ready");
    session.dialog(&[("one\n", "got-one"), ("two\n", "then-two")]);
    assert_eq!(session.code(), Some(0));
    store.assert_empty();
}

/// Some programs check whether they are in the foreground before they use the terminal.
#[test]
fn the_child_is_in_the_foreground_before_it_asks_and_again_after_a_stop() {
    let store = Store::new();
    let mut session = Session::start(&store, "exec sh -i");
    let wait = "until [ $(cut -d\" \" -f8 /proc/$$/stat) = $$ ]; do sleep 0.02; done";
    let child = format!("sh -c '{wait}; echo fo\"\"re; kill -STOP $$; {wait}; echo ag\"\"ain'");
    session.press(&format!("$PALISADE run x -- {child}\n"));
    session.see("fore");
    session.see("Stopped");
    session.press("fg\n");
    session.see("again");
    session.press("exit\n");
    assert_eq!(session.code(), Some(0));
}

/// A pager at the end of the pipeline must keep the terminal, so it is given on demand only.
#[test]
fn in_a_pipeline_the_child_gets_the_terminal_when_it_asks() {
    let store = Store::new();
    let child = "sh -c 'echo ready; read a </dev/tty; echo got-$a'";
    let line = format!("true | $PALISADE run x -- {child} | cat; read b; echo then-$b");
    let mut session = Session::start(&store, &line);
    session.see("ready");
    session.dialog(&[("one\n", "got-one"), ("two\n", "then-two")]);
    assert_eq!(session.code(), Some(0));
}

#[test]
fn ctrl_c_reaches_the_child_with_and_without_the_terminal() {
    let store = Store::new();
    let child = "sh -c 'trap \"echo caught; exit 5\" INT; echo ready; \
                 while :; do sleep 0.02; done'";
    for redirect in ["", "</dev/null"] {
        let line = format!("exec $PALISADE run x -- {child} {redirect}");
        let mut session = Session::start(&store, &line);
        session.see("ready");
        session.press("\x03");
        session.see("caught");
        assert_eq!(session.code(), Some(5), "{redirect}");
        store.assert_empty();
    }
}

#[test]
fn ctrl_z_stops_the_job_and_fg_resumes_it() {
    let store = Store::new();
    for redirect in ["", "</dev/null"] {
        let mut session = Session::start(&store, "exec sh -i");
        // Quoted in parts, so that the echo of the input does not look like the output. It has the
        // terminal before it prints `ready`: a key that is pressed while the terminal changes hands
        // may be lost, as with any shell.
        let child = "sh -c 'stty sane </dev/tty; echo re\"\"ady; \
                     read a </dev/tty; echo got\"\"-$a'";
        session.press(&format!(
            "$PALISADE run x --at-least 1s -- {child} {redirect}\n"
        ));
        session.see("ready");
        session.press("\x1a");
        session.see("Stopped");
        session.press("fg\n");
        session.dialog(&[("one\n", "got-one"), ("echo code-$?\n", "code-0")]);
        session.press("exit\n");
        assert_eq!(session.code(), Some(0));
        store.assert_empty();
    }
}

#[test]
fn a_job_that_stays_stopped_past_its_ttl_is_ended_and_fg_says_so() {
    let store = Store::new();
    let mut session = Session::start(&store, "exec sh -i");
    let child = "sh -c 'echo pid\"\"-$$-; exec sleep 60'";
    session.press(&format!("$PALISADE run x --ttl 1s -- {child}\n"));
    session.see("pid-");
    let pid = session.see("-").trim_end_matches('-').to_owned();
    assert!(runs(&pid), "{pid}");
    session.press("\x1a");
    session.see("Stopped");
    until("the guardian ends it", || !runs(&pid));
    session.dialog(&[("fg\n", "lost x"), ("echo code-$?\n", "code-76")]);
    session.press("exit\n");
    session.code();
    store.assert_empty();
}

#[test]
fn colours_are_for_terminals_that_want_them() {
    let store = Store::new();
    let _held = store.hold("x", &[]);
    let mut session = Session::start(&store, "$PALISADE ls; echo end");
    assert!(session.see("end").contains('\x1b'));
    let mut session = Session::start(&store, "NO_COLOR=1 $PALISADE ls; echo end");
    assert!(!session.see("end").contains('\x1b'));
}

#[test]
fn a_table_fits_into_the_terminal() {
    let store = Store::new();
    let mut session = Session::start(&store, "$PALISADE ls; echo end");
    assert!(session.see("end").contains("no locks are held"));
    let output = store.ran("ls");
    assert_eq!(output.stdout, b"", "a pipe gets rows only");
    let _held = store.hold("nightly-report", &[]);
    for columns in [80, 60, 40] {
        let line = format!("stty cols {columns}; NO_COLOR=1 $PALISADE ls; echo end");
        let mut session = Session::start(&store, &line);
        let seen = session.see("end");
        let rows = seen.lines().map(|row| row.trim_end().chars().count());
        assert!(rows.max() <= Some(columns), "{columns}: {seen}");
        assert!(seen.contains("nightly-report"), "{seen}");
    }
    let piped = store.ran("ls").out();
    assert!(piped.contains("TOKEN") && piped.contains("ID"), "{piped}");
}
