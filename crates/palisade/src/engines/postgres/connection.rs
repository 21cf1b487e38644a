//! `Connection`: one connection, driven by a task of the runtime that uses it, which can change.
//!
//! A session lock is as alive as its connection. If only the runtime that made a connection could
//! drive it, a caller that blocks its runtime would lose its locks; if it lived with the keeper,
//! every request would cross threads twice. So it lives with its user, and another runtime that
//! must use it takes it over, without the help of the one it is taken from.
//!
//! Invariant: one driver at a time polls; an older one finds another number and stops.

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
use tokio_postgres::{AsyncMessage, Client, Error};

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
    fn move_here(&self) -> io::Result<()> {
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

/// The client library's half that does the I/O, encrypted or not.
pub(super) trait Protocol: Send {
    /// What the server says unasked; answers go to those who asked.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<AsyncMessage, Error>>>;
}

impl<S, T> Protocol for tokio_postgres::Connection<S, T>
where
    S: AsyncRead + AsyncWrite + Unpin + Send,
    T: AsyncRead + AsyncWrite + Unpin + Send,
{
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<AsyncMessage, Error>>> {
        self.poll_message(cx)
    }
}

/// What the server says unasked.
pub(super) enum Notice<'a> {
    /// The text of a notification.
    Text(&'a str),
    /// The connection is over; its client knows.
    End,
}

/// Who hears it, on the task that drives the connection.
pub(super) type Listener = Arc<dyn Fn(Notice<'_>) + Send + Sync>;

/// A connection and what drives it.
pub(super) struct Connection {
    pub(super) client: Client,
    /// Which of the server's hosts it leads to.
    pub(super) host: usize,
    driver: Arc<Driver>,
}

struct Driver {
    /// `None` when it is over: then all that was asked fails at once.
    protocol: Mutex<Option<Box<dyn Protocol>>>,
    socket: Socket,
    listener: Listener,
    home: Mutex<Option<(Id, AbortHandle)>>,
    /// Rises with every move.
    moves: AtomicU64,
}

impl Connection {
    /// Drives a connection from now on, in the runtime that this is called in.
    pub(super) fn new(
        client: Client,
        protocol: Box<dyn Protocol>,
        socket: Socket,
        host: usize,
        listener: Listener,
    ) -> Self {
        let driver = Arc::new(Driver {
            protocol: Mutex::new(Some(protocol)),
            socket,
            listener,
            home: Mutex::new(None),
            moves: AtomicU64::new(0),
        });
        driver.move_here();
        Self {
            client,
            host,
            driver,
        }
    }

    /// The client, with its connection driven by the runtime that this is called in.
    pub(super) fn here(&self) -> &Client {
        self.driver.move_here();
        &self.client
    }
}

impl Driver {
    fn move_here(self: &Arc<Self>) {
        let here = Handle::current().id();
        let mut home = self.home.lock();
        match &*home {
            Some((id, _)) if *id == here => return,
            // Nothing would wake it any more, and it keeps the connection.
            Some((_, task)) => task.abort(),
            None => {}
        }
        let number = self.moves.fetch_add(1, Ordering::SeqCst) + 1;
        // Nobody polls while it moves: a driver that comes now waits, and finds another number.
        let protocol = self.protocol.lock();
        // A socket that can't be registered answers everything with an error, and is over.
        let _ = self.socket.move_here();
        drop(protocol);
        let task = tokio::spawn(Arc::clone(self).drive(number));
        *home = Some((here, task.abort_handle()));
    }

    async fn drive(self: Arc<Self>, number: u64) {
        loop {
            let message = poll_fn(|cx| {
                let mut protocol = self.protocol.lock();
                if self.moves.load(Ordering::SeqCst) != number {
                    return Poll::Ready(None);
                }
                match protocol.as_mut() {
                    Some(protocol) => protocol.poll(cx).map(Some),
                    None => Poll::Ready(None),
                }
            });
            match message.await {
                None => return,
                Some(Some(Ok(AsyncMessage::Notification(notification)))) => {
                    (self.listener)(Notice::Text(notification.payload()));
                }
                Some(Some(Ok(_))) => {}
                Some(Some(Err(_)) | None) => {
                    let over = self.protocol.lock().take();
                    drop(over);
                    return (self.listener)(Notice::End);
                }
            }
        }
    }
}
