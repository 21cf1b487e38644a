//! Metrics and traces, read back by recorders. Recorders are global: the keeper tells from its
//! own thread; so this is a binary of its own, and its tests use lines of their own modes.
#![cfg(all(feature = "metrics", feature = "trace"))]
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};
use palisade::events::{Event, Observer};
use palisade::fence::{Fence, MemoryFence};
use palisade::layers::{FenceMetrics, Metrics, Trace, Traced};
use palisade::{ErrorKind, Name};
use tracing::field::{Field, Visit};
use tracing_subscriber::layer::{Context, SubscriberExt};

static METRICS: LazyLock<Snapshotter> = LazyLock::new(|| {
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    recorder.install().unwrap();
    snapshotter
});

/// Adds up what was recorded since the last call: `name{label=value,…}` to a number. Histograms
/// count their entries.
fn recorded(into: &mut BTreeMap<String, f64>) {
    read(&METRICS, into);
}

fn read(metrics: &Snapshotter, into: &mut BTreeMap<String, f64>) {
    for (key, _, _, value) in metrics.snapshot().into_vec() {
        let key = key.key();
        let labels: Vec<_> = key
            .labels()
            .map(|label| format!("{}={}", label.key(), label.value()))
            .collect();
        let value = match value {
            DebugValue::Counter(count) => count as f64,
            DebugValue::Gauge(level) => level.into_inner(),
            DebugValue::Histogram(entries) => entries.len() as f64,
        };
        let name = format!("{}{{{}}}", key.name(), labels.join(","));
        *into.entry(name).or_default() += value;
    }
}

async fn until(mut done: impl FnMut() -> bool) {
    let waited = tokio::time::timeout(Duration::from_secs(20), async {
        while !done() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    waited.await.expect("did not come in time");
}

#[tokio::test]
async fn everything_that_happens_is_counted_under_its_name() {
    LazyLock::force(&METRICS);
    let client = palisade::connect("memory:metrics?ttl=900ms")
        .await
        .unwrap()
        .observed_by(Metrics);
    let mutex = client.mutex("x");
    let hold = mutex.lock().await.unwrap();
    assert!(mutex.try_lock().await.unwrap().is_none());
    assert!(
        tokio::time::timeout(Duration::from_millis(10), mutex.lock())
            .await
            .is_err()
    );

    let mut seen = BTreeMap::new();
    let renewed = "palisade_renew_total{engine=memory,outcome=held}";
    until(|| {
        recorded(&mut seen);
        seen.get(renewed).is_some_and(|count| *count >= 2.0)
    })
    .await;
    assert_eq!(seen["palisade_held{engine=memory}"], 1.0);

    let name = Name::new("x").unwrap();
    client
        .evict(&name, palisade::Which::Holders, palisade::Eviction::Remove)
        .await
        .unwrap();
    hold.lost().await;
    // The holder is told first, and then those who watch.
    until(|| {
        recorded(&mut seen);
        seen.contains_key("palisade_lost_total{engine=memory,reason=taken}")
    })
    .await;
    drop(hold);
    let permits = client.semaphore("s", 2);
    permits.acquire().await.unwrap().release().await.unwrap();
    let other_capacity = client.semaphore("s", 3);
    let _two = permits.acquire().await.unwrap();
    other_capacity.try_acquire().await.unwrap_err();

    let fence = FenceMetrics(MemoryFence::default());
    fence.write(&name, 2.into(), Vec::new()).await.unwrap();
    fence.write(&name, 1.into(), Vec::new()).await.unwrap();

    recorded(&mut seen);
    for (name, count) in [
        (
            "palisade_acquire_total{engine=memory,kind=exclusive,outcome=held}",
            1.0,
        ),
        (
            "palisade_acquire_total{engine=memory,kind=exclusive,outcome=busy}",
            1.0,
        ),
        (
            "palisade_acquire_total{engine=memory,kind=exclusive,outcome=cancelled}",
            1.0,
        ),
        (
            "palisade_acquire_total{engine=memory,kind=permits,outcome=held}",
            2.0,
        ),
        (
            "palisade_acquire_total{engine=memory,kind=permits,outcome=failed}",
            1.0,
        ),
        ("palisade_wait_seconds{engine=memory,kind=exclusive}", 3.0),
        ("palisade_hold_seconds{engine=memory,kind=exclusive}", 1.0),
        ("palisade_hold_seconds{engine=memory,kind=permits}", 1.0),
        ("palisade_lost_total{engine=memory,reason=taken}", 1.0),
        ("palisade_fence_rejected_total{}", 1.0),
    ] {
        assert_eq!(seen.get(name), Some(&count), "{name} in {seen:#?}");
    }
    assert!(seen.contains_key("palisade_renew_seconds{engine=memory}"));
    assert_eq!(seen["palisade_waiting{engine=memory}"], 0.0);
    assert_eq!(
        seen["palisade_held{engine=memory}"], 1.0,
        "the second permit"
    );
    assert!(
        seen.keys().all(|key| !key.contains("=x")),
        "no name of a lock is a label"
    );
}

/// Keeps every span and event as one line of text.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<String>>>);

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        write!(self.0, " {}={value:?}", field.name()).unwrap();
    }
}

impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Lines {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        let mut text = Text(event.metadata().target().to_owned());
        event.record(&mut text);
        self.0.lock().unwrap().push(text.0);
    }

    fn on_new_span(
        &self,
        attributes: &tracing::span::Attributes<'_>,
        _: &tracing::Id,
        _: Context<'_, S>,
    ) {
        let mut text = Text(format!("span {}", attributes.metadata().target()));
        attributes.record(&mut text);
        self.0.lock().unwrap().push(text.0);
    }
}

/// Counts deadlocks alone: the rest may be told from another thread, and is not of this test.
struct Circles;

impl Observer for Circles {
    fn see(&self, event: &Event<'_>) {
        if let Event::Deadlocked { .. } = event {
            Metrics.see(event);
        }
    }
}

/// A circle is counted by each waiter that finds itself in it, and once as broken.
#[tokio::test]
async fn a_deadlock_is_counted() {
    let recorder = DebuggingRecorder::new();
    let _this_thread = metrics::set_default_local_recorder(&recorder);
    let connect = async || {
        let client = palisade::connect("memory:circle?ttl=3s").await;
        client.unwrap().observed_by(Circles)
    };
    let (a, b) = (connect().await.agent("a"), connect().await.agent("b"));
    let x = a.mutex("x").lock().await.unwrap();
    let y = b.mutex("y").lock().await.unwrap();
    let wait = async |client: palisade::Client, name: &str, own: palisade::Hold| {
        let lock = client.mutex(name).deadlock_after(Duration::from_millis(50));
        let got = lock.lock().await;
        drop(own);
        got.map_err(|error| error.kind()).err()
    };
    let both = async { tokio::join!(wait(a, "y", x), wait(b, "x", y)) };
    let both = tokio::time::timeout(Duration::from_secs(30), both).await;
    let (one, two) = both.expect("the circle is broken");
    assert!(one != two && one.or(two) == Some(ErrorKind::Deadlock));
    let mut seen = BTreeMap::new();
    read(&recorder.snapshotter(), &mut seen);
    let counted = |outcome: &str| {
        let name = format!("palisade_deadlocks_total{{engine=memory,outcome={outcome}}}");
        seen.get(&name).copied().unwrap_or_default()
    };
    assert_eq!(counted("gave_way"), 1.0, "{seen:?}");
    // The other may have been granted before it looked again.
    assert!((1.0..=2.0).contains(&counted("found")), "{seen:?}");
    assert!(seen.len() <= 2, "no name is a label: {seen:?}");
}

#[tokio::test]
async fn every_verb_is_a_span_and_a_loss_is_a_warning() {
    let lines = Lines::default();
    let subscriber = tracing_subscriber::registry().with(lines.clone());
    tracing::subscriber::set_global_default(subscriber).unwrap();

    let client = palisade::connect("memory:trace?ttl=1500ms&label=hunter2")
        .await
        .unwrap()
        .observed_by(Trace)
        .layer(Traced::over);
    let election = client.election("x");
    let elected = election.campaign("hunter2").await.unwrap();
    elected.proclaim("hunter2 again").await.unwrap();
    let waited = election
        .campaign_timeout("hunter2", Duration::from_millis(500))
        .await;
    assert!(waited.unwrap().is_none());
    let has = |words: &[&str]| {
        let lines = lines.0.lock().unwrap();
        lines
            .iter()
            .any(|line| words.iter().all(|word| line.contains(word)))
    };
    until(|| has(&["verb=\"renew\""])).await;
    client
        .evict(
            &Name::new("x").unwrap(),
            palisade::Which::Holders,
            palisade::Eviction::Remove,
        )
        .await
        .unwrap();
    elected.hold().lost().await;
    drop(elected);
    client.flush().await;
    client.check().await.unwrap();

    for verb in [
        "enter", "wait", "renew", "amend", "leave", "survey", "evict", "check",
    ] {
        assert!(
            has(&["span palisade::engine", &format!("verb=\"{verb}\"")]),
            "{verb}"
        );
    }
    assert!(has(&["palisade ", "message=acquired", "name=x", "token="]));
    assert!(has(&[
        "palisade ",
        "message=lost",
        "name=x",
        "reason=\"taken\""
    ]));
    assert!(has(&[
        "palisade ",
        "message=not acquired",
        "outcome=\"busy\""
    ]));
    assert!(has(&["palisade ", "message=released"]));
    assert!(!has(&["hunter2"]), "values and labels may be secret");
}
