//! The etcd engine on real clusters: with etcdctl and v3lock, under faults of three members, and
//! what only it promises. Skipped, with the reason, where etcd is not available.

#![allow(clippy::unwrap_used)]

#[macro_use]
extern crate palisade_testkit;

mod access;
mod faults;
mod interop;
mod leases;
mod names;
mod util;
mod waiting;
