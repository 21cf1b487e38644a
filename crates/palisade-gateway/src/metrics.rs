//! `Metrics`: the metrics of the library and the gateway, in the format of Prometheus.
//!
//! A recorder for the `metrics` facade. Labels are an engine, a kind, an outcome, a route or a
//! status, never a name: the number of series does not grow with the number of locks.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use metrics::{
    Counter, Gauge, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder, SharedString, Unit,
};
use palisade::{Error, ErrorKind, Result};
use parking_lot::RwLock;

/// Upper ends of the buckets, in seconds: from a lock in memory to a long wait.
const BUCKETS: [f64; 12] = [
    0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0, 300.0,
];

/// See the module's documentation.
#[derive(Clone, Default)]
pub struct Metrics(Arc<RwLock<Series>>);

/// By name, then by labels as they are printed.
#[derive(Default)]
struct Series {
    counters: BTreeMap<String, BTreeMap<String, Arc<AtomicU64>>>,
    gauges: BTreeMap<String, BTreeMap<String, Arc<AtomicU64>>>,
    histograms: BTreeMap<String, BTreeMap<String, Arc<Buckets>>>,
    /// What each name counts.
    help: BTreeMap<String, String>,
}

#[derive(Default)]
struct Buckets {
    counts: [AtomicU64; BUCKETS.len() + 1],
    micros: AtomicU64,
}

impl HistogramFn for Buckets {
    fn record(&self, seconds: f64) {
        let at = BUCKETS.iter().position(|end| seconds <= *end);
        self.counts[at.unwrap_or(BUCKETS.len())].fetch_add(1, Ordering::Relaxed);
        let micros = (seconds * 1e6) as u64;
        self.micros.fetch_add(micros, Ordering::Relaxed);
    }
}

impl Metrics {
    /// Makes it the recorder of this process.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] when there is another.
    pub fn install() -> Result<Self> {
        let metrics = Self::default();
        metrics::set_global_recorder(metrics.clone()).map_err(|_| {
            Error::new(
                ErrorKind::Config,
                "serve",
                "this process has a recorder of metrics already",
            )
        })?;
        palisade::layers::Metrics::describe();
        describe();
        Ok(metrics)
    }

    /// The text that Prometheus scrapes, with `more` gauges of this moment.
    pub(crate) fn text(&self, more: &[(&str, u64)]) -> String {
        let series = self.0.read();
        let mut out = String::new();
        let mut line = |text: std::fmt::Arguments<'_>| {
            // Writing to a string can't fail.
            let _ = writeln!(out, "{text}");
        };
        let head = |name: &str, kind: &str| {
            let help = series.help.get(name).map(|help| {
                let help = help.replace('\\', "\\\\").replace('\n', "\\n");
                format!("# HELP {name} {help}\n")
            });
            format!("{}# TYPE {name} {kind}", help.unwrap_or_default())
        };
        for (name, by_labels) in &series.counters {
            line(format_args!("{}", head(name, "counter")));
            for (labels, value) in by_labels {
                let value = value.load(Ordering::Relaxed);
                line(format_args!("{name}{} {value}", braced(labels)));
            }
        }
        for (name, by_labels) in &series.gauges {
            line(format_args!("{}", head(name, "gauge")));
            for (labels, value) in by_labels {
                let value = f64::from_bits(value.load(Ordering::Relaxed));
                line(format_args!("{name}{} {value}", braced(labels)));
            }
        }
        for (name, value) in more {
            line(format_args!("{}\n{name} {value}", head(name, "gauge")));
        }
        for (name, by_labels) in &series.histograms {
            line(format_args!("{}", head(name, "histogram")));
            for (labels, buckets) in by_labels {
                let comma = if labels.is_empty() { "" } else { "," };
                let mut count = 0;
                let ends = BUCKETS.iter().map(f64::to_string);
                for (at, end) in ends.chain(["+Inf".to_owned()]).enumerate() {
                    count += buckets.counts[at].load(Ordering::Relaxed);
                    line(format_args!(
                        "{name}_bucket{{{labels}{comma}le=\"{end}\"}} {count}"
                    ));
                }
                let sum = buckets.micros.load(Ordering::Relaxed) as f64 / 1e6;
                line(format_args!("{name}_sum{} {sum}", braced(labels)));
                line(format_args!("{name}_count{} {count}", braced(labels)));
            }
        }
        out
    }
}

/// Describes the gateway's own metrics.
fn describe() {
    metrics::describe_counter!(
        "palisade_gateway_requests_total",
        "Responses of this gateway, by route and status"
    );
    metrics::describe_histogram!(
        "palisade_gateway_request_seconds",
        Unit::Seconds,
        "How long responses of this gateway took, waits included"
    );
    metrics::describe_gauge!(
        "palisade_gateway_sessions",
        "Sessions of clients that are open at this gateway"
    );
    metrics::describe_gauge!(
        "palisade_gateway_claims",
        "Claims of this gateway's clients, held or waiting"
    );
    metrics::describe_gauge!(
        "palisade_gateway_draining",
        "1 while this gateway drains, otherwise 0"
    );
}

fn braced(labels: &str) -> String {
    if labels.is_empty() {
        return String::new();
    }
    format!("{{{labels}}}")
}

fn labels(key: &Key) -> String {
    let one = |label: &metrics::Label| {
        let value = label.value().replace('\\', "\\\\");
        let value = value.replace('"', "\\\"").replace('\n', "\\n");
        format!("{}=\"{value}\"", label.key())
    };
    key.labels().map(one).collect::<Vec<_>>().join(",")
}

/// The series of a key, created if missing.
fn series<T: Default>(all: &mut BTreeMap<String, BTreeMap<String, Arc<T>>>, key: &Key) -> Arc<T> {
    let by_labels = all.entry(key.name().to_owned()).or_default();
    Arc::clone(by_labels.entry(labels(key)).or_default())
}

impl Recorder for Metrics {
    fn describe_counter(&self, name: KeyName, _: Option<Unit>, help: SharedString) {
        let names = &mut self.0.write().help;
        names.insert(name.as_str().to_owned(), help.into_owned());
    }

    fn describe_gauge(&self, name: KeyName, unit: Option<Unit>, help: SharedString) {
        self.describe_counter(name, unit, help);
    }

    fn describe_histogram(&self, name: KeyName, unit: Option<Unit>, help: SharedString) {
        self.describe_counter(name, unit, help);
    }

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(series(&mut self.0.write().counters, key))
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(series(&mut self.0.write().gauges, key))
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(series(&mut self.0.write().histograms, key))
    }
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Metrics")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_prints_what_prometheus_reads() {
        let metrics = Metrics::default();
        metrics::with_local_recorder(&metrics, || {
            metrics::describe_counter!("a_total", "a\\b\nc");
            metrics::describe_gauge!("d", "d's");
            metrics::counter!("a_total", "engine" => "x\"y\\z\n").increment(2);
            metrics::gauge!("b").set(1.5);
            metrics::histogram!("c_seconds", "kind" => "k").record(0.002);
            metrics::histogram!("c_seconds", "kind" => "k").record(1000.0);
        });
        let text = metrics.text(&[("d", 7)]);
        for line in [
            "# HELP a_total a\\\\b\\nc",
            "# TYPE a_total counter",
            r#"a_total{engine="x\"y\\z\n"} 2"#,
            "b 1.5",
            "# HELP d d's",
            "# TYPE d gauge",
            "d 7",
            r#"c_seconds_bucket{kind="k",le="0.001"} 0"#,
            r#"c_seconds_bucket{kind="k",le="0.005"} 1"#,
            r#"c_seconds_bucket{kind="k",le="+Inf"} 2"#,
            r#"c_seconds_count{kind="k"} 2"#,
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in {text}");
        }
    }
}
