//! Fenced keys: one transaction compares the mark with the token, and puts the new mark and the
//! data. Marks have 20 digits, so that etcd can compare them as text.
//!
//! The mark of a resource is `.palisade/fence/` + `NS/NAME`, its data `.palisade/data/` + the
//! same; with `namespace=` the data is the key NAME itself.

use std::sync::Arc;

use super::Inner;
use super::config;
use super::keys::Keys;
use super::proto::{Compare, KeyValue, LESS, RequestOp, TxnRequest, VALUE};
use super::txn::{created_at, delete, found, one, plain, put, read};
use palisade_core::engine::{Settings, Url};
use palisade_core::fence::{
    Fenced, Rule, SharedFence, Taken, Verdict, WriteToken, digits, read_digits,
};
use palisade_core::{Error, ErrorKind, Name, Result, Token};
use palisade_kit::fence_store::{FenceStore, Stored};

/// How often a write is retried because others created or removed the mark in between.
const TRIES: u32 = 20;

/// Opens the fenced storage of a cluster.
///
/// # Errors
/// As opening the engine.
pub async fn open(url: Url, settings: &Settings, rule: Rule) -> Result<SharedFence> {
    let inner = config::open(url, settings).await?;
    Ok(Arc::new(Stored::new(EtcdFence { inner, rule })))
}

struct EtcdFence {
    inner: Inner,
    rule: Rule,
}

/// The keys of a fenced resource.
struct Fencing {
    mark: Vec<u8>,
    data: Vec<u8>,
}

impl Fencing {
    /// # Errors
    /// As [`Keys::line`].
    fn of(keys: &Keys, resource: &Name) -> Result<Self> {
        // Refuses names that can't be used unchanged.
        keys.line(resource)?;
        let key = keys.scope(resource.as_str());
        let data = if keys.shared_with_others() {
            key.clone()
        } else {
            format!(".palisade/data/{key}")
        };
        Ok(Self {
            mark: format!(".palisade/fence/{key}").into_bytes(),
            data: data.into_bytes(),
        })
    }
}

impl EtcdFence {
    async fn txn(&self, request: TxnRequest) -> Result<(bool, Vec<Vec<KeyValue>>)> {
        let answer = self.inner.client.call("fence", request).await?;
        Ok((answer.succeeded, found(answer).collect()))
    }

    /// Does `steps` in one transaction if the token is accepted, and answers with what they read.
    async fn judged(
        &self,
        keys: &Fencing,
        token: WriteToken,
        steps: Vec<RequestOp>,
    ) -> Result<std::result::Result<Vec<Vec<KeyValue>>, Token>> {
        let number = token.stored()?;
        // etcd has no "at most" comparison, and an absent key is neither less nor greater.
        let above = match self.rule {
            Rule::Strict => number,
            _ => number.saturating_add(1),
        };
        let mut condition = value_below(&keys.mark, &digits(above));
        for _ in 0..TRIES {
            let request = TxnRequest {
                compare: vec![condition],
                success: steps.clone(),
                failure: vec![read(one(&keys.mark))],
            };
            let (accepted, found) = self.txn(request).await?;
            if accepted {
                return Ok(Ok(found));
            }
            let highest = found.first().and_then(|kvs| kvs.first());
            let highest = highest.map(token_of).transpose()?;
            if let Verdict::Stale { highest } = self.rule.judge(highest, token) {
                return Ok(Err(highest));
            }
            condition = match highest {
                None => created_at(&keys.mark, 0),
                Some(_) => value_below(&keys.mark, &digits(above)),
            };
        }
        let message = "others forget this resource and make it again all the time";
        Err(Error::new(ErrorKind::Unreachable, "fence", message))
    }
}

/// Puts the mark.
fn mark(keys: &Fencing, number: i64) -> RequestOp {
    put(keys.mark.clone(), digits(number).into_bytes(), 0)
}

impl FenceStore for EtcdFence {
    async fn judged(
        &self,
        resource: &Name,
        token: WriteToken,
        data: Option<Vec<u8>>,
    ) -> Result<Verdict> {
        let keys = Fencing::of(&self.inner.keys, resource)?;
        let mut steps = vec![mark(&keys, token.stored()?)];
        steps.extend(data.map(|data| put(keys.data.clone(), data, 0)));
        Ok(match self.judged(&keys, token, steps).await? {
            Ok(_) => Verdict::Accepted,
            Err(highest) => Verdict::Stale { highest },
        })
    }

    async fn take(&self, resource: &Name, token: WriteToken) -> Result<Taken> {
        let keys = Fencing::of(&self.inner.keys, resource)?;
        let raised = self
            .rule
            .mark_of_take(token)?
            .map(|number| mark(&keys, number));
        let steps = raised.into_iter().chain([read(one(&keys.data))]).collect();
        Ok(match self.judged(&keys, token, steps).await? {
            Ok(found) => Taken::Accepted {
                data: found.into_iter().flatten().next().map(|kv| kv.value),
            },
            Err(highest) => Taken::Stale { highest },
        })
    }

    async fn read(&self, resource: &Name) -> Result<Option<Fenced>> {
        let keys = Fencing::of(&self.inner.keys, resource)?;
        let both = plain(vec![read(one(&keys.mark)), read(one(&keys.data))]);
        let (_, found) = self.txn(both).await?;
        let mut found = found.into_iter().map(|kvs| kvs.into_iter().next());
        let (mark, data) = (found.next().flatten(), found.next().flatten());
        let Some(mark) = mark else { return Ok(None) };
        Ok(Some(Fenced {
            token: token_of(&mark)?,
            data: data.map(|kv| kv.value).unwrap_or_default(),
        }))
    }

    async fn highest(&self, resource: &Name) -> Result<Option<Token>> {
        let keys = Fencing::of(&self.inner.keys, resource)?;
        let (_, found) = self.txn(plain(vec![read(one(&keys.mark))])).await?;
        let mark = found.first().and_then(|kvs| kvs.first());
        mark.map(token_of).transpose()
    }

    async fn forget(&self, resource: &Name) -> Result<bool> {
        let keys = Fencing::of(&self.inner.keys, resource)?;
        let all = vec![read(one(&keys.mark)), delete(keys.mark), delete(keys.data)];
        let (_, found) = self.txn(plain(all)).await?;
        Ok(found.first().is_some_and(|kvs| !kvs.is_empty()))
    }

    fn rule(&self) -> Rule {
        self.rule
    }
}

/// True if the key exists and its value is below `value`, as text.
fn value_below(key: &[u8], value: &str) -> Compare {
    Compare {
        result: LESS,
        target: VALUE,
        key: key.to_vec(),
        value: Some(value.as_bytes().to_vec()),
        ..Default::default()
    }
}

fn token_of(mark: &KeyValue) -> Result<Token> {
    read_digits(&mark.value).ok_or_else(|| {
        let message = "the mark of this resource is damaged; put a token above all before, as 20 \
                       digits, at its key below .palisade/fence/";
        Error::new(ErrorKind::Unusable, "fence", message)
    })
}
