//! A cron job on many hosts: each host starts it at the same minute, one does the work.
//!
//! The lock is kept for a while after the work (`at_least`), or else a host whose clock is late would
//! find it free and do the work again.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

#[tokio::main(flavor = "current_thread")]
async fn main() -> palisade::Result<()> {
    let url = std::env::var("PALISADE_URL").unwrap_or("file:".into());
    let runs = AtomicU32::new(0);

    let host = async |late: Duration| {
        let client = palisade::connect(&url).await?;
        // As a clock that is late.
        tokio::time::sleep(late).await;
        let job = client.mutex("examples/nightly-report");
        let job = job.at_least(Duration::from_secs(5));
        let Some(hold) = job.try_lock().await? else {
            println!("somebody else is at it, or was just now");
            return Ok(());
        };
        let run = async { runs.fetch_add(1, Ordering::Relaxed) };
        hold.run(run).await?;
        println!("the report is written, with token {}", hold.token());
        hold.release().await
    };
    let (one, two, three) = tokio::join!(
        host(Duration::ZERO),
        host(Duration::ZERO),
        host(Duration::from_millis(500)),
    );
    one.and(two).and(three)?;
    assert_eq!(runs.into_inner(), 1, "reports written");
    Ok(())
}
