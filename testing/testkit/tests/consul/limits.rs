//! What an agent accepts from one address: as few connections as can be, and a message that names
//! the limit.

use std::io::ErrorKind::WouldBlock;
use std::io::Read;
use std::net::TcpStream;
use std::time::Duration;

use palisade::ErrorKind;
use palisade::report::Scope;
use palisade_testkit::lab::launch::proc::connections_to;

use crate::util::{connected, soon, started, until};

/// Settings of an agent with this limit.
fn limited(most: u32) -> [String; 2] {
    let limit = format!("limits = {{ http_max_conns_per_client = {most} }}");
    ["-hcl".to_owned(), limit]
}

/// The agent's default is 200. Each of these has a keeper of its own, as processes have.
#[tokio::test(flavor = "multi_thread")]
async fn a_crowd_of_holders_and_waiters_fits_into_the_agents_default() {
    let limit = limited(200);
    let running = need!(started("consul", &limit.each_ref().map(|word| &**word)));
    let port = running.nodes()[0].port();
    let mut holders = Vec::new();
    // One that starts has more for a moment, so that all at once would not fit.
    let room = async || {
        until("room to start", async || connections_to(port) < 180).await;
    };
    for number in 0..50 {
        room().await;
        let client = palisade::connect(&format!("{}?ttl=3s", running.url())).await;
        let client = client.unwrap();
        let hold = client.mutex(format!("lock-{number}")).lock().await.unwrap();
        holders.push((client, hold));
    }
    let mut waiters = tokio::task::JoinSet::new();
    for _ in 0..20 {
        room().await;
        let client = connected(&running).await;
        waiters.spawn(async move {
            let mutex = client.mutex("lock-0");
            mutex.lock().await.unwrap().release().await.unwrap();
        });
    }
    // All have renewed, with what they keep.
    for (_, hold) in &holders {
        let first = hold.deadline();
        until("a renewal", async || hold.deadline() > first).await;
    }
    until("the idle connections' end", async || {
        connections_to(port) <= 50 * 2 + 20 * 3 + 10
    })
    .await;
    // Others find room.
    let other = connected(&running).await;
    let lines = other.survey(Scope::Prefix(String::new())).await.unwrap();
    assert_eq!(lines.len(), 50);
    for (_, hold) in holders {
        assert!(hold.is_valid());
        soon("a release", hold.release()).await.unwrap();
    }
    soon("the waiters", async {
        while waiters.join_next().await.is_some() {}
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_without_room_is_named_as_such() {
    let limit = limited(8);
    let running = need!(started("consul", &limit.each_ref().map(|word| &**word)));
    let client = palisade::connect(&format!("{}?ttl=2s", running.url()))
        .await
        .unwrap();
    let hold = client.mutex("held").lock().await.unwrap();
    let first = hold.deadline();
    until("a renewal", async || hold.deadline() > first).await;
    // What it closes later would make room.
    let port = running.nodes()[0].port();
    until("no idle connections", async || connections_to(port) <= 2).await;
    // As other processes do.
    let address = running.nodes()[0].address();
    let others: Vec<TcpStream> = (0..12)
        .map(|_| TcpStream::connect(&address).unwrap())
        .collect();
    // It takes connections one after another, and closes those beyond its limit.
    until("the agent is full", async || {
        others.iter().any(|mut other| {
            other.set_nonblocking(true).unwrap();
            let read = other.read(&mut [0]);
            read.map_or_else(|error| error.kind() != WouldBlock, |read| read == 0)
        })
    })
    .await;
    for _ in 0..3 {
        let refused = palisade::connect(running.url()).await.err().unwrap();
        assert_eq!(refused.kind(), ErrorKind::Unreachable, "{refused}");
        let message = refused.message();
        assert!(message.contains("http_max_conns_per_client"), "{message}");
    }
    // A holder has what it needs.
    let held = hold.deadline();
    until("more renewals", async || {
        hold.deadline() > held + Duration::from_secs(2)
    })
    .await;
    assert!(hold.is_valid());
    drop(others);
    soon("the release", hold.release()).await.unwrap();
}
