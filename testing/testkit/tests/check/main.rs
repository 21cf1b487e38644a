//! The checkers work: bad histories are refused with the right events named, good ones pass, random
//! histories of a correct lock pass, and the same histories are refused after tampering.

#![allow(clippy::unwrap_used)]

mod hand_made;
mod linear;
mod losses;
mod random;
mod reading;
mod resumed;
mod simulated;
mod storage;
mod support;
