//! Fenced storage on real servers: every store passes one suite, and on every store a writer that
//! was stopped between its check and its write is refused, while the same without the fence loses
//! what the second one wrote.

#![allow(clippy::unwrap_used)]

mod guard;
mod http;
mod paused;
mod rows;
mod stores;

use palisade_testkit::lab::launch::{self, Running};

/// A server, or `None` when it can't be had here, which is told.
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
