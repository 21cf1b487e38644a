//! The raw operations to compare with `memory:`: a set of keys under a mutex, and one permit of a
//! tokio semaphore per key as the baton. Batons are shared by the whole process, like the lines.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, LazyLock};

use parking_lot::Mutex;
use tokio::sync::Semaphore;

use crate::core::baseline::Baseline;
use crate::core::engine::BoxFuture;
use crate::core::error::{Error, ErrorKind, Result};

static BATONS: LazyLock<Mutex<HashMap<String, Arc<Semaphore>>>> = LazyLock::new(Default::default);

/// The locked keys.
#[derive(Default)]
pub(super) struct Keys(Arc<Mutex<HashSet<String>>>);

fn baton(key: String) -> Arc<Semaphore> {
    let none = || Arc::new(Semaphore::new(0));
    Arc::clone(BATONS.lock().entry(key).or_insert_with(none))
}

impl Baseline for Keys {
    fn describe(&self) -> String {
        "insert and remove in a set under a mutex; hand-over: a tokio semaphore".to_owned()
    }

    fn cycle(&self, key: String) -> BoxFuture<Result<()>> {
        let keys = Arc::clone(&self.0);
        Box::pin(async move {
            keys.lock().insert(key.clone());
            keys.lock().remove(&key);
            Ok(())
        })
    }

    fn take(&self, key: String) -> BoxFuture<Result<()>> {
        let baton = baton(key);
        Box::pin(async move {
            let taken = baton.acquire().await.map_err(|error| {
                Error::new(ErrorKind::Internal, "baseline", "the baton is gone").because(error)
            })?;
            taken.forget();
            Ok(())
        })
    }

    fn give(&self, key: String) -> BoxFuture<Result<()>> {
        let baton = baton(key);
        Box::pin(async move {
            baton.add_permits(1);
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn a_baton_is_had_by_one_at_a_time() {
        let (one, two) = (Keys::default(), Keys::default());
        one.cycle("k".into()).await.unwrap();
        one.give("k".into()).await.unwrap();
        one.take("k".into()).await.unwrap();
        let mut waits = two.take("k".into());
        let early = tokio::time::timeout(Duration::from_millis(50), &mut waits).await;
        assert!(early.is_err(), "both have it");
        one.give("k".into()).await.unwrap();
        waits.await.unwrap();
    }
}
