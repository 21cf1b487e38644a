//! `Model`: what `top` shows, and how keys change it. No terminal here: all of it can be tested by
//! pressing keys.

use std::cmp::Reverse;
use std::time::{Duration, Instant};

use crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use jiff::Timestamp;

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
    /// What people call it.
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
    pub(super) since: Timestamp,
    pub(super) began: Instant,
    pub(super) message: String,
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
    /// `None` before the first look.
    lines: Option<Vec<LineView>>,
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
            selected: None,
        }
    }

    /// Takes what was seen.
    pub(super) fn saw(&mut self, lines: Vec<LineView>) {
        self.outage = None;
        self.lines = Some(lines);
    }

    /// Takes that nothing could be seen.
    pub(super) fn outage(&mut self, message: &str) {
        let outage = self.outage.get_or_insert_with(|| Outage {
            since: Timestamp::now(),
            began: Instant::now(),
            message: String::new(),
        });
        outage.message = message.to_owned();
    }

    /// Whether anything was seen yet.
    pub(super) fn is_ready(&self) -> bool {
        self.lines.is_some()
    }

    /// The lines to show, in order.
    pub(super) fn lines(&self) -> Vec<&LineView> {
        let all = self.lines.iter().flatten();
        let mut lines: Vec<_> = all.filter(|line| self.matches(line)).collect();
        // By name where the rest is equal, so that rows don't jump.
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

    /// Whether the filter lets a line through: by its name, or by an owner, label or host in it.
    fn matches(&self, line: &LineView) -> bool {
        let wanted = self.filter.to_lowercase();
        let has = |text: &str| text.to_lowercase().contains(&wanted);
        has(&line.name)
            || line.claims().any(|claim| {
                let parts = [&claim.owner, &claim.label, &claim.host];
                parts.into_iter().flatten().any(|text| has(text))
            })
    }

    /// Which of `lines` is selected: the one that was, wherever it is now.
    pub(super) fn selected(&self, lines: &[&LineView]) -> Option<usize> {
        let name = self.selected.as_ref()?;
        lines.iter().position(|line| line.name == *name)
    }

    /// Does what a key says.
    pub(super) fn press(&mut self, key: KeyEvent) -> Next {
        if key.kind == KeyEventKind::Release {
            return Next::Go;
        }
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return match key.code {
                KeyCode::Char('c') => Next::Interrupt,
                KeyCode::Char('z') => Next::Stop,
                _ => Next::Go,
            };
        }
        match key.code {
            KeyCode::Up => self.step(-1),
            KeyCode::Down => self.step(1),
            KeyCode::PageUp => self.step(-PAGE),
            KeyCode::PageDown => self.step(PAGE),
            KeyCode::Home => self.step(isize::MIN),
            KeyCode::End => self.step(isize::MAX),
            KeyCode::Enter => self.typing = false,
            KeyCode::Esc => {
                self.typing = false;
                self.filter.clear();
            }
            KeyCode::Backspace if self.typing => drop(self.filter.pop()),
            KeyCode::Char(c) if self.typing => self.filter.push(c),
            KeyCode::Char('q') => return Next::End,
            KeyCode::Char('/') => self.typing = true,
            KeyCode::Char('k') => self.step(-1),
            KeyCode::Char('j') => self.step(1),
            KeyCode::Char('r') => self.reversed = !self.reversed,
            KeyCode::Char('n') => self.sort = Sort::Name,
            KeyCode::Char('h') => self.sort = Sort::Holders,
            KeyCode::Char('w') => self.sort = Sort::Waiters,
            KeyCode::Char('l') => self.sort = Sort::Wait,
            KeyCode::Char('a') => self.sort = Sort::Age,
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
            // The first key shows where the selection is.
            None if by == isize::MAX => last,
            None => 0,
        };
        self.selected = Some(lines[to].name.clone());
    }
}

/// How long the first in line waits, or whoever waits longest.
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
    fn line(name: &str, holders: &[i64], waiters: &[i64]) -> LineView {
        let claim = |seconds: &i64| {
            let mut claim = ClaimView::of_owner(None);
            claim.asked = Some(Timestamp::now() - jiff::SignedDuration::from_secs(*seconds));
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
        model.saw(vec![
            line("b", &[50], &[30]),
            line("a", &[10], &[]),
            line("c", &[90, 5], &[3, 2, 1]),
        ]);
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
        let press = |c| KeyEvent::new(KeyCode::Char(c), KeyModifiers::NONE);
        keys.chars().fold(Next::Go, |_, c| model.press(press(c)))
    }

    fn key(model: &mut Model, code: KeyCode) {
        model.press(KeyEvent::new(code, KeyModifiers::NONE));
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
        key(&mut model, KeyCode::Backspace);
        key(&mut model, KeyCode::Enter);
        assert_eq!(names(&model), "b");
        assert_eq!(press(&mut model, "q"), Next::End);
        key(&mut model, KeyCode::Esc);
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
        key(&mut model, KeyCode::End);
        assert_eq!(at(&model), Some(2));
        key(&mut model, KeyCode::PageDown);
        assert_eq!(at(&model), Some(2));
        key(&mut model, KeyCode::Home);
        assert_eq!(at(&model), Some(0));
        model.saw(Vec::new());
        assert_eq!(at(&model), None);
        press(&mut model, "jk");
    }

    #[test]
    fn control_keys_are_signals() {
        let mut model = model();
        let control = |c| KeyEvent::new(KeyCode::Char(c), KeyModifiers::CONTROL);
        assert_eq!(model.press(control('c')), Next::Interrupt);
        assert_eq!(model.press(control('z')), Next::Stop);
        press(&mut model, "/");
        assert_eq!(
            model.press(control('c')),
            Next::Interrupt,
            "also while typing"
        );
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
        model.saw(Vec::new());
        assert!(model.outage.is_none());
    }
}
