//! Leases: the stand-in API server behaves as a real one, and palisade on it beside client-go
//! and when it is hurt.

#![allow(clippy::unwrap_used)]

mod access;
mod client_go;
mod faults;
mod interop;
mod records;
mod status;
mod util;
mod watches;
