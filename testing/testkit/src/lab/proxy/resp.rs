//! Redis framing, RESP2 and RESP3: nested values with their lengths in front.
//!
//! Replies come in the order of requests, so each takes the label of the oldest request without a
//! reply. Push messages are not replies: RESP3 marks them; in RESP2 they are recognised by their
//! first word on a connection that has subscribed. Confirmations of SUBSCRIBE are also pushed, one
//! for each channel, and answer it.

use std::sync::Arc;

use super::message::{Direction, Frame, Framing, Kind, Step, Turns};

const LINE_MAX: usize = 64 << 10;
const BULK_MAX: usize = 64 << 20;
const ELEMENTS_MAX: usize = 1 << 20;
const LABEL_MAX: usize = 80;

/// A request that waits for its reply.
#[derive(Clone)]
struct Asked {
    label: Arc<str>,
    /// How many pushed confirmations answer it, if it concerns subscriptions.
    confirmations: usize,
}

#[derive(Default)]
pub(super) struct Resp {
    asked: Turns<Asked>,
    subscribed: bool,
}

/// Why a value can't be measured.
enum Stop {
    More,
    Garbage,
}

impl Framing for Resp {
    fn next(&mut self, direction: Direction, bytes: &[u8]) -> Step {
        let measured = match direction {
            Direction::ToEngine if bytes[0] != b'*' => inline(bytes),
            _ => measure(bytes),
        };
        let length = match measured {
            Ok(length) => length,
            Err(Stop::More) => return Step::More,
            Err(Stop::Garbage) => return Step::Raw,
        };
        let value = &bytes[..length];
        Step::Frame(match direction {
            Direction::ToEngine => self.request(value),
            Direction::ToClient => self.answer(value),
        })
    }

    fn copies(&mut self, turn: u64, copies: u32) {
        self.asked.copies(turn, copies);
    }
}

impl Resp {
    fn request(&mut self, value: &[u8]) -> Frame {
        let words = words(value);
        let Some(first) = words.first() else {
            // An empty line or array is no request and gets no reply.
            return Frame::new(value.len(), Kind::Control, None);
        };
        let word = text(first).to_ascii_uppercase();
        let about = match word.as_str() {
            "EVALSHA" | "EVALSHA_RO" | "EVAL" | "EVAL_RO" | "FCALL" | "FCALL_RO" => words.get(1),
            _ => None,
        };
        let label: Arc<str> = match about {
            None => word.as_str().into(),
            Some(script) => {
                let script = text(script);
                format!("{word} {}", script.lines().next().unwrap_or_default()).into()
            }
        };
        let subscribes = word.ends_with("SUBSCRIBE");
        self.subscribed |= subscribes;
        let confirmations = if subscribes {
            element_count(value).saturating_sub(1).max(1)
        } else {
            0
        };
        let turn = self.asked.push(Asked {
            label: label.clone(),
            confirmations,
        });
        let mut frame = Frame::new(value.len(), Kind::Request, Some(label));
        frame.turn = Some(turn);
        frame
    }

    fn answer(&mut self, value: &[u8]) -> Frame {
        let marked = value[0] == b'>';
        if marked || (self.subscribed && value[0] == b'*') {
            let word = words(value)
                .first()
                .map(|word| text(word))
                .unwrap_or_default();
            let confirms = word.ends_with("subscribe");
            if confirms {
                self.confirm();
            }
            if marked || confirms || word.ends_with("message") {
                return Frame::new(value.len(), Kind::Push, Some(word.as_str().into()));
            }
        }
        let label = self.asked.pop().map(|asked| asked.label);
        Frame::new(value.len(), Kind::Reply, label)
    }

    /// Processes one confirmation of the oldest request, if that concerns subscriptions.
    fn confirm(&mut self) {
        if let Some(oldest) = self.asked.front_mut() {
            match oldest.confirmations {
                0 => {}
                1 => drop(self.asked.pop()),
                _ => oldest.confirmations -= 1,
            }
        }
    }
}

/// The length of a line with its end, from `at`.
fn line(bytes: &[u8], at: usize) -> Result<usize, Stop> {
    let rest = bytes.get(at..).unwrap_or_default();
    match rest.iter().take(LINE_MAX).position(|byte| *byte == b'\n') {
        Some(end) => Ok(end + 1),
        None if rest.len() >= LINE_MAX => Err(Stop::Garbage),
        None => Err(Stop::More),
    }
}

/// An inline request, as typed by people: printable text up to the end of the line.
fn inline(bytes: &[u8]) -> Result<usize, Stop> {
    let length = line(bytes, 0);
    let text = &bytes[..*length.as_ref().unwrap_or(&bytes.len())];
    let printable = |byte: &u8| matches!(byte, b' '..=b'~' | b'\t' | b'\r' | b'\n');
    if text.iter().all(printable) {
        length
    } else {
        Err(Stop::Garbage)
    }
}

/// The length of the first value, without recursion: counts the values still to come.
fn measure(bytes: &[u8]) -> Result<usize, Stop> {
    let mut at = 0;
    let mut missing = 1usize;
    while missing > 0 {
        let kind = *bytes.get(at).ok_or(Stop::More)?;
        if !b"+-:,#(_$=!*~>%|".contains(&kind) {
            return Err(Stop::Garbage);
        }
        let length = line(bytes, at)?;
        let header = &bytes[at + 1..at + length];
        let header = header.strip_suffix(b"\r\n").ok_or(Stop::Garbage)?;
        at += length;
        missing -= 1;
        let more = match kind {
            b'$' | b'=' | b'!' => {
                if let Some(size) = count(header, BULK_MAX)? {
                    let end = at + size;
                    match bytes.get(end..end + 2) {
                        Some(b"\r\n") => at = end + 2,
                        Some(_) => return Err(Stop::Garbage),
                        None => return Err(Stop::More),
                    }
                }
                0
            }
            b'*' | b'~' | b'>' => count(header, ELEMENTS_MAX)?.unwrap_or(0),
            b'%' => 2 * count(header, ELEMENTS_MAX)?.unwrap_or(0),
            // Attributes precede the value that they describe.
            b'|' => 2 * count(header, ELEMENTS_MAX)?.unwrap_or(0) + 1,
            _ => 0,
        };
        missing = missing.checked_add(more).ok_or(Stop::Garbage)?;
    }
    Ok(at)
}

/// A length; -1 is RESP2's null. Streamed values (`$?`) are not in use and count as garbage.
fn count(header: &[u8], limit: usize) -> Result<Option<usize>, Stop> {
    if header == b"-1" {
        return Ok(None);
    }
    let digits = !header.is_empty() && header.iter().all(u8::is_ascii_digit);
    let number = std::str::from_utf8(header).ok().filter(|_| digits);
    match number.and_then(|digits| digits.parse().ok()) {
        Some(number) if number <= limit => Ok(Some(number)),
        _ => Err(Stop::Garbage),
    }
}

/// The number in the header of an array; 1 for a line.
fn element_count(value: &[u8]) -> usize {
    let header = value
        .split(|byte| *byte == b'\r')
        .next()
        .unwrap_or_default();
    match header.split_first() {
        Some((b'*', digits)) => count(digits, ELEMENTS_MAX).ok().flatten().unwrap_or(1),
        _ => value
            .split(|byte| *byte == b' ')
            .filter(|word| !word.is_empty())
            .count(),
    }
}

/// The first two strings of a measured value: of an array of strings, or of a line of text.
fn words(value: &[u8]) -> Vec<&[u8]> {
    if !matches!(value[0], b'*' | b'>') {
        let words = value.split(u8::is_ascii_whitespace);
        return words.filter(|word| !word.is_empty()).take(2).collect();
    }
    let mut found = Vec::new();
    let mut at = line(value, 0).unwrap_or(value.len());
    while found.len() < 2 && matches!(value.get(at), Some(b'$' | b'=' | b'+')) {
        let Ok(length) = line(value, at) else { break };
        let header = &value[at + 1..(at + length).saturating_sub(2).max(at + 1)];
        let start = at + length;
        if value[at] == b'+' {
            found.push(header);
            at = start;
            continue;
        }
        let Ok(Some(size)) = count(header, BULK_MAX) else {
            break;
        };
        let Some(string) = value.get(start..start + size) else {
            break;
        };
        found.push(string);
        at = start + size + 2;
    }
    found
}

fn text(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    text.chars().take(LABEL_MAX).collect()
}
