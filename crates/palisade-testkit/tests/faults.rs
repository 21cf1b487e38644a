//! Workloads × faults, with real processes that are stopped and killed: every cell of the matrix
//! is a trial, and none is missing. Short cells; `PALISADE_TEST_FULL=1` runs long ones.
//! `PALISADE_TEST_ENGINES` chooses engines, `PALISADE_TEST_SEED` repeats the choices of a run,
//! `PALISADE_TEST_KEEP` names a folder for histories and timelines.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::fs::File;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use libtest_mimic::{Arguments, Completion, Failed, Trial};
use palisade_testkit::engine::{EngineUnderTest, Site, chosen};
use palisade_testkit::lab::check::Invariant;
use palisade_testkit::lab::engines::ENGINES;
use palisade_testkit::lab::faults::{Cell, Fault, Report, Run, Workload, run};
use parking_lot::Mutex;

/// How long a run lasts, and its leases.
fn times() -> (Duration, Duration) {
    match std::env::var_os("PALISADE_TEST_FULL") {
        Some(_) => (Duration::from_secs(20), Duration::from_secs(1)),
        None => (Duration::from_millis(1500), Duration::from_millis(500)),
    }
}

fn main() -> ExitCode {
    let names = std::env::var("PALISADE_TEST_ENGINES").ok();
    let engines = match chosen(ENGINES, names.as_deref()) {
        Ok(engines) => engines,
        Err(why) => {
            eprintln!("{why}");
            return ExitCode::from(2);
        }
    };
    let seed = std::env::var("PALISADE_TEST_SEED").ok();
    let seed = seed.map_or_else(rand::random, |seed| seed.parse().unwrap());
    let filled = Arc::new(Mutex::new(BTreeSet::new()));
    let mut trials = Vec::new();
    for engine in &engines {
        for (&workload, &fault) in matrix() {
            let (engine, filled) = (*engine, Arc::clone(&filled));
            let name = cell_name(engine, workload, fault);
            trials.push(Trial::ignorable_test(name.clone(), move || {
                let went = trial(engine, workload, fault, seed);
                filled.lock().insert(name);
                went
            }));
        }
    }
    for &(workload, invariant) in NO_LOCK {
        let name = format!("no-lock::{workload}/{invariant}").replace(' ', "-");
        trials.push(Trial::test(name, move || {
            no_lock(workload, invariant, seed)
        }));
    }
    // Those that need the machine to themselves come last: the others are done by then.
    trials.sort_by_key(|trial| trial.name().ends_with(&format!("/{}", Fault::Slow)));
    let mut arguments = Arguments::from_args();
    // A cell mostly waits; this many keep two processors busy without starving anyone.
    arguments.test_threads.get_or_insert(4);
    let conclusion = libtest_mimic::run(&arguments, trials);
    let everything = conclusion.num_filtered_out == 0 && !arguments.list;
    if everything {
        let cells = engines.iter().flat_map(|engine| {
            matrix().map(|(workload, fault)| cell_name(*engine, *workload, *fault))
        });
        let filled = filled.lock();
        let missing: Vec<String> = cells.filter(|cell| !filled.contains(cell)).collect();
        if !missing.is_empty() {
            eprintln!("missing from the matrix: {missing:?}");
            return ExitCode::from(101);
        }
    }
    conclusion.exit_code()
}

fn matrix() -> impl Iterator<Item = (&'static Workload, &'static Fault)> {
    let workloads = Workload::ALL.iter();
    workloads.flat_map(|workload| Fault::ALL.iter().map(move |fault| (workload, fault)))
}

fn cell_name(engine: EngineUnderTest, workload: Workload, fault: Fault) -> String {
    format!("{}::{workload}/{fault}", engine.name)
}

/// A lock that cells share, and that a cell takes alone which needs the machine to itself.
fn machine(fault: Fault) -> File {
    let path = std::env::temp_dir().join("palisade-faults-machine.lock");
    let file = File::create(path).unwrap();
    match fault.alone() {
        true => file.lock().unwrap(),
        false => file.lock_shared().unwrap(),
    }
    file
}

fn trial(
    engine: EngineUnderTest,
    workload: Workload,
    fault: Fault,
    seed: u64,
) -> Result<Completion, Failed> {
    let (one, report) = went(engine, (engine.start)()?, workload, fault, seed)?;
    if let Cell::NotApplicable(why) = &report.cell {
        return Ok(Completion::ignored_with(why.clone()));
    }
    expect(&one, &report).map_err(|why| format!("{why}\nseed {seed}\n{}", report.figures).into())
}

fn went(
    engine: EngineUnderTest,
    site: Site,
    workload: Workload,
    fault: Fault,
    seed: u64,
) -> Result<(Run, Report), Failed> {
    let (time, ttl) = times();
    let keep = std::env::var_os("PALISADE_TEST_KEEP").map(PathBuf::from);
    let one = Run {
        engine,
        site,
        workload,
        fault,
        time,
        ttl,
        seed,
        workers: 4,
        // Four cells and whatever else runs on the machine.
        slack: Duration::from_millis(400),
        program: env!("CARGO_BIN_EXE_palisade-testkit").into(),
        keep: keep.map(|dir| dir.join(format!("{}-{workload}-{fault}", engine.name))),
    };
    let _machine = machine(fault);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    let limit = time * 2 + Duration::from_secs(40);
    let went = runtime.block_on(async { tokio::time::timeout(limit, run(&one)).await });
    runtime.shutdown_timeout(Duration::from_secs(1));
    let report = went.map_err(|_| format!("not done after {limit:?}, seed {seed}"))??;
    Ok((one, report))
}

/// The other control: no lock at all, since every process has an engine of its own. What the
/// workload is about must be found violated, or the run can't see.
const NO_LOCK: &[(Workload, Invariant)] = &[
    (Workload::Mutex, Invariant::BelievedExclusion),
    (Workload::RwLock, Invariant::Capacity),
    (Workload::Semaphore, Invariant::Capacity),
    (Workload::Election, Invariant::Election),
    (Workload::UnfencedCounter, Invariant::NoLostUpdate),
];

fn no_lock(workload: Workload, invariant: Invariant, seed: u64) -> Result<(), Failed> {
    let apart = EngineUnderTest::new("apart", || Err("not started".into()));
    let site = Site {
        processes: true,
        ..Site::new("memory:")
    };
    let (_, report) = went(apart, site, workload, Fault::None, seed)?;
    let mut verdicts = report.verdicts.iter();
    match verdicts.find(|(about, _)| *about == invariant) {
        Some((_, verdict)) if !verdict.violations().is_empty() => Ok(()),
        verdict => Err(format!("{invariant} was not refused: {verdict:?}").into()),
    }
}

/// What a cell must have shown.
fn expect(run: &Run, report: &Report) -> Result<Completion, String> {
    for (invariant, verdict) in &report.verdicts {
        if !verdict.is_ok() {
            return Err(format!("{invariant}: {verdict}"));
        }
    }
    if let Some(why) = &report.void {
        return Err(why.clone());
    }
    let figures = &report.figures;
    let fenced = matches!(
        run.workload,
        Workload::FencedCounter | Workload::FencedRegister
    );
    if report.cell == Cell::MustLose && report.lost_updates.is_none_or(|lost| lost == 0) {
        return Err("the control lost no update, as it must".into());
    }
    if fenced && run.fault == Fault::PauseBeforeWrite && figures.stale == 0 {
        return Err("no stale write was refused".into());
    }
    if run.fault == Fault::PauseHolder && figures.losses == 0 {
        return Err("nobody was told of a loss".into());
    }
    match report.is_ok() {
        true => Ok(Completion::Completed),
        false => Err(format!("{report:?}")),
    }
}
