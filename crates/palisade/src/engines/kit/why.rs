//! Why a connection failed, out of what a client library says.

use std::error::Error as Cause;
use std::io;
use std::sync::Arc;

/// What the system says, as the end of a message; nothing where it says nothing that helps. A host's
/// name is looked up while `connecting` only.
pub(crate) fn why(error: &(dyn Cause + 'static), connecting: bool) -> &'static str {
    cause::<io::Error>(error).map_or("", |io| match io.kind() {
        io::ErrorKind::ConnectionRefused => ": the connection is refused",
        io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable => {
            ": there is no way to this host"
        }
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => ": it closed the connection",
        // The resolver's errors have no number.
        _ if connecting && io.raw_os_error().is_none() => ": the host's name is not known",
        _ => "",
    })
}

/// The first cause of this type. An I/O error, and one that is shared, hides what it was made of.
pub(crate) fn cause<'a, T: Cause + 'static>(error: &'a (dyn Cause + 'static)) -> Option<&'a T> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(found) = error.downcast_ref::<T>() {
            return Some(found);
        }
        next = if let Some(shared) = error.downcast_ref::<Arc<dyn Cause + Send + Sync>>() {
            Some(&**shared)
        } else if let Some(inside) = error.downcast_ref().and_then(io::Error::get_ref) {
            Some(inside)
        } else {
            error.source()
        };
    }
    None
}
