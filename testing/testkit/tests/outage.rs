//! The conformance cases for an engine that is cut off: they pass on an engine that reports it, and
//! fail on one that keeps sleeping.

#![allow(clippy::unwrap_used)]

use std::sync::{Arc, LazyLock};

use palisade::engine::{BoxFuture, Url};
use palisade::{Client, Result};
use palisade_testkit::conformance::Verdict;
use palisade_testkit::engine::{CONNECT, Connect, CutOff, EngineUnderTest, Site};
use palisade_testkit::harness;
use palisade_testkit::spy::Spy;
use tokio::sync::watch;

/// One switch for all clients of the engine.
static SWITCH: LazyLock<watch::Sender<bool>> = LazyLock::new(|| watch::channel(false).0);

struct Switch;

impl CutOff for Switch {
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

fn verdict(connect: Connect, case: &str) -> Verdict {
    let engine = EngineUnderTest::new("cut", || Err("not started".into())).connecting(connect);
    let site = Site {
        cut_off: Some(Arc::new(Switch)),
        ..Site::new("memory:")
    };
    harness::try_case(engine, site, case)
}

#[test]
fn an_outage_is_told_and_silence_is_caught() {
    let cases = [
        "wait/cut_off_engine_is_unreachable",
        "renew/cut_off_engine_is_unknown",
    ];
    for name in cases {
        assert_eq!(verdict(honest, name), Verdict::Ok, "{name}");
        assert!(
            matches!(verdict(CONNECT, name), Verdict::Failed(_)),
            "{name}"
        );
    }
}
