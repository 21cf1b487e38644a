//! Text in aligned columns, fitted to the width of a terminal.

use unicode_width::UnicodeWidthStr;

/// Between two columns.
const GAP: usize = 2;

/// How a table is laid out. Columns go by their numbers.
pub(crate) struct Layout {
    /// Columns to omit on a narrow terminal, in this order.
    pub(crate) less: &'static [usize],
    /// Two columns that are clipped if nothing else can be omitted.
    pub(crate) long: [usize; 2],
    /// The width that these are clipped to before another column is omitted.
    pub(crate) shortest: usize,
    /// Columns of numbers, which are aligned to the right.
    pub(crate) right: &'static [usize],
}

/// `cells`, with the header first, as rows of at most `width` columns. Only the long columns are
/// clipped, with `…`; any other is shown whole or not at all.
pub(crate) fn rows<const N: usize>(
    mut cells: Vec<[String; N]>,
    layout: &Layout,
    width: Option<usize>,
) -> Vec<String> {
    let mut widths: [usize; N] = std::array::from_fn(|column| {
        let widths = cells.iter().map(|row| columns(&row[column]));
        widths.max().unwrap_or(0)
    });
    let mut kept: Vec<usize> = (0..N).collect();
    if let Some(width) = width {
        let least = |column: usize| {
            if layout.long.contains(&column) {
                widths[column].min(layout.shortest)
            } else {
                widths[column]
            }
        };
        for column in layout.less {
            if kept.iter().map(|kept| least(*kept) + GAP).sum::<usize>() > width + GAP {
                kept.retain(|kept| kept != column);
            }
        }
        let all: usize = kept.iter().map(|column| widths[*column] + GAP).sum();
        let over = all.saturating_sub(width + GAP);
        let [one, other] = layout.long;
        let others = widths[other] * usize::from(kept.contains(&other));
        if over > 0 {
            let left = (widths[one] + others).saturating_sub(over);
            widths[one] = widths[one].min(left.saturating_sub(others).max(left / 2));
            widths[other] = left - widths[one];
            for row in &mut cells {
                row[one] = clip(&row[one], widths[one]);
                row[other] = clip(&row[other], widths[other]);
            }
        }
    }
    let line = |row: [String; N]| {
        let mut line = String::new();
        for column in &kept {
            let (cell, pad) = (&row[*column], widths[*column] - columns(&row[*column]));
            let (before, after) = if layout.right.contains(column) {
                (pad, GAP)
            } else {
                (0, pad + GAP)
            };
            line.push_str(&format!("{:before$}{cell}{:after$}", "", ""));
        }
        line.trim_end().to_owned()
    };
    cells.into_iter().map(line).collect()
}

/// How many columns of a terminal a text takes.
pub(crate) fn columns(text: &str) -> usize {
    text.width()
}

/// As much of a text as fits, with `…` if it was cut.
pub(crate) fn clip(text: &str, width: usize) -> String {
    if columns(text) <= width {
        return text.to_owned();
    }
    let mut used = 0;
    let fits = text.chars().take_while(|c| {
        used += columns(c.encode_utf8(&mut [0; 4]));
        used < width
    });
    let mut clipped: String = fits.collect();
    if width > 0 {
        clipped.push('…');
    }
    clipped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_clipped_says_so() {
        assert_eq!(clip("abc", 3), "abc");
        assert_eq!(clip("abcd", 3), "ab…");
        assert_eq!(clip("日本語", 5), "日本…");
    }

    #[test]
    fn a_table_fits_and_its_numbers_are_whole() {
        let header = ["NAME", "COUNT", "HOLDER", "AGE"].map(str::to_owned);
        let row = [
            "é".repeat(30),
            "12345678".into(),
            "x".repeat(40),
            "3d 4h".into(),
        ];
        let layout = Layout {
            less: &[2, 3],
            long: [0, 2],
            shortest: 12,
            right: &[1],
        };
        for width in 12..100 {
            let rows = rows(vec![header.clone(), row.clone()], &layout, Some(width));
            assert!(
                rows.iter().all(|row| columns(row) <= width),
                "{width}: {rows:?}"
            );
            assert!(rows[1].contains("12345678"), "{width}: {rows:?}");
            assert_eq!(rows[0].contains("AGE"), rows[1].ends_with("3d 4h"));
        }
        let wide = rows(vec![header, row], &layout, None);
        assert!(wide[0].starts_with(&format!("NAME{}COUNT", " ".repeat(31))));
    }
}
