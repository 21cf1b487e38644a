//! `FenceStore`: the verbs of an engine's fenced storage as plain `async fn`s. `Stored` turns it into
//! a [`Fence`].

use std::sync::Arc;

use palisade_core::engine::BoxFuture;
use palisade_core::fence::{Fence, Fenced, Rule, Taken, Verdict, WriteToken};
use palisade_core::{Name, Result, Token};

/// The verbs of [`Fence`], where their behaviour is documented.
pub trait FenceStore: Send + Sync + 'static {
    /// Compares a token, and writes the data if the token is accepted.
    fn judged(
        &self,
        resource: &Name,
        token: WriteToken,
        data: Option<Vec<u8>>,
    ) -> impl Future<Output = Result<Verdict>> + Send;

    /// Compares a token, raises the mark, and reads the data.
    fn take(
        &self,
        resource: &Name,
        token: WriteToken,
    ) -> impl Future<Output = Result<Taken>> + Send;

    /// See [`Fence::read`].
    fn read(&self, resource: &Name) -> impl Future<Output = Result<Option<Fenced>>> + Send;

    /// See [`Fence::highest`].
    fn highest(&self, resource: &Name) -> impl Future<Output = Result<Option<Token>>> + Send;

    /// See [`Fence::forget`].
    fn forget(&self, resource: &Name) -> impl Future<Output = Result<bool>> + Send;

    /// See [`Fence::rule`].
    fn rule(&self) -> Rule;
}

/// See the module's documentation.
pub struct Stored<S>(Arc<S>);

impl<S> Stored<S> {
    /// The fence that `store` is.
    pub fn new(store: S) -> Self {
        Self(Arc::new(store))
    }
}

#[deny(clippy::missing_trait_methods)]
impl<S: FenceStore> Fence for Stored<S> {
    fn write(
        &self,
        resource: &Name,
        token: WriteToken,
        data: Vec<u8>,
    ) -> BoxFuture<Result<Verdict>> {
        let (store, resource) = (Arc::clone(&self.0), resource.clone());
        Box::pin(async move { store.judged(&resource, token, Some(data)).await })
    }

    fn accept(&self, resource: &Name, token: WriteToken) -> BoxFuture<Result<Verdict>> {
        let (store, resource) = (Arc::clone(&self.0), resource.clone());
        Box::pin(async move { store.judged(&resource, token, None).await })
    }

    fn take(&self, resource: &Name, token: WriteToken) -> BoxFuture<Result<Taken>> {
        let (store, resource) = (Arc::clone(&self.0), resource.clone());
        Box::pin(async move { store.take(&resource, token).await })
    }

    fn read(&self, resource: &Name) -> BoxFuture<Result<Option<Fenced>>> {
        let (store, resource) = (Arc::clone(&self.0), resource.clone());
        Box::pin(async move { store.read(&resource).await })
    }

    fn highest(&self, resource: &Name) -> BoxFuture<Result<Option<Token>>> {
        let (store, resource) = (Arc::clone(&self.0), resource.clone());
        Box::pin(async move { store.highest(&resource).await })
    }

    fn forget(&self, resource: &Name) -> BoxFuture<Result<bool>> {
        let (store, resource) = (Arc::clone(&self.0), resource.clone());
        Box::pin(async move { store.forget(&resource).await })
    }

    fn rule(&self) -> Rule {
        self.0.rule()
    }
}
