//! What only palisade's own engines need: [`launch`] starts real servers, [`outage`] causes their
//! outages, [`engines`] lists those under test, [`proxy`] is a TCP proxy that cuts, delays, loses
//! and duplicates single messages. [`faults`] runs workloads under faults, [`history`] records what
//! happens and [`check`] judges it. [`fencing`] stops a writer between its check and its write.
//! [`trial`] is shared by the tests of single engines, [`pages`] by those of the docs.

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
