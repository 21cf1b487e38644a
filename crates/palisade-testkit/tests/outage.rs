//! The cases that need an engine which can be cut off, on one that can: they pass on an engine
//! that says so, and fail on one that sleeps through it.

#![allow(clippy::unwrap_used)]

use std::path::PathBuf;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use palisade::core::engine::BoxFuture;
use palisade::core::url::Url;
use palisade::{Client, Result};
use palisade_testkit::conformance::{self, Bed, Verdict};
use palisade_testkit::subject::{Connect, Outage, Site, Subject};
use palisade_testkit::wrap::Spy;
use tokio::sync::watch;

/// One switch for all clients of the engine.
static SWITCH: LazyLock<watch::Sender<bool>> = LazyLock::new(|| watch::channel(false).0);

struct Switch;

impl Outage for Switch {
    fn begin(&self) {
        SWITCH.send_replace(true);
    }

    fn end(&self) {
        SWITCH.send_replace(false);
    }
}

fn honest(url: String) -> BoxFuture<Result<Client>> {
    Box::pin(async move {
        let settings = Url::parse(&url)?.take_settings()?;
        let engine = Arc::clone(palisade::connect(&url).await?.engine());
        let spy = Spy::new(engine).with_switch(SWITCH.clone());
        Client::new(Arc::new(spy), &settings)
    })
}

fn deaf(url: String) -> BoxFuture<Result<Client>> {
    Box::pin(async move { palisade::connect(&url).await })
}

fn verdict(connect: Connect, name: &str) -> Verdict {
    let subject = Subject {
        connect,
        ..Subject::new("cut", || Err("not started".into()))
    };
    let site = Site {
        outage: Some(Arc::new(Switch)),
        ..Site::new("memory:")
    };
    let cases = conformance::all();
    let case = cases.iter().find(|case| case.name == name).unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let bed = Bed::new(subject, site, PathBuf::new(), Arc::default());
        let run = conformance::run(case, bed.await.unwrap());
        tokio::time::timeout(Duration::from_secs(25), run)
            .await
            .unwrap()
    })
}

#[test]
fn an_outage_is_told_and_silence_is_caught() {
    let cases = [
        "wait/cut_off_engine_is_unreachable",
        "renew/cut_off_engine_is_unknown",
    ];
    for name in cases {
        assert_eq!(verdict(honest, name), Verdict::Ok, "{name}");
        assert!(matches!(verdict(deaf, name), Verdict::Failed(_)), "{name}");
    }
}
