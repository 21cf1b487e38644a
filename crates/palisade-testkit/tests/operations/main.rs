//! What those who run gateways look at: the dashboard in a real browser, and Prometheus.

#![allow(clippy::unwrap_used)]

mod looks;
mod pages;
mod prometheus;
mod serving;
mod webdriver;
