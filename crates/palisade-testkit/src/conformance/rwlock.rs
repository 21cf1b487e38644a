//! What the read-write lock promises, beyond the exclusion of its writers.

use std::time::Duration;

use super::bed::held;
use super::failure::{ensure, ensure_eq};
use super::{Bed, Check, SOON, cases, needs, within};

cases! { pub(super) CASES, "rwlock";
    "Readers hold beside each other, a writer alone." => [
        readers_share if needs::shared,
        a_writer_excludes_readers if needs::shared,
        a_reader_excludes_writers if needs::shared,
        a_writer_waits_for_every_reader if needs::shared,
        a_writer_and_a_mutex_exclude_each_other,
    ],
    "Readers and writers are served in the order in which they came." => [
        readers_do_not_overtake_a_waiting_writer if needs::fair_shared,
        a_writer_that_gives_up_lets_readers_in if needs::fair_shared,
    ],
    "A reader's patience is kept." => [
        read_timeout_is_none_in_time if needs::shared,
    ],
}

async fn readers_share(bed: Bed) -> Check {
    let other = bed.other_client().await?;
    let mut readers = Vec::new();
    for round in 0..6 {
        let client = if round % 2 == 0 {
            bed.client()
        } else {
            other.clone()
        };
        readers.push(held(client.rwlock("shared").try_read().await?)?);
    }
    ensure!(
        readers.iter().all(|hold| hold.is_valid()),
        "a reader is not valid"
    );
    let line = bed.line(&bed.name("shared")?).await?;
    ensure_eq!(line.holders.len(), 6, "readers");
    Ok(())
}

async fn a_writer_excludes_readers(bed: Bed) -> Check {
    let lock = bed.client().rwlock("shared");
    let other = bed.other_client().await?.rwlock("shared");
    let writer = lock.write().await?;
    ensure!(
        other.try_read().await?.is_none(),
        "a reader beside a writer"
    );
    ensure!(
        lock.try_read().await?.is_none(),
        "a reader beside a writer of its own client"
    );
    ensure!(other.try_write().await?.is_none(), "two writers");
    writer.release().await?;
    held(other.try_read().await?)?.release().await?;
    Ok(())
}

async fn a_reader_excludes_writers(bed: Bed) -> Check {
    let lock = bed.client().rwlock("shared");
    let other = bed.other_client().await?.rwlock("shared");
    let reader = lock.read().await?;
    ensure!(
        other.try_write().await?.is_none(),
        "a writer beside a reader"
    );
    ensure!(
        lock.try_write().await?.is_none(),
        "a writer beside a reader of its own client"
    );
    reader.release().await?;
    held(other.try_write().await?)?.release().await?;
    Ok(())
}

async fn a_writer_waits_for_every_reader(bed: Bed) -> Check {
    let lock = bed.client().rwlock("shared");
    let other = bed.other_client().await?.rwlock("shared");
    let (one, two) = (lock.read().await?, lock.read().await?);
    let writer = tokio::spawn(async move { other.write().await });
    if bed.capability().waiters_visible {
        bed.until_waiting(&bed.name("shared")?, 1).await?;
    }
    one.release().await?;
    let line = bed.line(&bed.name("shared")?).await?;
    ensure_eq!(line.holders.len(), 1, "holders");
    ensure!(!writer.is_finished(), "a writer beside a reader");
    two.release().await?;
    drop(within(SOON, "the writer's grant", writer).await???);
    Ok(())
}

async fn a_writer_and_a_mutex_exclude_each_other(bed: Bed) -> Check {
    let other = bed.other_client().await?;
    let writer = bed.client().rwlock("same").write().await?;
    ensure!(
        other.mutex("same").try_lock().await?.is_none(),
        "a mutex beside a writer"
    );
    writer.release().await?;
    let mutex = other.mutex("same").lock().await?;
    let busy = bed.client().rwlock("same").try_write().await?;
    ensure!(busy.is_none(), "a writer beside a mutex");
    mutex.release().await?;
    Ok(())
}

async fn readers_do_not_overtake_a_waiting_writer(bed: Bed) -> Check {
    let name = bed.name("shared")?;
    let lock = bed.client().rwlock("shared");
    let other = bed.other_client().await?.rwlock("shared");
    let reader = lock.read().await?;
    let writing = other.clone();
    let writer = tokio::spawn(async move { writing.write().await });
    bed.until_waiting(&name, 1).await?;
    ensure!(
        other.try_read().await?.is_none(),
        "a reader overtook the writer"
    );
    let reading = lock.clone();
    let behind = tokio::spawn(async move { reading.read().await });
    bed.until_waiting(&name, 2).await?;
    reader.release().await?;
    let writer = within(SOON, "the writer's grant", writer).await???;
    ensure!(!behind.is_finished(), "a reader beside a writer");
    let token = writer.token();
    writer.release().await?;
    let behind = within(SOON, "the reader's grant", behind).await???;
    ensure!(behind.token() > token, "the reader's token is not greater");
    Ok(())
}

async fn a_writer_that_gives_up_lets_readers_in(bed: Bed) -> Check {
    let name = bed.name("shared")?;
    let lock = bed.client().rwlock("shared");
    let _reader = lock.read().await?;
    let writing = lock.clone();
    let writer = tokio::spawn(async move { writing.write().await });
    bed.until_waiting(&name, 1).await?;
    let reading = lock.clone();
    let behind = tokio::spawn(async move { reading.read().await });
    bed.until_waiting(&name, 2).await?;
    writer.abort();
    drop(within(SOON, "the reader's grant", behind).await???);
    Ok(())
}

async fn read_timeout_is_none_in_time(bed: Bed) -> Check {
    let lock = bed.client().rwlock("shared");
    let _writer = lock.write().await?;
    let wait = lock.read_timeout(Duration::from_millis(150));
    ensure!(
        within(SOON, "the timeout", wait).await??.is_none(),
        "a reader beside a writer"
    );
    Ok(())
}
