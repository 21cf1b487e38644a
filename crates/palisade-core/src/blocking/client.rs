//! The blocking [`Client`].

use std::time::Duration;

use super::hold::Hold;
use super::primitives::{Election, MultiLock, Mutex, ReentrantMutex, RwLock, Semaphore};
use super::runtime::wait;
use crate::client::Which;
use crate::core::capability::Capability;
use crate::core::deadlock::Deadlock;
use crate::core::engine::Eviction;
use crate::core::error::Result;
use crate::core::report::{Checkup, LineReport, Scope};
use crate::core::token::Token;
use crate::core::wait::Patience;

/// A client of one engine; see [`palisade::Client`](crate::Client).
#[derive(Debug, Clone)]
pub struct Client(crate::Client);

impl From<crate::Client> for Client {
    /// The same client, for blocking code. Its engine was opened on the caller's runtime, and some
    /// engines need that runtime to stay alive.
    fn from(client: crate::Client) -> Self {
        Self(client)
    }
}

/// Generates methods that forward to the async client, directly or by waiting for its answer.
macro_rules! forward {
    ($($method:ident($($arg:ident: $type:ty),*) -> $answer:ty $(= $wrap:path)?;)*) => {$(
        #[doc = concat!("As [`", stringify!($method), "`](crate::Client::", stringify!($method), ").")]
        #[must_use]
        pub fn $method(&self $(, $arg: $type)*) -> $answer {
            $($wrap)?(self.0.$method($($arg),*))
        }
    )*};
    (wait: $($method:ident($($arg:ident: $type:ty),*) -> $answer:ty $(= $wrap:expr)?;)*) => {$(
        #[doc = concat!("As [`", stringify!($method), "`](crate::Client::", stringify!($method), "), blocking.")]
        ///
        /// # Errors
        /// As there, and [`ErrorKind::WouldBlock`](crate::ErrorKind::WouldBlock).
        pub fn $method(&self $(, $arg: $type)*) -> Result<$answer> {
            wait(self.0.$method($($arg),*))?$(.map($wrap))?
        }
    )*};
}

impl Client {
    forward! {
        capability() -> Capability;
        describe() -> String;
        owner() -> &str;
        ttl() -> Duration;
        with_owner(handle: impl Into<String>) -> Self = Self;
        agent(name: impl Into<String>) -> Self = Self;
        for_efficiency() -> Self = Self;
        mutex(name: impl AsRef<str>) -> Mutex = Mutex;
        rwlock(name: impl AsRef<str>) -> RwLock = RwLock;
        semaphore(name: impl AsRef<str>, capacity: u32) -> Semaphore = Semaphore;
        election(name: impl AsRef<str>) -> Election = Election;
        reentrant(name: impl AsRef<str>) -> ReentrantMutex = ReentrantMutex;
        multi_lock(names: impl IntoIterator<Item = impl AsRef<str>>) -> MultiLock = MultiLock;
    }

    forward! { wait:
        for_correctness() -> Self = Self;
        lock_any(names: impl IntoIterator<Item = impl AsRef<str>>, patience: Patience)
            -> Option<Hold> = |hold| hold.map(Hold);
        survey(scope: Scope) -> Vec<LineReport>;
        deadlocks() -> Vec<Deadlock>;
        check() -> Checkup;
        resize(name: impl AsRef<str>, capacity: u32) -> bool;
        evict(name: impl AsRef<str>, which: Which<'_>, how: Eviction) -> bool;
    }

    /// As [`token`](crate::Client::token).
    ///
    /// # Errors
    /// As there.
    pub fn token(&self, sequence: u64) -> Result<Token> {
        self.0.token(sequence)
    }

    /// As [`flush`](crate::Client::flush), blocking.
    ///
    /// # Errors
    /// [`ErrorKind::WouldBlock`](crate::ErrorKind::WouldBlock).
    pub fn flush(&self) -> Result<()> {
        wait(self.0.flush())
    }

    /// As [`close`](crate::Client::close), blocking.
    ///
    /// # Errors
    /// [`ErrorKind::WouldBlock`](crate::ErrorKind::WouldBlock).
    pub fn close(self) -> Result<()> {
        wait(self.0.close())
    }
}
