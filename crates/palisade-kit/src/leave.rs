//! A leave over a connection that may be dead though the server is healthy.

use palisade_core::engine::Left;
use palisade_core::{Outcome, Result};

/// Leaves, and retries once over another connection if there was no answer. A leave compares the
/// incarnation, so a second copy is harmless.
pub async fn leave_twice<F>(leave: impl Fn() -> F) -> Result<Left>
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

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use palisade_core::engine::unreachable;

    #[tokio::test]
    async fn a_second_copy_is_sent_without_an_answer_and_the_first_may_have_done_it() {
        let lost = || unreachable("leave", "no answer");
        let maybe = || lost().maybe_applied();
        for (answers, left) in [
            (vec![Ok(Left::Absent)], Left::Absent),
            (vec![Err(lost()), Ok(Left::Done)], Left::Done),
            (vec![Err(lost()), Ok(Left::Absent)], Left::Absent),
            (vec![Err(maybe()), Ok(Left::Absent)], Left::Done),
        ] {
            let answers = RefCell::new(answers.into_iter());
            let next = || std::future::ready(answers.borrow_mut().next().unwrap());
            assert_eq!(leave_twice(next).await.unwrap(), left);
            assert_eq!(answers.into_inner().len(), 0, "all were asked for");
        }
    }
}
