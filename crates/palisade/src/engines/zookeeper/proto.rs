//! Requests and answers of ZooKeeper's protocol, as far as locks need them.
//!
//! A [`Request`] is an operation code and its record; an [`Answer`] is parsed by the method for its
//! request. Paths are absolute: the caller has put the chroot in front.

use super::jute::{In, Malformed, Out};
use crate::core::clock::BootTime;

/// The error codes of the server.
pub(super) mod code {
    pub(in super::super) const UNIMPLEMENTED: i32 = -6;
    pub(in super::super) const BAD_ARGUMENTS: i32 = -8;
    pub(in super::super) const NO_NODE: i32 = -101;
    pub(in super::super) const NO_AUTH: i32 = -102;
    pub(in super::super) const BAD_VERSION: i32 = -103;
    pub(in super::super) const NODE_EXISTS: i32 = -110;
    pub(in super::super) const NOT_EMPTY: i32 = -111;
    pub(in super::super) const SESSION_EXPIRED: i32 = -112;
    pub(in super::super) const INVALID_ACL: i32 = -114;
    pub(in super::super) const AUTH_FAILED: i32 = -115;
    pub(in super::super) const SESSION_MOVED: i32 = -118;
    pub(in super::super) const QUOTA_EXCEEDED: i32 = -125;
    pub(in super::super) const THROTTLED: i32 = -127;
}

/// As [`CREATE`], but without a stat in its answer; used in a multi.
const CREATE_PLAIN: i32 = 1;
const DELETE: i32 = 2;
const EXISTS: i32 = 3;
const GET_DATA: i32 = 4;
const SET_DATA: i32 = 5;
const GET_ACL: i32 = 6;
const SYNC: i32 = 9;
const PING: i32 = 11;
const GET_CHILDREN: i32 = 12;
const CHECK: i32 = 13;
const MULTI: i32 = 14;
const CREATE: i32 = 15;
const CREATE_CONTAINER: i32 = 19;
const AUTH: i32 = 100;
const GET_EPHEMERALS: i32 = 103;
const ADD_WATCH: i32 = 106;
const REMOVE_WATCHES: i32 = 18;
const CLOSE: i32 = -11;

/// Any version of a node's data.
pub(super) const ANY: i32 = -1;

/// The xids of packets that are not requests.
pub(super) const WATCH_XID: i32 = -1;
const PING_XID: i32 = -2;
const AUTH_XID: i32 = -4;

/// All permissions.
pub(super) const ALL: i32 = 31;
/// Permission to read.
pub(super) const READ: i32 = 1;

/// The lifetime of a znode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lives {
    /// Until it is deleted.
    Persistent = 0,
    /// As long as its session.
    Ephemeral = 1,
    /// As long as its session, with a sequence from the server.
    EphemeralSequential = 3,
    /// As long as it has children.
    Container = 4,
}

/// The permissions on a znode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Acl {
    pub(super) rights: i32,
    pub(super) scheme: String,
    pub(super) id: String,
}

impl Acl {
    /// Everybody may do everything.
    pub(super) fn open() -> Self {
        Self::new("world", "anyone")
    }

    /// The user who created it may do everything.
    pub(super) fn creator() -> Self {
        Self::new("auth", "")
    }

    fn new(scheme: &str, id: &str) -> Self {
        Self {
            rights: ALL,
            scheme: scheme.to_owned(),
            id: id.to_owned(),
        }
    }
}

/// The metadata of a znode.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Stat {
    /// The czxid: the transaction that created it.
    pub(super) created: i64,
    /// The mzxid: the transaction that last changed its data.
    pub(super) modified: i64,
    /// How often its data was changed.
    pub(super) version: i32,
    /// How often its children were changed.
    pub(super) children_version: i32,
    /// The session that owns it; 0 for none.
    pub(super) owner: i64,
}

impl Stat {
    fn read(from: &mut In<'_>) -> Result<Self, Malformed> {
        let (created, modified) = (from.long()?, from.long()?);
        let _times = (from.long()?, from.long()?);
        let (version, children_version) = (from.int()?, from.int()?);
        let _acl_version = from.int()?;
        let owner = from.long()?;
        let _sizes = (from.int()?, from.int()?, from.long()?);
        Ok(Self {
            created,
            modified,
            version,
            children_version,
            owner,
        })
    }
}

/// An operation to send.
#[derive(Debug, Clone)]
pub(super) struct Request {
    pub(super) operation: i32,
    pub(super) record: Vec<u8>,
}

impl Request {
    fn new(operation: i32, record: Out) -> Self {
        let record = record.0;
        Self { operation, record }
    }

    pub(super) fn create(path: &str, data: &[u8], acl: &Acl, lives: Lives) -> Self {
        let operation = match lives {
            Lives::Container => CREATE_CONTAINER,
            _ => CREATE,
        };
        let record = Out::default().text(path).bytes(data).int(1);
        let record = record.int(acl.rights).text(&acl.scheme).text(&acl.id);
        Self::new(operation, record.int(lives as i32))
    }

    pub(super) fn delete(path: &str) -> Self {
        Self::new(DELETE, Out::default().text(path).int(ANY))
    }

    pub(super) fn exists(path: &str) -> Self {
        Self::new(EXISTS, Out::default().text(path).flag(false))
    }

    /// Reads a znode; with `watch` the server reports when it changes or is deleted.
    pub(super) fn data(path: &str, watch: bool) -> Self {
        Self::new(GET_DATA, Out::default().text(path).flag(watch))
    }

    /// Changes the data of a znode if it has this version.
    pub(super) fn set_data(path: &str, data: &[u8], version: i32) -> Self {
        let record = Out::default().text(path).bytes(data).int(version);
        Self::new(SET_DATA, record)
    }

    pub(super) fn acl(path: &str) -> Self {
        Self::new(GET_ACL, Out::default().text(path))
    }

    pub(super) fn children(path: &str, watch: bool) -> Self {
        Self::new(GET_CHILDREN, Out::default().text(path).flag(watch))
    }

    /// Lets the server catch up with the leader before the next request.
    pub(super) fn sync(path: &str) -> Self {
        Self::new(SYNC, Out::default().text(path))
    }

    /// Passes while the znode exists with this version of its data; only inside a
    /// [`Request::multi`].
    pub(super) fn check(path: &str, version: i32) -> Self {
        Self::new(CHECK, Out::default().text(path).int(version))
    }

    /// Executes all operations or none.
    pub(super) fn multi(operations: &[Self]) -> Self {
        let mut record = Out::default();
        for one in operations {
            let operation = match one.operation {
                CREATE => CREATE_PLAIN,
                other => other,
            };
            record = record.int(operation).flag(false).int(-1);
            record = record.then(&one.record);
        }
        Self::new(MULTI, record.int(-1).flag(true).int(-1))
    }

    /// The znodes that this session owns below `path`.
    pub(super) fn ephemerals(path: &str) -> Self {
        Self::new(GET_EPHEMERALS, Out::default().text(path))
    }

    /// Reports every change at and below `path`, until the watch is removed.
    pub(super) fn add_watch(path: &str) -> Self {
        const PERSISTENT_RECURSIVE: i32 = 1;
        Self::new(
            ADD_WATCH,
            Out::default().text(path).int(PERSISTENT_RECURSIVE),
        )
    }

    pub(super) fn remove_watches(path: &str) -> Self {
        const BOTH_KINDS: i32 = 3;
        Self::new(REMOVE_WATCHES, Out::default().text(path).int(BOTH_KINDS))
    }

    pub(super) fn close() -> Self {
        Self::new(CLOSE, Out::default())
    }

    /// Whether an answer without an error proves that a majority has accepted it.
    pub(super) fn is_write(&self) -> bool {
        matches!(
            self.operation,
            CREATE | CREATE_CONTAINER | DELETE | SET_DATA | MULTI
        )
    }

    /// The packet with this xid.
    pub(super) fn packet(&self, xid: i32) -> Vec<u8> {
        let header = Out::default().int(xid).int(self.operation);
        Out::default().bytes(&header.then(&self.record).0).0
    }

    pub(super) fn ping() -> Vec<u8> {
        Self::new(PING, Out::default()).packet(PING_XID)
    }

    /// The auth packet for `scheme`.
    pub(super) fn log_in(scheme: &str, secret: &[u8]) -> Vec<u8> {
        let record = Out::default().int(0).text(scheme).bytes(secret);
        Self::new(AUTH, record).packet(AUTH_XID)
    }
}

/// The connect request: opens a session, or continues one.
pub(super) fn greeting(seen: i64, timeout_ms: i32, session: i64, password: &[u8]) -> Vec<u8> {
    let record = Out::default().int(0).long(seen).int(timeout_ms);
    let record = record.long(session).bytes(password).flag(false);
    Out::default().bytes(&record.0).0
}

/// The connect response. Session 0 means that the requested session has expired.
#[derive(Debug, Clone)]
pub(super) struct Greeted {
    pub(super) timeout_ms: i32,
    pub(super) session: i64,
    pub(super) password: Vec<u8>,
}

impl Greeted {
    pub(super) fn read(record: &[u8]) -> Result<Self, Malformed> {
        let mut from = In(record);
        let _protocol = from.int()?;
        Ok(Self {
            timeout_ms: from.int()?,
            session: from.long()?,
            password: from.bytes()?.to_vec(),
        })
    }
}

/// A packet from the server.
#[derive(Debug)]
pub(super) enum Packet {
    /// The answer to the oldest unanswered request.
    Answer(Answer),
    /// A watch has fired.
    Event {
        kind: i32,
        path: String,
    },
    Pong,
    /// Whether the login was accepted.
    LoggedIn(bool),
}

/// Kinds of events.
pub(super) mod event {
    pub(in super::super) const DELETED: i32 = 2;
    pub(in super::super) const CHILDREN: i32 = 4;
}

impl Packet {
    pub(super) fn read(record: &[u8]) -> Result<Self, Malformed> {
        let mut from = In(record);
        let (xid, zxid, error) = (from.int()?, from.long()?, from.int()?);
        Ok(match xid {
            WATCH_XID => {
                let (kind, _state) = (from.int()?, from.int()?);
                let path = from.text()?;
                Self::Event { kind, path }
            }
            PING_XID => Self::Pong,
            AUTH_XID => Self::LoggedIn(error == 0),
            xid => Self::Answer(Answer {
                xid,
                zxid,
                error,
                record: from.0.to_vec(),
                sent: BootTime::PAST,
            }),
        })
    }
}

/// The answer to a request.
#[derive(Debug, Clone)]
pub(super) struct Answer {
    pub(super) xid: i32,
    /// The last zxid that the server had applied.
    pub(super) zxid: i64,
    pub(super) error: i32,
    record: Vec<u8>,
    /// When the request was sent.
    pub(super) sent: BootTime,
}

/// Why an answer has no result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refused {
    Code(i32),
    Malformed,
}

impl From<Malformed> for Refused {
    fn from(_: Malformed) -> Self {
        Self::Malformed
    }
}

impl Refused {
    pub(super) fn is(self, code: i32) -> bool {
        self == Self::Code(code)
    }
}

impl Answer {
    fn record(&self) -> Result<In<'_>, Refused> {
        match self.error {
            0 => Ok(In(&self.record)),
            code => Err(Refused::Code(code)),
        }
    }

    pub(super) fn done(&self) -> Result<(), Refused> {
        self.record().map(drop)
    }

    /// The path that was created, and its stat.
    pub(super) fn created(&self) -> Result<(String, Stat), Refused> {
        let mut from = self.record()?;
        Ok((from.text()?, Stat::read(&mut from)?))
    }

    pub(super) fn stat(&self) -> Result<Stat, Refused> {
        Ok(Stat::read(&mut self.record()?)?)
    }

    pub(super) fn data(&self) -> Result<(Vec<u8>, Stat), Refused> {
        let mut from = self.record()?;
        let data = from.bytes()?.to_vec();
        Ok((data, Stat::read(&mut from)?))
    }

    pub(super) fn children(&self) -> Result<(Vec<String>, Stat), Refused> {
        let mut from = self.record()?;
        Ok((from.texts()?, Stat::read(&mut from)?))
    }

    pub(super) fn ephemerals(&self) -> Result<Vec<String>, Refused> {
        Ok(self.record()?.texts()?)
    }

    pub(super) fn acl(&self) -> Result<Vec<Acl>, Refused> {
        let mut from = self.record()?;
        let count = from.int()?.max(0);
        let mut acl = || {
            Ok(Acl {
                rights: from.int()?,
                scheme: from.text()?,
                id: from.text()?,
            })
        };
        (0..count).map(|_| acl()).collect()
    }

    /// Whether a multi was applied; otherwise its first error.
    pub(super) fn multi(&self) -> Result<(), Refused> {
        let mut from = self.record()?;
        loop {
            let (operation, done, error) = (from.int()?, from.flag()?, from.int()?);
            match operation {
                _ if done => return Ok(()),
                // Operations before the failed one have 0 here.
                -1 => match from.int()? {
                    0 => {}
                    code => return Err(Refused::Code(code)),
                },
                _ if error != 0 && error != -1 => return Err(Refused::Code(error)),
                CREATE_PLAIN => drop(from.text()?),
                SET_DATA => drop(Stat::read(&mut from)?),
                DELETE | CHECK => {}
                _ => return Err(Refused::Malformed),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(record: Out) -> Answer {
        Answer {
            xid: 1,
            zxid: 1,
            error: 0,
            record: record.0,
            sent: BootTime::PAST,
        }
    }

    #[test]
    fn a_multi_tells_its_first_failure() {
        let end = |out: Out| answer(out.int(-1).flag(true).int(-1));
        let done = Out::default().int(DELETE).flag(false).int(0);
        assert_eq!(end(done.int(CHECK).flag(false).int(0)).multi(), Ok(()));
        let failed = Out::default().int(-1).flag(false).int(0).int(0);
        let failed = failed.int(-1).flag(false).int(code::NO_NODE);
        let failed = end(failed.int(code::NO_NODE));
        assert_eq!(failed.multi(), Err(Refused::Code(code::NO_NODE)));
        let cut = answer(Out::default().int(DELETE).flag(false));
        assert_eq!(cut.multi(), Err(Refused::Malformed));
    }

    #[test]
    fn packets_are_told_apart() {
        let packet = |xid: i32| Out::default().int(xid).long(9).int(0);
        let event = packet(-1).int(event::DELETED).int(3).text("/a");
        assert!(matches!(
            Packet::read(&event.0),
            Ok(Packet::Event { kind: event::DELETED, path }) if path == "/a"
        ));
        assert!(matches!(Packet::read(&packet(-2).0), Ok(Packet::Pong)));
        assert!(matches!(
            Packet::read(&packet(-4).0),
            Ok(Packet::LoggedIn(true))
        ));
        assert!(matches!(
            Packet::read(&packet(7).0),
            Ok(Packet::Answer(Answer {
                xid: 7,
                zxid: 9,
                ..
            }))
        ));
        assert!(Packet::read(&[0; 15]).is_err());
    }
}
