//! Fenced storage: what `palisade_core::fence` defines, and the stores of this crate.

mod file;
#[cfg(feature = "tower")]
pub mod http;
#[cfg(feature = "sqlite")]
pub mod sqlite;

pub use palisade_core::fence::*;
pub use palisade_kit::sql;

pub use crate::connect::{open_fence as open, open_strict_fence as open_strict};
pub use file::FileFence;
#[cfg(feature = "file")]
pub(crate) use file::{encode, encode_to};

#[cfg(test)]
mod tests;
