//! `RedisFence`: fenced strings and hashes, one script call each.
//!
//! The highest token is next to the data, in the same hash slot, and neither expires. What Redis
//! forgets (a failover to a lagging replica, a restart without persistence, eviction of keys) the
//! fence forgets too: its guarantee is that of the engine.

use std::sync::Arc;

use redis::{Cmd, FromRedisValue};

use super::client::{Client, Script, unexpected_reply};
use palisade_core::engine::{BoxFuture, Settings, Url};
use palisade_core::fence::{Fence, Fenced, Rule, Taken, Verdict, WriteToken, digits, read_digits};
use palisade_core::{Error, ErrorKind, Name, Result, Token};

/// Fenced strings and hashes in a Redis or Valkey server.
#[derive(Clone)]
pub struct RedisFence {
    client: Arc<Client>,
    rule: Rule,
}

impl std::fmt::Debug for RedisFence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let rule = &self.rule;
        f.debug_struct("RedisFence").field("rule", rule).finish()
    }
}

/// The fields of a hash and their values.
pub type Fields = Vec<(String, Vec<u8>)>;

impl RedisFence {
    /// Connects to the server or servers of a `redis:` or `rediss:` URL, also behind Sentinel
    /// (`redis+sentinel:`) or in a Cluster (`redis+cluster:`).
    ///
    /// # Errors
    /// As `palisade::connect`.
    pub async fn open(url: &str) -> Result<Self> {
        let mut url = Url::parse(url)?;
        let settings = url.take_settings()?;
        let known = [super::FACTORY, super::SENTINEL, super::CLUSTER];
        let known = known.iter().flat_map(|factory| factory.info.schemes);
        if !known.into_iter().any(|scheme| *scheme == url.scheme) {
            let message = "this is no redis: URL";
            return Err(Error::new(ErrorKind::Config, "fence", message));
        }
        Self::connect(url, &settings, Rule::default()).await
    }

    /// Connects to the server of a URL whose common options were taken.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub async fn connect(url: Url, settings: &Settings, rule: Rule) -> Result<Self> {
        let client = super::connect(url, settings).await?;
        Ok(Self { client, rule })
    }

    /// The same, but each token is accepted only once.
    #[must_use]
    pub fn strict(self) -> Self {
        Self {
            rule: Rule::Strict,
            ..self
        }
    }

    /// The key of a resource's data, for programs that read it.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidName`] with an empty namespace, for a name that can't be a key.
    pub fn data_key(&self, resource: &Name) -> Result<String> {
        Ok(self.client.keys.fenced(resource)?.key)
    }

    /// Sets fields of a hash and keeps the others, unless the token is stale; both are atomic. A
    /// resource is a string or a hash.
    ///
    /// # Errors
    /// As [`Fence::write`]; [`ErrorKind::InvalidArgument`] for no fields.
    pub async fn write_fields(
        &self,
        resource: &Name,
        token: WriteToken,
        fields: &Fields,
    ) -> Result<Verdict> {
        // Lua can unpack about 8,000 arguments.
        if !(1..=3000).contains(&fields.len()) {
            let message = "a write sets 1 to 3000 fields";
            return Err(Error::new(ErrorKind::InvalidArgument, "fence", message));
        }
        let add = |command: &mut Cmd| {
            for (field, value) in fields {
                command.arg(field).arg(value);
            }
        };
        self.judged("hash", resource, token, add).await
    }

    /// As [`Fence::take`], for a hash.
    ///
    /// # Errors
    /// As there; [`ErrorKind::Unusable`] when the resource is a string.
    pub async fn take_fields(&self, resource: &Name, token: WriteToken) -> Result<Taken<Fields>> {
        let taken: Taken<Fields> = self.taken("take_fields", resource, token).await?;
        Ok(match taken {
            Taken::Accepted { data } => Taken::Accepted {
                // A hash without fields does not exist.
                data: data.filter(|fields| !fields.is_empty()),
            },
            stale @ Taken::Stale { .. } => stale,
        })
    }

    /// Reads a hash, with the highest token accepted.
    ///
    /// # Errors
    /// [`ErrorKind::Unusable`] when the resource is a string; errors of the server.
    pub async fn read_fields(&self, resource: &Name) -> Result<Option<(Token, Fields)>> {
        let read: Option<(String, Fields)> = self.ask("fields", resource, |_| {}).await?;
        read.map(|(mark, fields)| Ok((token_of(&mark)?, fields)))
            .transpose()
    }

    /// Checks a token, raises the mark and reads, in one script.
    async fn taken<T: FromRedisValue>(
        &self,
        what: &str,
        resource: &Name,
        token: WriteToken,
    ) -> Result<Taken<T>> {
        let once = u8::from(self.rule == Rule::Strict);
        let mark = self
            .rule
            .mark_of_take(token)?
            .map_or_else(String::new, digits);
        let number = digits(token.stored()?);
        let keys = self.client.keys.fenced(resource)?;
        let mut link = self.client.link(Some(&keys)).await?;
        let add = |command: &mut Cmd| {
            command.arg(what).arg(&number).arg(once).arg(&mark);
        };
        let run = self.client.run(&mut link, Script::Fence, &keys, add);
        let (stands, data): (String, Option<T>) = run.await?;
        if !stands.is_empty() {
            let highest = token_of(&stands)?;
            return Ok(Taken::Stale { highest });
        }
        self.client.replicated("fence", &link).await?;
        Ok(Taken::Accepted { data })
    }

    async fn ask<T: FromRedisValue>(
        &self,
        what: &str,
        resource: &Name,
        arguments: impl Fn(&mut Cmd),
    ) -> Result<T> {
        let keys = self.client.keys.fenced(resource)?;
        let mut link = self.client.link(Some(&keys)).await?;
        let add = |command: &mut Cmd| {
            command.arg(what);
            arguments(command);
        };
        self.client.run(&mut link, Script::Fence, &keys, add).await
    }

    /// Checks a token, and writes the data if it is accepted.
    async fn judged(
        &self,
        what: &str,
        resource: &Name,
        token: WriteToken,
        data: impl Fn(&mut Cmd),
    ) -> Result<Verdict> {
        let (number, once) = (token.stored()?, u8::from(self.rule == Rule::Strict));
        let keys = self.client.keys.fenced(resource)?;
        let mut link = self.client.link(Some(&keys)).await?;
        let add = |command: &mut Cmd| {
            command.arg(what).arg(digits(number)).arg(once);
            data(command);
        };
        let run = self.client.run(&mut link, Script::Fence, &keys, add);
        let mark: String = run.await?;
        if !mark.is_empty() {
            let highest = token_of(&mark)?;
            return Ok(Verdict::Stale { highest });
        }
        self.client.replicated("fence", &link).await?;
        Ok(Verdict::Accepted)
    }
}

#[deny(clippy::missing_trait_methods)]
impl Fence for RedisFence {
    fn write(
        &self,
        resource: &Name,
        token: WriteToken,
        data: Vec<u8>,
    ) -> BoxFuture<Result<Verdict>> {
        let (fence, resource) = (self.clone(), resource.clone());
        Box::pin(async move {
            let add = |command: &mut Cmd| {
                command.arg(&data);
            };
            fence.judged("write", &resource, token, add).await
        })
    }

    fn accept(&self, resource: &Name, token: WriteToken) -> BoxFuture<Result<Verdict>> {
        let (fence, resource) = (self.clone(), resource.clone());
        Box::pin(async move { fence.judged("accept", &resource, token, |_| {}).await })
    }

    fn take(&self, resource: &Name, token: WriteToken) -> BoxFuture<Result<Taken>> {
        let (fence, resource) = (self.clone(), resource.clone());
        Box::pin(async move { fence.taken("take", &resource, token).await })
    }

    fn read(&self, resource: &Name) -> BoxFuture<Result<Option<Fenced>>> {
        let (fence, resource) = (self.clone(), resource.clone());
        Box::pin(async move {
            let read: Option<(String, Vec<u8>)> = fence.ask("read", &resource, |_| {}).await?;
            read.map(|(mark, data)| {
                let token = token_of(&mark)?;
                Ok(Fenced { token, data })
            })
            .transpose()
        })
    }

    fn highest(&self, resource: &Name) -> BoxFuture<Result<Option<Token>>> {
        let (fence, resource) = (self.clone(), resource.clone());
        Box::pin(async move {
            let mark: String = fence.ask("highest", &resource, |_| {}).await?;
            match mark.as_str() {
                "" => Ok(None),
                mark => token_of(mark).map(Some),
            }
        })
    }

    fn forget(&self, resource: &Name) -> BoxFuture<Result<bool>> {
        let (fence, resource) = (self.clone(), resource.clone());
        Box::pin(async move {
            let removed: u32 = fence.ask("forget", &resource, |_| {}).await?;
            Ok(removed > 0)
        })
    }

    fn rule(&self) -> Rule {
        self.rule
    }
}

fn token_of(mark: &str) -> Result<Token> {
    read_digits(mark.as_bytes()).ok_or_else(|| unexpected_reply("fence"))
}
