//! Connections that go silent, and servers that send endlessly.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use palisade::ErrorKind;
use palisade_testkit::lab::proxy::Proxies;

use super::{SOON, connect, server, throughout};

/// Existing connections go silent, new ones work: holds survive, waiters are served.
#[tokio::test]
async fn a_silent_connection_costs_no_lock() {
    let server = need!(server());
    let proxies = Proxies::before(server.url()).unwrap();
    let client = connect(&format!("{}?ttl=3s", proxies.url())).await;
    let near = connect(server.url()).await;
    let busy = near.mutex("busy").lock().await.unwrap();
    let hold = client.mutex("x").lock().await.unwrap();
    let lock = client.mutex("busy");
    let waiter = tokio::spawn(async move { lock.lock().await });
    for _ in 0..3 {
        proxies.silence();
        throughout(Duration::from_secs(4), || {
            assert!(hold.is_valid(), "lost with one connection");
        })
        .await;
    }
    busy.release().await.unwrap();
    let next = tokio::time::timeout(SOON * 2, waiter).await.unwrap();
    assert!(next.unwrap().unwrap().is_valid());
}

/// A fake server that sends endlessly is disconnected before it fills the memory.
#[tokio::test]
async fn a_server_that_floods_is_given_up() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let sent = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&sent);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut hello = [0; 8];
            stream.read_exact(&mut hello).unwrap();
            // The letter of a notice, and then a length of 1.1 GB.
            let mut bytes = vec![b'A'; 1 << 20];
            bytes[0] = b'N';
            while stream.write_all(&bytes).is_ok() {
                counter.fetch_add(1 << 20, Ordering::SeqCst);
            }
        }
    });
    let url = format!("postgres://palisade@{address}/postgres?connect_timeout=60s");
    let client = connect(&url).await;
    let lock = client.mutex("x");
    let refused = tokio::time::timeout(SOON * 6, lock.try_lock())
        .await
        .unwrap();
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Unreachable);
    let sent = sent.load(Ordering::SeqCst);
    assert!(sent < 200 << 20, "{sent} bytes were taken");
}
