//! `MemoryFence`: fenced values of this process. For tests and demonstrations: it forgets its
//! tokens with the process, which a fence for real data must not.

use std::collections::HashMap;
use std::sync::Arc;

use futures_util::FutureExt;
use parking_lot::Mutex;

use super::{Fence, Fenced, Rule, Verdict};
use crate::core::engine::BoxFuture;
use crate::core::error::Result;
use crate::core::name::Name;
use crate::core::token::Token;

/// Fenced values in a map. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct MemoryFence {
    rule: Rule,
    values: Arc<Mutex<HashMap<Name, Fenced>>>,
}

impl MemoryFence {
    /// A fence that takes each token once.
    pub fn strict() -> Self {
        Self {
            rule: Rule::Newer,
            ..Self::default()
        }
    }
}

impl Fence for MemoryFence {
    fn write(&self, resource: &Name, token: Token, data: Vec<u8>) -> BoxFuture<Result<Verdict>> {
        let (fence, resource) = (self.clone(), resource.clone());
        async move {
            let mut values = fence.values.lock();
            let verdict = fence
                .rule
                .judge(values.get(&resource).map(|value| value.token), token);
            if verdict == Verdict::Accepted {
                values.insert(resource, Fenced { token, data });
            }
            Ok(verdict)
        }
        .boxed()
    }

    fn read(&self, resource: &Name) -> BoxFuture<Result<Option<Fenced>>> {
        let value = self.values.lock().get(resource).cloned();
        async move { Ok(value) }.boxed()
    }

    fn check(&self, resource: &Name, token: Token) -> BoxFuture<Result<Verdict>> {
        let highest = self.values.lock().get(resource).map(|value| value.token);
        let verdict = self.rule.judge(highest, token);
        async move { Ok(verdict) }.boxed()
    }
}
