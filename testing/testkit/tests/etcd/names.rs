//! Names with unusual characters.

use palisade_testkit::lab::trial::every_nasty_name;

#[tokio::test(flavor = "multi_thread")]
async fn every_name_locks_shows_and_goes() {
    let running = need!("etcd");
    for namespace in ["palisade", "ü/\u{200b}"] {
        let url = format!("{}?namespace={namespace}", running.url());
        every_nasty_name(&palisade::connect(&url).await.unwrap()).await;
    }
}
