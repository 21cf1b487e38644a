//! Whether a transaction pooler stands in between: one that gives every transaction another
//! server connection, so that nothing of a session (LISTEN, prepared statements, advisory locks,
//! settings) stays where it was put.
//!
//! Two looks in a row may find the same server by chance. So a second connection occupies a
//! server with an open transaction: a pooler gives it ours, which was used last, and gives us
//! another one then.

use std::sync::Arc;

use tokio_postgres::Client;

use super::fault;
use super::mail::Mail;
use super::schema::first_cell;
use super::server::Server;
use crate::core::error::{Error, Kind, Result};
use crate::core::url::Url;

/// What stands between us and the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Between {
    /// Nothing that matters: a session stays a session.
    Nothing,
    /// A pooler that takes it apart.
    Pooler,
}

impl Between {
    /// Takes option `pooler` out; `None` is to find out.
    ///
    /// # Errors
    /// [`Kind::Config`] for another value.
    pub(super) fn take(url: &mut Url) -> Result<Option<Self>> {
        match url.take("pooler").as_deref() {
            None | Some("auto") => Ok(None),
            Some("none") => Ok(Some(Self::Nothing)),
            Some("transaction") => Ok(Some(Self::Pooler)),
            Some(_) => Err(Error::new(
                Kind::Config,
                "connect",
                "option pooler must be auto, none or transaction",
            )),
        }
    }
}

/// Finds out what `client` talks through.
///
/// # Errors
/// As connecting.
pub(super) async fn probe(server: &Server, client: &Client) -> Result<Between> {
    let first = backend(client, "SELECT pg_backend_pid()").await?;
    if backend(client, "SELECT pg_backend_pid()").await? != first {
        return Ok(Between::Pooler);
    }
    let other = match server.connect(Arc::new(Mail::default())).await {
        Ok(other) => other,
        // A server with no connection to spare has no pooler in front.
        Err(_) => return Ok(Between::Nothing),
    };
    let occupied = backend(&other, "BEGIN; SELECT pg_backend_pid()").await?;
    let second = backend(client, "SELECT pg_backend_pid()").await?;
    let _ = other.batch_execute("ROLLBACK").await;
    match occupied == first || second != first {
        true => Ok(Between::Pooler),
        false => Ok(Between::Nothing),
    }
}

async fn backend(client: &Client, sql: &str) -> Result<String> {
    let rows = client.simple_query(sql).await;
    let rows = rows.map_err(|error| fault::reading("connect", &error))?;
    match first_cell(&rows) {
        Some(pid) => Ok(pid.to_owned()),
        None => fault::unreadable("connect"),
    }
}
