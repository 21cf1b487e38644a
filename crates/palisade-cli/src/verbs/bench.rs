//! `palisade bench`: measures an engine, and what palisade costs beside its raw operations.
//!
//! A scenario gives figures; a figure is measured in rounds, in which palisade and the raw
//! operations take turns, so that whatever else the machine does hits both. Every lock has a name
//! that nobody else uses, and none is left behind, also when a signal ends the measurement.

mod cli;
mod counting;
mod course;
mod crew;
mod cycles;
mod figure;
mod held;
mod lane;
mod relay;
mod traces;

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use palisade::{Error, Kind, Url};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde_json::json;

use self::course::{Course, Plan};
use self::figure::{Figure, Who};
use self::traces::Traces;
use crate::args::Global;
use crate::config;
use crate::exit::{Failure, Outcome, Verdict};
use crate::print::Printer;
use crate::signals::Endings;

/// Turns of each side: enough to see whether they agree with each other.
const ROUNDS: u32 = 10;

/// Measure an engine: how fast locks are taken, given back and handed over
///
/// Takes locks of its own, under names that nobody else uses, and leaves none behind.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    palisade bench\n  \
    palisade bench --baseline --pin --scenario uncontended,pass\n  \
    palisade bench --url redis://localhost --baseline --json\n\n\
    Scenarios:\n  \
    uncontended  lock and unlock, one after the other\n  \
    parallel     lock and unlock 64 names at once, on one client\n  \
    handoff      2, 8 and 64 waiters that let go at once: from one grant to the next\n  \
    pass         the same waiters, each holds for 10 ms and stays away until another has the\n               \
                 lock: from the release to the next grant, which is the true hand-over\n  \
    held         10,000 locks held for one ttl: what renewing them costs\n  \
    cli          `palisade run NAME -- true` beside `flock FILE true`\n\n\
    p50 and p99 are times of one operation. The ratio is p50 to that of the raw operations, the\n\
    median over the rounds: 2.00 takes twice as long.")]
pub(crate) struct Bench {
    /// What to measure, several by comma [default: uncontended,parallel,handoff,pass]
    #[arg(long, value_enum, value_delimiter = ',', hide_possible_values = false)]
    scenario: Vec<Scenario>,
    /// Measure the engine's own raw operations in turns with palisade, and print the ratio
    #[arg(long)]
    baseline: bool,
    /// Stay on one core, where the scheduler has no say
    #[arg(long)]
    pin: bool,
    /// How long each figure is measured, of each side
    #[arg(long, value_name = "S", default_value = "2", value_parser = parse_seconds)]
    seconds: Duration,
    /// How many locks `held` holds [default: 10000], how often `cli` runs [default: 100]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    count: Option<u32>,
    /// How many wait in `handoff` and `pass`, several by comma
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "2,8,64",
          value_parser = clap::value_parser!(u16).range(2..=512))]
    waiters: Vec<u16>,
    /// Each waiter of `handoff` and `pass` is a process of its own [default on file:, where
    /// the clients of one process share everything; elsewhere each has its own connection]
    #[arg(long)]
    processes: bool,
    /// What a waiter of another bench is told; not for people
    #[arg(long, hide = true, value_name = "WHO,KEY,BOARD")]
    waiter_of: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Scenario {
    Uncontended,
    Parallel,
    Handoff,
    Pass,
    Held,
    Cli,
}

impl Bench {
    pub(crate) async fn run(self, global: &Global) -> Verdict {
        let url = config::url(global.url.as_deref())?;
        if let Some(told) = &self.waiter_of {
            return crew::serve(&url, told).await;
        }
        let mut endings = Endings::listen()?;
        if self.pin {
            pin().map_err(|error| Failure::Start(format!("can't stay on one core: {error}")))?;
        }
        let traces = Arc::default();
        let figures = tokio::select! {
            biased;
            signal = endings.next() => Err(signal),
            figures = self.measure(&url, &traces, global.printer()) => Ok(figures),
        };
        traces.remove().await;
        match figures {
            Err(signal) => Ok(Outcome::Interrupted(signal.as_raw())),
            Ok(figures) => {
                report(&figures?, global.printer())?;
                Ok(Outcome::Done)
            }
        }
    }

    async fn measure(
        &self,
        url: &str,
        traces: &Arc<Traces>,
        printer: Printer,
    ) -> Result<Vec<Figure>, Failure> {
        let client = traces.of(palisade::connect(url).await?);
        if self.baseline {
            // Refused before anything is measured.
            lane::raw(url).await?;
        }
        let plan = Plan {
            url: url.to_owned(),
            engine: client.describe(),
            // The owner is random: nobody else uses these names.
            name: format!("palisade-bench-{}", client.owner()),
            processes: self.as_processes(url)?,
            slice: self.seconds / ROUNDS,
            count: self.count,
            traces: Arc::clone(traces),
        };
        drop(client);
        let todo = self.courses();
        let progress = Progress::new(&todo, self.baseline, printer);
        let mut figures = Vec::new();
        for course in todo {
            let measured = match course {
                Course::Held => vec![held::measure(&plan, &progress).await?],
                course => self.in_turns(&plan, course, &progress).await?,
            };
            figures.extend(measured);
            // One course's connections are no burden on the next.
            traces.remove().await;
        }
        progress.bar.finish_and_clear();
        Ok(figures)
    }

    /// Whether waiters are processes: always on `file:`, never on `memory:`.
    fn as_processes(&self, url: &str) -> Result<bool, Failure> {
        match Url::parse(url)?.scheme.as_str() {
            "memory" if self.processes => {
                let why = "--processes: the locks of memory: are those of one process";
                Err(Failure::Usage(why.into()))
            }
            "file" => Ok(true),
            _ => Ok(self.processes),
        }
    }

    fn courses(&self) -> Vec<Course> {
        use Scenario::{Cli, Handoff, Held, Parallel, Pass, Uncontended};
        let chosen = match self.scenario.is_empty() {
            true => vec![Uncontended, Parallel, Handoff, Pass],
            false => self.scenario.clone(),
        };
        let among = |pass| {
            let waiters = self.waiters.iter();
            let courses = waiters.map(move |waiters| Course::Relay {
                waiters: *waiters,
                pass,
            });
            courses.collect::<Vec<_>>()
        };
        let courses = chosen.iter().flat_map(|scenario| match scenario {
            Uncontended => vec![Course::Cycles { at_once: 1 }],
            Parallel => vec![Course::Cycles { at_once: 64 }],
            Handoff => among(false),
            Pass => among(true),
            Held => vec![Course::Held],
            Cli => vec![Course::Cli],
        });
        courses.collect()
    }

    /// Measures one course: all sides, round by round.
    async fn in_turns(
        &self,
        plan: &Plan,
        course: Course,
        progress: &Progress,
    ) -> Result<Vec<Figure>, Failure> {
        let sides: &[Who] = match self.baseline || course == Course::Cli {
            true => &[Who::Palisade, Who::Raw],
            false => &[Who::Palisade],
        };
        let mut runners = Vec::new();
        for who in sides {
            let runner = course.ready(plan, *who).await?;
            runners.push((runner, Figure::new(&plan.engine, course.name(), *who)));
        }
        // Connections, caches and threads are warm when it counts.
        for (runner, _) in &mut runners {
            runner
                .round(plan.slice.min(Duration::from_millis(50)))
                .await?;
        }
        for _ in 0..ROUNDS {
            for (runner, figure) in &mut runners {
                figure.rounds.push(runner.round(plan.slice).await?);
                progress.step(&course.name());
            }
        }
        let mut figures = Vec::new();
        for (runner, figure) in runners {
            runner.end().await;
            figures.push(figure);
        }
        figure::compare(&mut figures)?;
        Ok(figures)
    }
}

/// Prints the figures, and says which of them mean little.
fn report(figures: &[Figure], printer: Printer) -> io::Result<()> {
    let rows: Vec<_> = figures.iter().map(Figure::row).collect();
    printer.answer(&rows, |_| figure::table(figures))?;
    let noisy = figures.iter();
    let noisy = noisy.filter_map(|figure| Some((figure.scenario.as_str(), figure.noise()?)));
    let noisy: Vec<(&str, f64)> = noisy.collect();
    if noisy.is_empty() {
        return Ok(());
    }
    let event = json!({
        "event": "noisy",
        "scenarios": noisy.iter().copied().collect::<BTreeMap<_, _>>(),
    });
    printer.event(event, || {
        let which = noisy.iter().map(|(scenario, spread)| {
            let percent = spread * 100.0;
            format!("{scenario} (rounds differ by {percent:.0} %)")
        });
        let which = which.collect::<Vec<_>>().join(", ");
        Some(format!(
            "the machine was too noisy to tell: {which}; measure when it is idle, \
             longer (--seconds), or on one core (--pin)"
        ))
    });
    Ok(())
}

/// How far it is, for a person at a terminal.
struct Progress {
    bar: ProgressBar,
}

impl Progress {
    fn new(todo: &[Course], baseline: bool, printer: Printer) -> Self {
        let steps = |course: &Course| match (course, baseline) {
            (Course::Held, _) | (_, false) => u64::from(ROUNDS),
            (_, true) => 2 * u64::from(ROUNDS),
        };
        let target = match printer.json {
            true => ProgressDrawTarget::hidden(),
            // Draws in a terminal only.
            false => ProgressDrawTarget::stderr(),
        };
        let bar = ProgressBar::with_draw_target(Some(todo.iter().map(steps).sum()), target);
        let style =
            ProgressStyle::with_template("{bar:30} {percent:>3} %  {msg}  {elapsed} of {duration}");
        Self {
            bar: bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar())),
        }
    }

    fn step(&self, what: &str) {
        self.bar.set_message(what.to_owned());
        self.bar.inc(1);
    }
}

/// Keeps this thread, and all threads and processes that it starts, on one core.
fn pin() -> io::Result<()> {
    let allowed = sched_getaffinity(None)?;
    let mut first = CpuSet::new();
    if let Some(core) = (0..CpuSet::MAX_CPU).find(|core| allowed.is_set(*core)) {
        first.set(core);
    }
    Ok(sched_setaffinity(None, &first)?)
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().ok();
    seconds
        .filter(|seconds| (0.01..=3600.0).contains(seconds))
        .map(Duration::from_secs_f64)
        .ok_or_else(|| "write seconds as a number from 0.01 to 3600".to_owned())
}

/// What the system refused.
fn refused(what: &'static str) -> impl Fn(io::Error) -> Failure {
    move |error| Failure::Start(format!("{what}: {error}"))
}

/// What the engine did not do.
fn stuck(message: &str) -> Failure {
    Error::new(Kind::Unreachable, "bench", message).into()
}
