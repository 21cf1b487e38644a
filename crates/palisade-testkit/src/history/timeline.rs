//! The timeline of a history: one HTML file for people.
use super::History;
use crate::check::{Invariant, Verdict};
/// The page.
pub fn page(_t: &str, _h: &History, _v: &[(Invariant, Verdict)]) -> String { String::new() }
