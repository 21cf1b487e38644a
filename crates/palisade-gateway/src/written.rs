//! `Written`: a connection with a time limit for what is written to it.
//!
//! A client that does not read keeps its response in memory, and its connection, for as long as it
//! likes. So a connection fails if a write makes no progress for `STILL`, or if less than 1 KiB was
//! written for each second in which writes were pending, over `WINDOW` of such time. Nothing counts
//! while no write is pending: a long poll and a stream of events may be silent.
//!
//! It wraps the socket itself, below TLS, which has a buffer of its own.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

/// How long a write may make no progress: longer than a phone loses its network for a moment.
const STILL: Duration = Duration::from_secs(30);
/// Over how much time of pending writes the rate counts.
const WINDOW: Duration = Duration::from_secs(60);
/// How much must be written in it.
const LEAST: usize = 60 * 1024;

/// See the module's documentation.
pub(crate) struct Written<S> {
    stream: S,
    /// Since when a write is pending without progress.
    since: Option<Instant>,
    /// For how long writes were pending, and how much was written, in this window.
    waited: Duration,
    bytes: usize,
    timer: Option<Pin<Box<Sleep>>>,
}

impl<S> Written<S> {
    pub(crate) fn new(stream: S) -> Self {
        Self {
            stream,
            since: None,
            waited: Duration::ZERO,
            bytes: 0,
            timer: None,
        }
    }

    /// Judges the result of a write.
    fn judge(
        &mut self,
        cx: &mut Context<'_>,
        wrote: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        match wrote {
            Poll::Ready(Ok(count)) => {
                if let Some(since) = self.since.take() {
                    self.waited += since.elapsed();
                    self.timer = None;
                }
                self.bytes += count;
                if self.bytes >= LEAST {
                    (self.waited, self.bytes) = (Duration::ZERO, 0);
                }
                wrote
            }
            Poll::Ready(Err(_)) => wrote,
            Poll::Pending => {
                let since = *self.since.get_or_insert_with(Instant::now);
                let ends = since + STILL.min(WINDOW.saturating_sub(self.waited));
                let timer = self
                    .timer
                    .get_or_insert_with(|| Box::pin(sleep_until(ends)));
                match timer.as_mut().poll(cx) {
                    Poll::Pending => Poll::Pending,
                    Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
                }
            }
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Written<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let wrote = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.judge(cx, wrote)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let wrote = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.judge(cx, wrote)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    // A socket has no buffer of its own to flush.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Written<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
    use tokio::time::sleep;

    use super::*;

    /// How long a write to a peer lasts that reads `count` bytes every `pause`.
    async fn lasts(count: usize, pause: Duration) -> Option<Duration> {
        let (ours, mut theirs) = duplex(4096);
        let mut written = Written::new(ours);
        let reader = tokio::spawn(async move {
            let mut buffer = vec![0; count];
            loop {
                sleep(pause).await;
                if theirs.read_exact(&mut buffer).await.is_err() {
                    return;
                }
            }
        });
        let began = Instant::now();
        let wrote = written.write_all(&[0; 512 * 1024]).await;
        reader.abort();
        let failed = wrote.is_err_and(|error| error.kind() == io::ErrorKind::TimedOut);
        failed.then(|| began.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_not_read_or_too_slowly_ends() {
        let second = Duration::from_secs(1);
        // Nothing, for a long time.
        assert_eq!(lasts(1, 1000 * second).await.unwrap().as_secs(), 30);
        // A little, again and again.
        let slow = lasts(1, 29 * second).await.unwrap();
        assert!((59..=61).contains(&slow.as_secs()), "{slow:?}");
        let slow = lasts(500, second).await.unwrap();
        assert!((59..=61).contains(&slow.as_secs()), "{slow:?}");
        // Slow, but enough.
        assert_eq!(lasts(1200, second).await, None);
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_counts_while_no_write_is_pending() {
        let (ours, mut theirs) = duplex(4096);
        let mut written = Written::new(ours);
        for _ in 0..10 {
            written.write_all(b"event").await.unwrap();
            sleep(Duration::from_secs(3600)).await;
            theirs.read_exact(&mut [0; 5]).await.unwrap();
        }
    }
}
