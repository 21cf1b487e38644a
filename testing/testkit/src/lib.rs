//! Tests of palisade's engines, in two halves.
//!
//! **For authors of engines**, here: [`conformance`] is the suite, one list of cases, each named
//! after a behaviour that the engine trait or a primitive promises. [`harness`] creates a trial for
//! every pair of engine and case, [`engine`] defines an engine under test, [`spy`] is an engine
//! around an engine that counts and loses calls, [`taker`] is a real second process that can be
//! stopped and killed, [`fences`] is the suite of fenced storage, [`report`] the table of
//! behaviours × engines, and [`model`] a simple line to compare with.
//!
//! **For palisade itself**, in [`lab`]: real servers, faults, a proxy that knows the engines'
//! protocols, histories and their checkers.

pub mod conformance;
pub mod engine;
pub mod fences;
pub mod harness;
pub mod lab;
pub mod model;
pub mod report;
pub mod spy;
pub mod taker;
