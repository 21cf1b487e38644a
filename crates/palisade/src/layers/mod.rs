//! What can be laid over any engine or client without either knowing of it.

#[cfg(feature = "metrics")]
mod metrics;
#[cfg(feature = "trace")]
mod trace;

#[cfg(feature = "metrics")]
pub use self::metrics::{FenceMetrics, Metrics};
#[cfg(feature = "trace")]
pub use self::trace::{Trace, Traced};
