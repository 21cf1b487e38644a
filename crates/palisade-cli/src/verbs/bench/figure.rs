//! `Figure`: what was measured, round by round, and its summary.
//!
//! The field names of [`Row`] are the command's contract. A ratio compares rounds that were next
//! to each other; a figure whose rounds disagree is called noisy.

use std::time::Duration;

use serde::Serialize;

use super::side::Who;
use crate::exit::Failure;
use crate::table::{self, Layout};

/// One turn.
#[derive(Debug, Default)]
pub(super) struct Round {
    /// How long single operations took, in nanoseconds.
    pub(super) times: Vec<u64>,
    /// How long the turn took.
    pub(super) took: Duration,
}

/// All turns of one side in one scenario.
#[derive(Debug)]
pub(super) struct Figure {
    engine: String,
    pub(super) scenario: String,
    pub(super) who: Who,
    pub(super) rounds: Vec<Round>,
    /// The ratio to the raw operations of the same run, for each round.
    ratios: Vec<f64>,
    /// Operations per second, if the timed unit is not one operation.
    pub(super) ops_s: Option<f64>,
    /// A further remark, for the text output.
    pub(super) remark: Option<String>,
}

/// A figure as programs see it.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    engine: String,
    scenario: String,
    who: &'static str,
    ops_s: f64,
    p50_us: f64,
    p99_us: f64,
    ratio_to_raw: Option<f64>,
}

/// Rounds that differ by more are noise: a quarter of a median is far more than an idle machine
/// shows, and less than the differences that decide between engines.
const NOISY: f64 = 0.25;

impl Figure {
    pub(super) fn new(engine: &str, scenario: String, who: Who) -> Self {
        Self {
            engine: engine.to_owned(),
            scenario,
            who,
            rounds: Vec::new(),
            ratios: Vec::new(),
            ops_s: None,
            remark: None,
        }
    }

    pub(super) fn row(&self) -> Row {
        let mut times: Vec<u64> = self
            .rounds
            .iter()
            .flat_map(|round| &round.times)
            .copied()
            .collect();
        times.sort_unstable();
        let took: Duration = self.rounds.iter().map(|round| round.took).sum();
        let sequence = times.len() as f64 / took.as_secs_f64().max(1e-9);
        let micros = |nanos: f64| rounded(nanos / 1e3, 3);
        Row {
            engine: self.engine.clone(),
            scenario: self.scenario.clone(),
            who: self.who.word(),
            ops_s: rounded(self.ops_s.unwrap_or(sequence), 1),
            p50_us: micros(quantile(&times, 0.5)),
            p99_us: micros(quantile(&times, 0.99)),
            ratio_to_raw: sorted(self.ratios.clone())
                .get(self.ratios.len() / 2)
                .map(|ratio| rounded(*ratio, 3)),
        }
    }

    fn medians(&self) -> Vec<f64> {
        let medians = self.rounds.iter().filter(|round| !round.times.is_empty());
        medians.map(middle).collect()
    }

    /// By how much the middle half of the rounds differs, if that is too much. With a ratio, the
    /// ratios of the rounds are compared: a slowdown of both sides does not affect them.
    pub(super) fn noise(&self) -> Option<f64> {
        let rounds = match (self.who, self.ratios.is_empty()) {
            (Who::Raw, _) => return None,
            (Who::Palisade, false) => self.ratios.clone(),
            (Who::Palisade, true) => self.medians(),
        };
        let rounds = sorted(rounds);
        let at = |share: f64| {
            let at = rounds.len().saturating_sub(1) as f64 * share;
            rounds.get(at.round() as usize).copied().unwrap_or_default()
        };
        let spread = (at(0.75) - at(0.25)) / at(0.5).max(1e-9);
        (rounds.len() > 3 && spread > NOISY).then(|| rounded(spread, 3))
    }
}

/// Fills in the ratio, and refuses figures without measurements.
pub(super) fn compare(figures: &mut [Figure]) -> Result<(), Failure> {
    for figure in figures.iter() {
        if figure.medians().len() < figure.rounds.len().div_ceil(2) {
            let (scenario, who) = (&figure.scenario, figure.who.word());
            let message = format!(
                "{scenario} ({who}): too few operations to measure; give it more --seconds"
            );
            return Err(Failure::Usage(message));
        }
    }
    if let [ours, raw] = figures {
        let pairs = ours.rounds.iter().zip(&raw.rounds);
        let pairs = pairs.filter(|(ours, raw)| !ours.times.is_empty() && !raw.times.is_empty());
        let ratios = pairs.map(|(ours, raw)| middle(ours) / middle(raw).max(1.0));
        ours.ratios = ratios.collect();
    }
    Ok(())
}

fn middle(round: &Round) -> f64 {
    let mut times = round.times.clone();
    times.sort_unstable();
    quantile(&times, 0.5)
}

fn sorted(mut values: Vec<f64>) -> Vec<f64> {
    values.sort_unstable_by(f64::total_cmp);
    values
}

/// The nearest rank, of sorted times.
fn quantile(sorted: &[u64], share: f64) -> f64 {
    let rank = (sorted.len() as f64 * share).ceil() as usize;
    sorted
        .get(rank.saturating_sub(1))
        .copied()
        .unwrap_or_default() as f64
}

fn rounded(value: f64, digits: i32) -> f64 {
    let scale = 10f64.powi(digits);
    (value * scale).round() / scale
}

const LAYOUT: Layout = Layout {
    less: &[],
    long: [0, 1],
    shortest: usize::MAX,
    right: &[2, 3, 4, 5],
};

/// For people.
pub(super) fn table(figures: &[Figure]) -> String {
    let header = ["SCENARIO", "WHO", "OPS/S", "P50", "P99", "RATIO", ""];
    let mut cells = vec![header.map(str::to_owned)];
    for figure in figures {
        let row = figure.row();
        let ratio = row.ratio_to_raw.map(|ratio| format!("{ratio:.2}"));
        cells.push([
            row.scenario,
            row.who.to_owned(),
            format!("{:.0}", row.ops_s),
            micros(row.p50_us),
            micros(row.p99_us),
            ratio.unwrap_or_else(|| "-".to_owned()),
            figure.noise().map_or("", |_| "noisy").to_owned(),
        ]);
    }
    let engine = figures.first().map_or("", |figure| &figure.engine);
    let rows = table::rows(cells, &LAYOUT, None).join("\n");
    let remarks = figures.iter().filter_map(|figure| figure.remark.as_deref());
    let remarks: String = remarks.map(|remark| format!("\n{remark}\n")).collect();
    format!("{engine}\n\n{rows}\n{remarks}")
}

fn micros(micros: f64) -> String {
    match micros {
        ..100.0 => format!("{micros:.1} µs"),
        ..10_000.0 => format!("{micros:.0} µs"),
        _ => format!("{:.1} ms", micros / 1e3),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(who: Who, medians: &[u64]) -> Figure {
        let mut figure = Figure::new("memory:", "uncontended".into(), who);
        figure.rounds = medians
            .iter()
            .map(|median| Round {
                times: vec![median - 1, *median, median + 1],
                took: Duration::from_secs(1),
            })
            .collect();
        figure
    }

    #[test]
    fn the_quantile_is_a_time_that_was_measured() {
        let times: Vec<u64> = (1..=100).collect();
        assert_eq!(
            (quantile(&times, 0.5), quantile(&times, 0.99)),
            (50.0, 99.0)
        );
        assert_eq!((quantile(&[7], 0.99), quantile(&[], 0.5)), (7.0, 0.0));
    }

    #[test]
    fn the_ratio_compares_neighbours() {
        // The machine became four times slower: the ratio is the same all along.
        let mut both = [
            figure(Who::Palisade, &[200, 200, 800, 800]),
            figure(Who::Raw, &[100, 100, 400, 400]),
        ];
        compare(&mut both).unwrap();
        assert_eq!(both[0].row().ratio_to_raw, Some(2.0));
        assert_eq!(both[1].row().ratio_to_raw, None);
        assert_eq!(both[0].noise(), None, "the ratio is steady");
    }

    #[test]
    fn rounds_that_disagree_are_noise() {
        let noise = |rounds: &[u64]| figure(Who::Palisade, rounds).noise();
        assert_eq!(noise(&[100, 102, 98, 101]), None);
        assert!(noise(&[200, 200, 800, 800]).is_some());
    }

    #[test]
    fn a_figure_of_nothing_is_refused() {
        let mut empty = Figure::new("memory:", "pass-2".into(), Who::Palisade);
        empty.rounds.push(Round::default());
        assert!(compare(std::slice::from_mut(&mut empty)).is_err());
    }
}
