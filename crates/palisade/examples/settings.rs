//! Settings that many read and few change: readers side by side, a writer alone.

use std::sync::Arc;

use palisade::fence;
use tokio::sync::Barrier;

#[tokio::main(flavor = "current_thread")]
async fn main() -> palisade::Result<()> {
    let url = std::env::var("PALISADE_URL").unwrap_or("file:".into());
    let (client, storage) = (palisade::connect(&url).await?, fence::open(&url).await?);
    let lock = client.rwlock("examples/settings");

    let mut writer = lock.write().await?;
    let (name, token) = (writer.name().clone(), writer.write_token()?);
    storage
        .write(&name, token, b"colour = green".into())
        .await?;
    // Readers may come in now, another writer may not.
    writer.downgrade().await?;

    let together = Arc::new(Barrier::new(3));
    let reader = async || {
        let hold = lock.read().await?;
        // All of them hold it at once, or else nobody passes.
        together.wait().await;
        let settings = storage.read(hold.name()).await?.expect("it was written");
        println!("{}", String::from_utf8_lossy(&settings.data));
        hold.release().await
    };
    let (one, two, three) = tokio::join!(reader(), reader(), reader());
    one.and(two).and(three)?;
    assert!(lock.try_write().await?.is_none(), "one still reads");
    writer.release().await
}
