//! `top`, in a real terminal, and `ls --watch` there.
//!
//! The terminal must be as it was afterwards: its modes by `stty -a`, its screen and cursor by the
//! sequences that were sent last.

use crate::deadlocks::opposite;
use crate::support::*;
use crate::terminal::Session;

const ENTER: &str = "\x1b[?1049h";
const LEAVE: &str = "\x1b[?1049l";
const SHOW_CURSOR: &str = "\x1b[?25h";

/// A shell line that runs `top`, says its code, and whether the modes of the terminal changed.
fn script(before: &str) -> String {
    format!(
        "stty rows 24 cols 100; before=$(stty -a); {before} $PALISADE top & \
         fg >/dev/null 2>&1; code=$?; \
         [ \"$before\" = \"$(stty -a)\" ] && echo modes-same; echo code-$code"
    )
}

/// A terminal that `top` runs in, and what is on its screen.
struct Top {
    session: Session,
    /// Everything that was sent.
    sent: String,
}

impl Top {
    /// Starts it in a shell with job control, and waits for its picture.
    fn start(store: &Store, before: &str) -> Self {
        let session = Session::start(store, &format!("set -m; {}", script(before)));
        let mut top = Self::of(session);
        top.shows("palisade top");
        assert!(top.sent.contains(ENTER), "{:?}", top.sent);
        top
    }

    fn of(session: Session) -> Self {
        let sent = String::new();
        Self { session, sent }
    }

    fn press(&mut self, keys: &str) {
        self.session.press(keys);
    }

    /// Waits until `text` is on the screen, and answers with all of it.
    #[track_caller]
    fn shows(&mut self, text: &str) -> String {
        let mut picture = String::new();
        let began = std::time::Instant::now();
        while !picture.contains(text) {
            assert!(
                began.elapsed() < LIMIT,
                "{text:?} is not on\n{picture}\n{:?}",
                self.sent
            );
            self.sent
                .push_str(&String::from_utf8_lossy(&self.session.more()));
            picture = render(&self.sent);
        }
        picture
    }

    /// Checks that the terminal was restored, and the exit code.
    #[track_caller]
    fn gave_back(mut self, code: i32) -> String {
        let picture = self.shows(&format!("code-{code}"));
        let (_, last) = self.sent.rsplit_once(ENTER).unwrap();
        assert!(
            last.contains(LEAVE) && last.contains(SHOW_CURSOR),
            "{last:?}"
        );
        assert!(picture.contains("modes-same"), "{picture}");
        picture
    }
}

/// What is on a screen after all this was sent to it: as much of a terminal as `top` uses.
fn render(sent: &str) -> String {
    let mut rows: Vec<Vec<char>> = vec![Vec::new()];
    let (mut row, mut column) = (0, 0);
    let mut chars = sent.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\x1b' if chars.peek() == Some(&'[') => {
                chars.next();
                let mut numbers = String::new();
                let last = loop {
                    match chars.next() {
                        Some(c) if c.is_ascii_alphabetic() => break c,
                        Some(c) => numbers.push(c),
                        // The rest is still to come.
                        None => return text(&rows),
                    }
                };
                match last {
                    'H' => {
                        let mut at = numbers.split(';').map(|n| n.parse::<usize>().unwrap_or(1));
                        row = at.next().unwrap_or(1) - 1;
                        column = at.next().unwrap_or(1) - 1;
                    }
                    'J' if numbers == "2" => rows.clear(),
                    'J' => rows.truncate(row + 1),
                    'K' => rows
                        .iter_mut()
                        .skip(row)
                        .take(1)
                        .for_each(|row| row.truncate(column)),
                    'h' | 'l' if numbers == "?1049" => {
                        rows.clear();
                        (row, column) = (0, 0);
                    }
                    _ => {}
                }
            }
            '\r' => column = 0,
            '\n' => row += 1,
            c => {
                if rows.len() <= row {
                    rows.resize(row + 1, Vec::new());
                }
                if rows[row].len() <= column {
                    rows[row].resize(column + 1, ' ');
                }
                rows[row][column] = c;
                column += 1;
            }
        }
    }
    text(&rows)
}

fn text(rows: &[Vec<char>]) -> String {
    let rows = rows.iter().map(|row| row.iter().collect::<String>());
    rows.collect::<Vec<_>>().join("\n")
}

/// The pid of the `top` that runs on this store.
fn pid_of_top(store: &Store) -> u32 {
    let mut found = None;
    until("top runs", || {
        found = std::fs::read_dir("/proc").unwrap().find_map(|entry| {
            let pid = entry.ok()?.file_name().to_str()?.parse::<u32>().ok()?;
            let args = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
            let environment = std::fs::read(format!("/proc/{pid}/environ")).ok()?;
            let environment = String::from_utf8_lossy(&environment).into_owned();
            let ours = environment.contains(&format!("PALISADE_URL={}\0", store.url()));
            (ours && args.ends_with(b"palisade\0top\0")).then_some(pid)
        });
        found.is_some()
    });
    found.unwrap()
}

#[test]
fn it_shows_holders_and_waiters_and_q_ends_it() {
    let store = Store::new();
    let _held = store.hold("nightly", &[]);
    let mut top = Top::start(&store, "");
    top.shows("1 locks, 1 held, 0 waiting");
    let _waits = Running::start(store.run("nightly", &[], "true"));
    top.shows("1 locks, 1 held, 1 waiting");
    top.press("j");
    let picture = top.shows("waits #1");
    for part in ["NAME", "LONGEST WAIT", "q end", "nightly", "exclusive"] {
        assert!(picture.contains(part), "{part} in\n{picture}");
    }
    top.press("q");
    top.gave_back(0);
}

#[test]
fn it_filters_by_what_is_typed() {
    let store = Store::new();
    let _one = store.hold("apple", &[]);
    let _two = store.hold("banana", &[]);
    let mut top = Top::start(&store, "");
    top.shows("2 locks");
    top.press("/ban");
    let picture = top.shows("1 locks");
    assert!(
        picture.contains("banana") && !picture.contains("apple"),
        "{picture}"
    );
    top.press("q");
    top.shows("nothing matches the filter");
    top.press("\x1b");
    top.shows("2 locks");
    top.press("w");
    top.shows("by waiters");
    top.press("q");
    top.gave_back(0);
}

#[test]
fn ctrl_c_and_signals_give_the_terminal_back() {
    let store = Store::new();
    let mut top = Top::start(&store, "");
    top.press("\x03");
    top.gave_back(130);
    for (signal, code) in [("TERM", 143), ("HUP", 129), ("INT", 130)] {
        let top = Top::start(&store, "");
        kill(pid_of_top(&store), signal);
        top.gave_back(code);
    }
}

#[test]
fn ctrl_z_gives_the_terminal_back_until_it_is_resumed() {
    let store = Store::new();
    let mut top = Top::of(Session::start(&store, "exec sh -i"));
    top.press("$PALISADE top\n");
    top.shows("nobody holds");
    top.press("\x1a");
    top.shows("Stopped");
    assert!(top.sent.contains(LEAVE), "{:?}", top.sent);
    // Different from the typed text, which the terminal may echo anywhere.
    top.press("stty -a | grep -o ' icanon' | tr a-z A-Z\n");
    top.shows(" ICANON");
    top.press("fg\n");
    top.shows("nobody holds");
    top.press("q");
    top.shows("# ");
    top.press("exit\n");
    assert_eq!(top.session.code(), Some(0));
}

#[test]
fn it_survives_an_outage_and_says_so() {
    let store = Store::new();
    let _held = store.hold("nightly", &[]);
    let url = format!("PALISADE_URL='{}?timeout=200ms'", store.url());
    let mut top = Top::start(&store, &url);
    top.shows("nightly");
    let gate = store.hang();
    let picture = top.shows("can't be reached since");
    assert!(picture.contains("nightly"), "{picture}");
    drop(gate);
    let _more = store.hold("weekly", &[]);
    let picture = top.shows("weekly");
    assert!(!picture.contains("reached"), "{picture}");
    top.press("q");
    top.gave_back(0);
}

#[test]
fn a_deadlock_is_a_row_while_it_lasts() {
    let store = Store::new();
    let mut top = Top::start(&store, "");
    let scripts = opposite(&store, "-q");
    let picture = top.shows("likely deadlock: ");
    let row = picture.lines().position(|row| row.contains("deadlock: "));
    assert_eq!(row, Some(1), "below the head: {picture}");
    assert!(picture.contains("2 locks, 2 held, 2 waiting"), "{picture}");
    drop(scripts);
    let picture = top.shows("nobody holds");
    assert!(!picture.contains("deadlock"), "{picture}");
    top.press("q");
    top.gave_back(0);
}

#[test]
fn an_engine_that_is_broken_ends_it_with_its_error() {
    let store = Store::new();
    let _held = store.hold("nightly", &[]);
    let mut top = Top::start(&store, "");
    top.shows("1 locks, 1 held");
    for line in std::fs::read_dir(store.path("store/lines")).unwrap() {
        std::fs::write(line.unwrap().path(), "something else").unwrap();
    }
    let picture = top.gave_back(70);
    assert!(
        picture.contains("palisade: "),
        "on the shell's screen: {picture}"
    );
}

#[test]
#[cfg(debug_assertions)]
fn a_panic_gives_the_terminal_back_before_it_is_reported() {
    let store = Store::new();
    // An earlier screen may be replaced before the test sees it.
    let line = format!("set -m; {}", script("PALISADE_TEST_PANIC=1"));
    let top = Top::of(Session::start(&store, &line));
    let picture = top.gave_back(101);
    assert!(
        picture.contains("panicked"),
        "on the shell's screen: {picture}"
    );
}

#[test]
fn colours_are_for_those_who_want_them() {
    let store = Store::new();
    let _held = store.hold("x", &[]);
    let _waits = Running::start(store.run("x", &[], "true"));
    until("it waits", || store.waiters() == 1);
    for (before, coloured) in [("", true), ("NO_COLOR=1", false)] {
        let mut top = Top::start(&store, before);
        top.shows("1 waiting");
        let yellow = top.sent.contains("\x1b[33m");
        assert_eq!(yellow, coloured, "{:?}", top.sent);
        top.press("q");
        top.gave_back(0);
    }
}

#[test]
fn a_pipe_is_not_a_terminal() {
    let store = Store::new();
    let output = store.soon("top");
    output.is(2);
    output.says("palisade ls --watch");
    assert!(!store.path("store").exists());
    let mut session = Session::start(&store, "$PALISADE top | cat; echo end");
    assert!(session.see("end").contains("palisade ls --watch"));
    let mut session = Session::start(&store, "$PALISADE top </dev/null; echo code-$?");
    assert!(session.see("code-2").contains("palisade ls --watch"));
}

#[test]
fn ls_watch_redraws_in_place() {
    let store = Store::new();
    let line = "stty rows 6 cols 40; exec $PALISADE ls --watch";
    let mut session = Session::start(&store, line);
    session.see("nobody holds or waits\r\n");
    let _held: Vec<_> = (0..9)
        .map(|nr| store.hold(&format!("name{nr}"), &[]))
        .collect();
    // As many rows as there is room for, each on one row, and the next picture over this one.
    session.see("\x1b[1A\r\x1b[J");
    let picture = session.see("… and 6 more\r\n");
    session.see("\x1b[5A\r\x1b[J");
    assert!(
        picture.contains("name2") && !picture.contains("name3"),
        "{picture:?}"
    );
    assert!(!picture.contains("TOKEN"), "cut at the edge: {picture:?}");
    session.press("\x03");
    assert_eq!(session.code(), Some(130));
}
