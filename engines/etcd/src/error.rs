//! The meaning of a refusal or failure of etcd, and whether a change may have been applied. The
//! messages are our own, because those of the gRPC library may contain addresses.

use tonic::{Code, Status};

use super::client::most;
use palisade_core::{Error, ErrorKind};
use palisade_kit::replies::too_large;

/// The message for a user whose role lacks a right.
pub(super) const NO_RIGHT: &str = "etcd denies this user the keys; grant its role readwrite on \
                                   the prefix of the namespace and on .palisade/";

/// The message for a read of a revision that was compacted away.
pub(super) const COMPACTED: &str = "etcd has compacted this revision";

/// The message of a status for a request that was never sent.
const NOT_SENT: &str = "not sent";

/// The status of a request that was never sent.
pub(super) fn not_sent(_: tonic::transport::Error) -> Status {
    Status::new(Code::Unavailable, NOT_SENT)
}

/// The error for `status`; `logs_in` says whether requests carry a login token, which expires.
pub(super) fn of(operation: &'static str, status: &Status, logs_in: bool) -> Error {
    let said = status.message();
    let (kind, message) = match status.code() {
        Code::PermissionDenied => (ErrorKind::Denied, NO_RIGHT),
        Code::InvalidArgument if said.contains("user name is empty") => (
            ErrorKind::Denied,
            "etcd asks for a login; give user and password_file, or a client certificate",
        ),
        Code::InvalidArgument if said.contains("authentication failed") => {
            (ErrorKind::Denied, "etcd refuses the user or the password")
        }
        // The login token has expired, or a restarted member has forgotten it; the next connection
        // logs in again. etcd checks the token before it executes anything.
        Code::Unauthenticated if logs_in => (
            ErrorKind::Unreachable,
            "the login has ended; logging in again",
        ),
        Code::Unauthenticated => (ErrorKind::Denied, "etcd refuses the login"),
        Code::NotFound if said.contains("lease not found") => {
            (ErrorKind::Lost, "the lease has ended")
        }
        Code::ResourceExhausted if said.contains("space exceeded") => (
            ErrorKind::Unusable,
            "etcd has used up its quota and takes no writes; compact, defragment, and disarm the \
             alarm",
        ),
        Code::ResourceExhausted => (ErrorKind::Unreachable, "etcd is too busy to take requests"),
        Code::Unavailable if said == NOT_SENT => (ErrorKind::Unreachable, "the connection is down"),
        Code::Unavailable if said.contains("no leader") => {
            (ErrorKind::Unreachable, "the cluster has no leader")
        }
        Code::Unavailable
        | Code::Unknown
        | Code::Internal
        | Code::Cancelled
        | Code::DeadlineExceeded => {
            let message = "the connection broke, or the cluster could not agree in time";
            return Error::new(ErrorKind::Unreachable, operation, message).maybe_applied();
        }
        Code::FailedPrecondition if said.contains("space") || said.contains("corrupt") => {
            (ErrorKind::Unusable, "etcd has raised an alarm and refuses")
        }
        Code::Unimplemented => (
            ErrorKind::Unusable,
            "the server does not know this request; etcd 3.4 or newer is needed",
        ),
        Code::OutOfRange if said.contains("has been compacted") => (ErrorKind::Unusable, COMPACTED),
        // By the gRPC library, before it has read the message.
        Code::OutOfRange if said.contains("message length too large") => {
            return too_large(operation, "etcd", most(operation)).maybe_applied();
        }
        code => {
            let message = "etcd refuses a request of the engine";
            return Error::new(ErrorKind::Internal, operation, message)
                .maybe_applied()
                .with("code", code as i32);
        }
    };
    Error::new(kind, operation, message)
}
