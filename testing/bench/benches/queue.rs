//! What a message on PostgreSQL costs, beside the raw statements of the same batch size in the same
//! run: `UPDATE … FOR UPDATE SKIP LOCKED` and `DELETE`, both prepared.
//!
//! - claim + done of batches, one consumer: ours is wanted at 0.8 of raw;
//! - 1, 4 and 16 consumers: messages per second, which must not fall (no convoy);
//! - 16 consumers with one message at a time, with `PALISADE_BENCH_BESIDE=1` beside sqlxmq.
//!
//! Machines are noisy: raw and ours take turns, and medians are compared.

#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use palisade::Patience;
use palisade::queue::{Draft, Queue};
use palisade_testkit::lab::launch;
use tokio_postgres::Client;

const ROUNDS: usize = 9;
const BODY: usize = 100;
const WANTED: f64 = 0.8;

fn main() {
    let Some(server) = launch::need("postgres") else {
        return;
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    let ok = runtime.unwrap().block_on(measure(server.url()));
    std::process::exit(i32::from(!ok));
}

async fn measure(url: &str) -> bool {
    let mut ok = true;
    for batch in [1, 10, 100] {
        let messages = if batch == 1 { 300 } else { 2_000 };
        let (raw, ours) = in_turns(url, 1, batch, messages).await;
        let ratio = ours / raw;
        ok &= ratio >= WANTED;
        let verdict = if ratio >= WANTED { "ok" } else { "TOO SLOW" };
        println!(
            "batches of {batch:3}: raw {raw:7.0}/s, ours {ours:7.0}/s, \
             ratio {ratio:.2} (wanted {WANTED:.2}) {verdict}"
        );
    }
    let mut alone = 0.0;
    for consumers in [1, 4, 16] {
        let (raw, ours) = in_turns(url, consumers, 10, 8_000).await;
        if consumers == 1 {
            alone = ours;
        }
        println!(
            "{consumers:2} consumers, batches of 10: raw {raw:7.0}/s, ours {ours:7.0}/s, \
             ratio {:.2}; beside one consumer {:.2}",
            ours / raw,
            ours / alone
        );
        ok &= ours >= alone * 0.9;
    }
    let (raw, ours) = in_turns(url, 16, 1, 3_000).await;
    println!("16 consumers, one message at a time: raw {raw:.0}/s, ours {ours:.0}/s");
    if let Some(rate) = beside(url, 3_000) {
        println!("the same with sqlxmq: {rate}/s");
    }
    ok
}

/// Messages per second of raw statements and of ours, by so many consumers.
async fn in_turns(url: &str, consumers: usize, batch: usize, messages: usize) -> (f64, f64) {
    let raws = join_all((0..consumers).map(|_| Raw::new(url))).await;
    let ours = join_all((0..consumers).map(|_| ours(url))).await;
    let (mut raw_times, mut our_times) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        raws[0].fill(messages).await;
        let begin = Instant::now();
        join_all(raws.iter().map(|raw| raw.work(batch))).await;
        raw_times.push(begin.elapsed());
        fill(&ours[0], messages).await;
        let begin = Instant::now();
        join_all(ours.iter().map(|queue| work(queue, batch))).await;
        our_times.push(begin.elapsed());
    }
    let per_second = |times| messages as f64 / median(times).as_secs_f64();
    (per_second(raw_times), per_second(our_times))
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

async fn ours(url: &str) -> Queue {
    palisade::connect(url).await.unwrap().queue("bench")
}

async fn fill(queue: &Queue, messages: usize) {
    for from in (0..messages).step_by(1_000) {
        let count = (messages - from).min(1_000);
        let drafts = (0..count).map(|_| Draft::new(vec![7; BODY]));
        queue.push_all(drafts).await.unwrap();
    }
}

/// Takes messages until there is none.
async fn work(queue: &Queue, batch: usize) {
    loop {
        let messages = if batch == 1 {
            let one = queue.next_within(Patience::NoWait).await.unwrap();
            one.into_iter().collect()
        } else {
            queue.claim(batch).await.unwrap()
        };
        if messages.is_empty() {
            return;
        }
        assert!(queue.done_all(messages).await.unwrap().is_empty());
    }
}

/// A table that could be a queue, and its two statements.
struct Raw {
    client: Client,
    claim: tokio_postgres::Statement,
    done: tokio_postgres::Statement,
}

impl Raw {
    async fn new(url: &str) -> Self {
        let url = url.split('?').next().unwrap();
        let connected = tokio_postgres::connect(url, tokio_postgres::NoTls).await;
        let (client, connection) = connected.unwrap();
        tokio::spawn(connection);
        let tables = "SET enable_seqscan = off; SET enable_bitmapscan = off; SET enable_sort = off; \
            SELECT pg_advisory_lock(1); \
            CREATE SEQUENCE IF NOT EXISTS raw_token; \
            CREATE TABLE IF NOT EXISTS raw (number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, \
              due timestamptz NOT NULL, token bigint NOT NULL DEFAULT 0, body bytea NOT NULL) \
              WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, \
                    autovacuum_vacuum_cost_delay = 0); \
            CREATE INDEX IF NOT EXISTS raw_due ON raw (due); \
            SELECT pg_advisory_unlock(1)";
        client.batch_execute(tables).await.unwrap();
        let claim = "UPDATE raw SET due = clock_timestamp() + interval '30 seconds', \
              token = nextval('raw_token') \
            WHERE number = ANY (ARRAY(SELECT number FROM raw WHERE due <= statement_timestamp() \
              ORDER BY due LIMIT $1 FOR UPDATE SKIP LOCKED)) RETURNING number, token, body";
        let done = "DELETE FROM raw USING unnest($1::bigint[], $2::bigint[]) AS d (number, token) \
            WHERE raw.number = d.number AND raw.token = d.token RETURNING raw.number";
        Self {
            claim: client.prepare(claim).await.unwrap(),
            done: client.prepare(done).await.unwrap(),
            client,
        }
    }

    async fn fill(&self, messages: usize) {
        let insert = "INSERT INTO raw (due, body) SELECT clock_timestamp(), $1 \
                      FROM generate_series(1, $2::bigint)";
        let (body, messages) = (vec![7u8; BODY], messages as i64);
        self.client
            .execute(insert, &[&body, &messages])
            .await
            .unwrap();
    }

    async fn work(&self, batch: usize) {
        loop {
            let most = batch as i64;
            let rows = self.client.query(&self.claim, &[&most]).await.unwrap();
            if rows.is_empty() {
                return;
            }
            let numbers: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
            let tokens: Vec<i64> = rows.iter().map(|row| row.get(1)).collect();
            let done = self.client.query(&self.done, &[&numbers, &tokens]).await;
            assert_eq!(done.unwrap().len(), rows.len());
        }
    }
}

/// Messages per second of sqlxmq on this server, by a program with dependencies of its own.
fn beside(url: &str, messages: usize) -> Option<String> {
    std::env::var_os("PALISADE_BENCH_BESIDE")?;
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/sqlxmq/Cargo.toml");
    let measured = std::process::Command::new(env!("CARGO"))
        .args([
            "run",
            "--release",
            "--quiet",
            "--manifest-path",
            manifest,
            "--",
        ])
        .args([url.split('?').next()?, &messages.to_string()])
        .output()
        .unwrap();
    assert!(measured.status.success(), "{measured:?}");
    Some(String::from_utf8_lossy(&measured.stdout).trim().to_owned())
}
