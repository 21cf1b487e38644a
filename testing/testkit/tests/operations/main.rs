//! What operators of gateways use: the dashboard in a real browser, Prometheus, and a collector of
//! traces.

#![allow(clippy::unwrap_used)]

mod collector;
mod commands;
mod looks;
mod pages;
mod prometheus;
mod serving;
mod traces;
mod webdriver;
