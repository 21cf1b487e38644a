//! A real gateway in front of a real store: its promises, and access control.
#![allow(clippy::unwrap_used)] // A step that fails is a test that fails.

mod claims;
mod deadlocks;
mod engine;
mod hostile;
mod page;
mod requests;
mod security;
mod support;
