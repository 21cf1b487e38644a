//! Distributed locks and coordination, the same everywhere: one library over an embedded store
//! and, by changing one URL, other engines.
//!
//! Every exclusive lock carries a fencing [`Token`]; every holder is told that its lease runs out
//! before anyone else can be granted ([`Hold::lost`]).
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> palisade::Result<()> {
//! let palisade = palisade::connect("memory:").await?;
//! let hold = palisade.mutex("charge-card-4711").lock().await?;
//! let charged = hold.run(async { "charged once" }).await?;
//! # assert_eq!(charged, "charged once");
//! hold.release().await
//! # }
//! ```
//!
//! The main flow, as a reader meets it: [`Mutex`] → [`core::acquire`] → an [`engines`] →
//! [`core::admission`] → [`core::wait`] → [`core::hold`] → the keeper → leave.

#[cfg(feature = "blocking")]
pub mod blocking;
mod client;
mod connect;
pub mod core;
pub mod engines;
pub mod fence;
pub mod layers;
mod primitives;

pub use client::{Client, Which};
#[cfg(feature = "baseline")]
pub use connect::baseline;
pub use connect::{Prepared, connect, connect_existing, open_fence, prepare, registry, schemes};
pub use core::acquire::Request;
pub use core::capability::{Capability, Class, Permits, Tokens, TtlRange};
pub use core::claim::{Ask, ClaimId, Mode};
pub use core::clock::BootTime;
pub use core::duration::parse_duration;
pub use core::engine::{Engine, Eviction};
pub use core::error::{Error, Kind, Outcome, Result};
pub use core::events::{Ending, Event, Observer, Renewed};
pub use core::hold::Hold;
pub use core::name::Name;
pub use core::owner::Owner;
pub use core::registry::EngineInfo;
pub use core::report::{Checkup, ClaimReport, Finding, LineReport, Scope, Severity};
pub use core::token::{Era, Token};
pub use core::url::{Settings, Url};
pub use core::validity::{Loss, LossReason};
pub use core::wait::{Patience, Retry};
pub use primitives::{
    Elected, Election, Leader, Leadership, MultiHold, MultiLock, Mutex, ReentrantHold,
    ReentrantMutex, RwHold, RwLock, Semaphore,
};
