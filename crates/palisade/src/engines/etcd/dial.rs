//! `Dial`: how a member is connected to, and `Wire`: a connection that sends a request as one
//! packet.
//!
//! The HTTP/2 library flushes the head of a request before its body is there, and large frames
//! apart from what follows them: two or three packets, each of which wakes the server. Every
//! request of this engine has a body that comes at once; so a head is kept until the next frame.
//! Invariant: nothing else is kept, and whatever is written next takes it along.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tonic::codegen::Service;
use tonic::codegen::http::Uri;

use crate::core::engine::BoxFuture;

/// How much is put together before it is written.
const MOST: usize = 64 << 10;

/// Connects by TCP.
#[derive(Clone)]
pub(super) struct Dial {
    /// Whether frames can be told apart: they can't under TLS, which is spoken above.
    pub(super) plain: bool,
}

impl Service<Uri> for Dial {
    type Response = TokioIo<Wire>;
    type Error = io::Error;
    type Future = BoxFuture<io::Result<Self::Response>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let frames = self.plain.then(Frames::default);
        Box::pin(async move {
            let host = uri.host().unwrap_or_default();
            let host = host.trim_start_matches('[').trim_end_matches(']');
            let port = uri.port_u16().unwrap_or(super::PORT);
            let stream = TcpStream::connect((host, port)).await?;
            stream.set_nodelay(true)?;
            Ok(TokioIo::new(Wire {
                stream,
                frames,
                out: Vec::new(),
            }))
        })
    }
}

/// A TCP connection, written to when a request is whole.
pub(super) struct Wire {
    stream: TcpStream,
    frames: Option<Frames>,
    /// What is not written yet.
    out: Vec<u8>,
}

impl Wire {
    fn poll_out(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.out.is_empty() {
            let written = ready!(Pin::new(&mut self.stream).poll_write(cx, &self.out))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.out.drain(..written);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for Wire {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Wire {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.out.len() >= MOST {
            ready!(self.poll_out(cx))?;
        }
        let this = &mut *self;
        let Some(frames) = &mut this.frames else {
            return Pin::new(&mut this.stream).poll_write(cx, bytes);
        };
        frames.read(bytes);
        this.out.extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.frames.as_ref().is_some_and(Frames::end_in_a_head) {
            return Poll::Ready(Ok(()));
        }
        ready!(self.poll_out(cx))?;
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_out(cx))?;
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// What a client says before its first frame.
const PREFACE: usize = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".len();
/// Length, type, flags, stream.
const HEAD: usize = 9;
const HEADERS: u8 = 1;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

/// Follows the frames of what is written, however it is cut.
struct Frames {
    head: [u8; HEAD],
    /// How much of the next head is there.
    got: usize,
    /// How much of the current frame, or of the preface, is still to come.
    rest: usize,
}

impl Default for Frames {
    fn default() -> Self {
        Self {
            head: [0; HEAD],
            got: 0,
            rest: PREFACE,
        }
    }
}

impl Frames {
    fn read(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            if self.rest > 0 {
                let (_, after) = bytes.split_at(self.rest.min(bytes.len()));
                self.rest -= bytes.len() - after.len();
                bytes = after;
                continue;
            }
            if self.got == HEAD {
                self.got = 0;
            }
            let (now, after) = bytes.split_at((HEAD - self.got).min(bytes.len()));
            self.head[self.got..self.got + now.len()].copy_from_slice(now);
            self.got += now.len();
            bytes = after;
            if self.got == HEAD {
                let [a, b, c, ..] = self.head;
                self.rest = u32::from_be_bytes([0, a, b, c]) as usize;
            }
        }
    }

    /// Whether the last frame is whole, and the head of a request whose body follows.
    fn end_in_a_head(&self) -> bool {
        let (kind, flags) = (self.head[3], self.head[4]);
        let whole = self.got == HEAD && self.rest == 0;
        whole && kind == HEADERS && flags & (END_HEADERS | END_STREAM) == END_HEADERS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
        let length = (payload.len() as u32).to_be_bytes();
        let mut frame = vec![length[1], length[2], length[3], kind, flags, 0, 0, 0, 1];
        frame.extend_from_slice(payload);
        frame
    }

    #[test]
    fn only_the_head_of_a_request_whose_body_follows_is_kept() {
        let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        let (settings, ping) = (frame(4, 0, b""), frame(6, 1, b"12345678"));
        let (head, body) = (frame(1, 4, b"path"), frame(0, 1, b"message"));
        let alone = frame(1, 5, b"path");
        // A message that looks like a head.
        let sly = frame(0, 1, &head);
        for (said, kept) in [
            (vec![], false),
            (vec![&settings], false),
            (vec![&head], true),
            (vec![&head, &body], false),
            (vec![&ping, &head], true),
            (vec![&head, &ping], false),
            (vec![&alone], false),
            (vec![&head, &sly], false),
            (vec![&head, &sly, &head], true),
            (vec![&frame(1, 0, b"longer")], false),
        ] {
            let said: Vec<u8> = [&preface]
                .into_iter()
                .chain(said)
                .flatten()
                .copied()
                .collect();
            for cut in [1, 3, 10, 4096] {
                let mut frames = Frames::default();
                said.chunks(cut).for_each(|bytes| frames.read(bytes));
                assert_eq!(frames.end_in_a_head(), kept, "{said:?} by {cut}");
            }
            // Cut anywhere else, it is not whole.
            if kept {
                let mut frames = Frames::default();
                frames.read(&said[..said.len() - 1]);
                assert!(!frames.end_in_a_head());
            }
        }
    }
}
