//! What operators of gateways use: the dashboard in a real browser, Prometheus, a collector of
//! traces, and the files of `deploy/`.

#![allow(clippy::unwrap_used)]

mod collector;
mod commands;
mod deploy;
mod looks;
mod pages;
mod prometheus;
mod serving;
mod traces;
mod webdriver;
