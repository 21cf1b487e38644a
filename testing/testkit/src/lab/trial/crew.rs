//! `Crew`: clients that use one lock while a test disturbs the engine. At its end it checks that no
//! two believed to hold at once, tokens rose, and everyone was served in time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use palisade::{BootTime, Client};
use parking_lot::Mutex;
use tokio::task::JoinSet;

use super::connected;
use crate::lab::launch::Running;

/// An allowance for a busy machine.
const MARGIN: Duration = Duration::from_secs(4);

/// One belief: from the grant until its holder released or its deadline passed.
#[derive(Debug, Clone, Copy)]
pub struct Belief {
    /// The token of the grant.
    pub token: u64,
    /// Not before the grant.
    pub from: BootTime,
    /// Not after the release was asked for, nor after the deadline.
    pub to: BootTime,
}

/// What the clients record.
#[derive(Default)]
struct Log {
    beliefs: Mutex<Vec<Belief>>,
    longest_wait: Mutex<Duration>,
    over: AtomicBool,
}

/// Clients that use one lock.
pub struct Crew {
    ttl: Duration,
    patience: Duration,
    log: Arc<Log>,
    tasks: JoinSet<()>,
}

impl Crew {
    /// Starts `clients` clients of `url`, whose holds have this ttl, and which wait at most
    /// `patience`.
    ///
    /// # Panics
    /// If a client can't connect.
    pub async fn start(url: &str, clients: usize, ttl: Duration, patience: Duration) -> Self {
        let mut crew = Self {
            ttl,
            patience,
            log: Arc::default(),
            tasks: JoinSet::new(),
        };
        for _ in 0..clients {
            match palisade::connect(url).await {
                Ok(client) => crew.hire(client),
                Err(error) => panic!("{url}: {error}"),
            }
        }
        crew
    }

    /// Adds a client.
    pub fn hire(&mut self, client: Client) {
        self.tasks
            .spawn(work(client, self.ttl, Arc::clone(&self.log)));
    }

    /// The beliefs so far.
    pub fn beliefs(&self) -> Vec<Belief> {
        let mut beliefs = self.log.beliefs.lock().clone();
        beliefs.sort_by_key(|belief| belief.from);
        beliefs
    }

    /// Waits until there were `more` further grants.
    ///
    /// # Panics
    /// If they don't come.
    pub async fn grants(&self, more: usize) {
        let goal = self.beliefs().len() + more;
        let look = async {
            while self.beliefs().len() < goal {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let limit = self.patience + MARGIN;
        let reached = tokio::time::timeout(limit, look).await;
        reached.unwrap_or_else(|_| panic!("{more} more grants did not come within {limit:?}"));
    }

    /// Kills the leader of the active servers, and restarts it.
    ///
    /// # Panics
    /// As [`Crew::grants`].
    pub async fn lose_leader(&self, servers: &Running) {
        self.grants(20).await;
        let killed = tokio::task::block_in_place(|| servers.kill_leader());
        let killed = &servers.nodes()[killed.unwrap_or_else(|error| panic!("{error}"))];
        self.grants(20).await;
        let restarted = tokio::task::block_in_place(|| killed.restart());
        restarted.unwrap_or_else(|error| panic!("{error}"));
        self.grants(20).await;
    }

    /// Restarts the one server; another client's hold with this ttl survives.
    ///
    /// # Panics
    /// As [`Crew::grants`], and if the hold is lost.
    pub async fn outlives_a_restart(self, server: &Running, ttl: Duration) {
        let client = connected(server).await;
        let mutex = client.mutex("kept").ttl(ttl);
        let lock = async || mutex.lock().await.unwrap_or_else(|e| panic!("{e}"));
        let kept = lock().await;
        self.grants(20).await;
        let restarted = tokio::task::block_in_place(|| server.nodes()[0].restart());
        restarted.unwrap_or_else(|error| panic!("{error}"));
        self.grants(20).await;
        self.end().await;
        assert!(kept.is_valid(), "a restart shorter than the ttl is no loss");
        let token = kept.token();
        kept.release().await.unwrap_or_else(|e| panic!("{e}"));
        assert!(lock().await.token() > token);
    }

    /// Stops the leader until the others have continued without it, then continues it.
    ///
    /// # Panics
    /// As [`Crew::grants`].
    pub async fn stop_leader(&self, servers: &Running) {
        self.grants(20).await;
        let leader = servers.leader_where(|_| true);
        let leader = &servers.nodes()[leader.unwrap_or_else(|error| panic!("{error}"))];
        let stopped = tokio::task::block_in_place(|| leader.stop());
        stopped.unwrap_or_else(|error| panic!("{error}"));
        self.grants(10).await;
        let went_on = tokio::task::block_in_place(|| leader.cont());
        went_on.unwrap_or_else(|error| panic!("{error}"));
        self.grants(20).await;
    }

    /// Ends the work, and judges it.
    ///
    /// # Panics
    /// If two believed to hold at once, tokens did not rise, or someone waited too long.
    pub async fn end(mut self) {
        self.log.over.store(true, Ordering::SeqCst);
        let all = async {
            while let Some(ended) = self.tasks.join_next().await {
                if let Err(error) = ended {
                    panic!("a client fails: {error}");
                }
            }
        };
        let all = tokio::time::timeout(self.patience + MARGIN, all);
        assert!(all.await.is_ok(), "not everyone ends");
        let beliefs = self.beliefs();
        for pair in beliefs.windows(2) {
            let [first, next] = [pair[0], pair[1]];
            assert!(first.to <= next.from, "two holders: {first:?} {next:?}");
            assert!(first.token < next.token, "tokens: {first:?} {next:?}");
        }
        let (longest, patience) = (*self.log.longest_wait.lock(), self.patience);
        assert!(
            longest <= patience,
            "somebody waited {longest:?}, longer than {patience:?}"
        );
        println!("{} grants, the longest wait {longest:?}", beliefs.len());
    }
}

async fn work(client: Client, ttl: Duration, log: Arc<Log>) {
    let mutex = client.mutex("shared").ttl(ttl);
    while !log.over.load(Ordering::SeqCst) {
        let asked = BootTime::now();
        let hold = mutex.lock().await;
        let hold = hold.unwrap_or_else(|error| panic!("{error}"));
        let from = BootTime::now();
        {
            let mut longest = log.longest_wait.lock();
            *longest = from.saturating_since(asked).max(*longest);
        }
        tokio::time::sleep(Duration::from_millis(3)).await;
        // The belief ends when it is released, or at its deadline.
        let to = BootTime::now().min(hold.deadline().max(from));
        let token = hold.token().0;
        log.beliefs.lock().push(Belief { token, from, to });
        // The hold may be lost, or there may be no answer: only the belief matters.
        let _ = hold.release().await;
    }
}
