//! The conformance suite on the JSON engine.

use std::process::ExitCode;

use palisade_testkit::engine::{EngineUnderTest, Site};
use palisade_testkit::harness;

fn main() -> ExitCode {
    let json = EngineUnderTest::new("json", start);
    harness::main(&[
        json.connecting(|url| Box::pin(async move { json_engine::connect(&url).await }))
    ])
}

/// A folder of this run, which ends with it.
fn start() -> Result<Site, String> {
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let site = Site {
        // Other processes reach it through the same URL.
        processes: true,
        ..Site::new(format!("json:{}", folder.path().display()))
    };
    Ok(site.keeping(folder))
}
