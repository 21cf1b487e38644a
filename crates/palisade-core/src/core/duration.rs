//! Durations in the notation of the command and the URLs: `500ms`, `1.5s`, `2m`, `1m30s`.

use std::fmt::Write;
use std::time::Duration;

/// A duration for a message: milliseconds below a second, hundredths of a second below a minute,
/// then seconds. Only no time at all is shown as `0s`.
pub fn rounded(time: Duration) -> String {
    let millis = (time.as_nanos() + 500_000) / 1_000_000;
    if time.is_zero() {
        return "0s".to_owned();
    }
    if millis < 1000 {
        return format!("{}ms", millis.max(1));
    }
    let hundredths = (time.as_millis() + 5) / 10;
    if hundredths < 6000 {
        let (whole, part) = (hundredths / 100, format!(".{:02}", hundredths % 100));
        return format!(
            "{whole}{}s",
            part.trim_end_matches(['0']).trim_end_matches('.')
        );
    }
    let mut left = (time.as_millis() + 500) / 1000;
    let mut text = String::new();
    for (unit, each) in [("h", 3600), ("m", 60), ("s", 1)] {
        if left >= each {
            // Writing to a string can't fail.
            let _ = write!(text, "{}{unit}", left / each);
            left %= each;
        }
    }
    text
}

/// Parses a duration. Every number needs a unit: `ms`, `s`, `m`, `h` or `d`. Spaces are allowed
/// before and after a unit.
///
/// # Errors
/// A message that says what is wrong and how to write it.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let wrong = |why: &str| Err(format!("{why}; write it like 500ms, 1.5s, 30s, 2m or 1h"));
    let text = text.trim_matches(' ');
    if text.is_empty() {
        return wrong("a duration can't be empty");
    }
    if text.starts_with('-') {
        return wrong("a duration can't be negative");
    }
    let mut total = Duration::ZERO;
    let mut rest = text;
    while !rest.is_empty() {
        let (number, tail) = digits(rest);
        if number.is_empty() {
            return wrong("a duration starts with a number");
        }
        let (fraction, tail) = match tail.strip_prefix('.').map(digits) {
            None => ("", tail),
            Some(("", _)) => return wrong("digits must follow the decimal point"),
            Some((fraction, tail)) => (fraction, tail),
        };
        let tail = tail.trim_start_matches(' ');
        let letters = tail
            .find(|c: char| !c.is_ascii_alphabetic())
            .unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(letters);
        let nanos_each: u128 = match unit {
            "ms" => 1_000_000,
            "s" => 1_000_000_000,
            "m" => 60_000_000_000,
            "h" => 3_600_000_000_000,
            "d" => 86_400_000_000_000,
            "" => return wrong("a duration needs a unit"),
            _ => return wrong("the units of a duration are ms, s, m, h and d"),
        };
        // Further digits are below a nanosecond in every unit.
        let fraction = &fraction[..fraction.len().min(15)];
        let below = match fraction.parse::<u128>() {
            Ok(digits) => digits * nanos_each / 10_u128.pow(fraction.len() as u32),
            Err(_) => 0,
        };
        let whole = number.parse::<u64>().ok().map(u128::from);
        let part = whole
            .map(|whole| whole * nanos_each + below)
            .and_then(|nanos| u64::try_from(nanos / 1_000_000_000).ok().zip(Some(nanos)))
            .map(|(seconds, nanos)| Duration::new(seconds, (nanos % 1_000_000_000) as u32));
        let Some(sum) = part.and_then(|part| total.checked_add(part)) else {
            return wrong("the duration is too large");
        };
        total = sum;
        rest = tail.trim_start_matches(' ');
    }
    Ok(total)
}

/// The digits that `text` begins with, and the rest.
fn digits(text: &str) -> (&str, &str) {
    let end = text.find(|c: char| !c.is_ascii_digit());
    text.split_at(end.unwrap_or(text.len()))
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
            ("10 s", 10_000),
            (" 1m 30 s ", 90_000),
            ("1.5s", 1_500),
            ("0.25m0.5s", 15_500),
            ("1.000000000000000000000000000001s", 1_000),
        ] {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(millis)));
        }
    }

    #[test]
    fn durations_in_messages_are_rounded() {
        for (nanos, text) in [
            (0, "0s"),
            (1, "1ms"),
            (666_666_666, "667ms"),
            (999_600_000, "1s"),
            (1_500_000_000, "1.5s"),
            (1_005_000_000, "1.01s"),
            (10_000_000_000, "10s"),
            (59_994_999_999, "59.99s"),
            (59_995_000_000, "1m"),
            (90_400_000_000, "1m30s"),
            (3_605_000_000_000, "1h5s"),
            (86_400_000_000_000, "24h"),
        ] {
            assert_eq!(rounded(Duration::from_nanos(nanos)), text);
            let (least, most) = (nanos * 99 / 100, nanos * 101 / 100 + 1_000_000);
            let read = parse_duration(text).unwrap().as_nanos();
            assert!(
                (u128::from(least)..=u128::from(most)).contains(&read),
                "{text}"
            );
        }
    }

    #[test]
    fn anything_else_says_what_is_wrong() {
        for (text, word) in [
            ("", "empty"),
            (" ", "empty"),
            ("1 0s", "unit"),
            ("1 .5s", "unit"),
            ("10 s x", "number"),
            ("-5s", "negative"),
            ("30", "unit"),
            ("s", "number"),
            ("3x", "units"),
            ("1.5", "unit"),
            ("1.s", "point"),
            (".5s", "number"),
            ("1.5.5s", "unit"),
            ("99999999999999999999s", "large"),
            ("18446744073709551615d", "large"),
        ] {
            let why = parse_duration(text).unwrap_err();
            assert!(why.contains(word), "{text}: {why}");
        }
    }
}
