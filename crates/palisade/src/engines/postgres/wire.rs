//! `Wire`: a connection that is driven wherever it is asked, and can change runtimes.
//!
//! A session lock is as alive as its connection. If a connection could only be driven by the
//! runtime that made it, a caller that blocks its runtime would lose its locks; if it lived with
//! the keeper, every request would cross threads twice. So it lives with whoever uses it, and
//! whoever must use it from another runtime takes it over, without the help of the one it is taken
//! from.
//!
//! Invariant: one driver at a time polls to the end; an older one finds another number and stops.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::runtime::{Handle, Id};
use tokio::task::AbortHandle;
use tokio_postgres::{AsyncMessage, Connection, Error};

use super::mail::Mail;

/// The most that a server may send after we have last sent something. The client library keeps a
/// message until it has all of it, and a first byte too many makes it one of a gigabyte. A survey
/// of 100,000 claims takes less.
const LONGEST_ANSWER: u64 = 64 << 20;

/// A socket that can be moved to the reactor of another runtime, and that ends when its server
/// sends without end.
#[derive(Clone)]
pub(super) struct Socket {
    stream: Arc<Mutex<Option<TcpStream>>>,
    /// How much has come since we last sent something.
    received: Arc<AtomicU64>,
}

impl Socket {
    pub(super) fn new(stream: TcpStream) -> Self {
        Self {
            stream: Arc::new(Mutex::new(Some(stream))),
            received: Arc::default(),
        }
    }

    /// Registers it with the runtime that this is called in.
    fn settle_here(&self) -> io::Result<()> {
        let mut slot = self.stream.lock();
        if let Some(stream) = slot.take() {
            *slot = Some(TcpStream::from_std(stream.into_std()?)?);
        }
        Ok(())
    }

    fn poll<T>(
        &self,
        io: impl FnOnce(Pin<&mut TcpStream>) -> Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        match self.stream.lock().as_mut() {
            Some(stream) => io(Pin::new(stream)),
            // It could not be registered anywhere.
            None => Poll::Ready(Err(io::ErrorKind::NotConnected.into())),
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = self.poll(|stream| stream.poll_read(cx, buffer));
        let more = u64::try_from(buffer.filled().len() - before).unwrap_or(u64::MAX);
        let received = self.received.fetch_add(more, Ordering::Relaxed) + more;
        if received > LONGEST_ANSWER {
            let why = "the server sends more than any answer has";
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, why)));
        }
        read
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.received.store(0, Ordering::Relaxed);
        self.poll(|stream| stream.poll_write(cx, bytes))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll(|stream| stream.poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll(|stream| stream.poll_shutdown(cx))
    }
}

/// A connection, encrypted or not.
pub(super) trait Driven: Send {
    /// What the server says unasked; everything else is answered on the way.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<AsyncMessage, Error>>>;
}

impl<S, T> Driven for Connection<S, T>
where
    S: AsyncRead + AsyncWrite + Unpin + Send,
    T: AsyncRead + AsyncWrite + Unpin + Send,
{
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<AsyncMessage, Error>>> {
        self.poll_message(cx)
    }
}

/// A connection and where it lives.
pub(super) struct Wire {
    connection: Mutex<Box<dyn Driven>>,
    socket: Socket,
    mail: Arc<Mail>,
    home: Mutex<Option<(Id, AbortHandle)>>,
    /// Rises with every move.
    moves: AtomicU64,
}

impl Wire {
    /// Takes a connection; it is driven from the first [`Wire::settle_here`] on.
    pub(super) fn new(connection: Box<dyn Driven>, socket: Socket, mail: Arc<Mail>) -> Arc<Self> {
        Arc::new(Self {
            connection: Mutex::new(connection),
            socket,
            mail,
            home: Mutex::new(None),
            moves: AtomicU64::new(0),
        })
    }

    /// Lives in the runtime that this is called in.
    pub(super) fn settle_here(self: &Arc<Self>) {
        let here = Handle::current().id();
        let mut home = self.home.lock();
        match &*home {
            Some((id, _)) if *id == here => return,
            // Nothing would wake it any more, and it keeps the connection.
            Some((_, driver)) => driver.abort(),
            None => {}
        }
        let number = self.moves.fetch_add(1, Ordering::SeqCst) + 1;
        // Nobody polls while it moves: a driver that comes now waits, and finds another number.
        let connection = self.connection.lock();
        // A socket that can't be registered answers everything with an error, and is over.
        let _ = self.socket.settle_here();
        drop(connection);
        let driver = tokio::spawn(Arc::clone(self).drive(number));
        *home = Some((here, driver.abort_handle()));
    }

    async fn drive(self: Arc<Self>, number: u64) {
        loop {
            let message = poll_fn(|cx| {
                let mut connection = self.connection.lock();
                match self.moves.load(Ordering::SeqCst) == number {
                    true => connection.poll(cx).map(Some),
                    false => Poll::Ready(None),
                }
            })
            .await;
            match message {
                None => return,
                Some(Some(Ok(AsyncMessage::Notification(notification)))) => {
                    self.mail.deliver(notification.payload());
                }
                Some(Some(Ok(_))) => {}
                Some(Some(Err(_)) | None) => {
                    drop(self.mail.end_when_dropped());
                    return;
                }
            }
        }
    }
}
