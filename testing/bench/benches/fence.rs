//! What a fence costs in PostgreSQL, beside the same work without it, in one run. Prints ratios.
//!
//! - row: one UPDATE of a row in a table with the triggers, beside one without;
//! - guard: BEGIN, UPDATE, COMMIT under `postgres_guard`, which is sent together with the UPDATE,
//!   beside the same without.
//!
//! The server keeps its data in memory, which hides nothing behind a disk. Machines are noisy: both
//! take turns, and the medians are compared.

#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use palisade::engines::postgres::PostgresHold;
use palisade::fence::sql::Table;
use palisade_testkit::lab::launch;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, NoTls};

const ROUNDS: usize = 60;
const BATCH: usize = 100;

fn main() {
    let Some(server) = launch::need("postgres") else {
        return;
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let ok = runtime.block_on(async {
        let (client, connection) = tokio_postgres::connect(server.url(), NoTls).await.unwrap();
        tokio::spawn(connection);
        let rows = rows(&client).await;
        guard(client, server.url()).await & rows
    });
    std::process::exit(i32::from(!ok));
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

fn judge(what: &str, (bare, fenced): (Vec<Duration>, Vec<Duration>), wanted: f64) -> bool {
    let (bare, fenced) = (median(bare), median(fenced));
    let ratio = bare.as_secs_f64() / fenced.as_secs_f64();
    let verdict = if ratio >= wanted { "ok" } else { "TOO SLOW" };
    println!(
        "{what:6} without {bare:?}, with {fenced:?}, ratio {ratio:.2} (wanted {wanted:.2}) {verdict}"
    );
    ratio >= wanted
}

async fn rows(client: &Client) -> bool {
    for table in ["bare", "fenced"] {
        let sql = format!(
            "CREATE TABLE public.{table} (id int PRIMARY KEY, n int, note text) \
             WITH (fillfactor = 50); \
             INSERT INTO public.{table} SELECT i, 0, repeat('x', 100) FROM generate_series(1, 100) i"
        );
        client.batch_execute(&sql).await.unwrap();
    }
    let triggers = Table::new("fenced").unwrap().postgres();
    client.batch_execute(&triggers).await.unwrap();
    let bare = "UPDATE public.bare SET n = n + 1 WHERE id = $1";
    let bare = client.prepare(bare).await.unwrap();
    let fenced = "UPDATE public.fenced SET n = n + 1, fence = $2 WHERE id = $1";
    let fenced = client.prepare(fenced).await.unwrap();
    let (mut without, mut with) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        let begin = Instant::now();
        for id in 0..BATCH as i32 {
            client.execute(&bare, &[&(id + 1)]).await.unwrap();
        }
        without.push(begin.elapsed() / BATCH as u32);
        let token = 1 + round as i64;
        let begin = Instant::now();
        for id in 0..BATCH as i32 {
            client.execute(&fenced, &[&(id + 1), &token]).await.unwrap();
        }
        with.push(begin.elapsed() / BATCH as u32);
    }
    judge("row", (without, with), 0.85)
}

async fn guard(mut db: Client, url: &str) -> bool {
    let client = palisade::connect(url).await.unwrap();
    let hold = client.mutex("bench").lock().await.unwrap();
    let update = "UPDATE public.bare SET n = n + 1 WHERE id = $1";
    let update = db.prepare(update).await.unwrap();
    let (mut without, mut with) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        for guarded in [false, true] {
            let begin = Instant::now();
            for id in 0..BATCH as i32 {
                let transaction = db.transaction().await.unwrap();
                let id = id + 1;
                let parameters: [&(dyn ToSql + Sync); 1] = [&id];
                let update = transaction.execute(&update, &parameters);
                if guarded {
                    // Both are sent at once.
                    let guard = hold.postgres_guard(&transaction);
                    let (guard, update) = tokio::join!(guard, update);
                    guard.unwrap();
                    update.unwrap();
                } else {
                    update.await.unwrap();
                }
                transaction.commit().await.unwrap();
            }
            let took = begin.elapsed() / BATCH as u32;
            if guarded { &mut with } else { &mut without }.push(took);
        }
    }
    judge("guard", (without, with), 0.60)
}
