//! A site of one trial alone, which may cut it off: a real engine of one server.

use std::sync::Arc;

use super::{Error, Running, start};
use crate::subject::{Outage, Site};

/// Starts the engine `name` for one trial alone, which may cut it off.
///
/// # Errors
/// A sentence when it can't be had or does not start.
pub fn severable(name: &str) -> Result<Site, String> {
    let running: Running = start(name).map_err(|error: Error| error.to_string())?;
    let running = Arc::new(running);
    Ok(Site {
        processes: true,
        outage: Some(running.clone() as Arc<dyn Outage>),
        keep: Some(running.clone()),
        ..Site::new(running.url())
    })
}
