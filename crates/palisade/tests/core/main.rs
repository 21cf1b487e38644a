//! Tests of the core through its public face, with an engine that fails on demand.
#![allow(clippy::unwrap_used)]

mod correctness;
mod critical;
mod deadline;
mod entry;
mod incarnation;
mod keeping;
mod primitives;
mod support;
mod timely;
