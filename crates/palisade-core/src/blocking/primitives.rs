//! The blocking primitives: each wraps the async one of the same name and waits.

use std::time::Duration;

use super::hold::{Elected, Hold, MultiHold, ReentrantHold, RwHold};
use super::runtime::wait;
use crate::core::engine::BoxStream;
use crate::core::error::Result;
use crate::core::wait::Retry;
use crate::primitives::{self, Leader};

/// Generates a wrapper whose methods wait for the async method of the same name.
macro_rules! blocking {
    ($(#[$doc:meta])* $name:ident { $($method:ident($($arg:ident: $type:ty),*) -> $answer:ty = $wrap:expr;)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone)]
        pub struct $name(pub(super) primitives::$name);

        impl $name {
            /// Sets how long it lasts without renewal.
            #[must_use]
            pub fn ttl(self, ttl: Duration) -> Self {
                Self(self.0.ttl(ttl))
            }

            /// Keeps a granted hold for at least this long.
            #[must_use]
            pub fn at_least(self, at_least: Duration) -> Self {
                Self(self.0.at_least(at_least))
            }

            /// Lets a granted hold expire.
            #[must_use]
            pub fn unrenewed(self) -> Self {
                Self(self.0.unrenewed())
            }

            /// Sets when a waiting agent checks for deadlocks, `None` for never.
            #[must_use]
            pub fn deadlock_after(self, after: impl Into<Option<Duration>>) -> Self {
                Self(self.0.deadlock_after(after))
            }

            /// Sets how to retry when the engine can't be reached.
            #[must_use]
            pub fn retry(self, retry: Retry) -> Self {
                Self(self.0.retry(retry))
            }

            $(
                #[doc = concat!(
                    "As [`", stringify!($method), "`](crate::", stringify!($name), "::",
                    stringify!($method), "), blocking."
                )]
                ///
                /// # Errors
                /// As there, and [`ErrorKind::WouldBlock`](crate::ErrorKind::WouldBlock).
                pub fn $method(&self $(, $arg: $type)*) -> Result<$answer> {
                    wait(self.0.$method($($arg),*))?.map($wrap)
                }
            )*
        }
    };
}

blocking!(
    /// A mutual exclusion lock; see [`palisade::Mutex`](crate::Mutex).
    Mutex {
        lock() -> Hold = Hold;
        try_lock() -> Option<Hold> = |hold| hold.map(Hold);
        lock_timeout(limit: Duration) -> Option<Hold> = |hold| hold.map(Hold);
    }
);

blocking!(
    /// A lock that many may hold to read, or one to write; see [`palisade::RwLock`](crate::RwLock).
    RwLock {
        read() -> RwHold = RwHold;
        try_read() -> Option<RwHold> = |hold| hold.map(RwHold);
        read_timeout(limit: Duration) -> Option<RwHold> = |hold| hold.map(RwHold);
        write() -> RwHold = RwHold;
        try_write() -> Option<RwHold> = |hold| hold.map(RwHold);
        write_timeout(limit: Duration) -> Option<RwHold> = |hold| hold.map(RwHold);
    }
);

blocking!(
    /// A semaphore; see [`palisade::Semaphore`](crate::Semaphore).
    Semaphore {
        acquire() -> Hold = Hold;
        try_acquire() -> Option<Hold> = |hold| hold.map(Hold);
        acquire_timeout(limit: Duration) -> Option<Hold> = |hold| hold.map(Hold);
        acquire_many(permits: u32) -> Hold = Hold;
        try_acquire_many(permits: u32) -> Option<Hold> = |hold| hold.map(Hold);
        acquire_many_timeout(permits: u32, limit: Duration) -> Option<Hold> = |hold| hold.map(Hold);
    }
);

blocking!(
    /// Several locks, all or nothing; see [`palisade::MultiLock`](crate::MultiLock).
    MultiLock {
        lock() -> MultiHold = MultiHold;
        try_lock() -> Option<MultiHold> = |holds| holds.map(MultiHold);
        lock_timeout(limit: Duration) -> Option<MultiHold> = |holds| holds.map(MultiHold);
    }
);

blocking!(
    /// A lock that its owner may lock again; see
    /// [`palisade::ReentrantMutex`](crate::ReentrantMutex).
    ReentrantMutex {
        lock() -> ReentrantHold = ReentrantHold;
        try_lock() -> Option<ReentrantHold> = |hold| hold.map(ReentrantHold);
        lock_timeout(limit: Duration) -> Option<ReentrantHold> = |hold| hold.map(ReentrantHold);
    }
);

blocking!(
    /// An election of one leader; see [`palisade::Election`](crate::Election).
    Election {
        campaign(value: &str) -> Elected = Elected;
        try_campaign(value: &str) -> Option<Elected> = |elected| elected.map(Elected);
        campaign_timeout(value: &str, limit: Duration) -> Option<Elected> = |elected| elected.map(Elected);
        leader() -> Option<Leader> = |leader| leader;
    }
);

impl Election {
    /// The leader, now and after every change; see [`observe`](crate::Election::observe). Never
    /// ends.
    pub fn observe(&self) -> Leaders {
        Leaders(Box::pin(self.0.observe()))
    }
}

/// The successive leaders of an election. Each `next` blocks.
pub struct Leaders(BoxStream<Result<Option<Leader>>>);

impl std::fmt::Debug for Leaders {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Leaders").finish_non_exhaustive()
    }
}

impl Iterator for Leaders {
    type Item = Result<Option<Leader>>;

    fn next(&mut self) -> Option<Self::Item> {
        match wait(futures_util::StreamExt::next(&mut self.0)) {
            Ok(next) => next,
            Err(error) => Some(Err(error)),
        }
    }
}
