//! Fenced storage: what `palisade_core::fence` defines, and the stores of this crate.

mod file;
#[cfg(feature = "tower")]
pub mod http;
pub mod sql;
#[cfg(feature = "sqlite")]
pub mod sqlite;
#[cfg(any(feature = "etcd", feature = "postgres", feature = "zookeeper"))]
mod store;

pub use palisade_core::fence::*;

pub use crate::connect::{open_fence as open, open_strict_fence as open_strict};
pub use file::FileFence;
#[cfg(feature = "file")]
pub(crate) use file::{encode, encode_to};
#[cfg(any(feature = "etcd", feature = "postgres", feature = "zookeeper"))]
pub(crate) use store::{FenceStore, Stored};

#[cfg(test)]
mod tests;
