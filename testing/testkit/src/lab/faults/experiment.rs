//! `palisade-testkit pause-experiment`: the textbook experiment on every engine, as a table.
//!
//! Five processes increment one counter under one lock; one of them is stopped past its lease every
//! five seconds. Without a fence updates get lost; with it none may.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use super::{Fault, Report, Run, Workload, run};
use crate::engine::{EngineUnderTest, Site, named};
use crate::lab::check::Invariant;

/// How to call it.
pub const USAGE: &str =
    "  palisade-testkit pause-experiment [--engines ENGINE,ENGINE] [--seconds 60] [--ttl 2s]";

/// One engine of each kind, without the versions and setups that only tests distinguish.
const ENGINES: &str = "file,redis,redis+sentinel,redis+cluster,valkey,redlock,postgres,\
                       postgres+advisory,etcd,etcd3,consul,zookeeper,zookeeper3,kubernetes";

const EVERY: Duration = Duration::from_secs(5);
const WORKERS: usize = 5;

/// Runs `pause-experiment …` if the arguments ask for it.
pub fn main(arguments: &[String], table: &[EngineUnderTest]) -> Option<ExitCode> {
    let (verb, rest) = arguments.split_first()?;
    if verb != "pause-experiment" {
        return None;
    }
    let done = tokio::runtime::Runtime::new()
        .map_err(|error| error.to_string())
        .and_then(|runtime| runtime.block_on(experiment(rest, table)));
    Some(done.unwrap_or_else(|why| {
        eprintln!("pause-experiment: {why}\nusage:\n{USAGE}");
        ExitCode::from(2)
    }))
}

async fn experiment(arguments: &[String], table: &[EngineUnderTest]) -> Result<ExitCode, String> {
    let (mut engines, mut seconds, mut ttl) = (ENGINES.to_owned(), 60, Duration::from_secs(2));
    let mut rest = arguments.iter();
    while let Some(option) = rest.next() {
        let value = rest.next().ok_or(format!("{option} needs a value"))?;
        match option.as_str() {
            "--engines" => engines.clone_from(value),
            "--seconds" => seconds = value.parse().map_err(|_| "--seconds: a number")?,
            "--ttl" => ttl = palisade::command::parse_duration(value)?,
            _ => return Err(format!("unknown option {option}")),
        }
    }
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let time = Duration::from_secs(seconds);
    println!(
        "| engine | ttl | holders paused | updates | lost without fence | stale writes refused | lost with fence |"
    );
    println!("|---|---|---|---|---|---|---|");
    let mut fine = true;
    for name in engines.split(',') {
        let engine = named(table, name).ok_or(format!("no engine is called {name:?}"))?;
        let site = match (engine.start)() {
            Ok(site) => site,
            Err(why) => {
                println!("| {name} | – | not run: {} | | | | |", first_line(&why));
                continue;
            }
        };
        fine &= row(engine, site, &program, (time, ttl)).await?;
    }
    Ok(ExitCode::from(u8::from(!fine)))
}

/// Runs an engine without and with the fence, concurrently, and prints its row.
async fn row(
    engine: EngineUnderTest,
    site: Site,
    program: &Path,
    (time, ttl): (Duration, Duration),
) -> Result<bool, String> {
    let one = |workload| Run {
        engine,
        site: site.clone(),
        workload,
        fault: Fault::PauseHolder,
        time,
        ttl,
        seed: rand::random(),
        workers: WORKERS,
        every: Some(EVERY),
        slack: Duration::from_millis(250),
        program: program.to_path_buf(),
        keep: None,
    };
    let (plain, fenced) = (one(Workload::UnfencedCounter), one(Workload::FencedCounter));
    let (plain, fenced) = tokio::join!(run(&plain), run(&fenced));
    let (plain, fenced) = (plain?, fenced?);
    let (without, with) = (lost(&plain), lost(&fenced));
    println!(
        "| {} | {:?} | {} / {} | {} / {} | **{without}** | {} | **{with}** |",
        engine.name,
        plain.ttl,
        plain.figures.holders_hurt,
        fenced.figures.holders_hurt,
        plain.figures.accepted,
        fenced.figures.accepted,
        fenced.figures.stale,
    );
    for report in [&plain, &fenced] {
        if let Some(why) = &report.void {
            eprintln!("{}: proves nothing: {why}", engine.name);
        }
    }
    Ok(with == 0 && without > 0 && fenced.void.is_none())
}

fn lost(report: &Report) -> usize {
    let judged = report.verdicts.iter();
    let found = judged
        .filter(|(invariant, _)| *invariant == Invariant::NoLostUpdate)
        .map(|(_, verdict)| verdict.violations().len());
    report.lost_updates.unwrap_or_default() + found.sum::<usize>()
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}
