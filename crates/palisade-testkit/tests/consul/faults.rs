//! Servers are hurt while clients work: no two believe at once, tokens rise, everyone is served.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use palisade::BootTime;
use parking_lot::Mutex;
use tokio::task::JoinSet;

use crate::util::need;

const CLIENTS: usize = 4;
const TTL: Duration = Duration::from_secs(4);

/// Longer than an election, a lease twice over, and a busy machine.
const LIMIT: Duration = Duration::from_secs(25);

/// One belief: from the grant to when its holder let go, or had to.
#[derive(Debug, Clone, Copy)]
struct Belief {
    token: u64,
    from: BootTime,
    to: BootTime,
}

/// Clients at work on one lock.
struct Crew {
    beliefs: Arc<Mutex<Vec<Belief>>>,
    over: Arc<AtomicBool>,
    tasks: JoinSet<()>,
}

impl Crew {
    async fn start(url: &str) -> Self {
        let mut crew = Self {
            beliefs: Arc::default(),
            over: Arc::default(),
            tasks: JoinSet::new(),
        };
        for _ in 0..CLIENTS {
            let client = palisade::connect(url).await.unwrap();
            let (beliefs, over) = (Arc::clone(&crew.beliefs), Arc::clone(&crew.over));
            crew.tasks.spawn(async move {
                let mutex = client.mutex("shared").unwrap().ttl(TTL).unwrap();
                while !over.load(Ordering::SeqCst) {
                    let hold = mutex.lock().await.unwrap();
                    let from = BootTime::now();
                    tokio::time::sleep(Duration::from_millis(3)).await;
                    // What it believes ends when it says so, or when its time is over.
                    let to = BootTime::now().min(hold.deadline().max(from));
                    let token = hold.token().0;
                    beliefs.lock().push(Belief { token, from, to });
                    // Lost, or no answer: what matters is what was believed.
                    let _ = hold.release().await;
                }
            });
        }
        crew
    }

    async fn grants(&self, more: usize) {
        let goal = self.beliefs.lock().len() + more;
        let look = async {
            while self.beliefs.lock().len() < goal {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let reached = tokio::time::timeout(LIMIT, look).await;
        reached.unwrap_or_else(|_| panic!("{more} more grants did not come within {LIMIT:?}"));
    }

    async fn end(mut self) {
        self.over.store(true, Ordering::SeqCst);
        let all = async { while self.tasks.join_next().await.map(Result::unwrap).is_some() {} };
        tokio::time::timeout(LIMIT, all)
            .await
            .expect("everyone ends");
        let mut beliefs = self.beliefs.lock().clone();
        beliefs.sort_by_key(|belief| belief.from);
        for pair in beliefs.windows(2) {
            let [first, next] = [pair[0], pair[1]];
            assert!(first.to <= next.from, "two holders: {first:?} {next:?}");
            assert!(first.token < next.token, "tokens: {first:?} {next:?}");
        }
        println!("{} grants", beliefs.len());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_leader_is_killed() {
    let Some(running) = need("consul3") else {
        return;
    };
    let crew = Crew::start(running.url()).await;
    crew.grants(20).await;
    let killed = tokio::task::block_in_place(|| running.kill_leader()).unwrap();
    crew.grants(20).await;
    tokio::task::block_in_place(|| running.nodes()[killed].restart()).unwrap();
    crew.grants(20).await;
    crew.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_leader_is_stopped_past_the_ttl() {
    let Some(running) = need("consul3") else {
        return;
    };
    let crew = Crew::start(running.url()).await;
    crew.grants(20).await;
    let leader = running.leader().unwrap();
    tokio::task::block_in_place(|| running.nodes()[leader].stop()).unwrap();
    crew.grants(10).await;
    tokio::task::block_in_place(|| running.nodes()[leader].cont()).unwrap();
    crew.grants(20).await;
    crew.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_one_server_is_restarted() {
    let Some(running) = need("consul") else {
        return;
    };
    let client = palisade::connect(running.url()).await.unwrap();
    let ttl = Duration::from_secs(30);
    let kept = client
        .mutex("kept")
        .unwrap()
        .ttl(ttl)
        .unwrap()
        .lock()
        .await
        .unwrap();
    let crew = Crew::start(running.url()).await;
    crew.grants(20).await;
    tokio::task::block_in_place(|| running.nodes()[0].restart()).unwrap();
    crew.grants(20).await;
    crew.end().await;
    assert!(kept.is_valid(), "a restart shorter than the ttl is no loss");
    let token = kept.token();
    kept.release().await.unwrap();
    let next = client.mutex("kept").unwrap().lock().await.unwrap();
    assert!(next.token() > token);
}
