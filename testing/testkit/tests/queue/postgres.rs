//! What is specific to PostgreSQL: steps in the user's own transaction, and that nothing locks a
//! queue as a whole.

use std::time::Duration;

use futures_util::{StreamExt, stream};
use palisade::engines::postgres::{PostgresMessage, PostgresQueue};
use palisade::queue::{Draft, Message};
use palisade::{ErrorKind, Patience};
use palisade_testkit::lab::trial::cycle;
use tokio::sync::mpsc;
use tokio_postgres::{AsyncMessage, Client, IsolationLevel, Transaction};

use crate::{Fixture, cases, running, soon, until};

cases! {
    an_effect_and_done_are_one_transaction,
    a_transaction_of_a_lost_message_fails,
    nobody_else_has_the_message_while_its_transaction_is_open,
    a_push_is_there_when_its_transaction_commits,
    the_first_push_of_all_may_be_in_a_transaction,
    a_push_and_the_end_of_its_key_go_one_after_the_other,
    keys_need_read_committed,
    an_open_transaction_holds_up_nobody_else,
    only_who_sleeps_is_notified,
    changes_are_durable_whatever_the_session_says,
    an_earlier_schema_says_what_to_do,
}

async fn database() -> Client {
    let url = running("postgres").unwrap().url();
    let url = url.split('?').next().unwrap();
    let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls)
        .await
        .unwrap();
    tokio::spawn(connection);
    client
}

async fn an_effect_and_done_are_one_transaction(fx: Fixture) {
    let (queue, mut client) = (fx.queue().await, database().await);
    let table = format!("once_{:08x}", rand::random::<u32>());
    client
        .batch_execute(&format!("CREATE TABLE {table} (id text)"))
        .await
        .unwrap();
    let effect = format!("INSERT INTO {table} VALUES ($1)");
    queue.push(Draft::new("x").id("a")).await.unwrap();

    let in_one_step = async |transaction: &Transaction<'_>, message: &Message| {
        let wrote = transaction.execute(&effect, &[&message.id()]).await;
        wrote.unwrap();
        message.done_in(transaction).await.unwrap();
    };
    // Rolled back: neither happened, and the message is ready again.
    let message = queue.next().await.unwrap();
    let transaction = client.transaction().await.unwrap();
    in_one_step(&transaction, &message).await;
    transaction.rollback().await.unwrap();
    drop(message);

    let message = soon("it again", queue.next()).await.unwrap();
    assert_eq!(message.attempt(), 2);
    let transaction = client.transaction().await.unwrap();
    in_one_step(&transaction, &message).await;
    transaction.commit().await.unwrap();
    message.settled();
    assert_eq!(queue.report().await.unwrap().unwrap().total(), 0);
    let count = format!("SELECT count(*) FROM {table}");
    let count: i64 = client.query_one(&count, &[]).await.unwrap().get(0);
    assert_eq!(count, 1);
}

async fn a_transaction_of_a_lost_message_fails(fx: Fixture) {
    let (queue, other, mut client) = (fx.queue().await, fx.queue().await, database().await);
    for draft in [Draft::new("x").id("a"), Draft::new("x").id("b").key("k")] {
        queue.push(draft).await.unwrap();
        let message = queue.next().await.unwrap();
        let all = palisade::queue::Pick::All;
        assert_eq!(other.drop_messages(all, true).await.unwrap(), 1);
        let transaction = client.transaction().await.unwrap();
        let lost = message.done_in(&transaction).await.unwrap_err();
        assert_eq!(lost.kind(), ErrorKind::Lost, "{lost:?}");
        let after = transaction.execute("SELECT 1", &[]).await;
        assert!(after.is_err(), "it can't go on");
    }
}

async fn nobody_else_has_the_message_while_its_transaction_is_open(fx: Fixture) {
    let (queue, mut client) = (fx.queue().await, database().await);
    queue.push(Draft::new("1").key("k")).await.unwrap();
    queue.push(Draft::new("2").key("k")).await.unwrap();
    let message = queue.next().await.unwrap();
    let transaction = client.transaction().await.unwrap();
    message.done_in(&transaction).await.unwrap();
    // Past the lease: a message that the transaction has locked goes to nobody else.
    let end = tokio::time::Instant::now() + message.ttl() + Duration::from_secs(1);
    while tokio::time::Instant::now() < end {
        assert!(queue.claim(5).await.unwrap().is_empty());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    transaction.commit().await.unwrap();
    message.settled();
    let next = soon("the next of the key", queue.next()).await.unwrap();
    assert_eq!((next.body(), next.attempt()), (&b"2"[..], 1));
    next.done().await.unwrap();
}

async fn a_push_is_there_when_its_transaction_commits(fx: Fixture) {
    let (queue, mut client) = (fx.queue().await, database().await);
    let transaction = client.transaction().await.unwrap();
    let pushed = queue.push_in(&transaction, "never").await.unwrap();
    assert!(!pushed.duplicate);
    transaction.rollback().await.unwrap();
    let transaction = client.transaction().await.unwrap();
    let draft = Draft::new("x").id("a").key("k");
    queue.push_in(&transaction, draft.clone()).await.unwrap();
    assert!(queue.push_in(&transaction, draft).await.unwrap().duplicate);
    assert!(queue.claim(5).await.unwrap().is_empty());
    let waits = tokio::spawn({
        let queue = queue.clone();
        async move { queue.next().await }
    });
    tokio::time::sleep(Duration::from_millis(50)).await;
    transaction.commit().await.unwrap();
    let message = soon("the message", waits).await.unwrap().unwrap();
    assert_eq!(message.body(), b"x");
    message.done().await.unwrap();
    let memory = palisade::connect("memory:").await.unwrap().queue("x");
    let transaction = client.transaction().await.unwrap();
    let refused = memory.push_in(&transaction, "x").await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unsupported);
}

/// Neither transaction sees what the other has not committed: without the lock of the key, neither
/// would make the second message the first.
async fn the_first_push_of_all_may_be_in_a_transaction(fx: Fixture) {
    let url = format!("{}&schema=first_{:08x}", fx.url, rand::random::<u32>());
    let queue = palisade::connect(&*url).await.unwrap().queue("work");
    let mut client = database().await;
    let transaction = client.transaction().await.unwrap();
    transaction.execute("SELECT 1", &[]).await.unwrap();
    queue.push_in(&transaction, "x").await.unwrap();
    transaction.commit().await.unwrap();
    assert_eq!(queue.next().await.unwrap().body(), b"x");
}

async fn a_push_and_the_end_of_its_key_go_one_after_the_other(fx: Fixture) {
    let (queue, mut client, other) = (fx.queue().await, database().await, database().await);
    queue.push(Draft::new("1").key("k")).await.unwrap();
    let first = queue.next().await.unwrap();
    let transaction = client.transaction().await.unwrap();
    let second = Draft::new("2").key("k");
    queue.push_in(&transaction, second).await.unwrap();
    let done = tokio::spawn(first.done());
    let waits = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event = 'advisory')";
    until("the end of the first waits", async || {
        other.query_one(waits, &[]).await.unwrap().get(0)
    })
    .await;
    transaction.commit().await.unwrap();
    soon("the end of the first", done).await.unwrap().unwrap();
    let second = soon("the second", queue.next()).await.unwrap();
    assert_eq!(second.body(), b"2");
    second.done().await.unwrap();
}

async fn keys_need_read_committed(fx: Fixture) {
    let (queue, mut client) = (fx.queue().await, database().await);
    queue.push(Draft::new("x").key("k")).await.unwrap();
    queue.push(Draft::new("y")).await.unwrap();
    let (keyed, plain) = (queue.next().await.unwrap(), queue.next().await.unwrap());
    for level in [IsolationLevel::RepeatableRead, IsolationLevel::Serializable] {
        let transaction = client.build_transaction().isolation_level(level);
        let transaction = transaction.start().await.unwrap();
        let refused = keyed.done_in(&transaction).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused:?}");
    }
    let transaction = client
        .build_transaction()
        .isolation_level(IsolationLevel::RepeatableRead)
        .start()
        .await
        .unwrap();
    plain.done_in(&transaction).await.unwrap();
    transaction.commit().await.unwrap();
    plain.settled();
    keyed.done().await.unwrap();
    assert_eq!(queue.report().await.unwrap().unwrap().total(), 0);
}

/// A client that is paused in a transaction blocks only its own message, key and id.
async fn an_open_transaction_holds_up_nobody_else(fx: Fixture) {
    let (queue, mut client) = (fx.queue().await, database().await);
    queue.push(Draft::new("1").key("k")).await.unwrap();
    let message = queue.next().await.unwrap();
    let transaction = client.transaction().await.unwrap();
    message.done_in(&transaction).await.unwrap();
    let draft = Draft::new("2").key("other").id("i");
    queue.push_in(&transaction, draft).await.unwrap();
    for number in 0..20 {
        let free = Draft::new("x").key(format!("free{number}"));
        queue.push_all([Draft::new("x"), free]).await.unwrap();
        for message in queue.claim(2).await.unwrap() {
            message.done().await.unwrap();
        }
    }
    transaction.commit().await.unwrap();
    message.settled();
    let left = queue.next_within(Patience::NoWait).await.unwrap().unwrap();
    assert_eq!(left.body(), b"2");
    left.done().await.unwrap();
}

/// What is notified on `channel` from now on, while the client lives.
async fn listen(channel: &str) -> (Client, mpsc::UnboundedReceiver<String>) {
    let url = running("postgres").unwrap().url();
    let url = url.split('?').next().unwrap();
    let connected = tokio_postgres::connect(url, tokio_postgres::NoTls).await;
    let (client, mut connection) = connected.unwrap();
    let (tell, told) = mpsc::unbounded_channel();
    let mut messages = stream::poll_fn(move |cx| connection.poll_message(cx));
    tokio::spawn(async move {
        while let Some(Ok(message)) = messages.next().await {
            if let AsyncMessage::Notification(note) = message {
                let _ = tell.send(note.payload().to_owned());
            }
        }
    });
    let listen = format!("LISTEN \"{channel}\"");
    client.batch_execute(&listen).await.unwrap();
    (client, told)
}

/// A notification holds up the commits of all others, so that there is one for a consumer that
/// sleeps, for each message that it could take, and none for anyone else.
async fn only_who_sleeps_is_notified(fx: Fixture) {
    let (queue, client) = (fx.queue().await, database().await);
    let of_this = format!(
        "FROM palisade.queue_sleeper s USING palisade.queue q \
         WHERE q.id = s.queue AND q.namespace = '{}'",
        fx.url.split("namespace=").nth(1).unwrap()
    );
    let asleep = format!("SELECT s.mailbox {}", of_this.replace(" USING ", ", "));
    let mailboxes = async || client.query(&asleep, &[]).await.unwrap();
    queue.push("x").await.unwrap();
    queue.next().await.unwrap().done().await.unwrap();
    assert_eq!(mailboxes().await.len(), 0, "there was something to do");
    let waits: Vec<_> = (0..3)
        .map(|_| {
            let queue = queue.clone();
            tokio::spawn(async move { queue.next().await })
        })
        .collect();
    until("all sleep", async || mailboxes().await.len() >= 3).await;
    let mailbox: String = mailboxes().await[0].get(0);
    let (_listener, mut told) = listen(&mailbox).await;
    // Notifications come in the order of the commits: what was sent before this one is there.
    let mut count = async || -> usize {
        let end = "SELECT pg_notify($1, 'end')";
        client.execute(end, &[&mailbox]).await.unwrap();
        let mut count = 0;
        while soon("a notification", told.recv()).await.unwrap() != "end" {
            count += 1;
        }
        count
    };
    queue.push("x").await.unwrap();
    assert_eq!(count().await, 1, "one message, one of three sleepers");
    let two = [Draft::new("y"), Draft::new("z")];
    queue.push_all(two).await.unwrap();
    for wait in waits {
        let message = soon("a message", wait).await.unwrap().unwrap();
        message.done().await.unwrap();
    }
    // One that was woken by its own clock has left its place there.
    let nobody = format!("DELETE {of_this}");
    client.execute(&nobody, &[]).await.unwrap();
    count().await;
    queue
        .push_all(["1", "2", "3"].map(Draft::new))
        .await
        .unwrap();
    assert_eq!(count().await, 0, "nobody sleeps");
}

async fn changes_are_durable_whatever_the_session_says(fx: Fixture) {
    let (queue, mut client) = (fx.queue().await, database().await);
    client
        .batch_execute("SET synchronous_commit = off")
        .await
        .unwrap();
    let level = async |transaction: &Transaction<'_>| -> String {
        let row = transaction.query_one("SHOW synchronous_commit", &[]);
        row.await.unwrap().get(0)
    };
    let transaction = client.transaction().await.unwrap();
    assert_eq!(level(&transaction).await, "off");
    queue.push_in(&transaction, "x").await.unwrap();
    assert_eq!(level(&transaction).await, "on");
    transaction.commit().await.unwrap();
    let message = queue.next().await.unwrap();
    let transaction = client.transaction().await.unwrap();
    message.done_in(&transaction).await.unwrap();
    assert_eq!(level(&transaction).await, "on");
    transaction.commit().await.unwrap();
    message.settled();
}

async fn an_earlier_schema_says_what_to_do(fx: Fixture) {
    let schema = format!("early_{:08x}", rand::random::<u32>());
    let url = format!("{}&schema={schema}", fx.url);
    let client = palisade::connect(&*url).await.unwrap();
    cycle(&client.mutex("x")).await;
    let drop = format!(
        "DROP FUNCTION {schema}.queue_push, {schema}.queue_claim; DROP TABLE {schema}.message;"
    );
    database().await.batch_execute(&drop).await.unwrap();
    let early = client.queue("x").push("y").await.unwrap_err();
    assert_eq!(early.kind(), ErrorKind::Unusable);
    assert!(
        early.to_string().contains("palisade schema postgres"),
        "{early}"
    );
    let sql = palisade::engines::postgres::Schema::new(&schema)
        .unwrap()
        .sql();
    database().await.batch_execute(&sql).await.unwrap();
    client.queue("x").push("y").await.unwrap();
}
