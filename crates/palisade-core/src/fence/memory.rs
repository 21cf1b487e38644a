//! `MemoryFence`: fenced values in this process. For tests and demonstrations: it loses its tokens
//! with the process, which a fence for real data must not.

use std::collections::HashMap;
use std::sync::Arc;

use futures_util::FutureExt;
use parking_lot::Mutex;

use super::{Fence, Fenced, Rule, Taken, Verdict, WriteToken};
use crate::core::engine::BoxFuture;
use crate::core::error::Result;
use crate::core::name::Name;
use crate::core::token::Token;

/// Fenced values in a map that clones share.
#[derive(Debug, Clone, Default)]
pub struct MemoryFence {
    rule: Rule,
    values: Arc<Mutex<HashMap<Name, Value>>>,
}

/// A mark, and the data if any was written.
#[derive(Debug)]
struct Value {
    token: Token,
    data: Option<Vec<u8>>,
}

impl MemoryFence {
    /// A fence that accepts each token only once.
    pub fn strict() -> Self {
        Self {
            rule: Rule::Strict,
            ..Self::default()
        }
    }

    /// Judges a token. If it is accepted, raises the mark to `mark` and runs `then` on the data.
    fn judged<T>(
        &self,
        resource: &Name,
        token: WriteToken,
        mark: Option<i64>,
        then: impl FnOnce(&mut Option<Vec<u8>>) -> T,
    ) -> std::result::Result<T, Token> {
        let mut values = self.values.lock();
        let highest = values.get(resource).map(|value| value.token);
        if let Verdict::Stale { highest } = self.rule.judge(highest, token) {
            return Err(highest);
        }
        let Some(mark) = mark.map(|mark| Token(mark.unsigned_abs())) else {
            // Nothing older can come, so nothing was written either.
            return Ok(then(&mut None));
        };
        let fresh = || Value {
            token: mark,
            data: None,
        };
        let value = values.entry(resource.clone()).or_insert_with(fresh);
        value.token = mark;
        Ok(then(&mut value.data))
    }

    /// Writes data, or leaves it as it is.
    fn written(
        &self,
        resource: &Name,
        token: WriteToken,
        data: Option<Vec<u8>>,
    ) -> Result<Verdict> {
        let mark = Some(token.stored()?);
        let written = self.judged(resource, token, mark, |value| {
            if data.is_some() {
                *value = data;
            }
        });
        Ok(match written {
            Ok(()) => Verdict::Accepted,
            Err(highest) => Verdict::Stale { highest },
        })
    }
}

#[deny(clippy::missing_trait_methods)]
impl Fence for MemoryFence {
    fn write(
        &self,
        resource: &Name,
        token: WriteToken,
        data: Vec<u8>,
    ) -> BoxFuture<Result<Verdict>> {
        let (fence, resource) = (self.clone(), resource.clone());
        async move { fence.written(&resource, token, Some(data)) }.boxed()
    }

    fn accept(&self, resource: &Name, token: WriteToken) -> BoxFuture<Result<Verdict>> {
        let (fence, resource) = (self.clone(), resource.clone());
        async move { fence.written(&resource, token, None) }.boxed()
    }

    fn take(&self, resource: &Name, token: WriteToken) -> BoxFuture<Result<Taken>> {
        let (fence, resource) = (self.clone(), resource.clone());
        async move {
            let mark = fence.rule.mark_of_take(token)?;
            let taken = fence.judged(&resource, token, mark, |data| data.clone());
            Ok(match taken {
                Ok(data) => Taken::Accepted { data },
                Err(highest) => Taken::Stale { highest },
            })
        }
        .boxed()
    }

    fn read(&self, resource: &Name) -> BoxFuture<Result<Option<Fenced>>> {
        let value = self.values.lock().get(resource).map(|value| Fenced {
            token: value.token,
            data: value.data.clone().unwrap_or_default(),
        });
        async move { Ok(value) }.boxed()
    }

    fn highest(&self, resource: &Name) -> BoxFuture<Result<Option<Token>>> {
        let highest = self.values.lock().get(resource).map(|value| value.token);
        async move { Ok(highest) }.boxed()
    }

    fn forget(&self, resource: &Name) -> BoxFuture<Result<bool>> {
        let known = self.values.lock().remove(resource).is_some();
        async move { Ok(known) }.boxed()
    }

    fn rule(&self) -> Rule {
        self.rule
    }
}
