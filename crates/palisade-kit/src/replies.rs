//! How much a server may send in one reply, whatever its protocol. A server that is hostile, broken
//! or none of ours could otherwise fill this process's memory within one timeout.

use super::files::shown;
use palisade_core::{Error, ErrorKind};

/// The most for a verb of a lock: its largest reply is a line with thousands of claims.
pub const REPLY: usize = 4 << 20;

/// The most for a reply that lists lines: some 100,000 claims.
pub const LISTING: usize = 64 << 20;

/// The most for a list that comes in pages of at most [`LISTING`].
pub const PAGES: usize = 256 << 20;

/// The error for a server called `who` that sent more than `most`.
pub fn too_large(operation: &'static str, who: &str, most: usize) -> Error {
    let size = shown(most);
    let message = if most >= LISTING {
        format!(
            "{who} sends more than {size} for one list, which is more than this program takes; ask \
             for fewer names (--prefix)"
        )
    } else {
        format!(
            "{who} sends more than {size} in one reply, which none of its replies to this has; is \
             it the right server?"
        )
    };
    Error::new(ErrorKind::Unusable, operation, message)
}
