//! The cause of a failed connection, extracted from a client library's error.

use std::error::Error as Cause;
use std::io;
use std::sync::Arc;

/// The system's reason as the end of a message; empty if there is none that helps. A host name is
/// resolved only while `connecting`.
pub fn why(error: &(dyn Cause + 'static), connecting: bool) -> &'static str {
    cause::<io::Error>(error).map_or("", |io| match io.kind() {
        io::ErrorKind::ConnectionRefused => ": the connection is refused",
        io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable => {
            ": there is no route to this host"
        }
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => ": it closed the connection",
        // Errors of the resolver have no OS error number.
        _ if connecting && io.raw_os_error().is_none() => ": the host name is unknown",
        _ => "",
    })
}

/// The first cause of this type. I/O errors and shared errors hide the error inside them.
pub fn cause<'a, T: Cause + 'static>(error: &'a (dyn Cause + 'static)) -> Option<&'a T> {
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
