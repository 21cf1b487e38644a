//! Creates a trial for every pair of engine and case and runs them, for `cargo test` and nextest
//! alike.
//!
//! Each trial has its own runtime and an overall deadline, so that a hang is a failure that names
//! its case. A run of all trials fails if a cell of the table is missing. The test binary also
//! serves as its own second process: [`main`] first checks for `taker` and `counter`.

use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Completion, Failed, Trial};
use parking_lot::Mutex;

use crate::conformance::{self, Case, Fixture, Notes, Verdict};
use crate::engine::{self, EngineUnderTest, Site};
use crate::report::{Report, Row};
use crate::taker;

/// How long one trial may take; the slowest takes a few seconds.
const LIMIT: Duration = Duration::from_secs(90);

/// The sites of a run, started when a trial first needs them. Each engine has its own lock, so that
/// starting one server does not delay the trials of the others.
#[derive(Default)]
pub struct Sites(Mutex<HashMap<&'static str, Arc<Mutex<Started>>>>);

type Started = Option<Result<Site, String>>;

impl Sites {
    /// The site of `engine`.
    ///
    /// # Errors
    /// A message if it can't be started.
    pub fn get(&self, engine: EngineUnderTest) -> Result<Site, String> {
        let slot = Arc::clone(self.0.lock().entry(engine.name).or_default());
        let mut site = slot.lock();
        site.get_or_insert_with(|| (engine.start)()).clone()
    }
}

/// The main function of a conformance binary (`harness = false`) over the engines of `table`.
/// `PALISADE_TEST_ENGINES` chooses among them, `PALISADE_TEST_REPORT` collects the results.
pub fn main(table: &[EngineUnderTest]) -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    if let Some(code) = taker::process::main(arguments.get(1..).unwrap_or_default(), table) {
        return code;
    }
    let names = std::env::var("PALISADE_TEST_ENGINES").ok();
    let engines = match engine::chosen(table, names.as_deref()) {
        Ok(engines) => engines,
        Err(why) => {
            eprintln!("{why}");
            return ExitCode::from(2);
        }
    };
    let report = Arc::new(Report::from_env());
    let sites = Arc::new(Sites::default());
    let cases = conformance::all();
    let mut trials = Vec::new();
    // Engines alternate, so that their servers share the load of a run.
    for (case, engine) in cases
        .iter()
        .flat_map(|c| engines.iter().map(move |e| (*c, *e)))
    {
        let (sites, report) = (Arc::clone(&sites), Arc::clone(&report));
        let name = format!("{}::{}", engine.name, case.name);
        let run = move || trial(engine, case, &sites, &report);
        trials.push(Trial::ignorable_test(name, run));
    }
    let mut arguments = Arguments::from_args();
    // Most trials wait rather than work, so run a few more than there are cores.
    arguments.test_threads.get_or_insert_with(|| {
        std::thread::available_parallelism().map_or(4, |cores| cores.get() * 2)
    });
    let conclusion = libtest_mimic::run(&arguments, trials);
    let mut missing = Vec::new();
    if conclusion.num_filtered_out == 0 && !arguments.list {
        missing = self::missing(&engines, &cases, &report.rows());
    }
    for cell in &missing {
        eprintln!("missing from the table: {cell}");
    }
    if missing.is_empty() {
        conclusion.exit_code()
    } else {
        ExitCode::from(101)
    }
}

/// The cells without a row, as `engine::case`.
pub fn missing(engines: &[EngineUnderTest], cases: &[Case], rows: &[Row]) -> Vec<String> {
    let name = |engine: &str, case: &str| format!("{engine}::{case}");
    let filled: BTreeSet<String> = rows.iter().map(|r| name(&r.engine, &r.case)).collect();
    let cells = engines
        .iter()
        .flat_map(|engine| cases.iter().map(|case| name(engine.name, case.name)));
    cells.filter(|cell| !filled.contains(cell)).collect()
}

fn trial(
    engine: EngineUnderTest,
    case: Case,
    sites: &Sites,
    report: &Report,
) -> Result<Completion, Failed> {
    let start = Instant::now();
    let notes = Notes::default();
    let verdict = match sites.get(engine) {
        Err(why) => Verdict::Failed(why),
        Ok(site) => verdict(engine, site, &case, Arc::clone(&notes)),
    };
    let notes = notes.lock().clone();
    report.add(Row::new(
        engine.name,
        &case,
        &verdict,
        start.elapsed(),
        notes,
    ));
    match verdict {
        Verdict::Ok => Ok(Completion::Completed),
        Verdict::NotApplicable(reason) => Ok(Completion::ignored_with(reason)),
        Verdict::Failed(why) => Err(format!("{}\n  promised: {}", why, case.behavior).into()),
    }
}

/// Runs the case of that name on an engine, outside of a run.
///
/// # Panics
/// When there is no such case.
pub fn try_case(engine: EngineUnderTest, site: Site, name: &str) -> Verdict {
    let case = conformance::named(name).unwrap_or_else(|| panic!("no case is called {name}"));
    verdict(engine, site, &case, Notes::default())
}

fn verdict(engine: EngineUnderTest, site: Site, case: &Case, notes: Notes) -> Verdict {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => return Verdict::Failed(format!("no runtime: {error}")),
    };
    let run = async {
        let program = std::env::current_exe();
        let program = program.unwrap_or_else(|_| PathBuf::from("palisade-testkit"));
        match Fixture::new(engine, site, program, notes).await {
            Ok(fixture) => conformance::run(case, fixture).await,
            Err(error) => Verdict::Failed(format!("no connection: {error:?}")),
        }
    };
    let done = runtime.block_on(async { tokio::time::timeout(LIMIT, run).await });
    // A task that blocks must not delay the whole run.
    runtime.shutdown_timeout(Duration::from_secs(1));
    done.unwrap_or_else(|_| {
        Verdict::Failed(format!("{} hangs: not done after {LIMIT:?}", case.name))
    })
}
