//! Findings that apply to every engine behind a network.

use std::time::Duration;

use super::host::Host;
use palisade_core::report::{Finding, Severity};

/// Warns about a connection that others on the network can read and change.
pub fn plain_text(hosts: &[Host], encrypted: bool) -> Option<Finding> {
    let remote = hosts.iter().find(|host| !host.is_local())?;
    (!encrypted).then(|| {
        Finding::new(
            Severity::Warning,
            "plain_text",
            format!("the connection to {remote} is not encrypted"),
            "use the scheme for TLS, or keep the traffic inside a network you trust".to_owned(),
        )
    })
}

/// Warns about a server whose clock differs much from ours. Ages and times shown would be wrong by
/// that much, and one of the clocks will be corrected, perhaps by a step.
pub fn clock_off(ahead_us: i64) -> Option<Finding> {
    const TOLERATED: Duration = Duration::from_secs(1);
    let off = Duration::from_micros(ahead_us.unsigned_abs());
    (off > TOLERATED).then(|| {
        Finding::new(
            Severity::Warning,
            "clock_off",
            format!("the server's clock and ours are {off:.1?} apart"),
            "run NTP on both; a clock that is stepped can end leases early or late".to_owned(),
        )
    })
}
