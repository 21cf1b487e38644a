//! Soon.
use crate::cases;
cases! {}
