//! `Timed`: a connection whose heads must come in time.
//!
//! Hyper has one limit for a head that has begun and for the silence before it. Pools of clients
//! and balancers keep a connection for a minute, and a request on one that is just being closed is
//! in doubt; a head that has begun has no reason to take long. So hyper's limit is that of the
//! silence, and the head has one here. A new connection has said nothing yet that is worth keeping
//! it for: its first head counts from the start.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

/// See the module's text.
pub(crate) struct Timed<S> {
    stream: S,
    limit: Duration,
    phase: Arc<Mutex<Phase>>,
    /// Only for a head that does not come in one piece.
    timer: Option<Pin<Box<Sleep>>>,
}

/// What a connection is at.
#[derive(Debug, Clone, Copy)]
enum Phase {
    Silent,
    /// A head has begun, and is not whole.
    Head(Instant),
    /// A request has come, and its answer has not.
    Answering,
}

/// Says what a connection is at.
#[derive(Clone)]
pub(crate) struct Phases(Arc<Mutex<Phase>>);

impl<S> Timed<S> {
    /// A connection whose heads may take so long.
    pub(crate) fn new(stream: S, limit: Duration) -> (Self, Phases) {
        let phase = Arc::new(Mutex::new(Phase::Head(Instant::now())));
        let phases = Phases(Arc::clone(&phase));
        let timed = Self {
            stream,
            limit,
            phase,
            timer: None,
        };
        (timed, phases)
    }
}

impl Phases {
    /// A head has come, and `answer` is what it gets.
    pub(crate) async fn answering<T>(&self, answer: impl Future<Output = T>) -> T {
        *self.0.lock() = Phase::Answering;
        let answer = answer.await;
        *self.0.lock() = Phase::Silent;
        answer
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Timed<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.stream).poll_read(cx, buffer);
        let phase = *self.phase.lock();
        match phase {
            Phase::Silent if read.is_ready() => {
                *self.phase.lock() = Phase::Head(Instant::now());
                self.timer = None;
            }
            Phase::Head(began) if read.is_pending() => {
                let ends = began + self.limit;
                let timer = self
                    .timer
                    .get_or_insert_with(|| Box::pin(sleep_until(ends)));
                ready!(timer.as_mut().poll(cx));
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            _ => {}
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Timed<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
