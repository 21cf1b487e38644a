//! `Connector`: how a member is connected to: TCP, and TLS on top of it if the URL asks for it.
//!
//! TLS is set up here rather than by the gRPC library, so that its errors reach us as they are
//! and the one crypto provider is ours.

use std::io;
use std::task::{Context, Poll};

use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tonic::codegen::Service;
use tonic::codegen::http::Uri;

use crate::core::engine::BoxFuture;

/// Connects by TCP, and speaks TLS if it is told how, and to whom.
#[derive(Clone)]
pub(super) struct Connector {
    pub(super) tls: Option<(TlsConnector, ServerName<'static>)>,
}

/// Bytes to and from a member.
pub(super) trait Bytes: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Bytes for T {}

impl Service<Uri> for Connector {
    type Response = TokioIo<Box<dyn Bytes>>;
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
            let bytes: Box<dyn Bytes> = match tls {
                None => Box::new(stream),
                Some((tls, whom)) => Box::new(tls.connect(whom, stream).await?),
            };
            Ok(TokioIo::new(bytes))
        })
    }
}
