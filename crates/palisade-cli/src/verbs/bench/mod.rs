//! `palisade bench`: measures an engine, and palisade's cost compared with its raw operations.
//!
//! A scenario gives figures; a figure is measured in rounds, in which palisade and the raw
//! operations take turns, so that other load on the machine affects both. Every lock has a name
//! that nobody else uses, and none is left behind, even if a signal ends the measurement.

mod figure;
mod handover;
mod held;
mod runner;
mod side;

use std::collections::BTreeMap;
use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use palisade::engine::Url;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde_json::json;

use self::figure::Figure;
use self::runner::Runner;
use self::side::{Cleanup, Who};
use crate::args::Global;
use crate::config;
use crate::exit::{Failure, Outcome, Verdict, refused};
use crate::print::Printer;
use crate::signals::Endings;

/// Turns of each side: enough to see whether they agree.
const ROUNDS: u32 = 10;

/// Measure an engine: how fast locks are acquired, released and handed over
///
/// It takes locks under names that nobody else uses, and leaves none behind.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    palisade bench\n  \
    palisade bench --baseline --pin --scenario uncontended,pass\n  \
    palisade bench --url redis://localhost --baseline --json\n\n\
    Scenarios:\n  \
    uncontended  lock and unlock, one after the other\n  \
    parallel     lock and unlock 64 names at once, on one client\n  \
    handoff      2, 8 and 64 waiters that release at once: from one grant to the next\n  \
    pass         the same waiters; each holds for 10 ms and asks again when another has had\n               \
                 the lock: from the release to the next grant, which is the true hand-over\n  \
    held         10,000 locks held for one ttl: what renewing them costs\n  \
    cli          `palisade run NAME -- true` compared with `flock FILE true`\n\n\
    p50 and p99 are times of one operation. The ratio is p50 to that of the raw operations, the\n\
    median over the rounds: 2.00 takes twice as long.")]
pub(crate) struct Bench {
    /// What to measure, separated by commas [default: uncontended,parallel,handoff,pass]
    #[arg(long, value_enum, value_delimiter = ',', hide_possible_values = false)]
    scenario: Vec<Scenario>,
    /// Measure the engine's own raw operations in turns with palisade, and print the ratio
    #[arg(long)]
    baseline: bool,
    /// Run on one core, which removes the influence of the scheduler
    #[arg(long)]
    pin: bool,
    /// How long each figure is measured, for palisade and for the raw operations
    #[arg(long, value_name = "S", default_value = "2", value_parser = parse_seconds)]
    seconds: Duration,
    /// How many locks `held` holds [default: 10000], how often `cli` runs [default: 100]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    count: Option<u32>,
    /// The number of waiters in `handoff` and `pass`, separated by commas
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "2,8,64",
          value_parser = clap::value_parser!(u16).range(2..=512))]
    waiters: Vec<u16>,
    /// Make each waiter of `handoff` and `pass` its own process [default on file:, where the
    /// clients of one process share everything; elsewhere each has its own connection]
    #[arg(long)]
    processes: bool,
    /// Arguments for a waiter of another bench; not for people
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

/// What one figure measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Measured {
    /// Lock and unlock, this many names at once on one client.
    Cycles { at_once: u16 },
    /// Hand-over among waiters. In a true pass a waiter holds for a while, and does not ask again
    /// until another has the lock.
    Handover { waiters: u16, pass: bool },
    /// The cost of holding many locks.
    Held,
    /// The command itself.
    Cli,
}

impl Measured {
    fn name(self) -> String {
        match self {
            Self::Cycles { at_once: 1 } => "uncontended".to_owned(),
            Self::Cycles { .. } => "parallel".to_owned(),
            Self::Handover { waiters, pass } => {
                let what = if pass { "pass" } else { "handoff" };
                format!("{what}-{waiters}")
            }
            Self::Held => "held".to_owned(),
            Self::Cli => "cli".to_owned(),
        }
    }
}

/// What all figures share.
struct Plan<'a> {
    url: &'a str,
    engine: String,
    /// The prefix of all names.
    name: String,
    /// Waiters are processes.
    processes: bool,
    /// How long a round takes.
    slice: Duration,
    count: Option<u32>,
    cleanup: &'a Cleanup,
}

impl Bench {
    pub(crate) async fn run(self, global: &Global) -> Verdict {
        let url = config::url(global.url.as_deref())?;
        if let Some(told) = &self.waiter_of {
            return handover::serve(&url, told).await;
        }
        let mut endings = Endings::listen()?;
        if self.pin {
            pin().map_err(refused("can't stay on one core"))?;
        }
        let cleanup = Cleanup::default();
        let figures = tokio::select! {
            biased;
            signal = endings.next() => Err(Failure::Interrupted(signal.as_raw())),
            figures = self.measure(&url, &cleanup, global.printer()) => figures,
        };
        cleanup.run().await;
        report(&figures?, global.printer())?;
        Ok(Outcome::Done)
    }

    async fn measure(
        &self,
        url: &str,
        cleanup: &Cleanup,
        printer: Printer,
    ) -> Result<Vec<Figure>, Failure> {
        let client = cleanup.client(palisade::connect(url).await?);
        if self.baseline {
            // Checked before anything is measured.
            side::raw(url).await?;
        }
        let plan = Plan {
            url,
            engine: client.describe(),
            // The owner is random: nobody else uses these names.
            name: format!("palisade-bench-{}", client.owner()),
            processes: self.as_processes(url)?,
            slice: self.seconds / ROUNDS,
            count: self.count,
            cleanup,
        };
        drop(client);
        let todo = self.todo();
        let mut progress = Progress::new(&todo, self.baseline, printer);
        let mut figures = Vec::new();
        for what in todo {
            match what {
                Measured::Held => figures.push(held::measure(&plan, &mut progress).await?),
                what => figures.extend(self.in_turns(&plan, what, &mut progress).await?),
            }
            // The connections of one figure must not affect the next.
            cleanup.run().await;
        }
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

    fn todo(&self) -> Vec<Measured> {
        use Scenario::{Cli, Handoff, Held, Parallel, Pass, Uncontended};
        let chosen = if self.scenario.is_empty() {
            &[Uncontended, Parallel, Handoff, Pass][..]
        } else {
            &self.scenario
        };
        let mut todo = Vec::new();
        for scenario in chosen {
            match scenario {
                Uncontended => todo.push(Measured::Cycles { at_once: 1 }),
                Parallel => todo.push(Measured::Cycles { at_once: 64 }),
                Handoff | Pass => todo.extend(self.waiters.iter().map(|waiters| {
                    let (waiters, pass) = (*waiters, *scenario == Pass);
                    Measured::Handover { waiters, pass }
                })),
                Held => todo.push(Measured::Held),
                Cli => todo.push(Measured::Cli),
            }
        }
        todo
    }

    /// Measures all sides, round by round.
    async fn in_turns(
        &self,
        plan: &Plan<'_>,
        what: Measured,
        progress: &mut Progress,
    ) -> Result<Vec<Figure>, Failure> {
        let sides: &[Who] = if self.baseline || what == Measured::Cli {
            &[Who::Palisade, Who::Raw]
        } else {
            &[Who::Palisade]
        };
        let mut runners = Vec::new();
        for who in sides {
            let runner = Runner::ready(plan, what, *who).await?;
            runners.push((runner, Figure::new(&plan.engine, what.name(), *who)));
        }
        // A warm-up of connections, caches and threads.
        let warm_up = plan.slice.min(Duration::from_millis(50));
        for (runner, _) in &mut runners {
            runner.round(warm_up).await?;
        }
        for _ in 0..ROUNDS {
            for (runner, figure) in &mut runners {
                figure.rounds.push(runner.round(plan.slice).await?);
                progress.step(&what.name());
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

/// Prints the figures, and a note about those that are noisy.
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

/// The progress line for a terminal.
struct Progress {
    shown: bool,
    steps: u32,
    done: u32,
}

impl Progress {
    fn new(todo: &[Measured], baseline: bool, printer: Printer) -> Self {
        let sides = |what: &Measured| match what {
            Measured::Held => 1,
            Measured::Cli => 2,
            _ => 1 + u32::from(baseline),
        };
        Self {
            shown: !printer.json && io::stderr().is_terminal(),
            steps: todo.iter().map(sides).sum::<u32>() * ROUNDS,
            done: 0,
        }
    }

    fn step(&mut self, what: &str) {
        self.done += 1;
        if self.shown {
            let percent = 100 * self.done / self.steps.max(1);
            let _ = write!(io::stderr(), "\r{percent:>3} %  {what}\x1b[K");
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.shown {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
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
