//! `Connection`: one connection, driven by a task of the runtime that uses it. Another runtime can
//! take it over.
//!
//! A session lock lives as long as its connection. If only the runtime that opened the connection
//! could drive it, a caller that blocks its runtime would lose its locks. If the keeper's runtime
//! drove it, every request would cross threads twice. So the caller's runtime drives it, and
//! another runtime that needs it takes it over without the cooperation of the first.
//!
//! Invariant: only one driver polls at a time. A driver whose number is outdated stops.

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

/// The most that a server may send after our last write. The client library buffers a message until
/// it is complete, and one corrupt length byte can announce a gigabyte. A survey of 100,000 claims
/// takes less than this.
const LONGEST_ANSWER: u64 = 64 << 20;

/// A socket that can be moved to the reactor of another runtime. It fails when the server sends
/// more than [`LONGEST_ANSWER`].
#[derive(Clone)]
pub(super) struct Socket {
    stream: Arc<Mutex<Option<TcpStream>>>,
    /// The bytes received since our last write.
    received: Arc<AtomicU64>,
}

impl Socket {
    pub(super) fn new(stream: TcpStream) -> Self {
        Self {
            stream: Arc::new(Mutex::new(Some(stream))),
            received: Arc::default(),
        }
    }

    /// Registers the socket with the current runtime.
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
            // A move has failed: the socket could not be registered.
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
            let why = "the server sent more than any reply needs";
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

/// The half of the client library that does the I/O, encrypted or not.
pub(super) trait Protocol: Send {
    /// Asynchronous messages from the server; replies go to their requests.
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

/// An event that is not a reply.
pub(super) enum Notice<'a> {
    /// The payload of a NOTIFY.
    Text(&'a str),
    /// The connection has ended; its client knows.
    End,
}

/// Receives notices on the task that drives the connection.
pub(super) type Listener = Arc<dyn Fn(Notice<'_>) + Send + Sync>;

/// A connection and its driver.
pub(super) struct Connection {
    pub(super) client: Client,
    /// The index of its host.
    pub(super) host: usize,
    driver: Arc<Driver>,
}

struct Driver {
    /// `None` once it has ended; then all pending requests fail at once.
    protocol: Mutex<Option<Box<dyn Protocol>>>,
    socket: Socket,
    listener: Listener,
    home: Mutex<Option<(Id, AbortHandle)>>,
    /// Incremented with every move; the number of the current driver.
    moves: AtomicU64,
}

impl Connection {
    /// Drives a connection in the current runtime.
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

    /// The client, after its connection was moved to the current runtime.
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
            // After the move nothing would wake this task, and it would keep the connection alive.
            Some((_, task)) => task.abort(),
            None => {}
        }
        let number = self.moves.fetch_add(1, Ordering::SeqCst) + 1;
        // Nobody polls during the move: a driver that is about to poll waits for this lock, and
        // then finds its number outdated.
        let protocol = self.protocol.lock();
        // A socket that can't be registered fails every request, which ends the connection.
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
