//! What authors of engines and layers need: the [`Engine`] trait with its parameters and results,
//! the admission rule for engines that decide themselves, and what their errors, clocks and hints
//! have in common.
//!
//! `docs/adding-an-engine.md` leads from an empty folder to a green conformance run.

pub use crate::core::admission::{Admission, Standing, admit, capacity};
#[cfg(feature = "baseline")]
pub use crate::core::baseline::Baseline;
pub use crate::core::capability::{DEFAULT_TTL, EndsWith, Permits, Tokens, TtlRange};
pub use crate::core::claim::{Ask, Claim, ClaimId, Mode, READERS};
pub use crate::core::clock::unix_time;
pub use crate::core::duration::{parse_duration, rounded};
pub use crate::core::dyn_engine::{DynEngine, Layer, SharedEngine};
pub use crate::core::engine::{
    Alarm, Amended, Amendment, Audited, BoxFuture, BoxStream, Engine, Entered, Left, Place,
    Renewal, cannot_resize,
};
pub use crate::core::entry::{Entry, Progress};
pub use crate::core::error::{config_error, no_connection, unreachable};
pub use crate::core::leasing::Leasing;
pub use crate::core::line::{Line, Seat, capacity_mismatch, resize};
pub use crate::core::name::MAX_NAME;
pub use crate::core::owner::may_block;
pub use crate::core::registry::{EngineFactory, EngineInfo, Opener};
pub use crate::core::ticket::{Lease, LeaseId, LeaseStart, Ticket};
pub use crate::core::token::Era;
pub use crate::core::url::{IntoUrl, Settings, Url};
pub use crate::core::wait::look_by;
pub use crate::core::{alarms, sync, tombstones};
