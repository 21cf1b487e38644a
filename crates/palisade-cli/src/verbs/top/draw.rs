//! The picture of `top`: a head, the table of lines, the claims of the one that is selected, and a
//! line of help. Colours only for who wants them; the rest is bold, dim and reversed.

use std::time::Duration;

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Cell, Paragraph, Row, Table, TableState};

use super::model::{Model, age, longest_wait};
use crate::print;
use crate::view::{LineView, shown};

const HELP: &str = "q end  / filter  n name  h holders  w waiters  l longest wait  a age  \
                    r reverse  ↑↓ select";

/// Draws all of it.
pub(super) fn draw(frame: &mut Frame<'_>, model: &Model) {
    let lines = model.lines();
    let selected = model.selected(&lines);
    let chosen = selected.map(|at| lines[at]);
    let detail = chosen.map_or(0, |line| 2 + line.claims().count().min(12) as u16);
    let outage = u16::from(model.outage.is_some());
    let [head, warning, table, claims, help] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(outage),
        Constraint::Min(3),
        Constraint::Length(detail.min(frame.area().height / 2)),
        Constraint::Length(1),
    ])
    .areas(frame.area());

    frame.render_widget(heading(model, &lines), head);
    if let Some(outage) = &model.outage {
        let went =
            humantime::format_duration(Duration::from_secs(outage.began.elapsed().as_secs()));
        let (since, why) = (outage.since, shown(&outage.message));
        let text = format!("can't be reached since {since:.0} ({went}): {why}");
        frame.render_widget(Line::styled(text, in_colour(Color::Red).bold()), warning);
    }
    lines_table(frame, model, &lines, selected, table);
    if let Some(line) = chosen {
        claims_table(frame, line, claims);
    }
    let bottom = match model.typing || !model.filter.is_empty() {
        true => {
            let cursor = if model.typing { "▏" } else { "" };
            let hint = if model.typing {
                "Enter keeps it, Esc forgets it"
            } else {
                "Esc forgets it"
            };
            Line::from(vec![
                Span::raw(format!("/{}{cursor}  ", shown(&model.filter))).bold(),
                Span::styled(hint, dim()),
            ])
        }
        false => Line::styled(HELP, dim()),
    };
    frame.render_widget(bottom, help);
}

fn heading(model: &Model, lines: &[&LineView]) -> Line<'static> {
    let holders: usize = lines.iter().map(|line| line.holders.len()).sum();
    let waiters: usize = lines.iter().map(|line| line.waiters.len()).sum();
    let order = if model.reversed { ", reversed" } else { "" };
    Line::from(vec![
        Span::raw("palisade top").bold(),
        Span::raw(format!("  {}  ", shown(&model.engine))),
        Span::raw(format!(
            "{} locks, {holders} held, {waiters} waiting  ",
            lines.len()
        )),
        Span::styled(format!("by {}{order}", model.sort.word()), dim()),
    ])
}

fn lines_table(
    frame: &mut Frame<'_>,
    model: &Model,
    lines: &[&LineView],
    selected: Option<usize>,
    area: Rect,
) {
    if lines.is_empty() {
        let text = match (model.is_ready(), model.filter.is_empty()) {
            (false, _) => "looking…",
            (true, true) => "nobody holds or waits",
            (true, false) => "nothing matches the filter",
        };
        frame.render_widget(Paragraph::new(text).style(dim()), area);
        return;
    }
    let rows = lines.iter().map(|line| {
        let (waiting, wait) = (line.waiters.len(), longest_wait(line));
        let style = match waiting {
            0 => Style::new(),
            _ => in_colour(Color::Yellow),
        };
        let first = line.holders.first();
        let mode = first.map_or("-".to_owned(), |claim| print::row(line, claim)[2].clone());
        Row::new([
            Cell::new(shown(&line.name)),
            Cell::new(mode),
            Cell::new(line.holders.len().to_string()),
            Cell::new(waiting.to_string()).style(style),
            Cell::new(time(wait)).style(style),
            Cell::new(time(age(line))),
            Cell::new(first.map_or("-".to_owned(), ToString::to_string)),
        ])
    });
    let widths = [
        Constraint::Fill(2),
        Constraint::Length(10),
        Constraint::Length(7),
        Constraint::Length(7),
        Constraint::Length(12),
        Constraint::Length(12),
        Constraint::Fill(3),
    ];
    let names = [
        "NAME",
        "MODE",
        "HOLDERS",
        "WAITERS",
        "LONGEST WAIT",
        "AGE",
        "FIRST HOLDER",
    ];
    let mut style = Style::new();
    if model.outage.is_some() {
        style = dim();
    }
    let table = Table::new(rows, widths)
        .header(Row::new(names).style(Style::new().add_modifier(Modifier::BOLD)))
        .style(style)
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    // It scrolls to what is selected.
    let mut state = TableState::new().with_selected(selected);
    frame.render_stateful_widget(table, area, &mut state);
}

fn claims_table(frame: &mut Frame<'_>, line: &LineView, area: Rect) {
    let rows = print::rows(std::slice::from_ref(line)).into_iter();
    let rows = rows.enumerate().map(|(at, (_, row))| match at {
        0 => Line::styled(row, Style::new().add_modifier(Modifier::BOLD)),
        _ => Line::raw(row),
    });
    let title = Line::styled("─".repeat(usize::from(area.width)), dim());
    let text: Vec<_> = std::iter::once(title).chain(rows).collect();
    frame.render_widget(Paragraph::new(text), area);
}

fn time(time: Option<Duration>) -> String {
    match time {
        Some(time) => humantime::format_duration(time).to_string(),
        None => "-".to_owned(),
    }
}

fn dim() -> Style {
    Style::new().add_modifier(Modifier::DIM)
}

/// A colour, unless `NO_COLOR` is set.
fn in_colour(colour: Color) -> Style {
    let unwanted = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    match unwanted {
        true => Style::new(),
        false => Style::new().fg(colour),
    }
}
