//! Workloads × faults, with real processes that are stopped and killed: every cell of the matrix is
//! a trial, and none is missing. Cells are short; `PALISADE_TEST_FULL=1` runs long ones.
//! `PALISADE_TEST_ENGINES` selects engines and `PALISADE_TEST_WORKLOADS` workloads (comma-separated
//! lists), `PALISADE_TEST_SEED` repeats the random choices of a run, `PALISADE_TEST_KEEP` names a
//! directory for histories and timelines. Cells that don't disturb the server share one.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::fs::File;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use libtest_mimic::{Arguments, Completion, Failed, Trial};
use palisade_testkit::engine::{EngineUnderTest, Site, chosen};
use palisade_testkit::harness::Sites;
use palisade_testkit::lab::check::Invariant;
use palisade_testkit::lab::engines::ENGINES;
use palisade_testkit::lab::faults::{Cell, Fault, Report, Run, Workload, run};
use parking_lot::Mutex;

/// The duration of a run, and the ttl of its leases.
fn times() -> (Duration, Duration) {
    match std::env::var_os("PALISADE_TEST_FULL") {
        Some(_) => (Duration::from_secs(20), Duration::from_secs(1)),
        None => (Duration::from_millis(1500), Duration::from_millis(500)),
    }
}

fn main() -> ExitCode {
    let names = std::env::var("PALISADE_TEST_ENGINES").ok();
    let (engines, workloads) = match (chosen(ENGINES, names.as_deref()), workloads()) {
        (Ok(engines), Ok(workloads)) => (engines, workloads),
        (Err(why), _) | (_, Err(why)) => {
            eprintln!("{why}");
            return ExitCode::from(2);
        }
    };
    let seed = std::env::var("PALISADE_TEST_SEED").ok();
    let seed = seed.map_or_else(rand::random, |seed| seed.parse().unwrap());
    let filled = Arc::new(Mutex::new(BTreeSet::new()));
    let sites = Arc::new(Sites::default());
    let (mut trials, mut cells) = (Vec::new(), Vec::new());
    let rows = workloads
        .iter()
        .flat_map(|w| Fault::ALL.iter().map(move |f| (*w, *f)));
    // Engines alternate, so that their servers share the load of a run.
    for ((workload, fault), engine) in rows.flat_map(|row| engines.iter().map(move |e| (row, *e))) {
        let (filled, sites) = (Arc::clone(&filled), Arc::clone(&sites));
        let name = format!("{}::{workload}/{fault}", engine.name);
        cells.push(name.clone());
        trials.push(Trial::ignorable_test(name.clone(), move || {
            let went = trial(engine, &sites, workload, fault, seed);
            filled.lock().insert(name);
            went
        }));
    }
    for &(workload, invariant) in NO_LOCK {
        let name = format!("no-lock::{workload}/{invariant}").replace(' ', "-");
        let run = move || no_lock(workload, invariant, seed);
        trials.push(Trial::test(name, run));
    }
    // Those that need the machine for themselves come last, when the others are done.
    trials.sort_by_key(|trial| trial.name().ends_with(&format!("/{}", Fault::Slow)));
    let mut arguments = Arguments::from_args();
    // A cell mostly waits; this many keep two cores busy without starvation.
    arguments.test_threads.get_or_insert(4);
    let conclusion = libtest_mimic::run(&arguments, trials);
    if conclusion.num_filtered_out == 0 && !arguments.list {
        cells.retain(|cell| !filled.lock().contains(cell));
        if !cells.is_empty() {
            eprintln!("missing from the matrix: {cells:?}");
            return ExitCode::from(101);
        }
    }
    conclusion.exit_code()
}

/// The workloads that `PALISADE_TEST_WORKLOADS` names; by default all.
fn workloads() -> Result<Vec<Workload>, String> {
    let Ok(names) = std::env::var("PALISADE_TEST_WORKLOADS") else {
        return Ok(Workload::ALL.to_vec());
    };
    let find = |name: &str| Workload::ALL.iter().find(|w| w.name() == name).copied();
    let unknown = |name| format!("PALISADE_TEST_WORKLOADS: no workload is called {name:?}");
    let names = names.split(',').map(str::trim);
    names
        .map(|name| find(name).ok_or_else(|| unknown(name)))
        .collect()
}

/// A lock that cells share, and that a cell takes exclusively if it needs the machine for itself.
fn machine(fault: Fault) -> File {
    let path = std::env::temp_dir().join("palisade-faults-machine.lock");
    let file = File::create(path).unwrap();
    if fault.alone() {
        file.lock().unwrap();
    } else {
        file.lock_shared().unwrap();
    }
    file
}

fn trial(
    engine: EngineUnderTest,
    sites: &Sites,
    workload: Workload,
    fault: Fault,
    seed: u64,
) -> Result<Completion, Failed> {
    let shared = engine.installed && !matches!(fault, Fault::Engine(_));
    let site = if shared {
        sites.get(engine)?
    } else {
        (engine.start)()?
    };
    let (one, report) = went(engine, site.clone(), workload, fault, seed)?;
    if let Cell::NotApplicable(why) = &report.cell {
        return Ok(Completion::ignored_with(why.clone()));
    }
    let explain = |why: String, report: &Report, seed| -> Failed {
        format!("{why}\nseed {seed}\n{}", report.figures).into()
    };
    let why = match expect(&one, &report) {
        Ok(completion) => return Ok(completion),
        Err(why) => why,
    };
    let mut violated = report.verdicts.iter().filter(|(_, v)| !v.is_ok());
    if !violated.all(|(invariant, _)| invariant.is_about_time()) {
        return Err(explain(why, &report, seed));
    }
    // A stalled machine may have caused a delay, or made the fault miss. A second failure is ours.
    // Invariants that must hold on any machine get no second try.
    eprintln!("{}::{workload}/{fault} once more: {why}", engine.name);
    let seed = seed.wrapping_add(1);
    let (one, report) = went(engine, site, workload, fault, seed)?;
    expect(&one, &report).map_err(|why| explain(why, &report, seed))
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
        every: None,
        workers: 4,
        // Allows for four cells and other load on the machine.
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

/// The other control: no lock at all, since every process has its own engine. The workload's
/// invariant must be violated; otherwise the run could not detect violations.
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
    if report.is_ok() {
        return Ok(Completion::Completed);
    }
    Err(format!("{report:?}"))
}
