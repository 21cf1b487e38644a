//! `Dial`: how a member is connected to, and `Wire`: a connection with as few packets as can be.
//!
//! The HTTP/2 library flushes the head of a request before its body is there, and large frames
//! apart from what follows them: two or three packets, each of which wakes the server. Every
//! request of this engine has a body that comes at once; so a head is kept until the next frame.
//! A server written in Go measures the line with a ping for every request, but for one only while
//! another is not answered: so the answers to pings are kept for a moment, which halves what we
//! send and spares us most pings. It tells a dead peer by a ping too, and waits for seconds.
//! Invariant: nothing else is kept; whatever is written after a head takes it along, and answers
//! to pings go when their time has come, whatever happens until then.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::codegen::Service;
use tonic::codegen::http::Uri;

use super::frames::{Frames, PONG};
use crate::core::engine::BoxFuture;

/// How much is put together before it is written.
const MOST: usize = 64 << 10;

/// How long the answer to a ping is kept: many requests, and far less than anyone waits for it.
const KEPT: Duration = Duration::from_millis(100);

/// Connects by TCP, and speaks TLS if it is told how, and to whom.
#[derive(Clone)]
pub(super) struct Dial {
    pub(super) tls: Option<(TlsConnector, ServerName<'static>)>,
}

impl Service<Uri> for Dial {
    type Response = TokioIo<Wire>;
    type Error = io::Error;
    type Future = BoxFuture<io::Result<Self::Response>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let tls = self.tls.clone();
        Box::pin(async move {
            let host = uri.host().unwrap_or_default();
            let host = host.trim_start_matches('[').trim_end_matches(']');
            let port = uri.port_u16().unwrap_or(super::PORT);
            let stream = TcpStream::connect((host, port)).await?;
            stream.set_nodelay(true)?;
            let stream = match tls {
                None => Stream::Plain(stream),
                Some((tls, whom)) => Stream::Tls(Box::new(tls.connect(whom, stream).await?)),
            };
            Ok(TokioIo::new(Wire::new(stream)))
        })
    }
}

/// Bytes to and from a member.
enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// Does the same with either.
macro_rules! either {
    ($stream:expr, $bytes:ident => $done:expr) => {
        match $stream {
            Stream::Plain(stream) => {
                let $bytes = Pin::new(stream);
                $done
            }
            Stream::Tls(stream) => {
                let $bytes = Pin::new(stream);
                $done
            }
        }
    };
}

/// A connection, written to when a request is whole.
pub(super) struct Wire {
    stream: Stream,
    frames: Frames,
    /// What is not written yet.
    out: Vec<u8>,
    /// Answers to pings, and when they go.
    pongs: Vec<u8>,
    due: Pin<Box<Sleep>>,
    /// Whether some are in `out`, or on their way.
    overdue: bool,
}

impl Wire {
    fn new(stream: Stream) -> Self {
        Self {
            stream,
            frames: Frames::default(),
            out: Vec::new(),
            pongs: Vec::new(),
            due: Box::pin(tokio::time::sleep(Duration::ZERO)),
            overdue: false,
        }
    }

    /// Takes what is to be written, and puts the answer to a ping aside.
    fn take(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let (now, after) = bytes.split_at(self.frames.read(bytes));
            self.out.extend_from_slice(now);
            bytes = after;
            // A part of it may be on its way already.
            if self.frames.end_in_a_pong() && self.out.len() >= PONG {
                if self.pongs.is_empty() {
                    self.due.as_mut().reset(Instant::now() + KEPT);
                }
                let pong = self.out.split_off(self.out.len() - PONG);
                self.pongs.extend(pong);
            }
        }
    }

    /// Writes what there is, and sees it off.
    fn poll_out(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.out.is_empty() {
            let written =
                ready!(either!(&mut self.stream, bytes => bytes.poll_write(cx, &self.out)))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.out.drain(..written);
        }
        ready!(either!(&mut self.stream, bytes => bytes.poll_flush(cx)))?;
        self.overdue = false;
        Poll::Ready(Ok(()))
    }

    /// Sends the answers to pings when they are due; until then, and until they are gone, the
    /// task is woken for it. Whoever drives a connection always reads it, and calls this.
    fn poll_pongs(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        if !self.pongs.is_empty()
            && self.frames.end_whole()
            && self.due.as_mut().poll(cx).is_ready()
        {
            self.out.append(&mut self.pongs);
            self.overdue = true;
        }
        match self.overdue.then(|| self.poll_out(cx)) {
            Some(Poll::Ready(sent)) => sent,
            _ => Ok(()),
        }
    }
}

impl AsyncRead for Wire {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.poll_pongs(cx)?;
        either!(&mut self.stream, bytes => bytes.poll_read(cx, buffer))
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
        self.take(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.frames.end_in_a_head() {
            return Poll::Ready(Ok(()));
        }
        self.poll_pongs(cx)?;
        self.poll_out(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        this.out.append(&mut this.pongs);
        ready!(self.poll_out(cx))?;
        either!(&mut self.stream, bytes => bytes.poll_shutdown(cx))
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::super::frames::PREFACE;
    use super::super::frames::tests::frame;
    use super::*;

    /// A wire that has said its preface, and what is heard of it.
    async fn pair() -> (Wire, TcpStream) {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await;
        let (mut peer, _) = listener.accept().await.unwrap();
        let mut wire = Wire::new(Stream::Plain(stream.unwrap()));
        wire.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            .await
            .unwrap();
        wire.flush().await.unwrap();
        peer.read_exact(&mut [0; PREFACE]).await.unwrap();
        (wire, peer)
    }

    async fn hear(peer: &mut TcpStream, length: usize) -> Vec<u8> {
        let mut heard = vec![0; length];
        let whole = peer.read_exact(&mut heard);
        let whole = tokio::time::timeout(Duration::from_secs(10), whole).await;
        whole.expect("in time").unwrap();
        heard
    }

    #[tokio::test]
    async fn an_answer_to_a_ping_lets_requests_pass_and_goes_by_itself() {
        let (pong, body) = (frame(6, 1, b"12345678"), frame(0, 1, b"message"));
        for cut in [1, 5, 17, 4096] {
            let (mut wire, mut peer) = pair().await;
            let said = [&pong[..], &body, &pong].concat();
            for bytes in said.chunks(cut) {
                wire.write_all(bytes).await.unwrap();
            }
            wire.flush().await.unwrap();
            assert_eq!(hear(&mut peer, body.len()).await, body);
            // Whoever drives a connection reads it, and nothing else.
            let reading = tokio::spawn(async move { wire.read_u8().await });
            let both = [&pong[..], &pong].concat();
            assert_eq!(hear(&mut peer, both.len()).await, both);
            drop(peer);
            assert!(reading.await.unwrap().is_err());
        }
    }

    #[tokio::test]
    async fn an_answer_to_a_ping_is_not_lost_at_the_end_nor_put_into_a_request() {
        let pong = frame(6, 1, b"12345678");
        let (head, body) = (frame(1, 4, b"path"), frame(0, 1, b"message"));
        let (mut wire, mut peer) = pair().await;
        wire.write_all(&[&head[..], &pong].concat()).await.unwrap();
        wire.flush().await.unwrap();
        wire.write_all(&body).await.unwrap();
        wire.shutdown().await.unwrap();
        let mut heard = Vec::new();
        peer.read_to_end(&mut heard).await.unwrap();
        assert_eq!(heard, [head, body, pong].concat());
    }
}
