//! `Baseline`: an engine's own raw operations, for `bench` to compare with.
//!
//! The fewest round trips that could do the job, through the same client library, with nothing
//! of palisade in between: no line, no token, no owner record, no keeper. A ratio to these says
//! what palisade costs; nothing else may use them.

use super::engine::BoxFuture;
use super::error::Result;

/// The raw operations of one engine. Keys are taken as they are, apart from every line.
pub trait Baseline: Send + Sync + 'static {
    /// What the operations are, in the engine's words: `SET NX PX, EVALSHA compare-and-delete`.
    fn describe(&self) -> String;

    /// Takes `key`, which is free, and gives it back.
    fn cycle(&self, key: String) -> BoxFuture<Result<()>>;

    /// Sleeps until the baton of `key` is there, and takes it: the engine's own wake-up
    /// (BLPOP, a watch, NOTIFY, a blocking query, a blocking flock).
    fn take(&self, key: String) -> BoxFuture<Result<()>>;

    /// Gives the baton of `key` to one of those who wait for it, or to the next who comes.
    fn give(&self, key: String) -> BoxFuture<Result<()>>;
}
