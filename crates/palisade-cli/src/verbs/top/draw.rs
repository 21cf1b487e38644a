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
use crate::view::{LineView, brief, shown};

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
        let went = brief(outage.began.elapsed());
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
        // Numbers first: what does not fit is not shown.
        Span::raw(format!(
            "  {} locks, {holders} held, {waiters} waiting  ",
            lines.len()
        )),
        Span::styled(format!("by {}{order}", model.sort.word()), dim()),
        Span::raw(format!("  {}", shown(&model.engine))),
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
    let cells = lines.iter().map(|line| {
        let first = line.holders.first();
        [
            shown(&line.name),
            first.map_or("-".to_owned(), |claim| print::row(line, claim)[2].clone()),
            line.holders.len().to_string(),
            line.waiters.len().to_string(),
            time(longest_wait(line)),
            time(age(line)),
            first.map_or("-".to_owned(), ToString::to_string),
        ]
    });
    let mut cells: Vec<_> = std::iter::once(NAMES.map(str::to_owned))
        .chain(cells)
        .collect();
    let (kept, widths) = fit(&mut cells, usize::from(area.width));
    let mut rows = cells.into_iter().map(|row| {
        let row = row.into_iter().enumerate();
        row.filter(|(column, _)| kept.contains(column))
            .collect::<Vec<_>>()
    });
    let header = Row::new(rows.next().into_iter().flatten().map(|(_, cell)| cell));
    let rows = rows.zip(lines).map(|(row, line)| {
        let style = match line.waiters.len() {
            0 => Style::new(),
            _ => in_colour(Color::Yellow),
        };
        Row::new(row.into_iter().map(|(column, cell)| match column {
            3 | 4 => Cell::new(cell).style(style),
            _ => Cell::new(cell),
        }))
    });
    let mut style = Style::new();
    if model.outage.is_some() {
        style = dim();
    }
    let table = Table::new(rows, widths)
        .header(header.style(Style::new().add_modifier(Modifier::BOLD)))
        .style(style)
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    // It scrolls to what is selected.
    let mut state = TableState::new().with_selected(selected);
    frame.render_stateful_widget(table, area, &mut state);
}

const NAMES: [&str; 7] = [
    "NAME",
    "MODE",
    "HOLDERS",
    "WAITERS",
    "LONGEST WAIT",
    "AGE",
    "FIRST HOLDER",
];

/// What a name, or a holder, has at least.
const SHORTEST: usize = 12;

/// Which columns there is room for, and how wide they are. Numbers are shown whole or not at all;
/// names and holders are clipped, with a sign.
fn fit(cells: &mut [[String; 7]], width: usize) -> (Vec<usize>, Vec<Constraint>) {
    let widest = |column: usize| {
        let cells = cells.iter().map(|row| print::columns(&row[column]));
        cells.max().unwrap_or(0)
    };
    let natural: [usize; 7] = std::array::from_fn(widest);
    let least = |column: usize| match column {
        0 | 6 => natural[column].min(SHORTEST),
        _ => natural[column],
    };
    let mut kept: Vec<usize> = (0..natural.len()).collect();
    // With one column between two.
    let needed = |kept: &[usize]| kept.iter().map(|column| least(*column) + 1).sum::<usize>();
    for column in [6, 1, 5, 4] {
        if needed(&kept) > width + 1 {
            kept.retain(|kept| *kept != column);
        }
    }
    let mut spare = (width + 1).saturating_sub(needed(&kept));
    let mut widths = Vec::new();
    for &column in &kept {
        let more = (natural[column] - least(column)).min(spare);
        spare -= more;
        let width = least(column) + more;
        for row in cells.iter_mut() {
            row[column] = print::clip(&row[column], width);
        }
        widths.push(Constraint::Length(u16::try_from(width).unwrap_or(u16::MAX)));
    }
    (kept, widths)
}

fn claims_table(frame: &mut Frame<'_>, line: &LineView, area: Rect) {
    let width = usize::from(area.width);
    let rows = print::rows(std::slice::from_ref(line), Some(width)).into_iter();
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
        Some(time) => brief(time),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_shown_whole_or_not_at_all() {
        let row = [
            "nightly-report-of-everything",
            "1000000/4000000000",
            "1000000",
            "12345678",
            "10000d 23h",
            "3d 4h",
            "681f235aa74a2c64 on db1 pid 4194304",
        ];
        for width in 30..200 {
            let mut cells = vec![NAMES.map(str::to_owned), row.map(str::to_owned)];
            let (kept, widths) = fit(&mut cells, width);
            assert!(kept.starts_with(&[0]) && kept.contains(&2) && kept.contains(&3));
            assert_eq!(kept.len(), widths.len());
            let used: usize = kept
                .iter()
                .map(|column| print::columns(&cells[1][*column]) + 1)
                .sum();
            assert!(used <= width + 1, "{width}: {cells:?}");
            for column in kept.into_iter().filter(|column| (1..6).contains(column)) {
                assert_eq!(cells[1][column], row[column], "{width}");
            }
        }
    }
}
