//! A server on a port of its own that answers what a test says, and a proxy that turns on its
//! client.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// What it sends: a beginning, and then the same for ever.
#[derive(Clone, Copy)]
pub(crate) struct Endless(pub(crate) &'static [u8], pub(crate) &'static [u8]);

impl Endless {
    /// Sends until the client has gone.
    async fn send(self, to: &mut TcpStream) {
        let mut next = self.0.to_vec();
        let more = self.1.repeat((64 << 10) / self.1.len().max(1));
        while to.write_all(&next).await.is_ok() {
            next.clone_from(&more);
        }
    }
}

/// Answers each connection, once something was asked on it, and closes it.
pub(crate) async fn answering(answer: &'static [u8]) -> SocketAddr {
    serving(move |mut client| async move {
        let mut asked = [0; 4096];
        if client.read(&mut asked).await.is_ok_and(|read| read > 0) {
            let _ = client.write_all(answer).await;
            let _ = client.shutdown().await;
            // Otherwise the close could overtake the answer.
            while client.read(&mut asked).await.is_ok_and(|read| read > 0) {}
        }
    })
    .await
}

/// Answers the first request of each connection without end.
pub(crate) async fn flooding(with: Endless) -> SocketAddr {
    serving(move |mut client| async move {
        if client.read(&mut [0; 4096]).await.is_ok_and(|read| read > 0) {
            with.send(&mut client).await;
        }
    })
    .await
}

pub(crate) async fn serving<F: Future<Output = ()> + Send + 'static>(
    serve: impl Fn(TcpStream) -> F + Send + 'static,
) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            tokio::spawn(serve(client));
        }
    });
    address
}

/// A proxy in front of a server. Once it has turned, it answers the next request on any connection
/// without end.
pub(crate) struct Turncoat {
    pub(crate) address: SocketAddr,
    turned: Arc<AtomicBool>,
}

impl Turncoat {
    pub(crate) async fn before(server: SocketAddr, with: Endless) -> Self {
        let turned = Arc::new(AtomicBool::new(false));
        let has_turned = Arc::clone(&turned);
        let address = serving(move |client| {
            let turned = Arc::clone(&has_turned);
            async move {
                if let Ok(server) = TcpStream::connect(server).await {
                    pass(client, server, &turned, with).await;
                }
            }
        })
        .await;
        Self { address, turned }
    }

    pub(crate) fn turn(&self) {
        self.turned.store(true, Ordering::SeqCst);
    }
}

async fn pass(mut client: TcpStream, mut server: TcpStream, turned: &AtomicBool, with: Endless) {
    let (mut asked, mut answered) = (vec![0; 64 << 10], vec![0; 64 << 10]);
    loop {
        tokio::select! {
            read = client.read(&mut asked) => match read {
                Ok(read @ 1..) if turned.load(Ordering::SeqCst) => {
                    let _ = read;
                    return with.send(&mut client).await;
                }
                Ok(read @ 1..) if server.write_all(&asked[..read]).await.is_ok() => {}
                _ => return,
            },
            read = server.read(&mut answered) => match read {
                Ok(read @ 1..) if client.write_all(&answered[..read]).await.is_ok() => {}
                _ => return,
            },
        }
    }
}
