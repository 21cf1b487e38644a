//! A real gateway in front of a real store: its promises, and who may not do what.
#![allow(clippy::unwrap_used)] // A step that fails is a test that fails.

mod claims;
mod deadlocks;
mod engine;
mod page;
mod requests;
mod security;
mod support;
