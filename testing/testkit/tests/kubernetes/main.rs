//! Leases: the fake API server behaves as a real one, and palisade works on it with client-go and
//! under faults.

#![allow(clippy::unwrap_used)]

mod access;
mod client_go;
mod faults;
mod interop;
mod records;
mod status;
mod util;
mod watches;
