//! `Client`: the sessions of one client, one per ttl.
//!
//! The first session has the longest timeout that the servers allow: it also serves requests
//! without a claim, and it shows the longest ttl. A session whose lease is over is never used
//! again.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::broadcast;

use super::connection::Endpoints;
use super::proto::{Acl, Answer, Request};
use super::session::Session;
use super::thread::Thread;
use palisade_core::engine::{Alarm, LeaseId};
use palisade_core::{Error, ErrorKind, Result};
use palisade_kit::shared_sessions::Maker;

pub(super) struct Client {
    pub(super) thread: Thread,
    pub(super) endpoints: Arc<Endpoints>,
    pub(super) timeout: Duration,
    pub(super) acl: Acl,
    pub(super) alarms: broadcast::Sender<Alarm>,
    /// The longest session timeout that the servers grant.
    longest: Duration,
    sessions: Mutex<Vec<Arc<Session>>>,
    maker: Maker,
}

/// The session timeout for a lease: 1.5 times the lease, so that a holder gives up well before the
/// servers expire the session.
fn session_for(ttl: Duration) -> Duration {
    // Whole milliseconds, rounded up.
    Duration::from_millis(
        u64::try_from((ttl * 3 / 2).as_micros().div_ceil(1000)).unwrap_or(u64::MAX),
    )
}

impl Client {
    /// Connects, and learns the shortest and the longest ttl.
    ///
    /// # Errors
    /// As connecting.
    pub(super) async fn open(
        endpoints: Endpoints,
        timeout: Duration,
        acl: Acl,
        alarms: broadcast::Sender<Alarm>,
    ) -> Result<(Self, Duration, Duration)> {
        let (thread, endpoints) = (Thread::start()?, Arc::new(endpoints));
        let open = |timeout| Session::open(&thread, &endpoints, timeout, &alarms);
        let longest = Duration::from_millis(i32::MAX as u64);
        let (shortest, longest) =
            futures_util::future::try_join(open(Duration::from_millis(1)), open(longest)).await?;
        // A lease that just fits: a shorter one would be granted more than it asked for.
        let min = (shortest.timeout() * 2 / 3) + Duration::from_millis(1);
        let max = longest.timeout() * 2 / 3;
        let client = Self {
            thread,
            endpoints,
            timeout,
            acl,
            alarms,
            longest: longest.timeout(),
            sessions: Mutex::new(vec![longest]),
            maker: Maker::default(),
        };
        Ok((client, min.min(max), max))
    }

    /// The session for claims of this ttl; a new one if none is alive.
    ///
    /// # Errors
    /// As connecting.
    pub(super) async fn for_ttl(&self, ttl: Duration) -> Result<Arc<Session>> {
        let timeout = session_for(ttl).min(self.longest);
        let find = || self.find(|session| session.timeout() == timeout && session.lease_out());
        if let Some(session) = find() {
            return Ok(session);
        }
        let make = async {
            let session = self.make(timeout).await?;
            session.lease_out();
            Ok(session)
        };
        self.maker.find_or_make(self.timeout, find, make).await
    }

    /// A session for requests without a claim.
    ///
    /// # Errors
    /// As connecting.
    pub(super) async fn any(&self) -> Result<Arc<Session>> {
        let (find, make) = (|| self.find(|_| true), self.make(self.longest));
        self.maker.find_or_make(self.timeout, find, make).await
    }

    async fn make(&self, timeout: Duration) -> Result<Arc<Session>> {
        let made = Session::open(&self.thread, &self.endpoints, timeout, &self.alarms).await?;
        self.sessions.lock().push(Arc::clone(&made));
        Ok(made)
    }

    /// A living session that fits; those that have ended are forgotten.
    fn find(&self, fits: impl Fn(&Session) -> bool) -> Option<Arc<Session>> {
        let mut sessions = self.sessions.lock();
        sessions.retain(|session| session.is_usable());
        sessions.iter().find(|session| fits(session)).cloned()
    }

    /// The session of a lease, while it is alive.
    pub(super) fn of_lease(&self, lease: LeaseId) -> Option<Arc<Session>> {
        self.find(|session| session.lease() == lease)
    }

    /// Stops using a session; `false` when it is the only one.
    pub(super) fn retire(&self, session: &Session) -> bool {
        let mut sessions = self.sessions.lock();
        let is_spare = sessions.len() > 1;
        if is_spare {
            sessions.retain(|other| other.id() != session.id());
        }
        is_spare
    }

    /// Sends read-only requests on any session, and waits for all answers. They are retried when
    /// that session or its connection ends.
    ///
    /// # Errors
    /// [`ErrorKind::Unreachable`] when they were not answered.
    pub(super) async fn read(
        &self,
        operation: &'static str,
        requests: &[Request],
    ) -> Result<Vec<Answer>> {
        let mut again = true;
        loop {
            let session = self.any().await?;
            let answers = session
                .call(operation, self.timeout, requests.to_vec())
                .await;
            match answers {
                Err(error) if again && is_passing(&error) => again = false,
                Err(error) if error.kind() == ErrorKind::Lost => {
                    let message = "sessions end as soon as they begin";
                    return Err(Error::new(ErrorKind::Unreachable, operation, message));
                }
                // Read-only requests are never applied.
                Err(error) => return Err(Error::new(error.kind(), operation, error.message())),
                answered => return answered,
            }
        }
    }

    pub(super) async fn close(&self) {
        let sessions = std::mem::take(&mut *self.sessions.lock());
        let closed = sessions.iter().map(|session| session.close());
        futures_util::future::join_all(closed).await;
    }
}

fn is_passing(error: &Error) -> bool {
    use palisade_core::Outcome;
    let broke = error.is_transient() && error.outcome() == Outcome::MaybeApplied;
    broke || error.kind() == ErrorKind::Lost
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_is_half_as_long_again_in_whole_milliseconds() {
        let ms = Duration::from_millis;
        assert_eq!(session_for(ms(1000)), ms(1500));
        assert_eq!(session_for(ms(667)), ms(1001));
        assert_eq!(session_for(Duration::from_micros(26_666_700)), ms(40_001));
    }
}
