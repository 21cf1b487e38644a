//! An API that allows ten concurrent calls, whatever the number of workers and machines.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::task::JoinSet;

#[tokio::main(flavor = "current_thread")]
async fn main() -> palisade::Result<()> {
    let url = std::env::var("PALISADE_URL").unwrap_or("file:".into());
    let client = palisade::connect(&url).await?;
    let (calling, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));

    let mut workers = JoinSet::new();
    for _ in 0..40 {
        let api = client.semaphore("examples/partner-api", 10);
        let (calling, most) = (Arc::clone(&calling), Arc::clone(&most));
        workers.spawn(async move {
            let permit = api.acquire().await?;
            most.fetch_max(calling.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            let call = tokio::time::sleep(Duration::from_millis(20));
            let called = permit.run(call).await;
            calling.fetch_sub(1, Ordering::SeqCst);
            called?;
            permit.release().await
        });
    }
    while let Some(worker) = workers.join_next().await {
        worker.expect("no worker panics")?;
    }
    let most = most.load(Ordering::SeqCst);
    println!("40 calls, at most {most} at once");
    assert!(most <= 10);
    Ok(())
}
