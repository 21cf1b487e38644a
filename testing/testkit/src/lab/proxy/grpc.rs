//! HTTP/2 framing for gRPC: frames of streams, which are identified by their `:path`.
//!
//! Header blocks are compressed with a table that both peers build from all earlier blocks. Here
//! every block is decoded, to learn paths and to maintain that table. After a block was withheld
//! from the sink (or sent twice), all later ones are sent in full, so that they need no table: one
//! stream can be lost while the others continue. Otherwise not a byte is changed.
//!
//! HEADERS and its CONTINUATION frames are one message: nothing may come between them.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use loona_hpack::Decoder;

use super::message::{Direction, Frame, Framing, Kind, Step};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const HEADER: usize = 9;
/// The frame size that every peer must accept.
const FRAME_MAX: usize = 16 << 10;
const HEADERS_MAX: usize = 1 << 20;
/// More than any client requests; a peer that uses more makes the connection raw.
const TABLE_MAX: usize = 1 << 20;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const PUSH_PROMISE: u8 = 5;
const CONTINUATION: u8 = 9;

const END_STREAM: u8 = 0x1;
const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;

type Fields = Vec<(Vec<u8>, Vec<u8>)>;

/// A decoded header block and its frame.
#[derive(Clone, Debug)]
pub(super) struct Block {
    stream: u32,
    flags: u8,
    fields: Arc<Fields>,
}

struct Side {
    greeted: bool,
    decoder: Decoder<'static>,
    /// The streams that this side has opened or answered.
    opened: HashSet<u32>,
}

pub(super) struct Grpc {
    sides: [Side; 2],
    paths: HashMap<u32, Arc<str>>,
}

impl Default for Grpc {
    fn default() -> Grpc {
        let side = || {
            let mut decoder = Decoder::new();
            // The table's default size stays 4096; this only limits how far a peer may raise it.
            decoder.set_max_allowed_table_size(TABLE_MAX);
            Side {
                greeted: false,
                decoder,
                opened: HashSet::new(),
            }
        };
        Grpc {
            sides: [side(), side()],
            paths: HashMap::new(),
        }
    }
}

impl Framing for Grpc {
    fn next(&mut self, direction: Direction, bytes: &[u8]) -> Step {
        let side = &mut self.sides[direction.index()];
        if direction == Direction::ToEngine && !side.greeted {
            let known = bytes.len().min(PREFACE.len());
            return match bytes[..known] == PREFACE[..known] {
                false => Step::Raw,
                true if known < PREFACE.len() => Step::More,
                true => {
                    side.greeted = true;
                    Step::Frame(Frame::new(known, Kind::Control, Some("PREFACE".into())))
                }
            };
        }
        let Some(head) = Head::read(bytes) else {
            return Step::More;
        };
        // The engine's first frame must be SETTINGS; otherwise this is not HTTP/2.
        if !side.greeted && head.kind != 4 {
            return Step::Raw;
        }
        side.greeted = true;
        match head.kind {
            HEADERS | PUSH_PROMISE => self.headers(direction, &head, bytes),
            CONTINUATION => Step::Raw,
            _ if bytes.len() < head.end() => Step::More,
            _ => Step::Frame(self.plain(&head)),
        }
    }

    fn copies(&mut self, _: u64, _: u32) {}
}

impl Grpc {
    fn plain(&self, head: &Head) -> Frame {
        let kind = match head.kind {
            DATA => Kind::Data,
            RST_STREAM => Kind::Reset,
            _ => Kind::Control,
        };
        if head.stream == 0 {
            return Frame::new(head.end(), kind, Some(frame_name(head.kind).into()));
        }
        let mut frame = Frame::new(head.end(), kind, self.paths.get(&head.stream).cloned());
        frame.unit = Some(u64::from(head.stream));
        frame
    }

    fn headers(&mut self, direction: Direction, head: &Head, bytes: &[u8]) -> Step {
        let (block, length) = match gather(head, bytes) {
            Ok(gathered) => gathered,
            Err(step) => return step,
        };
        let side = &mut self.sides[direction.index()];
        let Ok(fields) = side.decoder.decode(&block) else {
            return Step::Raw;
        };
        let stream = head.stream;
        let path = fields.iter().find(|(name, _)| name == b":path");
        if let Some((_, path)) = path.filter(|_| direction == Direction::ToEngine) {
            let path = String::from_utf8_lossy(path).as_ref().into();
            self.paths.insert(stream, path);
        }
        let opens = side.opened.insert(stream);
        let kind = match (opens, direction) {
            (false, _) => Kind::Data,
            (true, Direction::ToEngine) => Kind::Request,
            (true, Direction::ToClient) => Kind::Reply,
        };
        let mut frame = Frame::new(length, kind, self.paths.get(&stream).cloned());
        frame.unit = Some(u64::from(stream));
        frame.opens = opens;
        frame.block = Some(Block {
            stream,
            flags: head.flags & END_STREAM,
            fields: Arc::new(fields),
        });
        Step::Frame(frame)
    }
}

struct Head {
    length: usize,
    kind: u8,
    flags: u8,
    stream: u32,
}

impl Head {
    fn read(bytes: &[u8]) -> Option<Head> {
        let head: &[u8; HEADER] = bytes.first_chunk()?;
        let [a, b, c, kind, flags, s0, s1, s2, s3] = *head;
        Some(Head {
            length: u32::from_be_bytes([0, a, b, c]) as usize,
            kind,
            flags,
            stream: u32::from_be_bytes([s0 & 0x7f, s1, s2, s3]),
        })
    }

    fn end(&self) -> usize {
        HEADER + self.length
    }
}

/// The block of a HEADERS frame with its continuations, and the length of all these frames.
fn gather(head: &Head, bytes: &[u8]) -> Result<(Vec<u8>, usize), Step> {
    // Push promises are not supported, because gRPC does not use them.
    if head.kind == PUSH_PROMISE || head.stream == 0 {
        return Err(Step::Raw);
    }
    let mut payload = bytes.get(HEADER..head.end()).ok_or(Step::More)?;
    if head.flags & PADDED != 0 {
        let (padding, rest) = payload.split_first().ok_or(Step::Raw)?;
        let kept = rest.len().checked_sub(usize::from(*padding));
        payload = &rest[..kept.ok_or(Step::Raw)?];
    }
    if head.flags & PRIORITY != 0 {
        payload = payload.get(5..).ok_or(Step::Raw)?;
    }
    let mut block = payload.to_vec();
    let mut length = head.end();
    let mut flags = head.flags;
    while flags & END_HEADERS == 0 {
        let rest = &bytes[length..];
        let next = Head::read(rest).ok_or(Step::More)?;
        if next.kind != CONTINUATION || next.stream != head.stream || block.len() > HEADERS_MAX {
            return Err(Step::Raw);
        }
        block.extend(rest.get(HEADER..next.end()).ok_or(Step::More)?);
        length += next.end();
        flags = next.flags;
    }
    Ok((block, length))
}

impl Block {
    /// The same headers in frames that can be decoded with any table: all fields literal and not
    /// indexed, without Huffman coding. The table is cleared first, which is always allowed.
    pub(super) fn in_full(&self) -> Vec<u8> {
        let mut block = vec![0x20];
        for (name, value) in self.fields.iter() {
            block.push(0);
            push_string(&mut block, name);
            push_string(&mut block, value);
        }
        let mut frames = Vec::new();
        let mut chunks = block.chunks(FRAME_MAX).peekable();
        let (mut kind, mut flags) = (HEADERS, self.flags);
        while let Some(chunk) = chunks.next() {
            if chunks.peek().is_none() {
                flags |= END_HEADERS;
            }
            frames.extend(&(chunk.len() as u32).to_be_bytes()[1..]);
            frames.extend([kind, flags]);
            frames.extend(self.stream.to_be_bytes());
            frames.extend(chunk);
            (kind, flags) = (CONTINUATION, 0);
        }
        frames
    }
}

/// A string literal of HPACK: a length with seven bits in its first byte, then the bytes.
fn push_string(block: &mut Vec<u8>, string: &[u8]) {
    let mut length = string.len();
    if length < 127 {
        block.push(length as u8);
    } else {
        block.push(127);
        length -= 127;
        while length >= 128 {
            block.push((length % 128) as u8 | 128);
            length /= 128;
        }
        block.push(length as u8);
    }
    block.extend(string);
}

fn frame_name(kind: u8) -> &'static str {
    match kind {
        DATA => "DATA",
        2 => "PRIORITY",
        RST_STREAM => "RST_STREAM",
        4 => "SETTINGS",
        6 => "PING",
        7 => "GOAWAY",
        8 => "WINDOW_UPDATE",
        _ => "UNKNOWN",
    }
}
