//! The etcd engine on real clusters: beside etcdctl and v3lock, under faults of three members,
//! and what only it promises. Skipped, with the reason, where etcd can't be had.

#![allow(clippy::unwrap_used)]

mod access;
mod faults;
mod interop;
mod leases;
mod names;
mod util;
mod waiting;
