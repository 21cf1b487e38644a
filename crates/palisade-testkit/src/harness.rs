//! Makes a trial of every engine × case and runs them, for `cargo test` and nextest alike.
//!
//! Each trial has its own runtime and an overall deadline, so that a hang is a failure that says
//! which case. A run of everything fails when a cell of the table is missing. The test binary is
//! its own second process: [`main`] looks for `taker` and `counter` first.

use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Completion, Failed, Trial};
use parking_lot::Mutex;

use crate::conformance::{self, Bed, Case, Verdict};
use crate::report::{Report, Row};
use crate::subject::{self, Site, Subject};
use crate::taker;

/// How long one trial may take; the slowest takes a few seconds.
const LIMIT: Duration = Duration::from_secs(30);

/// The sites of a run, started when their first trial needs them.
#[derive(Default)]
struct Sites(Mutex<HashMap<&'static str, Result<Site, String>>>);

impl Sites {
    fn get(&self, subject: Subject) -> Result<Site, String> {
        let mut sites = self.0.lock();
        let site = sites
            .entry(subject.name)
            .or_insert_with(|| (subject.start)());
        site.clone()
    }
}

/// The main function of a conformance binary (`harness = false`) over the engines of `table`.
/// `PALISADE_TEST_ENGINES` chooses among them, `PALISADE_TEST_REPORT` collects the results.
pub fn main(table: &[Subject]) -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    if let Some(code) = taker::process::main(arguments.get(1..).unwrap_or_default(), table) {
        return code;
    }
    let names = std::env::var("PALISADE_TEST_ENGINES").ok();
    let subjects = match subject::chosen(table, names.as_deref()) {
        Ok(subjects) => subjects,
        Err(why) => {
            eprintln!("{why}");
            return ExitCode::from(2);
        }
    };
    let report = Arc::new(Report::from_env());
    let sites = Arc::new(Sites::default());
    let cases = conformance::all();
    let trials = subjects.iter().flat_map(|subject| {
        let (sites, report) = (&sites, &report);
        cases.iter().map(move |case| {
            let (sites, report) = (Arc::clone(sites), Arc::clone(report));
            let (subject, case) = (*subject, *case);
            let name = format!("{}::{}", subject.name, case.name);
            Trial::ignorable_test(name, move || trial(subject, case, &sites, &report))
        })
    });
    let mut arguments = Arguments::from_args();
    // Most trials wait rather than work; a few more than there are cores run side by side.
    arguments.test_threads.get_or_insert_with(|| {
        std::thread::available_parallelism().map_or(4, |cores| cores.get() * 2)
    });
    let conclusion = libtest_mimic::run(&arguments, trials.collect());
    let everything = conclusion.num_filtered_out == 0 && !arguments.list;
    let missing = match everything {
        true => missing(&subjects, &cases, &report.rows()),
        false => Vec::new(),
    };
    for cell in &missing {
        eprintln!("missing from the table: {cell}");
    }
    match missing.is_empty() {
        true => conclusion.exit_code(),
        false => ExitCode::from(101),
    }
}

/// The cells that no row fills, as `engine::case`.
pub fn missing(subjects: &[Subject], cases: &[Case], rows: &[Row]) -> Vec<String> {
    let filled: BTreeSet<(&str, &str)> = rows
        .iter()
        .map(|row| (row.engine.as_str(), row.case.as_str()))
        .collect();
    let cells = subjects
        .iter()
        .flat_map(|subject| cases.iter().map(|case| (subject.name, case.name)));
    cells
        .filter(|cell| !filled.contains(cell))
        .map(|(engine, case)| format!("{engine}::{case}"))
        .collect()
}

fn trial(
    subject: Subject,
    case: Case,
    sites: &Sites,
    report: &Report,
) -> Result<Completion, Failed> {
    let start = Instant::now();
    let notes = Arc::default();
    let verdict = match sites.get(subject) {
        Err(why) => Verdict::Failed(why),
        Ok(site) => on_its_own_runtime(subject, case, site, Arc::clone(&notes)),
    };
    let notes = notes.lock().clone();
    report.add(Row::new(
        subject.name,
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

fn on_its_own_runtime(
    subject: Subject,
    case: Case,
    site: Site,
    notes: Arc<Mutex<Vec<(String, f64)>>>,
) -> Verdict {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => return Verdict::Failed(format!("no runtime: {error}")),
    };
    let verdict = runtime.block_on(async {
        let run = async {
            let program =
                std::env::current_exe().unwrap_or_else(|_| PathBuf::from("palisade-testkit"));
            match Bed::new(subject, site, program, notes).await {
                Ok(bed) => conformance::run(&case, bed).await,
                Err(error) => Verdict::Failed(format!("no connection: {error:?}")),
            }
        };
        let hung = || Verdict::Failed(format!("{} hangs: not done after {LIMIT:?}", case.name));
        tokio::time::timeout(LIMIT, run)
            .await
            .unwrap_or_else(|_| hung())
    });
    // A task that blocks must not keep the whole run waiting.
    runtime.shutdown_timeout(Duration::from_secs(1));
    verdict
}
