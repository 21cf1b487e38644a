//! What becomes of a lock when the work that it protects panics.

use crate::support::{SOON, within};
use palisade::Client;

/// A client of each engine of this machine, with a ttl that no test waits for.
async fn clients(dir: &tempfile::TempDir) -> Vec<Client> {
    let store: u64 = rand::random();
    let urls = [
        format!("memory:{store:x}?ttl=60s"),
        format!("file:{}?ttl=60s", dir.path().display()),
    ];
    let mut clients = Vec::new();
    for url in urls {
        clients.push(palisade::connect(&url).await.unwrap());
    }
    clients
}

#[tokio::test]
async fn a_panic_in_the_critical_section_releases() {
    let dir = tempfile::tempdir().unwrap();
    for client in clients(&dir).await {
        let mutex = client.mutex("x");
        for inside_run in [false, true] {
            let mutex = mutex.clone();
            let work = tokio::spawn({
                let mutex = mutex.clone();
                async move {
                    let hold = mutex.lock().await.unwrap();
                    if inside_run {
                        let ran = hold.run(async { panic!("the test asked for it") });
                        ran.await.unwrap()
                    }
                    panic!("the test asked for it, while {hold:?}");
                }
            });
            assert!(within(SOON, work).await.unwrap_err().is_panic());
            within(SOON, mutex.lock())
                .await
                .unwrap()
                .release()
                .await
                .unwrap();
        }
    }
}
