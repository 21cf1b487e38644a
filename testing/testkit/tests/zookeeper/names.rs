//! Names with unusual characters.

use palisade::ErrorKind;
use palisade_testkit::lab::trial::{NASTY, every_nasty_name};

use crate::util::beside_others;

#[tokio::test(flavor = "multi_thread")]
async fn every_name_locks_shows_and_goes_or_is_refused() {
    let running = need!("zookeeper");
    for namespace in ["palisade", "ü/x"] {
        let url = format!("{}/root?namespace={namespace}", running.url());
        every_nasty_name(&palisade::connect(&url).await.unwrap()).await;
    }
    // As paths of ZooKeeper they work, or are refused before any request.
    let client = beside_others(&running, "").await;
    let mut refused = 0;
    for name in NASTY {
        match client.mutex(*name).lock().await {
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::InvalidName, "{name:?}: {error}");
                refused += 1;
            }
            Ok(hold) => {
                let again = client.mutex(*name).try_lock().await.unwrap();
                assert!(again.is_none(), "{name:?} twice");
                hold.release().await.unwrap();
            }
        }
    }
    assert!((6..15).contains(&refused), "{refused} names refused");
}
