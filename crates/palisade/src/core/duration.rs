//! Durations as people write them: `500ms`, `30s`, `2m`, `1h`, `1m30s`.

use std::time::Duration;

/// Reads a duration. Every number needs its unit: `ms`, `s`, `m`, `h` or `d`.
///
/// # Errors
/// A sentence that says what is wrong and how to write it.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let wrong = |why: &str| Err(format!("{why}; write it like 500ms, 30s, 2m or 1h"));
    if text.is_empty() {
        return wrong("a duration can't be empty");
    }
    if text.starts_with('-') {
        return wrong("a duration can't be negative");
    }
    let mut total = Duration::ZERO;
    let mut rest = text;
    while !rest.is_empty() {
        let digits = rest
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(rest.len());
        if digits == 0 {
            return wrong("a duration starts with a whole number");
        }
        let (number, tail) = rest.split_at(digits);
        let letters = tail
            .find(|c: char| !c.is_ascii_alphabetic())
            .unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(letters);
        let millis_each: u64 = match unit {
            "ms" => 1,
            "s" => 1_000,
            "m" => 60_000,
            "h" => 3_600_000,
            "d" => 86_400_000,
            "" => return wrong("a duration needs a unit"),
            _ => return wrong("the units of a duration are ms, s, m, h and d"),
        };
        let part = number
            .parse::<u64>()
            .ok()
            .and_then(|n| n.checked_mul(millis_each));
        let Some(sum) = part.and_then(|part| total.checked_add(Duration::from_millis(part))) else {
            return wrong("the duration is too large");
        };
        total = sum;
        rest = tail;
    }
    Ok(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_as_people_write_them() {
        for (text, millis) in [
            ("0s", 0),
            ("500ms", 500),
            ("30s", 30_000),
            ("1m30s", 90_000),
        ] {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(millis)));
        }
    }

    #[test]
    fn anything_else_says_what_is_wrong() {
        for (text, word) in [
            ("", "empty"),
            ("-5s", "negative"),
            ("30", "unit"),
            ("s", "number"),
            ("3x", "units"),
            ("1.5s", "unit"),
            ("99999999999999999999s", "large"),
            ("18446744073709551615d", "large"),
        ] {
            let why = parse_duration(text).unwrap_err();
            assert!(why.contains(word), "{text}: {why}");
        }
    }
}
