//! Two workers want to charge the same card; one does, the other finds it done.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

#[tokio::main(flavor = "current_thread")]
async fn main() -> palisade::Result<()> {
    let dir = tempfile::tempdir().unwrap();
    let url = format!("file:{}", dir.path().display());
    let charges = Arc::new(AtomicU32::new(0));

    let worker = |name: &'static str| {
        let (url, charges) = (url.clone(), Arc::clone(&charges));
        async move {
            let palisade = palisade::connect(&url).await?.for_correctness().await?;
            let hold = palisade.mutex("charge-card-4711").lock().await?;
            let first = hold
                .run(async { charges.fetch_add(1, Ordering::SeqCst) == 0 })
                .await?;
            let did = if first {
                "charges the card"
            } else {
                "finds it charged"
            };
            println!("{name} {did} with token {}", hold.token());
            hold.release().await
        }
    };
    let (one, two) = tokio::join!(worker("anna"), worker("ben"));
    one.and(two)
}
