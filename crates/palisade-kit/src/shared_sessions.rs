//! `Maker`: creates one shared session or lease for all claims that can use it.
//!
//! Without it, claims that arrive together would find none and create one each. The first one
//! creates it, within a time limit, and the others find it.

use std::future::Future;
use std::time::Duration;

use tokio::sync::Mutex;

use palisade_core::engine::rounded;
use palisade_core::{Error, ErrorKind, Result};

/// See the module documentation.
#[derive(Debug, Default)]
pub struct Maker(Mutex<()>);

impl Maker {
    /// Returns what `find` finds, or else what `make` creates while nobody else is creating one.
    ///
    /// # Errors
    /// Those of `make`; [`ErrorKind::Unreachable`] if another claim is still creating one after
    /// `timeout`.
    pub async fn find_or_make<T>(
        &self,
        timeout: Duration,
        find: impl Fn() -> Option<T>,
        make: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        if let Some(found) = find() {
            return Ok(found);
        }
        let turn = tokio::time::timeout(timeout, self.0.lock()).await;
        let _turn = turn.map_err(|_| {
            let message = format!("no session was created within {}", rounded(timeout));
            Error::new(ErrorKind::Unreachable, "session", message)
        })?;
        match find() {
            Some(found) => Ok(found),
            None => make.await,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn claims_that_come_together_share_what_one_makes() {
        let (maker, made) = (Maker::default(), AtomicU32::new(0));
        let find = || Some(made.load(Ordering::SeqCst)).filter(|made| *made > 0);
        let make = || async {
            tokio::time::sleep(Duration::from_secs(2)).await;
            Ok(made.fetch_add(1, Ordering::SeqCst) + 1)
        };
        let share = |seconds| maker.find_or_make(Duration::from_secs(seconds), find, make());
        let (one, two, three) = tokio::join!(share(3), share(3), share(1));
        assert_eq!((one.unwrap(), two.unwrap()), (1, 1));
        assert_eq!(three.unwrap_err().kind(), ErrorKind::Unreachable);
    }
}
