//! What a refusal or failure of ZooKeeper means, and whether a change may have been applied.

use super::proto::{Refused, code};
use super::session::Failure;
use palisade_core::engine::rounded;
use palisade_core::{Error, ErrorKind};
use palisade_kit::replies::too_large;

/// The error for a request without an answer.
pub(super) fn failed(operation: &'static str, failure: Failure) -> Error {
    match failure {
        Failure::NotSent(error) => Error::new(error.kind(), operation, error.message()),
        Failure::Broken => {
            let message = "the connection broke before the answer came";
            Error::new(ErrorKind::Unreachable, operation, message).maybe_applied()
        }
        Failure::Late(within) => {
            let message = format!("no answer within {}", rounded(within));
            Error::new(ErrorKind::Unreachable, operation, message).maybe_applied()
        }
        Failure::TooLarge(most) => too_large(operation, "ZooKeeper", most).maybe_applied(),
        Failure::Over => Error::new(ErrorKind::Lost, operation, "the session has ended"),
    }
}

/// The error for fewer answers than requests.
pub(super) fn missing() -> Error {
    Error::new(ErrorKind::Internal, "call", "answers are missing (bug)").maybe_applied()
}

/// The error for an answer that refuses. A refused request is not applied.
pub(super) fn refused(operation: &'static str, refused: Refused) -> Error {
    let Refused::Code(code) = refused else {
        let message = "unexpected reply from the server; is it ZooKeeper 3.6 or newer?";
        return Error::new(ErrorKind::Unusable, operation, message).maybe_applied();
    };
    let (kind, message) = match code {
        code::NO_AUTH => (
            ErrorKind::Denied,
            "ZooKeeper denies this user the nodes; pass the user that made them with user= and \
             password_file=, or have their ACL opened",
        ),
        code::AUTH_FAILED => (ErrorKind::Denied, "ZooKeeper refuses the login"),
        code::INVALID_ACL => (
            ErrorKind::Denied,
            "ZooKeeper refuses the ACL of new nodes; acl=creator needs user= and password_file=",
        ),
        code::BAD_ARGUMENTS => (
            ErrorKind::InvalidName,
            "ZooKeeper can't have this name as a path; omit namespace= so that it is encoded",
        ),
        code::UNIMPLEMENTED => (
            ErrorKind::Unusable,
            "the server does not know this request; ZooKeeper 3.6 or newer is needed",
        ),
        code::QUOTA_EXCEEDED => (
            ErrorKind::Unusable,
            "a quota of ZooKeeper is used up; raise it, or use another namespace",
        ),
        code::NOT_EMPTY => (
            ErrorKind::Unusable,
            "this node has children; remove them first",
        ),
        code::SESSION_EXPIRED => (ErrorKind::Lost, "the session has ended"),
        code::SESSION_MOVED | code::THROTTLED => (
            ErrorKind::Unreachable,
            "the server did not take the request",
        ),
        // It is gone since it was read; the caller reads again.
        code::NO_NODE | code::NODE_EXISTS | code::BAD_VERSION => (
            ErrorKind::Unreachable,
            "others changed this line at the same time; try again",
        ),
        _ => {
            let message = "ZooKeeper refuses a request of the engine";
            let error = Error::new(ErrorKind::Unusable, operation, message);
            return error.maybe_applied().with("code", code);
        }
    };
    Error::new(kind, operation, message)
}
