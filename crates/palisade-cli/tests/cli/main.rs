//! End to end: the built command, as a person or a script uses it.

#![allow(clippy::unwrap_used)]

mod acquire;
mod bench;
mod config;
mod contract;
mod deadlocks;
mod demo;
mod doctor;
mod elect;
mod every_verb;
mod fence;
mod gateway;
mod guardian;
mod guide;
mod limits;
mod list;
mod loss;
mod manual;
mod nested;
mod page;
mod queue;
mod redis;
mod resize;
mod run;
mod scripts;
mod secrets;
mod serve;
mod signals;
mod support;
mod terminal;
mod top;
mod unreachable;
mod usage;
mod waiting;
mod watch;
