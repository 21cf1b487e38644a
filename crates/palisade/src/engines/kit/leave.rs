//! A leave over a connection that may be dead though the server is healthy.

use crate::core::engine::Left;
use crate::core::error::{Outcome, Result};

/// Leaves, and retries once over another connection if there was no answer. A leave compares the
/// incarnation, so a second copy is harmless.
pub(crate) async fn leave_twice<F>(leave: impl Fn() -> F) -> Result<Left>
where
    F: Future<Output = Result<Left>>,
{
    let error = match leave().await {
        Err(error) if error.is_transient() => error,
        left => return left,
    };
    match leave().await {
        // If the place is gone by now, the first copy was applied.
        Ok(Left::Absent) if error.outcome() == Outcome::MaybeApplied => Ok(Left::Done),
        left => left,
    }
}
