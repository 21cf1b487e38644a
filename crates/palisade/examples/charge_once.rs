//! A card is charged once, whoever asks: one worker at a time by a lock, and no late write by a fence.
//!
//! Ben is stopped with the lock in his hands, as by a debugger or a sleeping laptop, until it has been
//! given to Anna. He still believes; the storage does not believe him.

use palisade::fence::{self, Taken, Verdict};
use palisade::{Eviction, Which};

#[tokio::main(flavor = "current_thread")]
async fn main() -> palisade::Result<()> {
    let url = std::env::var("PALISADE_URL").unwrap_or("file:".into());
    let (client, storage) = (palisade::connect(&url).await?, fence::open(&url).await?);
    let lock = client.mutex("examples/card-4711");

    let ben = lock.lock().await?;
    let bens_token = ben.write_token()?;
    let card = storage.take(ben.name(), bens_token).await?;
    assert_eq!(
        card,
        Taken::Accepted { data: None },
        "nobody has charged it"
    );

    // His lease ends; here an operator ends it, which is quicker.
    client
        .evict(ben.name(), Which::Holders, Eviction::Remove)
        .await?;
    let anna = lock.lock().await?;
    let annas_token = anna.write_token()?;
    // From here on Ben can't write; if he had, Anna would see it now.
    let card = storage.take(anna.name(), annas_token).await?;
    assert_eq!(
        card,
        Taken::Accepted { data: None },
        "nobody has charged it"
    );
    let charge = storage.write(anna.name(), annas_token, b"charged by Anna".into());
    // Dropped at once if the lock is lost.
    assert_eq!(anna.run(charge).await??, Verdict::Accepted);

    // Ben goes on where he was.
    let late = storage.write(ben.name(), bens_token, b"charged by Ben".into());
    let Verdict::Stale { highest } = late.await? else {
        panic!("the card was charged twice");
    };
    println!("Ben's token {bens_token} is refused: the storage has seen {highest}");

    let card = storage.read(anna.name()).await?.expect("Anna wrote it");
    println!("{}", String::from_utf8_lossy(&card.data));
    anna.release().await
}
