//! The Rust in README and docs, as doctests: `cargo test -p palisade-docs --doc`.
//!
//! The build script makes one of every `rust` block of every page, so that no page can be forgotten;
//! it says how.

#[cfg(doctest)]
include!(concat!(env!("OUT_DIR"), "/pages.rs"));
