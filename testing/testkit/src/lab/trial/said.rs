//! Checks that no secret is in the logs and traces of the program and its libraries, at their most
//! verbose levels.
#![allow(clippy::unwrap_used)] // A step that fails is a test that fails.

use std::fmt::{Debug, Write as _};
use std::sync::LazyLock;

use palisade::layers::{Trace, Traced};
use palisade::report::Scope;
use parking_lot::Mutex;
use tracing::field::{Field, Visit};
use tracing::span;
use tracing_subscriber::layer::{Context, SubscriberExt};

/// Everything that the whole process has logged since the first use.
static SAID: LazyLock<Mutex<String>> = LazyLock::new(|| {
    // This fails if there is another subscriber or logger, which would hide messages.
    tracing::subscriber::set_global_default(tracing_subscriber::registry().with(Ears)).unwrap();
    log::set_logger(&Ears).unwrap();
    log::set_max_level(log::LevelFilter::Trace);
    Mutex::default()
});

struct Ears;

fn hear(what: impl FnOnce(&mut Heard)) {
    let mut heard = Heard(String::new());
    what(&mut heard);
    // Locked only now, because formatting may log as well.
    SAID.lock().push_str(&heard.0);
}

struct Heard(String);

impl Visit for Heard {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let _ = writeln!(self.0, "{field}={value:?}");
    }
}

impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Ears {
    fn on_new_span(&self, span: &span::Attributes<'_>, _: &span::Id, _: Context<'_, S>) {
        hear(|heard| span.record(heard));
    }

    fn on_record(&self, _: &span::Id, values: &span::Record<'_>, _: Context<'_, S>) {
        hear(|heard| values.record(heard));
    }

    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        hear(|heard| event.record(heard));
    }
}

impl log::Log for Ears {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        hear(|heard| {
            let _ = writeln!(heard.0, "{}", record.args());
        });
    }

    fn flush(&self) {}
}

/// Connects by `url`, uses locks, and is refused by `wrong`. Searches for `secrets`, which are in
/// the URLs, in everything that was logged meanwhile and in the `Debug` output of our types.
///
/// # Panics
/// If one is found, if nothing was logged at all, or if `wrong` is not refused.
pub async fn says_no_secret(url: &str, wrong: &str, secrets: &[&str]) {
    LazyLock::force(&SAID);
    let client = palisade::connect(url).await.unwrap();
    let client = client.layer(Traced::over).observed_by(Trace);
    let hold = client.mutex("said").lock().await.unwrap();
    let lines = client.survey(Scope::Prefix(String::new())).await.unwrap();
    let mut shown = format!("{client:?} {hold:?} {lines:?}");
    hold.release().await.unwrap();
    let checked = client.check().await;
    client.close().await;
    let refused = match palisade::connect(wrong).await {
        Ok(client) => client.mutex("said").try_lock().await.map(|_| ()),
        Err(error) => Err(error),
    };
    let refused = refused.expect_err("refused");
    write!(shown, " {checked:?} {refused:?} {refused}").unwrap();
    let said = SAID.lock();
    assert!(said.contains("acquired"), "nothing was heard");
    for secret in secrets {
        assert!(!shown.contains(secret), "shown: {shown}");
        let line = said.lines().find(|line| line.contains(secret));
        assert!(line.is_none(), "said: {line:?}");
    }
}
