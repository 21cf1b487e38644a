//! The dashboard in a real browser, in front of a real gateway.

#![allow(clippy::unwrap_used)]

mod looks;
mod pages;
mod serving;
mod webdriver;
