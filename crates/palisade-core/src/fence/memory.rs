//! `MemoryFence`: fenced values in this process. For tests and demonstrations: it loses its tokens
//! with the process, which a fence for real data must not.

use std::collections::HashMap;
use std::sync::Arc;

use futures_util::FutureExt;
use parking_lot::Mutex;

use super::{Fence, Fenced, Rule, Verdict, WriteToken};
use crate::core::engine::BoxFuture;
use crate::core::error::Result;
use crate::core::name::Name;
use crate::core::token::Token;

/// Fenced values in a map that clones share.
#[derive(Debug, Clone, Default)]
pub struct MemoryFence {
    rule: Rule,
    values: Arc<Mutex<HashMap<Name, Fenced>>>,
}

impl MemoryFence {
    /// A fence that accepts each token only once.
    pub fn strict() -> Self {
        Self {
            rule: Rule::Strict,
            ..Self::default()
        }
    }

    /// Judges a token, and changes the value if it is accepted.
    fn judged(
        &self,
        resource: &Name,
        token: WriteToken,
        change: impl FnOnce(&mut Fenced),
    ) -> Result<Verdict> {
        token.stored()?;
        let mut values = self.values.lock();
        let highest = values.get(resource).map(|value| value.token);
        let verdict = self.rule.judge(highest, token);
        if verdict == Verdict::Accepted {
            let token = token.token();
            let fresh = || Fenced {
                token,
                data: Vec::new(),
            };
            let value = values.entry(resource.clone()).or_insert_with(fresh);
            value.token = token;
            change(value);
        }
        Ok(verdict)
    }
}

impl Fence for MemoryFence {
    fn write(
        &self,
        resource: &Name,
        token: WriteToken,
        data: Vec<u8>,
    ) -> BoxFuture<Result<Verdict>> {
        let (fence, resource) = (self.clone(), resource.clone());
        async move { fence.judged(&resource, token, |value| value.data = data) }.boxed()
    }

    fn accept(&self, resource: &Name, token: WriteToken) -> BoxFuture<Result<Verdict>> {
        let (fence, resource) = (self.clone(), resource.clone());
        async move { fence.judged(&resource, token, |_| {}) }.boxed()
    }

    fn read(&self, resource: &Name) -> BoxFuture<Result<Option<Fenced>>> {
        let value = self.values.lock().get(resource).cloned();
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
