//! Runs one cell: workers, the fault, surveys. Then reads the history and judges it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use palisade::engine::TtlRange;
use palisade::fence::Fence;
use palisade::report::Scope;
use palisade::{BootTime, Capability, Client, Name};
use rand::SeedableRng;
use rand::rngs::StdRng;

use super::crew::Crew;
use super::inject::inject;
use super::store::{Fenced, entries, unfenced};
use super::worker::Spec;
use super::{Cell, Fault, Figures, Workload, cell, invariants};
use crate::engine::{EngineUnderTest, Outage, Site};
use crate::lab::check::{Index, Invariant, Params, Verdict};
use crate::lab::history::{History, Recorder, Shown, What, timeline};

/// The lock of a run.
const NAME: &str = "line";

/// How long a line may take to become empty after all its leases have ended.
const REST: Duration = Duration::from_millis(1500);

/// One cell to run.
#[derive(Debug, Clone)]
pub struct Run {
    /// The engine.
    pub engine: EngineUnderTest,
    /// The engine's site.
    pub site: Site,
    /// What the workers do.
    pub workload: Workload,
    /// The fault.
    pub fault: Fault,
    /// How long to run.
    pub time: Duration,
    /// How long places last without renewal.
    pub ttl: Duration,
    /// The seed for all random choices of the harness and its workers.
    pub seed: u64,
    /// How many workers.
    pub workers: usize,
    /// The interval between injections; `None` for soon after the last one is healed.
    pub every: Option<Duration>,
    /// What a busy machine may add to any bound.
    pub slack: Duration,
    /// The testkit's command, which also runs the workers.
    pub program: PathBuf,
    /// The directory to keep history and timeline in.
    pub keep: Option<PathBuf>,
}

impl Run {
    /// Fits the ttl to the engine's range, and the time to several such ttls.
    fn fitted(&self, capability: &Capability) -> Self {
        let TtlRange { min, max, .. } = capability.ttl;
        let ttl = capability.explicit_ttl(self.ttl.clamp(min, max));
        let ttl = ttl.unwrap_or(max);
        let time = if ttl > self.ttl {
            self.time.max(ttl * 3 * self.site.lasts)
        } else {
            self.time
        };
        Self {
            ttl,
            time,
            ..self.clone()
        }
    }
}

/// The result of a cell.
#[derive(Debug)]
pub struct Report {
    /// What applied.
    pub cell: Cell,
    /// The numbers.
    pub figures: Figures,
    /// The verdict on each invariant.
    pub verdicts: Vec<(Invariant, Verdict)>,
    /// How many acknowledged updates the control lost, if it must lose some.
    pub lost_updates: Option<usize>,
    /// The ttl that was used.
    pub ttl: Duration,
    /// Why the run proves nothing, if so.
    pub void: Option<String>,
}

impl Report {
    /// Whether everything is as required.
    pub fn is_ok(&self) -> bool {
        self.void.is_none()
            && self.lost_updates != Some(0)
            && self.verdicts.iter().all(|(_, verdict)| verdict.is_ok())
    }

    fn not_applicable(why: String) -> Self {
        Self {
            cell: Cell::NotApplicable(why),
            figures: Figures::default(),
            verdicts: Vec::new(),
            lost_updates: None,
            ttl: Duration::ZERO,
            void: None,
        }
    }
}

/// Runs a cell and judges it.
///
/// # Errors
/// A message if it could not be run at all.
pub async fn run(run: &Run) -> Result<Report, String> {
    let words = |error: palisade::Error| format!("{error:?}");
    let url = run.site.fresh_url();
    let client = (run.engine.connect)(url.clone()).await.map_err(words)?;
    let run = &run.fitted(&client.capability());
    let what = cell(&run.site, &client.capability(), run.workload, run.fault);
    if let Cell::NotApplicable(why) = what {
        return Ok(Report::not_applicable(why));
    }
    let work = tempfile::Builder::new()
        .prefix("palisade-faults-")
        .tempdir();
    let work = work.map_err(|error| error.to_string())?;
    let (events, store) = (work.path().join("history"), work.path().join("store"));
    for dir in [&events, &store] {
        std::fs::create_dir_all(dir).map_err(|error| error.to_string())?;
    }
    let record = Recorder::open(&events.join("harness.jsonl"), "harness", NAME)
        .map_err(|error| error.to_string())?;
    let spec = Spec {
        client: String::new(),
        url,
        name: NAME.to_owned(),
        workload: run.workload.name().to_owned(),
        ttl_ms: u64::try_from(run.ttl.as_millis()).unwrap_or(u64::MAX),
        seed: 0,
        history: events.clone(),
        store: store.clone(),
        drops: run.fault == Fault::DropFutures,
    };
    let hung = drive(run, &client, spec, record.clone()).await?;
    last_look(run, &client, &record).await?;
    take_stock(run.workload, &store, &record).await?;
    let history = History::read(&events).map_err(|error| error.to_string())?;
    let report = judge(run, what, &history, hung)?;
    if let Some(dir) = &run.keep {
        keep(run, dir, &history, &report).map_err(|error| error.to_string())?;
    }
    Ok(report)
}

/// Runs the crew under the fault. Returns the workers that did not finish.
async fn drive(
    run: &Run,
    client: &Client,
    spec: Spec,
    record: Recorder,
) -> Result<Vec<String>, String> {
    let words = |error: std::io::Error| error.to_string();
    let rng = StdRng::seed_from_u64(run.seed);
    let (program, engine) = (run.program.clone(), run.engine.name);
    let mut crew = Crew::new(program, engine, spec, rng, record.clone());
    for _ in 0..run.workers {
        crew.hire().map_err(words)?;
    }
    let over = Arc::new(AtomicBool::new(false));
    let every = match run.workload {
        Workload::QueueOrder => Duration::from_millis(10),
        _ => Duration::from_millis(100),
    };
    let surveys = tokio::spawn({
        let (client, over) = (client.clone(), Arc::clone(&over));
        async move {
            while !over.load(Ordering::SeqCst) {
                survey(&client, &record).await;
                tokio::time::sleep(every).await;
            }
        }
    });
    // The time counts from when all workers are active.
    let limit = BootTime::now() + Duration::from_secs(10);
    for _ in 0..run.workers {
        crew.one(super::crew::Phase::Held, limit).await;
    }
    let end = BootTime::now() + run.time;
    inject(&mut crew, &run.site, (run.fault, run.every), run.ttl, end).await?;
    let hung = crew.dismiss(run.ttl * 4 + Duration::from_secs(10)).await;
    over.store(true, Ordering::SeqCst);
    surveys.await.map_err(|error| error.to_string())?;
    hung.map_err(words)
}

/// Records the line as the engine shows it; returns its length.
async fn survey(client: &Client, record: &Recorder) -> Option<usize> {
    let asked = BootTime::now().as_nanos();
    let name = Name::new(NAME).ok()?;
    // An engine that is cut off shows nothing.
    let lines = client.survey(Scope::Line(name)).await.ok()?;
    let claims = lines.into_iter().flat_map(|line| {
        let all = line.holders.into_iter().chain(line.waiters);
        all.collect::<Vec<_>>()
    });
    let line: Vec<Shown> = claims
        .map(|claim| Shown {
            claim: claim.id,
            owner: claim.owner.map(|owner| owner.owner).unwrap_or_default(),
            token: claim
                .sequence
                .and_then(|sequence| client.token(sequence).ok())
                .map(|token| token.0),
        })
        .collect();
    let length = line.len();
    record.record(What::Survey { asked, line });
    Some(length)
}

/// Surveys the line until it is empty, or until it should have been.
async fn last_look(run: &Run, client: &Client, record: &Recorder) -> Result<(), String> {
    let limit = BootTime::now() + run.ttl * run.site.lasts + run.site.late + run.slack + REST;
    loop {
        let length = survey(client, record).await;
        if length == Some(0) {
            return Ok(());
        }
        if limit.has_passed() {
            return match length {
                Some(_) => Ok(()),
                None => Err("the engine does not answer at the end".into()),
            };
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Records the final content of the store.
async fn take_stock(workload: Workload, store: &Path, record: &Recorder) -> Result<(), String> {
    let chain = match workload {
        Workload::FencedCounter => {
            let fenced = Fenced::open(store).map_err(|error| error.to_string())?;
            let kept = fenced.fence.read(&fenced.resource).await;
            let kept = kept.map_err(|error| error.to_string())?;
            kept.map(|kept| kept.data).unwrap_or_default()
        }
        Workload::UnfencedCounter => std::fs::read(unfenced(store)).unwrap_or_default(),
        _ => return Ok(()),
    };
    let entries = entries(&String::from_utf8_lossy(&chain)).ok_or("the storage is damaged")?;
    let count = entries.len() as u64;
    for (token, client, op) in entries {
        let stored = What::Stored { op, token };
        record.record_at(BootTime::now(), &client, stored);
    }
    record.record(What::StoredAll { count });
    Ok(())
}

fn judge(run: &Run, what: Cell, history: &History, hung: Vec<String>) -> Result<Report, String> {
    let lease = run.ttl * run.site.lasts + run.site.late;
    let params = Params {
        slack: run.slack,
        no_wait: lease * u32::from(run.site.watches_overdue),
        takes_away: run.site.takes_away && run.fault == Fault::Engine(Outage::Stop),
        ..Params::new(run.ttl, run.site.notices_death).lasting(run.site.lasts, run.site.late)
    };
    let index = Index::new(history)?;
    let figures = Figures::of(&index);
    let must_lose = what == Cell::MustLose;
    let checked = match &what {
        Cell::Checked(checked) => checked.clone(),
        _ => invariants(run.workload, run.fault),
    };
    let mut lost_updates = None;
    let mut verdicts = Vec::new();
    for invariant in checked {
        let verdict = invariant.check(history, &params);
        if must_lose && invariant == Invariant::NoLostUpdate {
            lost_updates = Some(verdict.violations().len());
            continue;
        }
        verdicts.push((invariant, verdict));
    }
    let landed = match run.fault {
        Fault::PauseHolder | Fault::PauseShort | Fault::KillHolder | Fault::PauseBeforeWrite => {
            figures.holders_hurt
        }
        Fault::KillWaiter => figures.hurt,
        Fault::DropFutures => figures.dropped,
        Fault::None | Fault::Slow | Fault::Engine(_) => figures.grants,
    };
    let void = match (hung.is_empty(), landed) {
        (false, _) => Some(format!("did not end: {}", hung.join(", "))),
        (true, 0) => Some("the fault hit nobody".to_owned()),
        _ => None,
    };
    Ok(Report {
        cell: what,
        figures,
        verdicts,
        lost_updates,
        ttl: run.ttl,
        void,
    })
}

fn keep(run: &Run, dir: &Path, history: &History, report: &Report) -> std::io::Result<()> {
    std::fs::create_dir_all(dir)?;
    std::fs::write(dir.join("history.jsonl"), history.to_lines())?;
    let title = format!("{} · {} · {}", run.engine.name, run.workload, run.fault);
    let page = timeline::page(&title, history, &report.verdicts);
    std::fs::write(dir.join("timeline.html"), page)
}
