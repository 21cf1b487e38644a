//! How the proxy splits a byte stream: messages with a kind and a label.
//!
//! A [`Framing`] examines the bytes of one direction and returns the length of the next message. It
//! never changes a byte, keeps no copy, and must not panic on any input. Bytes that it can't parse
//! make the whole connection raw: from there on bytes pass as they come, without labels.

use std::collections::VecDeque;
use std::sync::Arc;

use super::{grpc, http1, postgres, resp, zookeeper};

/// The largest message that is collected; a longer one makes its connection raw.
const MESSAGE_MAX: usize = 64 << 20;

/// The direction of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the client to the engine.
    ToEngine,
    /// From the engine to the client.
    ToClient,
}

impl Direction {
    /// Both directions.
    pub const ALL: [Direction; 2] = [Direction::ToEngine, Direction::ToClient];

    /// The other direction.
    pub fn back(self) -> Direction {
        match self {
            Direction::ToEngine => Direction::ToClient,
            Direction::ToClient => Direction::ToEngine,
        }
    }

    pub(super) fn index(self) -> usize {
        self as usize
    }
}

/// How a stream is split into messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// No messages: every read is a piece without a label. Rules by byte, connection and direction
    /// work.
    Raw,
    /// RESP2 and RESP3. Labels: the command word in capitals, for scripts and functions with the
    /// sha, the script's first line or the function's name (`EVALSHA 6b1b…`). A reply has the label
    /// of its request; a push message has its own first word (`message`, `invalidate`).
    Resp,
    /// HTTP/1.x. Label: method and path with the query (`PUT /v1/kv/a?acquire=…`), also for the
    /// reply. A body of known length up to 1 MiB belongs to its message; a longer or chunked one
    /// comes as [`Kind::Data`], one message per chunk.
    Http1,
    /// HTTP/2 frames. Label: the `:path` of the frame's stream (`/etcdserverpb.Lease/LeaseGrant`)
    /// or, outside of streams, the name of the frame (`SETTINGS`).
    Grpc,
    /// ZooKeeper. Labels: opcode and xid (`create2 7`), also for the reply; `watch`, `ping`,
    /// `connect`.
    ZooKeeper,
    /// PostgreSQL. Label: the name of the message (`Query`, `ReadyForQuery`). A connection that
    /// switches to TLS is raw from there on.
    Postgres,
}

/// The kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A request, or its head if the rest follows as [`Kind::Data`].
    Request,
    /// A reply, or its head if the rest follows as [`Kind::Data`].
    Reply,
    /// More of a request or reply: an HTTP chunk, a gRPC DATA frame, gRPC trailers.
    Data,
    /// Unsolicited messages of the engine: RESP push frames and pub/sub messages, watch events,
    /// NOTIFY.
    Push,
    /// The reset of one stream (RST_STREAM).
    Reset,
    /// Connection management: handshake, ping, settings, window updates.
    Control,
    /// Bytes of a raw connection.
    Bytes,
}

/// The first message of a buffer.
#[derive(Clone, Debug)]
pub(super) struct Frame {
    pub(super) length: usize,
    pub(super) kind: Kind,
    pub(super) label: Option<Arc<str>>,
    /// The unit that several messages belong to: a gRPC stream, or a chunked HTTP message.
    pub(super) unit: Option<u64>,
    /// Whether it is the first message of its unit in this direction, without which the peer can't
    /// understand the rest.
    pub(super) opens: bool,
    /// The number of a request whose reply is matched by order.
    pub(super) turn: Option<u64>,
    /// The header block of an HTTP/2 frame, whose encoding depends on all blocks before it.
    pub(super) block: Option<grpc::Block>,
}

impl Frame {
    pub(super) fn new(length: usize, kind: Kind, label: Option<Arc<str>>) -> Frame {
        Frame {
            length,
            kind,
            label,
            unit: None,
            opens: false,
            turn: None,
            block: None,
        }
    }
}

/// The result of examining a buffer.
#[derive(Debug)]
pub(super) enum Step {
    /// The message is incomplete.
    More,
    Frame(Frame),
    /// Not this protocol, or no longer.
    Raw,
}

/// The state of one connection, for both directions, because replies are matched to requests.
pub(super) trait Framing: Send {
    /// Examines the bytes that were not consumed yet; never empty. After a [`Step::Frame`] the
    /// caller consumes that many bytes.
    fn next(&mut self, direction: Direction, bytes: &[u8]) -> Step;

    /// Reports that a request was passed on `copies` times instead of once.
    fn copies(&mut self, turn: u64, copies: u32);
}

/// Requests that wait for replies, which come in the same order.
pub(super) struct Turns<T> {
    waiting: VecDeque<(u64, T)>,
    next: u64,
}

impl<T> Default for Turns<T> {
    fn default() -> Turns<T> {
        Turns {
            waiting: VecDeque::new(),
            next: 0,
        }
    }
}

impl<T: Clone> Turns<T> {
    pub(super) fn push(&mut self, request: T) -> u64 {
        self.next += 1;
        self.waiting.push_back((self.next, request));
        self.next
    }

    pub(super) fn front(&self) -> Option<&T> {
        self.waiting.front().map(|(_, request)| request)
    }

    pub(super) fn front_mut(&mut self) -> Option<&mut T> {
        self.waiting.front_mut().map(|(_, request)| request)
    }

    pub(super) fn pop(&mut self) -> Option<T> {
        self.waiting.pop_front().map(|(_, request)| request)
    }

    /// A lost request gets no reply; a duplicated one gets two.
    pub(super) fn copies(&mut self, turn: u64, copies: u32) {
        let Some(at) = self.waiting.iter().position(|(it, _)| *it == turn) else {
            return;
        };
        match copies {
            0 => drop(self.waiting.remove(at)),
            _ => {
                let (_, request) = self.waiting[at].clone();
                for _ in 1..copies {
                    self.waiting.insert(at, (turn, request.clone()));
                }
            }
        }
    }
}

/// A framing with a fallback: once raw, the connection stays raw in both directions.
pub(super) struct Splitter {
    framing: Option<Box<dyn Framing>>,
}

impl Splitter {
    pub(super) fn new(protocol: Protocol) -> Splitter {
        let framing: Option<Box<dyn Framing>> = match protocol {
            Protocol::Raw => None,
            Protocol::Resp => Some(Box::<resp::Resp>::default()),
            Protocol::Http1 => Some(Box::<http1::Http1>::default()),
            Protocol::Grpc => Some(Box::<grpc::Grpc>::default()),
            Protocol::ZooKeeper => Some(Box::<zookeeper::ZooKeeper>::default()),
            Protocol::Postgres => Some(Box::<postgres::Postgres>::default()),
        };
        Splitter { framing }
    }

    pub(super) fn is_raw(&self) -> bool {
        self.framing.is_none()
    }

    /// Reports how often a message was passed on, if not once.
    pub(super) fn copies(&mut self, frame: &Frame, copies: u32) {
        if let (Some(framing), Some(turn)) = (&mut self.framing, frame.turn) {
            framing.copies(turn, copies);
        }
    }

    /// The next message of a buffer that is not empty; `None` if more bytes are needed.
    pub(super) fn next(&mut self, direction: Direction, bytes: &[u8]) -> Option<Frame> {
        if let Some(framing) = &mut self.framing {
            match framing.next(direction, bytes) {
                Step::More if bytes.len() <= MESSAGE_MAX => return None,
                Step::Frame(frame) if (1..=bytes.len()).contains(&frame.length) => {
                    return Some(frame);
                }
                _ => self.framing = None,
            }
        }
        Some(Frame::new(bytes.len(), Kind::Bytes, None))
    }
}

/// Four bytes as a big-endian number, if they are there.
pub(super) fn be_i32(bytes: &[u8], at: usize) -> Option<i32> {
    let four = bytes.get(at..at.checked_add(4)?)?;
    Some(i32::from_be_bytes(four.try_into().ok()?))
}
