//! `Model`: the state of `top`, and how keys change it. It uses no terminal, so that tests can send
//! keys to it.

use std::cmp::Reverse;
use std::time::{Duration, SystemTime};

use palisade::report::Deadlock;

use super::tty::Key;
use crate::live::Sight;
use crate::view::LineView;

/// How many rows a page key moves.
const PAGE: isize = 10;

/// What lines are sorted by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sort {
    Name,
    Holders,
    Waiters,
    Wait,
    Age,
}

impl Sort {
    /// Its name on the screen.
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Name => "name",
            Self::Holders => "holders",
            Self::Waiters => "waiters",
            Self::Wait => "longest wait",
            Self::Age => "age",
        }
    }
}

/// What to do after a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// Show it.
    Go,
    /// End.
    End,
    /// End as by SIGINT.
    Interrupt,
    /// Stop, until the shell resumes us.
    Stop,
}

/// An engine that can't be reached.
pub(super) struct Outage {
    pub(super) since: SystemTime,
    pub(super) message: String,
}

impl Outage {
    pub(super) fn age(&self) -> Duration {
        self.since.elapsed().unwrap_or_default()
    }
}

/// Everything that is on the screen.
pub(super) struct Model {
    pub(super) engine: String,
    pub(super) outage: Option<Outage>,
    pub(super) sort: Sort,
    pub(super) reversed: bool,
    pub(super) filter: String,
    /// Whether keys go to the filter.
    pub(super) typing: bool,
    /// `None` before the first survey.
    lines: Option<Vec<LineView>>,
    /// The deadlocks among all lines, each as one line of text.
    pub(super) deadlocks: Vec<String>,
    /// The name of the line that is selected.
    selected: Option<String>,
}

impl Model {
    pub(super) fn new(engine: String) -> Self {
        Self {
            engine,
            outage: None,
            sort: Sort::Name,
            reversed: false,
            filter: String::new(),
            typing: false,
            lines: None,
            deadlocks: Vec::new(),
            selected: None,
        }
    }

    /// Takes over a survey.
    pub(super) fn saw(&mut self, seen: Sight) {
        self.outage = None;
        self.lines = Some(seen.lines);
        let deadlocks = seen.deadlocks.iter();
        let text = |found: &Deadlock| {
            if found.likely {
                format!("likely deadlock: {found}")
            } else {
                format!("deadlock: {found}")
            }
        };
        self.deadlocks = deadlocks.map(text).collect();
    }

    /// Records that the engine can't be reached.
    pub(super) fn outage(&mut self, message: &str) {
        let outage = self.outage.get_or_insert_with(|| Outage {
            since: SystemTime::now(),
            message: String::new(),
        });
        outage.message = message.to_owned();
    }

    /// Whether there was a survey yet.
    pub(super) fn is_ready(&self) -> bool {
        self.lines.is_some()
    }

    /// The lines to show, in order.
    pub(super) fn lines(&self) -> Vec<&LineView> {
        let all = self.lines.iter().flatten();
        let mut lines: Vec<_> = all.filter(|line| self.matches(line)).collect();
        // Ties are sorted by name, so that rows don't jump.
        match self.sort {
            Sort::Name => lines.sort_by(|a, b| a.name.cmp(&b.name)),
            Sort::Holders => lines.sort_by_key(|line| (Reverse(line.holders.len()), &line.name)),
            Sort::Waiters => lines.sort_by_key(|line| (Reverse(line.waiters.len()), &line.name)),
            Sort::Wait => lines.sort_by_key(|line| (Reverse(longest_wait(line)), &line.name)),
            Sort::Age => lines.sort_by_key(|line| (Reverse(age(line)), &line.name)),
        }
        if self.reversed {
            lines.reverse();
        }
        lines
    }

    /// Whether a line matches the filter: by its name, or by an owner, label or host in it.
    fn matches(&self, line: &LineView) -> bool {
        let wanted = self.filter.to_lowercase();
        let has = |text: &str| text.to_lowercase().contains(&wanted);
        has(&line.name)
            || line.claims().any(|claim| {
                let parts = [&claim.owner, &claim.label, &claim.host];
                parts.into_iter().flatten().any(|text| has(text))
            })
    }

    /// The index of the selected line, wherever it is now.
    pub(super) fn selected(&self, lines: &[&LineView]) -> Option<usize> {
        let name = self.selected.as_ref()?;
        lines.iter().position(|line| line.name == *name)
    }

    /// Handles a key.
    pub(super) fn press(&mut self, key: Key) -> Next {
        match key {
            Key::CtrlC => return Next::Interrupt,
            Key::CtrlZ => return Next::Stop,
            Key::Up => self.step(-1),
            Key::Down => self.step(1),
            Key::PageUp => self.step(-PAGE),
            Key::PageDown => self.step(PAGE),
            Key::Home => self.step(isize::MIN),
            Key::End => self.step(isize::MAX),
            Key::Enter => self.typing = false,
            Key::Esc => {
                self.typing = false;
                self.filter.clear();
            }
            Key::Backspace if self.typing => drop(self.filter.pop()),
            Key::Char(c) if self.typing => self.filter.push(c),
            Key::Char('q') => return Next::End,
            Key::Char('/') => self.typing = true,
            Key::Char('k') => self.step(-1),
            Key::Char('j') => self.step(1),
            Key::Char('r') => self.reversed = !self.reversed,
            Key::Char('n') => self.sort = Sort::Name,
            Key::Char('h') => self.sort = Sort::Holders,
            Key::Char('w') => self.sort = Sort::Waiters,
            Key::Char('l') => self.sort = Sort::Wait,
            Key::Char('a') => self.sort = Sort::Age,
            _ => {}
        }
        Next::Go
    }

    fn step(&mut self, by: isize) {
        let lines = self.lines();
        let Some(last) = lines.len().checked_sub(1) else {
            return;
        };
        let to = match self.selected(&lines) {
            Some(at) => at.saturating_add_signed(by).min(last),
            // The first key only shows the selection.
            None if by == isize::MAX => last,
            None => 0,
        };
        self.selected = Some(lines[to].name.clone());
    }
}

/// The longest wait of a waiter.
pub(super) fn longest_wait(line: &LineView) -> Option<Duration> {
    line.waiters.iter().filter_map(|claim| claim.age()).max()
}

/// How old the oldest hold is.
pub(super) fn age(line: &LineView) -> Option<Duration> {
    line.holders.iter().filter_map(|claim| claim.age()).max()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::ClaimView;

    /// A line with so many holders and waiters, which came so many seconds ago.
    fn line(name: &str, holders: &[u64], waiters: &[u64]) -> LineView {
        let claim = |seconds: &u64| {
            let mut claim = ClaimView::of_owner(None);
            claim.asked = Some(SystemTime::now() - Duration::from_secs(*seconds));
            claim.owner = Some(format!("owner-of-{name}"));
            claim
        };
        let mut line = LineView::empty(name);
        line.holders = holders.iter().map(claim).collect();
        line.waiters = waiters.iter().map(claim).collect();
        line
    }

    fn model() -> Model {
        let mut model = Model::new("file:".into());
        model.saw(Sight {
            lines: vec![
                line("b", &[50], &[30]),
                line("a", &[10], &[]),
                line("c", &[90, 5], &[3, 2, 1]),
            ],
            deadlocks: Vec::new(),
        });
        model
    }

    fn names(model: &Model) -> String {
        model
            .lines()
            .iter()
            .map(|line| line.name.as_str())
            .collect()
    }

    fn press(model: &mut Model, keys: &str) -> Next {
        let press = |_, c| model.press(Key::Char(c));
        keys.chars().fold(Next::Go, press)
    }

    #[test]
    fn keys_sort_and_reverse() {
        let mut model = model();
        assert_eq!(names(&model), "abc");
        for (key, expected) in [("h", "cab"), ("w", "cba"), ("l", "bca"), ("a", "cba")] {
            press(&mut model, key);
            assert_eq!(names(&model), expected, "{key}");
        }
        press(&mut model, "nr");
        assert_eq!(names(&model), "cba");
    }

    #[test]
    fn what_is_typed_after_a_slash_filters_and_ends_nothing() {
        let mut model = model();
        assert_eq!(press(&mut model, "/OF-B"), Next::Go);
        assert_eq!(names(&model), "b");
        press(&mut model, "q");
        assert_eq!(
            (names(&model).as_str(), model.filter.as_str()),
            ("", "OF-Bq")
        );
        model.press(Key::Backspace);
        model.press(Key::Enter);
        assert_eq!(names(&model), "b");
        assert_eq!(press(&mut model, "q"), Next::End);
        model.press(Key::Esc);
        assert_eq!(names(&model), "abc");
    }

    #[test]
    fn the_selection_stays_with_its_line() {
        let mut model = model();
        let at = |model: &Model| model.selected(&model.lines());
        assert_eq!(at(&model), None);
        press(&mut model, "jj");
        assert_eq!(at(&model), Some(1));
        press(&mut model, "w");
        assert_eq!(at(&model), Some(1), "b is the second by waiters too");
        press(&mut model, "l");
        assert_eq!(at(&model), Some(0));
        model.press(Key::End);
        assert_eq!(at(&model), Some(2));
        model.press(Key::PageDown);
        assert_eq!(at(&model), Some(2));
        model.press(Key::Home);
        assert_eq!(at(&model), Some(0));
        model.saw(Sight::default());
        assert_eq!(at(&model), None);
        press(&mut model, "jk");
    }

    #[test]
    fn control_keys_are_signals_also_while_typing() {
        let mut model = model();
        for _ in 0..2 {
            assert_eq!(model.press(Key::CtrlC), Next::Interrupt);
            assert_eq!(model.press(Key::CtrlZ), Next::Stop);
            press(&mut model, "/");
        }
    }

    #[test]
    fn an_outage_keeps_its_beginning_and_what_was_seen() {
        let mut model = model();
        model.outage("one");
        let since = model.outage.as_ref().unwrap().since;
        model.outage("two");
        let outage = model.outage.as_ref().unwrap();
        assert_eq!((outage.since, outage.message.as_str()), (since, "two"));
        assert_eq!(names(&model), "abc");
        model.saw(Sight::default());
        assert!(model.outage.is_none());
    }
}
