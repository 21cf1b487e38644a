//! What authors of engines and layers need: the [`Engine`] trait with its parameters and results,
//! and the admission rule for engines that decide themselves.
//!
//! `docs/adding-an-engine.md` leads from an empty folder to a green conformance run.

pub use crate::core::admission::{Admission, Standing, admit, capacity};
pub use crate::core::capability::{EndsWith, Permits, Tokens, TtlRange};
pub use crate::core::claim::{Ask, Claim, ClaimId, Mode, READERS};
pub use crate::core::dyn_engine::{DynEngine, Layer, SharedEngine};
pub use crate::core::engine::{
    Alarm, Amended, Amendment, Audited, BoxFuture, BoxStream, Engine, Entered, Left, Place,
    Renewal, cannot_resize,
};
pub use crate::core::entry::{Entry, Progress};
pub use crate::core::leasing::Leasing;
pub use crate::core::line::{Line, Seat, capacity_mismatch, resize};
pub use crate::core::registry::{EngineFactory, EngineInfo, Opener};
pub use crate::core::ticket::{Lease, LeaseId, LeaseStart, Ticket};
pub use crate::core::token::Era;
pub use crate::core::url::{IntoUrl, Settings, Url};
