//! Detects a pooler that shares few server sessions among many clients, so that session state
//! (LISTEN, prepared statements, advisory locks, settings) does not stay with the client.
//!
//! When a connection starts, the server announces the process that serves it (BackendKeyData, for
//! cancelling), and `pg_backend_pid()` stays that process to the end. A pooler has no fixed process
//! to announce, so it makes up a number. One comparison on one connection is enough, whatever other
//! clients do. Comparing the backend of two statements would work only by luck.

use std::future::{Ready, ready};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::FutureExt;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_postgres::Client;
use tokio_postgres::tls::{ChannelBinding, TlsConnect, TlsStream};

use super::error;
use super::schema::first_cell;
use palisade_core::engine::{Url, config_error};
use palisade_core::{Error, ErrorKind, Result};

/// What is between the client and the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Between {
    /// Nothing that matters: a session stays with its client.
    Nothing,
    /// A pooler that shares sessions, or may do so.
    Pooler,
}

impl Between {
    /// Takes the option `pooler` out of the URL; `None` means to probe.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for another value.
    pub(super) fn take(url: &mut Url) -> Result<Option<Self>> {
        match url.take("pooler").as_deref() {
            None | Some("auto") => Ok(None),
            Some("none" | "session") => Ok(Some(Self::Nothing)),
            Some("transaction") => Ok(Some(Self::Pooler)),
            Some(_) => Err(config_error(
                "option pooler must be auto, none, session or transaction",
            )),
        }
    }
}

/// The error for session locks behind a pooler that shares sessions.
pub(super) fn no_session_locks(operation: &'static str) -> Error {
    let message = "there is a pooler in front of the server, and advisory locks belong to sessions; name the server itself, or use postgres://; set pooler=session only if the pooler is in session mode";
    Error::new(ErrorKind::Unsupported, operation, message)
}

/// Finds out whether `client` talks through a pooler.
pub(super) async fn probe(client: &Client) -> Result<Between> {
    let rows = client.simple_query("SELECT pg_backend_pid()").await;
    let rows = rows.map_err(|error| error::failed("connect", &error))?;
    let Some(pid) = first_cell(&rows).and_then(|cell| cell.parse::<i32>().ok()) else {
        return error::unreadable("connect");
    };
    let same = announced(client) == Some(pid);
    Ok(if same {
        Between::Nothing
    } else {
        Between::Pooler
    })
}

/// The process that was announced at the start of the connection. The client library keeps it only
/// for cancelling, so it is read from the cancel request: length, code, process and secret, four
/// bytes each.
pub(super) fn announced(client: &Client) -> Option<i32> {
    let tap = Tap::default();
    let token = client.cancel_token();
    // A `Tap` never blocks, so neither does this.
    token
        .cancel_query_raw(tap.clone(), tap.clone())
        .now_or_never()?
        .ok()?;
    let sent = tap.0.lock();
    let process = sent.last_chunk::<8>()?.first_chunk::<4>()?;
    Some(i32::from_be_bytes(*process))
}

/// Records what is written. It accepts a request for TLS, but does not encrypt.
#[derive(Clone, Default)]
struct Tap(Arc<Mutex<Vec<u8>>>);

impl AsyncRead for Tap {
    fn poll_read(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        buffer.put_slice(b"S");
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Tap {
    fn poll_write(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.0.lock().extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

impl TlsStream for Tap {
    fn channel_binding(&self) -> ChannelBinding {
        ChannelBinding::none()
    }
}

impl TlsConnect<Self> for Tap {
    type Stream = Self;
    type Error = io::Error;
    type Future = Ready<io::Result<Self>>;

    fn connect(self, stream: Self) -> Self::Future {
        ready(Ok(stream))
    }
}
