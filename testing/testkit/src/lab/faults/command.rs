//! `palisade-testkit faults …`: runs one cell and prints it, or lists the matrix.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use super::{Cell, Fault, Report, Run, Workload, cell, run};
use crate::engine::EngineUnderTest;

/// How to call it.
pub const USAGE: &str = "  palisade-testkit faults --engine ENGINE --workload WORKLOAD --fault FAULT [--seconds 60] [--ttl 1s] [--workers 5] [--seed N] [--keep DIR]
  palisade-testkit faults --list";

/// Runs `faults …` if the arguments ask for it.
pub fn main(arguments: &[String], table: &[EngineUnderTest]) -> Option<ExitCode> {
    let (verb, rest) = arguments.split_first()?;
    if verb != "faults" {
        return None;
    }
    let done = tokio::runtime::Runtime::new()
        .map_err(|error| error.to_string())
        .and_then(|runtime| runtime.block_on(faults(rest, table)));
    Some(done.unwrap_or_else(|why| {
        eprintln!("faults: {why}\nusage:\n{USAGE}");
        ExitCode::from(2)
    }))
}

async fn faults(arguments: &[String], table: &[EngineUnderTest]) -> Result<ExitCode, String> {
    if arguments == ["--list"] {
        return list(table).await;
    }
    let (mut engine, mut workload, mut fault) = (None, None, None);
    let (mut seconds, mut ttl, mut workers) = (60.0, Duration::from_secs(1), 5);
    let (mut seed, mut kept) = (rand::random(), None);
    let mut rest = arguments.iter();
    while let Some(option) = rest.next() {
        let value = rest.next().ok_or(format!("{option} needs a value"))?;
        let wrong = || format!("{option}: {value:?} is not known; see --list");
        match option.as_str() {
            "--engine" => engine = Some(*find(table, |s| s.name == value).ok_or_else(wrong)?),
            "--workload" => {
                workload = Some(*find(Workload::ALL, |w| w.name() == value).ok_or_else(wrong)?);
            }
            "--fault" => fault = Some(*find(Fault::ALL, |f| f.name() == value).ok_or_else(wrong)?),
            "--seconds" => seconds = value.parse::<f64>().map_err(|_| wrong())?,
            "--ttl" => ttl = palisade::command::parse_duration(value)?,
            "--workers" => workers = value.parse().map_err(|_| wrong())?,
            "--seed" => seed = value.parse().map_err(|_| wrong())?,
            "--keep" => kept = Some(PathBuf::from(value)),
            _ => return Err(format!("unknown option {option}")),
        }
    }
    let engine = engine.ok_or("--engine is missing")?;
    let one = Run {
        engine,
        site: (engine.start)()?,
        workload: workload.ok_or("--workload is missing")?,
        fault: fault.ok_or("--fault is missing")?,
        time: Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())?,
        ttl,
        seed,
        workers,
        every: None,
        slack: Duration::from_millis(250),
        program: std::env::current_exe().map_err(|error| error.to_string())?,
        keep: kept,
    };
    let report = run(&one).await?;
    print(&one, &report);
    Ok(ExitCode::from(u8::from(!report.is_ok())))
}

fn find<T>(all: &[T], is: impl Fn(&T) -> bool) -> Option<&T> {
    all.iter().find(|one| is(one))
}

fn print(run: &Run, report: &Report) {
    let (engine, workload, fault) = (run.engine.name, run.workload, run.fault);
    println!("{engine} · {workload} · {fault}   (seed {})", run.seed);
    if let Cell::NotApplicable(why) = &report.cell {
        println!("  n/a: {why}");
        return;
    }
    print!("{}", report.figures);
    for (invariant, verdict) in &report.verdicts {
        println!("  {invariant:<34}{verdict:>12}");
        for violation in verdict.violations().iter().skip(1).take(4) {
            println!("      {}", violation.text);
        }
    }
    match report.lost_updates {
        Some(0) => println!("  the control lost no update: THIS RUN CAN'T SEE"),
        Some(lost) => println!("  lost {lost} updates, as it must"),
        None => {}
    }
    if let Some(why) = &report.void {
        println!("  PROVES NOTHING: {why}");
    }
    if let Some(dir) = &run.keep {
        println!("  kept in {}", dir.display());
    }
}

async fn list(table: &[EngineUnderTest]) -> Result<ExitCode, String> {
    for engine in table.iter().filter(|engine| !engine.installed) {
        let site = (engine.start)()?;
        let client = (engine.connect)(site.url.clone()).await;
        let capability = client.map_err(|error| format!("{error:?}"))?.capability();
        println!("{}", engine.name);
        let mut reasons: Vec<String> = Vec::new();
        print!("  {:<20}", "");
        for workload in Workload::ALL {
            print!("{workload:>18}");
        }
        println!();
        for &fault in Fault::ALL {
            print!("  {fault:<20}");
            for &workload in Workload::ALL {
                let shown = match cell(&site, &capability, workload, fault) {
                    Cell::Checked(invariants) => format!("{} checks", invariants.len()),
                    Cell::MustLose => "must lose".to_owned(),
                    Cell::NotApplicable(why) => {
                        let at = reasons.iter().position(|other| *other == why);
                        let at = at.unwrap_or_else(|| {
                            reasons.push(why);
                            reasons.len() - 1
                        });
                        format!("n/a {}", at + 1)
                    }
                };
                print!("{shown:>18}");
            }
            println!();
        }
        for (at, why) in reasons.iter().enumerate() {
            println!("  n/a {}: {why}", at + 1);
        }
    }
    Ok(ExitCode::SUCCESS)
}
