//! `for_correctness` goes by what the engine is, and by how it is set up.

use std::time::Duration;

use palisade::report::{Finding, Severity};
use palisade::{ErrorKind, Guarantee};

use crate::support::Faulty;

fn finding(severity: Severity, message: &str) -> Finding {
    Finding::new(severity, "code", message, format!("mend {message}"))
}

#[tokio::test]
async fn settings_that_endanger_tokens_are_refused_with_their_remedy() {
    let (engine, client) = Faulty::client(Duration::from_secs(5)).await;
    let refused = client.for_correctness().await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::NotForCorrectness, "class C");

    *engine.class.lock() = Some(Guarantee::Durable);
    client.for_correctness().await.unwrap();
    engine.findings.lock().extend([
        finding(Severity::Info, "a note"),
        finding(Severity::Warning, "a worry"),
    ]);
    client.for_correctness().await.unwrap();

    engine.findings.lock().extend([
        finding(Severity::Danger, "fsync is off"),
        finding(Severity::Danger, "writes are lost"),
    ]);
    let refused = client.for_correctness().await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::NotForCorrectness);
    for said in ["fsync is off", "mend fsync is off", "writes are lost"] {
        assert!(refused.message().contains(said), "{refused}");
    }
    assert!(!refused.message().contains("worry"), "{refused}");
}
