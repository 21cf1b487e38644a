//! `Baseline`: an engine's own raw operations, for `bench` to compare with.
//!
//! Each uses the fewest round trips that can do the job, through the same client library, without
//! anything of palisade: no line, no token, no owner record, no keeper. The ratio to these is what
//! palisade costs. Nothing else may use them.

use super::engine::BoxFuture;
use super::error::Result;

/// The raw operations of one engine. Keys are used as given and never collide with lines.
pub trait Baseline: Send + Sync + 'static {
    /// Names the operations in the engine's words: `SET NX PX, EVALSHA compare-and-delete`.
    fn describe(&self) -> String;

    /// Locks `key`, which is free, and unlocks it.
    fn cycle(&self, key: String) -> BoxFuture<Result<()>>;

    /// Sleeps until the baton of `key` is available, and takes it. Uses the engine's own
    /// notification (BLPOP, a watch, NOTIFY, a blocking query, a blocking flock).
    fn take(&self, key: String) -> BoxFuture<Result<()>>;

    /// Passes the baton of `key` to one waiter, or leaves it for the next one.
    fn give(&self, key: String) -> BoxFuture<Result<()>>;
}
