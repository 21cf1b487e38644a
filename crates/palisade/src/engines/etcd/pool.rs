//! `Pool`: keys of places that were left, to be used again by later claims of the same client.
//!
//! etcd remembers every key that ever was until its history is compacted, and reads of a line
//! pass over all of them: a key of its own for every claim would make a busy line slower and
//! slower. So a key is used again once its place is known to have been left, and only then: the
//! answer said so, the incarnation was compared, and no copy of an enter is under way. The create
//! revision tells the claims on one key apart, and the record in its value says whose it is.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

/// How many keys are kept at the most.
const MOST: usize = 4096;

/// The keys of one lease, by line.
#[derive(Default)]
pub(super) struct Pool(Mutex<Free>);

#[derive(Default)]
struct Free {
    keys: HashMap<(i64, String), Vec<Arc<str>>>,
    count: usize,
}

impl Pool {
    /// A key of this line on this lease that nobody uses.
    pub(super) fn take(&self, lease: i64, prefix: &str) -> Option<Arc<str>> {
        let mut free = self.0.lock();
        let key = free.keys.get_mut(&(lease, prefix.to_owned()))?.pop()?;
        free.count -= 1;
        Some(key)
    }

    /// Takes a key back. Keys of leases that have ended go when there are too many.
    pub(super) fn give(&self, lease: i64, prefix: String, key: Arc<str>) {
        let mut free = self.0.lock();
        if free.count >= MOST {
            *free = Free::default();
        }
        free.count += 1;
        free.keys.entry((lease, prefix)).or_default().push(key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_given_to_one_and_only_on_its_own_lease_and_line() {
        let pool = Pool::default();
        pool.give(1, "a/".into(), "a/1-x".into());
        assert_eq!(pool.take(2, "a/"), None);
        assert_eq!(pool.take(1, "b/"), None);
        assert_eq!(pool.take(1, "a/").as_deref(), Some("a/1-x"));
        assert_eq!(pool.take(1, "a/"), None);
        for _ in 0..MOST * 2 {
            pool.give(1, "a/".into(), "a/1-x".into());
        }
        assert!(pool.0.lock().count <= MOST);
    }
}
