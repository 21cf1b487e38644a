//! Fenced storage: what `palisade_core::fence` defines, and the stores of this crate.

#[cfg(feature = "tower")]
pub mod http;
#[cfg(feature = "sqlite")]
pub mod sqlite;

pub use palisade_core::fence::*;
pub use palisade_kit::sql;

pub use crate::connect::{open_fence as open, open_strict_fence as open_strict};
#[cfg(feature = "file")]
pub use palisade_file::FileFence;
