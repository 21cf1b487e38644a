//! `Limit`: how much a server may send in one reply, and `Limited`: a stream that holds to it.
//!
//! The client library reads a reply to its end, whatever its size, and the replies to all requests
//! of a connection come on one stream. So the stream itself is read along: it knows where each
//! reply (or push) begins, and fails as soon as one announces or has more than the requests in
//! flight may be answered with. Then the connection is over, and [`Limit::error`] says why.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use palisade_core::Error;
use palisade_kit::Host;
use palisade_kit::replies::{REPLY, too_large};

/// The most that one reply on a connection may have now.
#[derive(Debug, Default)]
pub(super) struct Limit {
    /// What the requests in flight may have beyond [`REPLY`].
    room: AtomicUsize,
    /// The limit that a reply has exceeded; zero if none has.
    exceeded: AtomicUsize,
}

impl Limit {
    /// Allows larger replies until the guard is dropped.
    pub(super) fn expect(self: &Arc<Self>, more: usize) -> Room {
        self.room.fetch_add(more, Ordering::Relaxed);
        Room(Arc::clone(self), more)
    }

    fn most(&self) -> usize {
        REPLY.saturating_add(self.room.load(Ordering::Relaxed))
    }

    /// The error if a reply of `host` has exceeded its limit.
    pub(super) fn error(&self, operation: &'static str, host: &Host) -> Option<Error> {
        let most = self.exceeded.load(Ordering::Relaxed);
        (most > 0).then(|| too_large(operation, &format!("Redis at {host}"), most))
    }
}

/// A request in flight whose reply may be large.
#[must_use]
pub(super) struct Room(Arc<Limit>, usize);

impl Drop for Room {
    fn drop(&mut self) {
        self.0.room.fetch_sub(self.1, Ordering::Relaxed);
    }
}

/// A stream from a server whose replies are limited.
pub(super) struct Limited<S> {
    stream: S,
    limit: Arc<Limit>,
    replies: Replies,
}

impl<S> Limited<S> {
    pub(super) fn new(stream: S, limit: Arc<Limit>) -> Self {
        Self {
            stream,
            limit,
            replies: Replies::default(),
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Limited<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buffer.filled().len();
        let read = Pin::new(&mut this.stream).poll_read(cx, buffer);
        let most = this.limit.most();
        if !this.replies.fit(&buffer.filled()[before..], most) {
            this.limit.exceeded.store(most, Ordering::Relaxed);
            buffer.set_filled(before);
            let why = "the server sent more than any reply needs";
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::ConnectionAborted, why)));
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Limited<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Finds the ends of replies in RESP2 and RESP3.
#[derive(Debug)]
struct Replies {
    /// The bytes of the current reply so far.
    taken: usize,
    /// How many values the current reply still lacks.
    values: usize,
    /// How many bytes of a string are still to come, with its line end.
    string: usize,
    /// The current line, unless a string is read.
    line: Option<Line>,
}

/// The first line of a value, as far as it is read.
#[derive(Debug, Clone, Copy)]
struct Line {
    kind: u8,
    number: usize,
    /// A negative length: a null, which has nothing after it.
    null: bool,
}

impl Default for Replies {
    fn default() -> Self {
        Self {
            taken: 0,
            values: 1,
            string: 0,
            line: None,
        }
    }
}

impl Replies {
    /// Reads on; `false` when a reply has or announces more than `most` bytes. What is no RESP is a
    /// line without end, or the library refuses it.
    fn fit(&mut self, mut bytes: &[u8], most: usize) -> bool {
        while !bytes.is_empty() {
            let used = if self.string > 0 {
                self.read_string(bytes)
            } else {
                self.read_line(bytes)
            };
            bytes = &bytes[used..];
            self.taken = self.taken.saturating_add(used);
            // Every value takes three bytes at least.
            let announced = self.values.saturating_mul(3).saturating_add(self.string);
            if self.taken > most || announced > most.saturating_add(3) {
                return false;
            }
            if self.values == 0 {
                *self = Self::default();
            }
        }
        true
    }

    /// Reads a string, or a part of it; returns how many bytes.
    fn read_string(&mut self, bytes: &[u8]) -> usize {
        let used = self.string.min(bytes.len());
        self.string -= used;
        if self.string == 0 {
            self.values -= 1;
        }
        used
    }

    /// Reads a line, or a part of it; returns how many bytes.
    fn read_line(&mut self, bytes: &[u8]) -> usize {
        let end = bytes.iter().position(|byte| *byte == b'\n');
        let used = end.map_or(bytes.len(), |end| end + 1);
        let (mut line, rest) = match self.line {
            Some(line) => (line, &bytes[..used]),
            None => {
                let (kind, number, null) = (bytes[0], 0, false);
                (Line { kind, number, null }, &bytes[1..used])
            }
        };
        for byte in rest {
            match byte {
                b'-' => line.null = true,
                b'0'..=b'9' => {
                    let digit = usize::from(byte - b'0');
                    line.number = line.number.saturating_mul(10).saturating_add(digit);
                }
                _ => {}
            }
        }
        self.line = end.is_none().then_some(line);
        if end.is_some() {
            self.begin(line);
        }
        used
    }

    /// The first line of a value has ended.
    fn begin(&mut self, Line { kind, number, null }: Line) {
        let parts = match kind {
            b'$' | b'!' | b'=' if !null => {
                self.string = number.saturating_add(2);
                return;
            }
            b'*' | b'~' | b'>' if !null => number,
            b'%' if !null => number.saturating_mul(2),
            // An attribute precedes the value that it is about.
            b'|' if !null => number.saturating_mul(2).saturating_add(1),
            _ => 0,
        };
        self.values = (self.values - 1).saturating_add(parts);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether the replies fit, in whatever parts they come.
    fn fit(bytes: &[u8], most: usize) -> bool {
        let whole = Replies::default().fit(bytes, most);
        for part in 1..bytes.len() {
            let mut replies = Replies::default();
            let parts = bytes.chunks(part).all(|part| replies.fit(part, most));
            assert_eq!(parts, whole, "in parts of {part}");
        }
        whole
    }

    #[test]
    fn a_limit_is_for_each_reply() {
        let replies: [&[u8]; 12] = [
            b"+OK\r\n",
            b"-ERR 12 - no\r\n",
            b":-1234\r\n",
            b"$5\r\n\r\n$9\n\r\n",
            b"$0\r\n\r\n",
            b"$-1\r\n*-1\r\n_\r\n",
            b"*2\r\n$1\r\na\r\n*1\r\n:1\r\n",
            b"%1\r\n+a\r\n~1\r\n+b\r\n",
            b">2\r\n+message\r\n=7\r\ntxt:abc\r\n",
            b"|1\r\n+ttl\r\n:36\r\n$3\r\nabc\r\n",
            b",3.14\r\n#t\r\n(123\r\n",
            b"*0\r\n",
        ];
        let longest = replies.iter().map(|reply| reply.len()).max().unwrap();
        let stream = replies.concat().repeat(3);
        assert!(fit(&stream, longest), "each fits");
        for reply in replies {
            let mut ended = Replies::default();
            assert!(ended.fit(reply, longest));
            let at_start = (ended.taken, ended.values, ended.string);
            assert_eq!(at_start, (0, 1, 0), "{}", reply.escape_ascii());
        }
        assert!(fit(b"*2\r\n$1\r\na\r\n*1\r\n:1\r\n", 19));
        assert!(!fit(b"*2\r\n$1\r\na\r\n*1\r\n:1\r\n", 18));
    }

    #[test]
    fn what_announces_too_much_is_refused_before_it_comes() {
        let huge = "9".repeat(40);
        for begun in [
            "$1001\r\n".to_owned(),
            "*400\r\n".to_owned(),
            "%200\r\n".to_owned(),
            format!("${huge}\r\n"),
            format!("*{huge}\r\n"),
            format!("|{huge}\r\n"),
            // Nested, each of them small.
            "*99\r\n".repeat(4),
            // No reply at all, or one that goes on and on.
            "x".repeat(1001),
            format!("+{}", "x".repeat(1001)),
            "*1\r\n".repeat(300),
        ] {
            assert!(!fit(begun.as_bytes(), 1000), "{begun:.20}");
        }
    }

    #[test]
    fn room_is_given_while_it_is_needed() {
        let limit = Arc::new(Limit::default());
        let room = limit.expect(5);
        assert_eq!(limit.most(), REPLY + 5);
        drop(room);
        assert_eq!(limit.most(), REPLY);
    }
}
