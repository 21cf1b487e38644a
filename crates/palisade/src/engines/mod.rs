//! The engines, one folder or file each, by feature.

#[cfg(feature = "file")]
pub mod file;
