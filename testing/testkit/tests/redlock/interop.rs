//! Another Redlock client on the same servers: rslock, both ways.

use std::time::Duration;

use rslock::LockManager;

use super::support::{FRESH, Five};

#[tokio::test(flavor = "multi_thread")]
async fn rslock_and_palisade_exclude_each_other_on_five_servers() {
    let Some(five) = Five::start() else { return };
    let client = five.client(FRESH).await;
    let nodes = five.running.nodes().iter();
    let urls: Vec<String> = nodes
        .map(|node| format!("redis://{}", node.address()))
        .collect();
    let mut other = LockManager::new(urls);
    other.set_retry(1, Duration::from_millis(1));
    let ttl = Duration::from_secs(20);

    let hold = client.mutex("job").lock().await.unwrap();
    assert!(
        other.lock("job", ttl).await.is_err(),
        "it takes what we hold"
    );
    hold.release().await.unwrap();
    // Our release may still be in flight to the last servers.
    let mut theirs = other.lock("job", ttl).await;
    for _ in 0..50 {
        if theirs.is_ok() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
        theirs = other.lock("job", ttl).await;
    }
    let theirs = theirs.expect("a free lock");
    assert!(client.mutex("job").try_lock().await.unwrap().is_none());
    other.unlock(&theirs).await;
    drop(client.mutex("job").lock().await.unwrap());
}
