//! The messages between palisade and its guardian: one per packet of a socket pair.
//!
//! The command line is not sent: it may be megabytes long, and the guardian has it from the fork.
//! When the other process ends, the socket is closed.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Far longer than any message, which holds a name, a path and some numbers.
const LONGEST: usize = 64 * 1024;

/// From palisade to the guardian.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Order {
    /// Start the command.
    Start {
        /// Added to the environment.
        environment: Vec<(String, String)>,
        /// Until when the lock is held, in nanoseconds of the boot clock.
        deadline: u64,
        /// How long before that the command is asked to end, in nanoseconds.
        grace: u64,
        /// Whether it gets the terminal.
        foreground: bool,
        /// The file for its stdin, if it does not inherit ours.
        stdin: Option<String>,
    },
    /// The lock is held until then.
    Renewed(u64),
    /// The lock is lost, and another may have it then.
    EndBy(u64),
    /// The command is resumed, this many times by now.
    Resumed(u32),
}

/// From the guardian to palisade.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Report {
    /// The command runs, with this pid, which is also its group.
    Started(i32),
    /// The command can't be started, with this `errno`.
    NotStarted(i32),
    /// The command was stopped.
    Stopped {
        /// By this signal.
        signal: i32,
        /// After it was resumed this many times.
        resumed: u32,
    },
    /// The command has ended by itself, with this status of `wait`. The last report.
    Ended(i32),
    /// The command and all that it started were ended because the lock is lost. The last report.
    Lost,
}

/// Both ends of a link. Neither blocks, and no command gets them.
pub(crate) fn link() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    Ok(rustix::net::socketpair(family, kind, flags, None)?)
}

/// Sends a message. A message that can't be sent is dropped: the other process is gone, which the
/// next [`receive`] shows, or it hangs and has not read hundreds of messages.
pub(crate) fn send<T: Serialize>(link: impl AsFd, message: &T) {
    if let Ok(packet) = serde_json::to_vec(message) {
        let _ = rustix::net::send(link, &packet, SendFlags::NOSIGNAL);
    }
}

/// The next message; `None` when the other process is gone.
///
/// # Errors
/// [`io::ErrorKind::WouldBlock`] when there is no message.
pub(crate) fn receive<T: DeserializeOwned>(link: impl AsFd) -> io::Result<Option<T>> {
    let mut packet = vec![0; LONGEST];
    loop {
        return match rustix::net::recv(&link, &mut packet[..], RecvFlags::empty()) {
            // The other process ended with messages unread. Its own last messages come next.
            Err(Errno::INTR | Errno::CONNRESET) => continue,
            Err(Errno::AGAIN) => Err(io::ErrorKind::WouldBlock.into()),
            // Only our own code has the other end: an unreadable message is a bug.
            Ok((length @ 1.., _)) => Ok(serde_json::from_slice(&packet[..length]).ok()),
            Ok(_) | Err(_) => Ok(None),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_arrive_one_by_one_and_then_the_end() {
        let (one, other) = link().unwrap();
        let nothing = receive::<Order>(&other).unwrap_err();
        assert_eq!(nothing.kind(), io::ErrorKind::WouldBlock);
        send(&one, &Report::Started(7));
        send(&one, &Report::Lost);
        drop(one);
        assert_eq!(receive(&other).unwrap(), Some(Report::Started(7)));
        assert_eq!(receive(&other).unwrap(), Some(Report::Lost));
        assert_eq!(receive::<Report>(&other).unwrap(), None);
        // Nobody hears it, and nothing happens.
        send(&other, &Report::Lost);
    }

    #[test]
    fn the_last_messages_arrive_also_from_whoever_left_some_unread() {
        let (one, other) = link().unwrap();
        send(&other, &Order::Renewed(15));
        send(&one, &Report::Lost);
        drop(one);
        assert_eq!(receive(&other).unwrap(), Some(Report::Lost));
        assert_eq!(receive::<Report>(&other).unwrap(), None);
    }

    #[test]
    fn a_start_is_as_large_as_its_values_may_be() {
        let (one, other) = link().unwrap();
        let value = "\u{1}\"é".repeat(1024);
        let environment = vec![("PALISADE_ENGINE".to_owned(), value.clone())];
        send(
            &one,
            &Order::Start {
                environment,
                deadline: u64::MAX,
                grace: 1,
                foreground: false,
                stdin: None,
            },
        );
        let Ok(Some(Order::Start { environment, .. })) = receive(&other) else {
            panic!("no start");
        };
        assert_eq!(environment[0].1, value);
    }
}
