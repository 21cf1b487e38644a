//! The checkers can tell: bad histories are refused with the right events named, good ones pass,
//! random histories of a correct lock pass, and the same ones tampered with are refused.

#![allow(clippy::unwrap_used)]

mod hand_made;
mod linear;
mod losses;
mod random;
mod reading;
mod simulated;
mod storage;
mod support;
