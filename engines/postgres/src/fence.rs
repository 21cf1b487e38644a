//! Fenced storage in the lock's database, and helpers for fenced tables of the user's own.
//!
//! A resource is a row of `fenced`, which has the same triggers that any table can have
//! ([`palisade_kit::sql`]): the statement that writes also checks the token.

use std::sync::Arc;

use tokio_postgres::Transaction;
use tokio_postgres::types::{ToSql, Type};

use super::client::Client;
use super::config::{Config, OPTIONS};
use super::error;
use super::statements::{Parameters, Verb};
use palisade_core::engine::{Settings, Url};
use palisade_core::fence::{Fenced, Rule, SharedFence, Taken, Verdict, WriteToken};
use palisade_core::{Name, Result, Token};
use palisade_kit::fence_store::{FenceStore, Stored};
use palisade_kit::sql;

const FENCE: &str = "fence";

/// Opens the fenced storage of a database; nothing is sent before the first verb.
///
/// # Errors
/// As opening the lease table.
pub fn open(mut url: Url, settings: &Settings, rule: Rule) -> Result<SharedFence> {
    // Options of the locks, in one engine or the other, which do not concern the fence.
    for option in ["key", "layout", "max_connections"] {
        url.take(option);
    }
    let config = Config::take(&mut url, settings)?;
    url.finish(OPTIONS)?;
    let client = Arc::new(Client::new(config, settings));
    Ok(Arc::new(Stored::new(PostgresFence { client, rule })))
}

struct PostgresFence {
    client: Arc<Client>,
    rule: Rule,
}

impl PostgresFence {
    async fn kept(&self, resource: &Name, with_data: bool) -> Result<Option<Fenced>> {
        let parameters: Parameters<'_> = &[&self.client.namespace, &resource.as_str(), &with_data];
        let rows = self.client.ask(FENCE, Verb::FenceRead, parameters).await?;
        let Some(row) = rows.first() else {
            return Ok(None);
        };
        let (Ok(token), Ok(data)) = (row.try_get::<_, i64>(0), row.try_get(1)) else {
            return error::unreadable(FENCE);
        };
        let data: Option<Vec<u8>> = data;
        Ok(Some(Fenced {
            token: Token(token.unsigned_abs()),
            data: data.unwrap_or_default(),
        }))
    }
}

impl FenceStore for PostgresFence {
    async fn judged(
        &self,
        resource: &Name,
        token: WriteToken,
        data: Option<Vec<u8>>,
    ) -> Result<Verdict> {
        let (strict, number) = (self.rule == Rule::Strict, token.stored()?);
        let (namespace, name) = (&self.client.namespace, resource.as_str());
        let write: Parameters<'_> = &[namespace, &name, &data, &number, &strict];
        let accept: Parameters<'_> = &[namespace, &name, &number, &strict];
        let asked = match data {
            Some(_) => self.client.ask(FENCE, Verb::FenceWrite, write).await,
            None => self.client.ask(FENCE, Verb::FenceAccept, accept).await,
        };
        match asked {
            Ok(rows) if !rows.is_empty() => return Ok(Verdict::Accepted),
            Ok(_) => {}
            Err(error) if error::is_stale(&error) => {}
            Err(error) => return Err(error),
        }
        let kept = self.kept(resource, false).await?;
        let highest = kept.map_or(token.token(), |kept| kept.token);
        Ok(Verdict::Stale { highest })
    }

    async fn take(&self, resource: &Name, token: WriteToken) -> Result<Taken> {
        let (strict, number) = (self.rule == Rule::Strict, token.stored()?);
        let Some(mark) = self.rule.mark_of_take(token)? else {
            // No older token exists, and there is nothing to raise.
            let kept = self.kept(resource, false).await?;
            return Ok(match self.rule.judge(kept.map(|kept| kept.token), token) {
                Verdict::Accepted => Taken::Accepted { data: None },
                Verdict::Stale { highest } => Taken::Stale { highest },
            });
        };
        let (namespace, name) = (&self.client.namespace, resource.as_str());
        let take: Parameters<'_> = &[namespace, &name, &mark, &number, &strict];
        match self.client.ask(FENCE, Verb::FenceTake, take).await {
            Ok(rows) => match rows.first().map(|row| row.try_get(0)) {
                Some(Ok(data)) => return Ok(Taken::Accepted { data }),
                Some(Err(_)) => return error::unreadable(FENCE),
                None => {}
            },
            Err(error) if error::is_stale(&error) => {}
            Err(error) => return Err(error),
        }
        let kept = self.kept(resource, false).await?;
        let highest = kept.map_or(token.token(), |kept| kept.token);
        Ok(Taken::Stale { highest })
    }

    async fn read(&self, resource: &Name) -> Result<Option<Fenced>> {
        self.kept(resource, true).await
    }

    async fn highest(&self, resource: &Name) -> Result<Option<Token>> {
        let kept = self.kept(resource, false).await?;
        Ok(kept.map(|kept| kept.token))
    }

    async fn forget(&self, resource: &Name) -> Result<bool> {
        let parameters: Parameters<'_> = &[&self.client.namespace, &resource.as_str()];
        let asked = self.client.ask(FENCE, Verb::FenceForget, parameters);
        let rows = asked.await?;
        let known = rows.first().and_then(|row| row.try_get(0).ok());
        known.map_or_else(|| error::unreadable(FENCE), Ok)
    }

    fn rule(&self) -> Rule {
        self.rule
    }
}

/// Presents a token for everything that a transaction does to fenced tables from now on, including
/// DELETE and TRUNCATE. A statement may still present its own token in the column `fence`.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`](palisade_core::ErrorKind::InvalidArgument) for a number that is not a
/// token; errors of the server.
pub async fn present(transaction: &Transaction<'_>, token: WriteToken) -> Result<()> {
    let number = token.stored()?.to_string();
    let parameters: [(&(dyn ToSql + Sync), Type); 1] = [(&number, Type::TEXT)];
    let presented = transaction.client().query_typed(sql::PRESENT, &parameters);
    presented
        .await
        .map_err(|error| error::failed(FENCE, &error))?;
    Ok(())
}

/// The meaning of a failed write to a fenced table: [`Verdict::Stale`] when its token was refused,
/// `None` for any other reason.
pub fn refused(error: &tokio_postgres::Error) -> Option<Verdict> {
    let db = error.as_db_error()?;
    sql::refused(db.code().code(), db.detail())
}
