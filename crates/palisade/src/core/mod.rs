//! The core: one primitive, a weighted place in a fair line, and what keeps and watches it.
//! It names no engine and no primitive.

pub mod admission;
pub mod capability;
pub mod claim;
pub mod clock;
pub mod duration;
pub mod engine;
pub mod error;
pub mod line;
pub mod name;
pub mod owner;
pub mod report;
pub mod ticket;
pub mod token;
pub mod url;
