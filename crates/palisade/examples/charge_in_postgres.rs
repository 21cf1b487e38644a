//! A card is charged once: lock and data are in one PostgreSQL database, and the transaction commits
//! only while the lock is held. No token column is needed.
//!
//! `PALISADE_URL=postgres://app@localhost/shop`

use palisade::engines::postgres::{PostgresHold, is_guard_failure};
use palisade::{Client, Eviction, Hold, Which};
use tokio_postgres::{NoTls, Transaction};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::var("PALISADE_URL")?;
    let client = palisade::connect(&url).await?.for_correctness().await?;
    let (mut db, connection) = tokio_postgres::connect(&url, NoTls).await?;
    tokio::spawn(connection);
    db.batch_execute("CREATE TEMP TABLE charges (card int PRIMARY KEY, by_whom text)")
        .await?;
    let lock = client.mutex("examples/card-4711");

    // Ben is stopped in the middle of his transaction, and his lock is given to Anna.
    let ben = lock.lock().await?;
    let transaction = db.transaction().await?;
    charge(&transaction, &ben, "Ben").await?;
    take_away(&client, &ben).await?;
    let anna = lock.lock().await?;
    let refused = transaction.commit().await.expect_err("he lost the lock");
    assert!(is_guard_failure(&refused), "{refused}");
    println!("Ben's COMMIT is refused");

    let transaction = db.transaction().await?;
    charge(&transaction, &anna, "Anna").await?;
    transaction.commit().await?;
    let row = db.query_one("SELECT by_whom FROM charges WHERE card = 4711", &[]);
    println!("charged by {}", row.await?.get::<_, String>(0));
    Ok(anna.release().await?)
}

async fn charge(
    transaction: &Transaction<'_>,
    hold: &Hold,
    whom: &str,
) -> Result<(), Box<dyn std::error::Error>> {
    let (insert, values) = ("INSERT INTO charges VALUES (4711, $1)", [&whom as _]);
    // Sent together: the guard costs no round trip of its own.
    let (guarded, inserted) = tokio::join!(
        hold.postgres_guard(transaction),
        transaction.execute(insert, &values)
    );
    guarded?;
    inserted?;
    Ok(())
}

/// What the end of a lease does, only sooner.
async fn take_away(client: &Client, hold: &Hold) -> palisade::Result<()> {
    client
        .evict(hold.name(), Which::Holders, Eviction::Remove)
        .await?;
    Ok(())
}
