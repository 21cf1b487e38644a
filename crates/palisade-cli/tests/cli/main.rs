//! End to end: the built command, as a person or a script uses it.

#![allow(clippy::unwrap_used)]

mod bench;
mod demo;
mod doctor;
mod guardian;
mod guide;
mod list;
mod loss;
mod run;
mod schema;
mod signals;
mod support;
mod terminal;
mod unreachable;
mod usage;
mod waiting;
