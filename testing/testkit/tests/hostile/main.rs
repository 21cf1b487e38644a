//! Servers that are hostile, broken or none of ours: whatever they send, a client takes little
//! memory, says soon what is wrong, and follows nobody elsewhere.

#![allow(clippy::unwrap_used)]

mod endless;
mod files;
mod server;
mod strangers;
