//! `Timed`: a connection with a time limit for request heads.
//!
//! Hyper has one limit for both the idle time before a head and the head itself. Client pools and
//! load balancers keep an idle connection for a minute, and a request on a connection that is just
//! being closed has an unknown outcome, so the idle limit must be long. A head that has begun has
//! no reason to take long. Therefore hyper's limit is that of the idle time, and the limit of the
//! head is here. On a new connection the first head counts from the start.
//!
//! Hyper also takes the end of what a client sends for the end of the client. One that has sent its
//! request and closed its half of the connection still gets the response: until then the end is
//! held back. (A client that is gone looks the same, so its request lasts as long as it may wait.)
//! A stream of events has no end, so it ends with what its client sends.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

/// See the module's documentation.
pub(crate) struct Timed<S> {
    stream: S,
    limit: Duration,
    phase: Arc<Mutex<Phase>>,
    /// Only for a head that does not arrive in one piece.
    timer: Option<Pin<Box<Sleep>>>,
}

/// The phase of a connection.
#[derive(Debug, Clone, Copy)]
enum Phase {
    Silent,
    /// A head has begun, and is not complete.
    Head(Instant),
    /// A head has arrived, and its body has not.
    Body,
    /// A request has arrived, and its response is not finished.
    Answering,
}

/// Tracks the phase of a connection.
#[derive(Clone)]
pub(crate) struct Phases(Arc<Mutex<Phase>>);

impl<S> Timed<S> {
    /// A connection whose heads may take this long.
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
    /// Records that a head has arrived, and possibly all of the request; `answer` is its response.
    pub(crate) async fn answering<T>(&self, arrived: bool, answer: impl Future<Output = T>) -> T {
        *self.0.lock() = if arrived {
            Phase::Answering
        } else {
            Phase::Body
        };
        let answer = answer.await;
        *self.0.lock() = Phase::Silent;
        answer
    }

    /// Records that the body has arrived.
    pub(crate) fn arrived(&self) {
        *self.0.lock() = Phase::Answering;
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Timed<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buffer);
        let phase = *self.phase.lock();
        match phase {
            // The end of the response wakes this task, and reads again.
            Phase::Answering
                if matches!(read, Poll::Ready(Ok(()))) && buffer.filled().len() == before =>
            {
                return Poll::Pending;
            }
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
