//! Tools that test palisade's engines, also for authors of other engines.
//!
//! [`conformance`] is the suite: one list of cases, each named after a behaviour that the engine
//! trait or a primitive promises. [`harness`] makes a trial of every engine × case and runs them,
//! [`taker`] is a real second process that can be stopped and killed, [`report`] turns results
//! into the table of behaviours × engines, [`model`] is a line to compare with, [`subject`] lists
//! the engines, [`wrap`] are engines around an engine that lose or count calls, [`launch`] starts
//! real servers, [`hurt`] hurts them, [`proxy`] is a TCP proxy that knows the engines' protocols
//! and cuts, delays, eats and doubles what passes. [`faults`] runs workloads under faults,
//! [`history`] records what happens and [`check`] judges it. [`trial`] is what the tests of single
//! engines share.

pub mod check;
pub mod conformance;
pub mod faults;
pub mod harness;
pub mod history;
pub mod hurt;
pub mod launch;
pub mod model;
pub mod proxy;
pub mod report;
pub(crate) mod sites;
pub mod subject;
pub mod taker;
pub mod trial;
pub mod wrap;
