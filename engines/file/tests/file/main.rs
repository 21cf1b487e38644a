//! The embedded engine through its verbs: lines, real second processes, and damaged stores.
#![allow(clippy::unwrap_used)] // A step that fails is a test that fails.

mod child;
mod damage;
mod errors;
mod lines;
mod processes;
mod promises;
mod safety;
mod storm;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use palisade::engine::{
    Ask, Claim, ClaimId, Engine, Entered, Lease, Place, Renewal, SharedEngine, Ticket, Url,
};
use palisade::report::Owner;
use palisade::{BootTime, Name, Result};

/// Longer than anything here takes, shorter than a person's patience.
const PATIENCE: Duration = Duration::from_secs(30);

async fn try_open(dir: &Path, options: &str) -> Result<SharedEngine> {
    let mut url = Url::parse(&format!("file:{}?{options}", dir.display()))?;
    let settings = url.take_settings()?;
    palisade::engines::file::open(url, &settings).await
}

async fn open(dir: &Path) -> SharedEngine {
    try_open(dir, "").await.unwrap()
}

/// A store of the test's own.
async fn store() -> (tempfile::TempDir, SharedEngine) {
    let dir = tempfile::tempdir().unwrap();
    let engine = open(dir.path()).await;
    (dir, engine)
}

async fn renew(engine: &SharedEngine, ticket: &Ticket) -> Renewal {
    let lease = Lease::in_a_test(ticket);
    let within = Duration::from_secs(2);
    engine.renew(vec![lease], within).await.remove(0)
}

fn claim(name: &str, ask: Ask) -> Claim {
    Claim {
        id: ClaimId::random(),
        name: Name::new(name).unwrap(),
        ask,
        ttl: Duration::from_secs(30),
        queue: true,
        owner: Owner::here("tester", None),
        value: None,
        renewed: true,
        at_least: Duration::ZERO,
    }
}

/// Enters and says where: the count, or `None` while it waits.
async fn enter(engine: &SharedEngine, claim: Claim) -> (Ticket, Option<u64>) {
    match engine.enter(Arc::new(claim)).await.unwrap() {
        Entered::Busy => panic!("it queues"),
        Entered::In { ticket, place, .. } => match place {
            Place::Held { sequence } => (ticket, Some(sequence)),
            Place::Waiting => (ticket, None),
            Place::Gone => panic!("it is in"),
        },
    }
}

async fn hold(engine: &SharedEngine, name: &str) -> Ticket {
    let (ticket, sequence) = enter(engine, claim(name, Ask::Whole)).await;
    assert!(sequence.is_some(), "{name} is free");
    ticket
}

/// Waits with the only look at the end far away, so that only a push can bring the answer.
async fn pushed(engine: &SharedEngine, ticket: &Ticket) -> Place {
    let until = BootTime::now() + PATIENCE;
    let place = engine.wait(ticket.clone(), until).await.unwrap();
    assert!(
        !until.has_passed(),
        "pushed, not found by looking: {place:?}"
    );
    place
}

/// How often to try: reduced, or in full.
fn rounds(reduced: u64, full: u64) -> u64 {
    match std::env::var_os("PALISADE_TEST_FULL") {
        Some(_) => full,
        None => reduced,
    }
}
