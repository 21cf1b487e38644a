//! Fenced storage on real servers: every store passes one suite. On every store a writer that was
//! stopped between its check and its write is refused, while without the fence the second writer's
//! data is lost.

#![allow(clippy::unwrap_used)]

mod dropped;
mod guard;
mod http;
mod keys;
mod paused;
mod rows;
mod stores;
mod taken;

use palisade_testkit::lab::launch::{self, Running};

/// A server; `None`, with the reason reported, if it is not available here.
fn server(engine: &'static str) -> Option<Running> {
    launch::need(engine)
}

/// A connection of tokio-postgres to a server of the launcher.
async fn postgres(url: &str) -> tokio_postgres::Client {
    let connected = tokio_postgres::connect(url, tokio_postgres::NoTls).await;
    let (client, connection) = connected.unwrap();
    tokio::spawn(connection);
    client
}
