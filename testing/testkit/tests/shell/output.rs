//! Whether the output is what a page shows: equal except for numbers and `…`.

/// Whether the lines match, one by one.
pub(crate) fn like(shown: &str, seen: &str) -> bool {
    let (shown, seen) = (lines(shown), lines(seen));
    shown.len() == seen.len()
        && shown
            .iter()
            .zip(&seen)
            .all(|(shown, seen)| one_like(shown, seen))
}

/// Whether the last lines match.
pub(crate) fn ends_like(shown: &str, seen: &str) -> bool {
    let (count, seen) = (lines(shown).len(), lines(seen));
    let last = &seen[seen.len().saturating_sub(count)..];
    like(shown, &last.join("\n"))
}

fn lines(text: &str) -> Vec<String> {
    text.trim_end().lines().map(plain).collect()
}

/// Normalises a line: each number, and each long hex word, is `0`; spaces are merged; this host is
/// `db1`.
fn plain(line: &str) -> String {
    let host = rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned();
    let line = line.replace(&host, "db1");
    let mut plain = String::new();
    let mut rest = line.as_str();
    while let Some(c) = rest.chars().next() {
        let hex = rest
            .find(|c: char| !c.is_ascii_hexdigit())
            .unwrap_or(rest.len());
        let digits = rest
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(rest.len());
        let (kept, used) = match c {
            _ if hex >= 8 => ("0", hex),
            _ if digits > 0 => ("0", digits),
            ' ' => (" ", rest.find(|c| c != ' ').unwrap_or(rest.len())),
            c => (&rest[..c.len_utf8()], c.len_utf8()),
        };
        plain += kept;
        rest = &rest[used..];
    }
    plain.trim_end().to_owned()
}

fn one_like(shown: &str, seen: &str) -> bool {
    let parts: Vec<&str> = shown.split('…').collect();
    let [first, middle @ .., last] = parts.as_slice() else {
        return shown == seen;
    };
    let Some(mut rest) = seen.strip_prefix(first) else {
        return false;
    };
    for part in middle {
        match rest.split_once(part) {
            Some((_, behind)) => rest = behind,
            None => return false,
        }
    }
    rest.ends_with(last)
}

/// A test of this comparison: it notices differences.
pub(crate) fn tells_apart() {
    let same = [
        ("a … c", "a bb c"),
        ("token 17", "token 1794"),
        ("x  y", "x y"),
        ("…", "z"),
    ];
    for (shown, seen) in same {
        assert!(like(shown, seen), "{shown:?} is {seen:?}");
    }
    for (shown, seen) in [
        ("a … c", "a b d"),
        ("held", "busy"),
        ("a", "a\nb"),
        ("a…b…c", "a c b"),
    ] {
        assert!(!like(shown, seen), "{shown:?} is not {seen:?}");
    }
}
