//! A leave over a connection that may be dead while the server is well.

use crate::core::engine::Left;
use crate::core::error::{Outcome, Result};

/// Leaves, and once more, over another connection, if there was no answer. A leave compares the
/// incarnation, so that a second copy does no harm.
pub(crate) async fn leave_twice<F>(leave: impl Fn() -> F) -> Result<Left>
where
    F: Future<Output = Result<Left>>,
{
    let error = match leave().await {
        Err(error) if error.is_transient() => error,
        left => return left,
    };
    match leave().await {
        // Gone since: the first copy did it.
        Ok(Left::Absent) if error.outcome() == Outcome::MaybeApplied => Ok(Left::Done),
        left => left,
    }
}
