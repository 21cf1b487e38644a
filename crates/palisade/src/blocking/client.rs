//! The blocking [`Client`].

use std::ops::Deref;

use super::hold::Hold;
use super::primitives::{Election, MultiLock, Mutex, ReentrantMutex, RwLock, Semaphore};
use super::runtime::wait;
use crate::core::error::Result;
use crate::core::name::Name;
use crate::core::report::{LineReport, Scope};
use crate::core::wait::Patience;

/// Connects; see [`palisade::connect`](crate::connect()).
///
/// # Errors
/// As there, and [`Kind::WouldBlock`](crate::Kind::WouldBlock).
pub fn connect(url: &str) -> Result<Client> {
    wait(crate::connect(url))?.map(Client)
}

/// A client of one engine; see [`palisade::Client`](crate::Client), whose `capability()`,
/// `describe()`, `owner()` and the like it has too.
#[derive(Debug, Clone)]
pub struct Client(crate::Client);

impl From<crate::Client> for Client {
    /// The same client, for blocking code. Its engine was opened on the caller's runtime, which
    /// some engines need to live on.
    fn from(client: crate::Client) -> Self {
        Self(client)
    }
}

impl Client {
    /// As [`for_correctness`](crate::Client::for_correctness).
    ///
    /// # Errors
    /// As there, and [`Kind::WouldBlock`](crate::Kind::WouldBlock).
    pub fn for_correctness(&self) -> Result<Self> {
        wait(self.0.for_correctness())?.map(Self)
    }

    /// As [`mutex`](crate::Client::mutex).
    ///
    /// # Errors
    /// As there.
    pub fn mutex(&self, name: impl AsRef<str>) -> Result<Mutex> {
        self.0.mutex(name).map(Mutex)
    }

    /// As [`rwlock`](crate::Client::rwlock).
    ///
    /// # Errors
    /// As there.
    pub fn rwlock(&self, name: impl AsRef<str>) -> Result<RwLock> {
        self.0.rwlock(name).map(RwLock)
    }

    /// As [`semaphore`](crate::Client::semaphore).
    ///
    /// # Errors
    /// As there.
    pub fn semaphore(&self, name: impl AsRef<str>, capacity: u32) -> Result<Semaphore> {
        self.0.semaphore(name, capacity).map(Semaphore)
    }

    /// As [`election`](crate::Client::election).
    ///
    /// # Errors
    /// As there.
    pub fn election(&self, name: impl AsRef<str>) -> Result<Election> {
        self.0.election(name).map(Election)
    }

    /// As [`reentrant`](crate::Client::reentrant).
    ///
    /// # Errors
    /// As there.
    pub fn reentrant(&self, name: impl AsRef<str>) -> Result<ReentrantMutex> {
        self.0.reentrant(name).map(ReentrantMutex)
    }

    /// As [`multi_lock`](crate::Client::multi_lock).
    ///
    /// # Errors
    /// As there.
    pub fn multi_lock<N: AsRef<str>>(
        &self,
        names: impl IntoIterator<Item = N>,
    ) -> Result<MultiLock> {
        self.0.multi_lock(names).map(MultiLock)
    }

    /// As [`lock_any`](crate::Client::lock_any).
    ///
    /// # Errors
    /// As there, and [`Kind::WouldBlock`](crate::Kind::WouldBlock).
    pub fn lock_any<N: AsRef<str>>(
        &self,
        names: impl IntoIterator<Item = N>,
        patience: Patience,
    ) -> Result<Option<Hold>> {
        wait(self.0.lock_any(names, patience))?.map(|hold| hold.map(Hold))
    }

    /// As [`survey`](crate::Client::survey).
    ///
    /// # Errors
    /// As there, and [`Kind::WouldBlock`](crate::Kind::WouldBlock).
    pub fn survey(&self, scope: Scope) -> Result<Vec<LineReport>> {
        wait(self.0.survey(scope))?
    }

    /// As [`resize`](crate::Client::resize).
    ///
    /// # Errors
    /// As there, and [`Kind::WouldBlock`](crate::Kind::WouldBlock).
    pub fn resize(&self, name: impl AsRef<str>, capacity: u32) -> Result<bool> {
        wait(self.0.resize(name, capacity))?
    }

    /// As [`evict`](crate::Client::evict).
    ///
    /// # Errors
    /// As there, and [`Kind::WouldBlock`](crate::Kind::WouldBlock).
    pub fn evict(&self, name: &Name, id: Option<&str>, force: bool) -> Result<bool> {
        wait(self.0.evict(name, id, force))?
    }

    /// As [`end`](crate::Client::end).
    ///
    /// # Errors
    /// [`Kind::WouldBlock`](crate::Kind::WouldBlock).
    pub fn end(self) -> Result<()> {
        wait(self.0.end())
    }

    /// As [`close`](crate::Client::close).
    ///
    /// # Errors
    /// [`Kind::WouldBlock`](crate::Kind::WouldBlock).
    pub fn close(&self) -> Result<()> {
        wait(self.0.close())
    }
}

impl Deref for Client {
    type Target = crate::Client;

    fn deref(&self) -> &crate::Client {
        &self.0
    }
}
