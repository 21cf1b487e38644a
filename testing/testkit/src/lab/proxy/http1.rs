//! HTTP/1.x framing: heads, bodies by Content-Length, chunks.
//!
//! A watch is an endless chunked reply, so a chunked body can't be collected first: its head and
//! each chunk are messages of one unit. After an upgrade, or if only the end of the connection ends
//! a body, the connection is raw.

use std::sync::Arc;

use super::message::{Direction, Frame, Framing, Kind, Step, Turns};

const HEAD_MAX: usize = 64 << 10;
const CHUNK_MAX: usize = 16 << 20;
/// Longer bodies are passed on in pieces.
const WHOLE_MAX: usize = 1 << 20;
const PIECE: usize = 64 << 10;

#[derive(Clone, Copy, Default)]
enum State {
    #[default]
    Head,
    /// The number of bytes of a long body that are still to come.
    Body(usize),
    Chunks,
    /// No longer HTTP.
    Over,
}

#[derive(Default)]
struct Side {
    state: State,
    /// The unit and label of the message that the state belongs to.
    unit: u64,
    label: Option<Arc<str>>,
}

#[derive(Clone)]
struct Asked {
    method: Box<str>,
    label: Arc<str>,
}

#[derive(Default)]
pub(super) struct Http1 {
    sides: [Side; 2],
    asked: Turns<Asked>,
}

/// How a body ends.
enum Body {
    Length(usize),
    Chunked,
    AtEnd,
}

impl Framing for Http1 {
    fn next(&mut self, direction: Direction, bytes: &[u8]) -> Step {
        let side = &mut self.sides[direction.index()];
        match side.state {
            State::Head => self.head(direction, bytes).unwrap_or_else(|step| step),
            State::Body(left) => {
                let length = left.min(PIECE);
                if bytes.len() < length {
                    return Step::More;
                }
                side.state = match left - length {
                    0 => State::Head,
                    left => State::Body(left),
                };
                side.data(length)
            }
            State::Chunks => match chunk(bytes) {
                Err(step) => step,
                Ok((length, last)) => {
                    if last {
                        side.state = State::Head;
                    }
                    side.data(length)
                }
            },
            State::Over => Step::Raw,
        }
    }

    fn copies(&mut self, turn: u64, copies: u32) {
        self.asked.copies(turn, copies);
    }
}

impl Side {
    fn data(&self, length: usize) -> Step {
        let mut frame = Frame::new(length, Kind::Data, self.label.clone());
        frame.unit = Some(self.unit);
        Step::Frame(frame)
    }
}

impl Http1 {
    fn head(&mut self, direction: Direction, bytes: &[u8]) -> Result<Step, Step> {
        plausible(direction, bytes)?;
        let within = &bytes[..bytes.len().min(HEAD_MAX)];
        let Some(end) = within.windows(4).position(|four| four == b"\r\n\r\n") else {
            let full = bytes.len() >= HEAD_MAX;
            return Err(if full { Step::Raw } else { Step::More });
        };
        let text = std::str::from_utf8(&bytes[..end]).map_err(|_| Step::Raw)?;
        let (first, headers) = text.split_once("\r\n").unwrap_or((text, ""));
        let head = match direction {
            Direction::ToEngine => request(first, headers)?,
            Direction::ToClient => reply(first, headers, self.asked.front())?,
        };
        let (length, state) = match head.body {
            Body::Length(size) if size <= WHOLE_MAX => (end + 4 + size, State::Head),
            Body::Length(size) => (end + 4, State::Body(size)),
            Body::Chunked => (end + 4, State::Chunks),
            Body::AtEnd => (end + 4, State::Over),
        };
        if bytes.len() < length {
            return Err(Step::More);
        }
        if head.answers {
            self.asked.pop();
        }
        let turn = head.asks.map(|asks| self.asked.push(asks));
        let side = &mut self.sides[direction.index()];
        side.state = if head.upgrades { State::Over } else { state };
        side.unit += 1;
        side.label = head.label.clone();
        let mut frame = Frame::new(length, head.kind, head.label);
        frame.turn = turn;
        if !matches!(state, State::Head) {
            frame.unit = Some(side.unit);
            frame.opens = true;
        }
        Ok(Step::Frame(frame))
    }
}

/// A parsed head, and its effects once its message is complete.
struct Head {
    kind: Kind,
    label: Option<Arc<str>>,
    body: Body,
    asks: Option<Asked>,
    answers: bool,
    upgrades: bool,
}

/// Rejects bytes that can't become a head, before they are complete.
fn plausible(direction: Direction, bytes: &[u8]) -> Result<(), Step> {
    let fits = match direction {
        Direction::ToEngine => {
            let method = bytes
                .iter()
                .take_while(|byte| byte.is_ascii_uppercase())
                .count();
            (1..=32).contains(&method) && matches!(bytes.get(method), None | Some(b' '))
        }
        Direction::ToClient => {
            let known = bytes.len().min(7);
            b"HTTP/1."[..known] == bytes[..known]
        }
    };
    if fits { Ok(()) } else { Err(Step::Raw) }
}

fn request(first: &str, headers: &str) -> Result<Head, Step> {
    let mut words = first.split(' ');
    let (method, target, version) = (words.next(), words.next(), words.next());
    let (Some(method), Some(target), Some(version), None) = (method, target, version, words.next())
    else {
        return Err(Step::Raw);
    };
    if !version.starts_with("HTTP/1.") {
        return Err(Step::Raw);
    }
    let label: Arc<str> = format!("{method} {target}").into();
    Ok(Head {
        kind: Kind::Request,
        label: Some(label.clone()),
        body: declared(headers)?.unwrap_or(Body::Length(0)),
        asks: Some(Asked {
            method: method.into(),
            label,
        }),
        answers: false,
        upgrades: false,
    })
}

fn reply(first: &str, headers: &str, asked: Option<&Asked>) -> Result<Head, Step> {
    let status = first
        .split(' ')
        .nth(1)
        .and_then(|status| status.parse().ok());
    let status: u16 = status.ok_or(Step::Raw)?;
    // An interim reply is followed by the final one.
    let interim = (100..200).contains(&status) && status != 101;
    let method = asked.map_or("", |asked| &asked.method);
    let upgrades = status == 101 || (method == "CONNECT" && (200..300).contains(&status));
    let bare = upgrades || status < 200 || matches!(status, 204 | 304) || method == "HEAD";
    let body = if bare {
        Body::Length(0)
    } else {
        declared(headers)?.unwrap_or(Body::AtEnd)
    };
    Ok(Head {
        kind: if interim { Kind::Control } else { Kind::Reply },
        label: asked.map(|asked| asked.label.clone()),
        body,
        asks: None,
        answers: !interim,
        upgrades,
    })
}

/// How the headers declare the body.
fn declared(headers: &str) -> Result<Option<Body>, Step> {
    let mut length = None;
    for header in headers.split("\r\n") {
        let Some((name, value)) = header.split_once(':') else {
            continue;
        };
        let value = value.trim();
        if name.eq_ignore_ascii_case("transfer-encoding") {
            let last = value.rsplit(',').next().unwrap_or_default().trim();
            return if last.eq_ignore_ascii_case("chunked") {
                Ok(Some(Body::Chunked))
            } else {
                Err(Step::Raw)
            };
        }
        if name.eq_ignore_ascii_case("content-length") {
            length = Some(value.parse().map_err(|_| Step::Raw)?);
        }
    }
    Ok(length.map(Body::Length))
}

/// The length of the first chunk, and whether it is the last one (with its trailers).
fn chunk(bytes: &[u8]) -> Result<(usize, bool), Step> {
    let line = |at: usize| {
        let rest = &bytes[at..bytes.len().min(at + HEAD_MAX)];
        match rest.windows(2).position(|two| two == b"\r\n") {
            Some(end) => Ok(end + 2),
            None if rest.len() >= HEAD_MAX => Err(Step::Raw),
            None => Err(Step::More),
        }
    };
    if !bytes[0].is_ascii_hexdigit() {
        return Err(Step::Raw);
    }
    let mut at = line(0)?;
    let size = std::str::from_utf8(&bytes[..at]).map_err(|_| Step::Raw)?;
    let size = size.split(';').next().unwrap_or_default().trim();
    let size = usize::from_str_radix(size, 16).map_err(|_| Step::Raw)?;
    match size {
        0 => loop {
            let trailer = line(at)?;
            at += trailer;
            match trailer {
                2 => return Ok((at, true)),
                _ if at > HEAD_MAX => return Err(Step::Raw),
                _ => {}
            }
        },
        1..=CHUNK_MAX => match bytes.get(at + size..at + size + 2) {
            Some(b"\r\n") => Ok((at + size + 2, false)),
            Some(_) => Err(Step::Raw),
            None => Err(Step::More),
        },
        _ => Err(Step::Raw),
    }
}
