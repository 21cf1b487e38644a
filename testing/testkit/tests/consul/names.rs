//! Names with unusual characters.

use palisade::ErrorKind;
use palisade::report::Scope;
use palisade_testkit::lab::trial::{NASTY, every_nasty_name};

use crate::util::{beside_others, connected};

#[tokio::test(flavor = "multi_thread")]
async fn every_name_locks_shows_and_goes() {
    let running = need!("consul");
    every_nasty_name(&connected(&running).await).await;
}

/// As keys of Consul they work, or are refused before any request.
#[tokio::test(flavor = "multi_thread")]
async fn beside_other_tools_a_name_works_or_is_refused() {
    let running = need!("consul");
    let client = beside_others(&running, "").await;
    let mut refused = 0;
    for name in NASTY {
        let mutex = client.mutex(*name);
        match mutex.lock().await {
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::InvalidName, "{name:?}: {error}");
                refused += 1;
            }
            Ok(hold) => {
                assert!(mutex.try_lock().await.unwrap().is_none(), "{name:?} twice");
                let scope = Scope::Line(hold.name().clone());
                assert_eq!(client.survey(scope).await.unwrap().len(), 1, "{name:?}");
                hold.release().await.unwrap();
            }
        }
    }
    assert!((10..20).contains(&refused), "{refused} names refused");
}
