//! `beside-sqlxmq URL COUNT`: messages per second of sqlxmq, up to 16 at a time, whose jobs do nothing
//! but complete.

use std::error::Error;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use sqlx::postgres::PgPoolOptions;
use sqlxmq::{JobBuilder, JobRunnerOptions};

const ROUNDS: usize = 3;

#[tokio::main(worker_threads = 2)]
async fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [url, count] = arguments.as_slice() else {
        return Err("beside-sqlxmq URL COUNT".into());
    };
    let count: usize = count.parse()?;
    let pool = PgPoolOptions::new()
        .max_connections(20)
        .connect(url)
        .await?;
    for sql in migrations()? {
        sqlx::raw_sql(&sql).execute(&pool).await?;
    }
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        for _ in 0..count {
            let mut job = JobBuilder::new("bench");
            job.set_channel_name("bench").set_raw_bytes(&[7; 100]);
            job.spawn(&pool).await?;
        }
        let done = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&done);
        let begin = Instant::now();
        let runner = JobRunnerOptions::new(&pool, move |mut job| {
            let done = Arc::clone(&counted);
            tokio::spawn(async move {
                job.complete().await.expect("the server answers");
                done.fetch_add(1, Ordering::Relaxed);
            });
        })
        .set_concurrency(8, 16)
        .run()
        .await?;
        while done.load(Ordering::Relaxed) < count {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        times.push(begin.elapsed());
        drop(runner);
    }
    times.sort_unstable();
    println!("{:.0}", count as f64 / times[ROUNDS / 2].as_secs_f64());
    Ok(())
}

/// What its authors say to copy from the crate, from where cargo has put it.
fn migrations() -> Result<Vec<String>, Box<dyn Error>> {
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    let metadata = Command::new(env!("CARGO"))
        .args([
            "metadata",
            "--format-version",
            "1",
            "--manifest-path",
            manifest,
        ])
        .output()?;
    let metadata = String::from_utf8(metadata.stdout)?;
    // The only path that leads to a manifest of that name.
    let paths = metadata
        .split('"')
        .find(|text| text.contains("/sqlxmq-0") && text.ends_with("/Cargo.toml"));
    let folder = Path::new(paths.ok_or("cargo has no sqlxmq")?).with_file_name("migrations");
    let mut files = Vec::new();
    for file in std::fs::read_dir(folder)? {
        let path = file?.path();
        if path.to_string_lossy().ends_with(".up.sql") {
            files.push(path);
        }
    }
    files.sort();
    files
        .into_iter()
        .map(|file| Ok(std::fs::read_to_string(file)?))
        .collect()
}
