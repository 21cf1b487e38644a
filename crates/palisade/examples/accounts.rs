//! Money moves between two accounts, both locked: all or nothing, in an order that the library
//! chooses, so that two transfers in opposite directions never wait for each other.

use palisade::Client;
use palisade::fence::{self, SharedFence, Taken, Verdict};

#[tokio::main(flavor = "current_thread")]
async fn main() -> palisade::Result<()> {
    let url = std::env::var("PALISADE_URL").unwrap_or("file:".into());
    let (client, storage) = (palisade::connect(&url).await?, fence::open(&url).await?);
    let (one, two) = tokio::join!(
        transfer(&client, &storage, "anna", "ben"),
        transfer(&client, &storage, "ben", "anna"),
    );
    one.and(two)
}

async fn transfer(
    client: &Client,
    storage: &SharedFence,
    from: &str,
    to: &str,
) -> palisade::Result<()> {
    let names = [from, to].map(|account| format!("examples/accounts/{account}"));
    let both = client.multi_lock(names).lock().await?;
    both.run(async {
        for account in both.holds() {
            // Each account has its own lock, token and mark.
            let (name, token) = (account.name(), account.write_token()?);
            // Raised before it is read: an older holder's late entry would be overwritten.
            let Taken::Accepted { data } = storage.take(name, token).await? else {
                panic!("replaced");
            };
            let mut entries = data.unwrap_or_default();
            entries.extend_from_slice(format!("{from} to {to}: 10\n").as_bytes());
            let write = storage.write(name, token, entries);
            assert_eq!(write.await?, Verdict::Accepted);
        }
        println!("{from} pays {to}");
        palisade::Result::Ok(())
    })
    .await??;
    both.release().await
}
