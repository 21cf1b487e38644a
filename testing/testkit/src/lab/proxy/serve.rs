//! The proxy's thread: its own runtime, a listener, a task per connection.
//!
//! The proxy keeps its port for its whole life, even while it refuses: a second socket is bound to
//! it and never listens. Closing the listener then makes the kernel refuse connections, and no
//! other program gets the port meanwhile.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc as blocking;
use std::time::Duration;

use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::mpsc;

use super::{Shared, connection};

const BACKLOG: u32 = 1024;

/// Long enough not to spin when descriptors run out, short enough not to be noticed afterwards.
const ACCEPT_AGAIN: Duration = Duration::from_millis(20);

/// A command to the listener, answered when it has been executed.
pub(super) enum Command {
    Refuse(blocking::Sender<()>),
    Accept(blocking::Sender<()>),
}

/// The body of the thread: serves until the sender of commands is dropped.
pub(super) fn run(
    shared: Arc<Shared>,
    orders: mpsc::UnboundedReceiver<Command>,
    ready: &blocking::Sender<io::Result<SocketAddr>>,
) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    match runtime {
        // Dropping the runtime drops the tasks, and with them all sockets.
        Ok(runtime) => runtime.block_on(serve(shared, orders, ready)),
        Err(error) => drop(ready.send(Err(error))),
    }
}

async fn serve(
    shared: Arc<Shared>,
    mut orders: mpsc::UnboundedReceiver<Command>,
    ready: &blocking::Sender<io::Result<SocketAddr>>,
) {
    let (_place, addr, listener) = match open() {
        Ok(opened) => opened,
        Err(error) => return drop(ready.send(Err(error))),
    };
    if ready.send(Ok(addr)).is_err() {
        return;
    }
    let mut listener = Some(listener);
    loop {
        tokio::select! {
            biased;
            order = orders.recv() => match order {
                None => return,
                Some(Command::Refuse(done)) => {
                    listener = None;
                    let _ = done.send(());
                }
                Some(Command::Accept(done)) => {
                    if listener.is_none() {
                        listener = listen(addr).ok();
                    }
                    let _ = done.send(());
                }
            },
            client = accept(listener.as_ref()) => {
                let number = shared.accepted.fetch_add(1, Ordering::SeqCst) + 1;
                tokio::spawn(connection::run(shared.clone(), number, client));
            }
        }
    }
}

fn open() -> io::Result<(TcpSocket, SocketAddr, TcpListener)> {
    let place = socket((Ipv4Addr::LOCALHOST, 0).into())?;
    let addr = place.local_addr()?;
    Ok((place, addr, listen(addr)?))
}

fn socket(addr: SocketAddr) -> io::Result<TcpSocket> {
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseaddr(true)?;
    socket.bind(addr)?;
    Ok(socket)
}

fn listen(addr: SocketAddr) -> io::Result<TcpListener> {
    socket(addr)?.listen(BACKLOG)
}

/// The next connection; never resolves without a listener.
async fn accept(listener: Option<&TcpListener>) -> TcpStream {
    let Some(listener) = listener else {
        return std::future::pending().await;
    };
    loop {
        match listener.accept().await {
            Ok((client, _)) => return client,
            Err(_) => tokio::time::sleep(ACCEPT_AGAIN).await,
        }
    }
}
