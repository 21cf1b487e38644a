//! The screen of `top`: a heading, the table of lines, the claims of the selected line, and a line
//! of help. Colours only without `NO_COLOR`; the rest is bold, dim and reversed.

use std::time::Duration;

use anstyle::{AnsiColor, Style};
use humantime::format_rfc3339_seconds;

use super::model::{Model, age, longest_wait};
use crate::print;
use crate::table::{self, Layout};
use crate::view::{LineView, brief, shown};

const HELP: &str = "q end  / filter  n name  h holders  w waiters  l longest wait  a age  \
                    r reverse  ↑↓ select";

const BOLD: Style = Style::new().bold();
const DIM: Style = Style::new().dimmed();

/// How many claims of the selected line are shown, at the most.
const CLAIMS: usize = 12;

/// How many deadlocks are shown, at the most; `palisade deadlocks` shows all.
const DEADLOCKS: usize = 3;

const NAMES: [&str; 7] = [
    "NAME",
    "MODE",
    "HOLDERS",
    "WAITERS",
    "LONGEST WAIT",
    "AGE",
    "FIRST HOLDER",
];

const LAYOUT: Layout = Layout {
    less: &[6, 1, 5, 4, 3],
    long: [0, 6],
    shortest: 12,
    right: &[],
};

type Row = (Style, String);

/// All rows of a screen of this size.
pub(super) fn draw(model: &Model, width: usize, height: usize) -> Vec<Row> {
    let lines = model.lines();
    let selected = model.selected(&lines);
    let mut rows = vec![heading(model, &lines)];
    if let Some(outage) = &model.outage {
        let (since, went) = (format_rfc3339_seconds(outage.since), brief(outage.age()));
        let text = format!(
            "can't be reached since {since} ({went}): {}",
            shown(&outage.message)
        );
        rows.push((in_colour(AnsiColor::Red).bold(), text));
    }
    // Only a few, to leave room for the locks.
    for deadlock in model.deadlocks.iter().take(DEADLOCKS) {
        rows.push((in_colour(AnsiColor::Red).bold(), shown(deadlock)));
    }
    let mut claims = Vec::new();
    if let Some(line) = selected.map(|at| lines[at]) {
        claims.push((DIM, "─".repeat(width)));
        claims.extend(print::rows(std::slice::from_ref(line), Some(width)));
        claims.truncate((CLAIMS + 2).min(height / 2));
    }
    let room = height.saturating_sub(rows.len() + claims.len() + 1).max(3);
    rows.extend(lines_table(model, &lines, selected, width, room));
    rows.extend(claims);
    rows.push(bottom(model));
    for (_, row) in &mut rows {
        *row = table::clip(row, width);
    }
    rows
}

fn heading(model: &Model, lines: &[&LineView]) -> Row {
    let holders: usize = lines.iter().map(|line| line.holders.len()).sum();
    let waiters: usize = lines.iter().map(|line| line.waiters.len()).sum();
    let order = if model.reversed { ", reversed" } else { "" };
    let (locks, sort, engine) = (lines.len(), model.sort.word(), shown(&model.engine));
    // Numbers first: the end is cut off if it does not fit.
    let text = format!(
        "palisade top  {locks} locks, {holders} held, {waiters} waiting  by {sort}{order}  {engine}"
    );
    (BOLD, text)
}

/// The table in exactly `room` rows, scrolled to what is selected.
fn lines_table(
    model: &Model,
    lines: &[&LineView],
    selected: Option<usize>,
    width: usize,
    room: usize,
) -> Vec<Row> {
    let mut table = match (lines.is_empty(), model.is_ready(), model.filter.is_empty()) {
        (true, false, _) => vec![(DIM, "looking…".to_owned())],
        (true, true, true) => vec![(DIM, "nobody holds or waits".to_owned())],
        (true, true, false) => vec![(DIM, "nothing matches the filter".to_owned())],
        (false, ..) => {
            let mut cells = vec![NAMES.map(str::to_owned)];
            cells.extend(lines.iter().map(|line| row(line)));
            let rows = table::rows(cells, &LAYOUT, Some(width))
                .into_iter()
                .enumerate();
            let styled = rows.map(|(at, row)| match at.checked_sub(1) {
                None => (BOLD, row),
                Some(at) if selected == Some(at) => {
                    let style = style_of(model, lines[at]).invert();
                    (style, format!("{row:<width$}"))
                }
                Some(at) => (style_of(model, lines[at]), row),
            });
            styled.collect()
        }
    };
    let above = (selected.unwrap_or(0) + 2).saturating_sub(room);
    table.drain(1..=above);
    table.resize(room, (Style::new(), String::new()));
    table
}

fn style_of(model: &Model, line: &LineView) -> Style {
    match (&model.outage, line.waiters.len()) {
        (Some(_), _) => DIM,
        (None, 0) => Style::new(),
        (None, _) => in_colour(AnsiColor::Yellow),
    }
}

fn row(line: &LineView) -> [String; 7] {
    let dash = || "-".to_owned();
    let time = |time: Option<Duration>| time.map_or_else(dash, brief);
    let first = line.holders.first();
    [
        shown(&line.name),
        first.map_or_else(dash, |claim| print::row(line, claim)[2].clone()),
        line.holders.len().to_string(),
        line.waiters.len().to_string(),
        time(longest_wait(line)),
        time(age(line)),
        first.map_or_else(dash, ToString::to_string),
    ]
}

fn bottom(model: &Model) -> Row {
    let filter = shown(&model.filter);
    match (model.typing, filter.is_empty()) {
        (true, _) => (BOLD, format!("/{filter}▏  Enter keeps it, Esc clears it")),
        (false, false) => (BOLD, format!("/{filter}  Esc clears it")),
        (false, true) => (DIM, HELP.to_owned()),
    }
}

/// A colour, unless `NO_COLOR` is set.
fn in_colour(colour: AnsiColor) -> Style {
    if std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty()) {
        Style::new()
    } else {
        colour.on_default()
    }
}
