//! Observers and layers that work with any engine or client.

#[cfg(feature = "metrics")]
mod metrics;
#[cfg(feature = "trace")]
mod trace;

#[cfg(feature = "metrics")]
pub use self::metrics::{FenceMetrics, Metrics};
#[cfg(feature = "trace")]
pub use self::trace::{Trace, Traced};
