//! What only palisade's own engines need: [`launch`] starts real servers, [`outage`] takes them
//! away, [`engines`] lists those under test, [`proxy`] is a TCP proxy that cuts, delays, loses
//! and doubles single messages. [`faults`] runs workloads under faults, [`history`] records what
//! happens and [`check`] judges it. [`fencing`] stops a writer between its check and its write.
//! [`trial`] is what the tests of single engines share, [`pages`] what those of the docs do.

pub mod check;
pub mod consumer;
pub mod engines;
pub mod faults;
pub mod fencing;
pub mod history;
pub mod launch;
pub mod outage;
pub mod pages;
pub mod proxy;
pub mod trial;
