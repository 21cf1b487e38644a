//! The etcd engine on real clusters: beside etcdctl and v3lock, under faults of three members,
//! and what only it promises. Skipped, with the reason, where etcd can't be had.

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
