//! ZooKeeper's protocol, as far as locks need it: what a [`Request`] is on the wire, and what the
//! server's packets say. A session's driver reads and writes it, after the greeting of its
//! connection.
//!
//! The serialization is jute: big-endian numbers, and length-prefixed byte strings. Every length
//! that a server sends is checked. Paths are absolute: the caller has put the chroot in front.

use palisade_kit::replies::{LISTING, REPLY};

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
const SET_DATA: i32 = 5;
const PING: i32 = 11;
const CHECK: i32 = 13;
const CREATE: i32 = 15;
const AUTH: i32 = 100;

/// Any version of a node's data.
pub(super) const ANY: i32 = -1;

/// The xids of packets that are not requests.
const WATCH_XID: i32 = -1;
const PING_XID: i32 = -2;
const AUTH_XID: i32 = -4;

/// All permissions.
const ALL: i32 = 31;
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

/// Who may use a new znode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Acl {
    /// Everybody may do everything.
    Open,
    /// The user who created it may do everything.
    Creator,
}

/// An operation to send.
#[derive(Debug, Clone)]
pub(super) enum Request {
    Create {
        path: String,
        data: Vec<u8>,
        acl: Acl,
        lives: Lives,
    },
    Delete(String),
    Exists(String),
    /// Reads a znode; with `true` the server reports when it changes or is deleted.
    Data(String, bool),
    /// Changes the data of a znode if it has this version.
    SetData(String, Vec<u8>, i32),
    Acl(String),
    /// Lists the children of a znode; with `true` the server reports when they change.
    Children(String, bool),
    /// Lets the server catch up with the leader before the next request.
    Sync(String),
    /// Passes while the znode exists with this version of its data; only inside a `Multi`.
    Check(String, i32),
    /// Executes all operations or none.
    Multi(Vec<Self>),
    /// The znodes that this session owns below a path.
    Ephemerals(String),
    /// Reports every change at and below a path, until the watch is removed.
    AddWatch(String),
    RemoveWatches(String),
    Close,
}

impl Request {
    fn operation(&self) -> i32 {
        match self {
            Self::Delete(_) => DELETE,
            Self::Exists(_) => 3,
            Self::Data(..) => 4,
            Self::SetData(..) => SET_DATA,
            Self::Acl(_) => 6,
            Self::Sync(_) => 9,
            Self::Children(..) => 12,
            Self::Check(..) => CHECK,
            Self::Multi(_) => 14,
            Self::RemoveWatches(_) => 18,
            Self::Create {
                lives: Lives::Container,
                ..
            } => 19,
            Self::Create { .. } => CREATE,
            Self::Ephemerals(_) => 103,
            Self::AddWatch(_) => 106,
            Self::Close => -11,
        }
    }

    /// The most that its answer may have. Servers limit what they store (`jute.maxbuffer`, 1 MiB by
    /// default) and not what they list.
    pub(super) fn most(&self) -> usize {
        match self {
            Self::Data(..) | Self::Children(..) | Self::Ephemerals(_) => LISTING,
            _ => REPLY,
        }
    }

    /// Whether an answer without an error proves that a majority has accepted it.
    pub(super) fn is_write(&self) -> bool {
        matches!(
            self,
            Self::Create { .. } | Self::Delete(_) | Self::SetData(..) | Self::Multi(_)
        )
    }

    /// The packet with this xid.
    pub(super) fn packet(&self, xid: i32) -> Vec<u8> {
        packet(|out| self.write(out.int(xid).int(self.operation())))
    }

    fn write<'a>(&self, out: &'a mut Out) -> &'a mut Out {
        const PERSISTENT_RECURSIVE: i32 = 1;
        const BOTH_KINDS: i32 = 3;
        match self {
            Self::Create {
                path,
                data,
                acl,
                lives,
            } => {
                let (scheme, id) = match acl {
                    Acl::Open => ("world", "anyone"),
                    Acl::Creator => ("auth", ""),
                };
                out.text(path).bytes(data).int(1);
                out.int(ALL).text(scheme).text(id).int(*lives as i32)
            }
            Self::Delete(path) => out.text(path).int(ANY),
            Self::Exists(path) => out.text(path).flag(false),
            Self::Data(path, watch) | Self::Children(path, watch) => out.text(path).flag(*watch),
            Self::SetData(path, data, version) => out.text(path).bytes(data).int(*version),
            Self::Check(path, version) => out.text(path).int(*version),
            Self::Acl(path) | Self::Sync(path) | Self::Ephemerals(path) => out.text(path),
            Self::Multi(operations) => {
                for one in operations {
                    let operation = match one.operation() {
                        CREATE => CREATE_PLAIN,
                        other => other,
                    };
                    out.int(operation).flag(false).int(-1);
                    one.write(out);
                }
                out.int(-1).flag(true).int(-1)
            }
            Self::AddWatch(path) => out.text(path).int(PERSISTENT_RECURSIVE),
            Self::RemoveWatches(path) => out.text(path).int(BOTH_KINDS),
            Self::Close => out,
        }
    }

    /// What the server answers to it.
    pub(super) fn answer(&self, error: i32, record: &[u8]) -> Answer {
        if error != 0 {
            return Err(Refused::Code(error));
        }
        let (mut from, mut reply) = (In(record), Reply::default());
        match self {
            Self::Create { .. } => reply.path = from.text()?,
            Self::Data(..) => reply.data = from.bytes()?.to_vec(),
            Self::Children(..) | Self::Ephemerals(_) => reply.names = from.texts()?,
            Self::Acl(_) => reply.acl = from.acl()?,
            Self::Multi(_) => from.multi()?,
            _ => {}
        }
        if let Self::Create { .. }
        | Self::Data(..)
        | Self::Children(..)
        | Self::Exists(_)
        | Self::SetData(..) = self
        {
            reply.stat = from.stat()?;
        }
        Ok(reply)
    }
}

pub(super) fn ping() -> Vec<u8> {
    packet(|out| out.int(PING_XID).int(PING))
}

/// The auth packet for `scheme`.
pub(super) fn log_in(scheme: &str, secret: &[u8]) -> Vec<u8> {
    packet(|out| {
        out.int(AUTH_XID)
            .int(AUTH)
            .int(0)
            .text(scheme)
            .bytes(secret)
    })
}

/// The connect request: opens a session, or continues one.
pub(super) fn greeting(seen: i64, timeout_ms: i32, session: i64, password: &[u8]) -> Vec<u8> {
    packet(|out| {
        out.int(0).long(seen).int(timeout_ms);
        out.long(session).bytes(password).flag(false)
    })
}

fn packet(write: impl FnOnce(&mut Out) -> &mut Out) -> Vec<u8> {
    let (mut record, mut packet) = (Out::default(), Out::default());
    write(&mut record);
    packet.bytes(&record.0);
    packet.0
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
pub(super) enum Packet<'a> {
    /// The answer to the oldest unanswered request.
    Answer {
        xid: i32,
        /// The last zxid that the server had applied.
        zxid: i64,
        error: i32,
        record: &'a [u8],
    },
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

impl<'a> Packet<'a> {
    pub(super) fn read(record: &'a [u8]) -> Result<Self, Malformed> {
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
            xid => Self::Answer {
                xid,
                zxid,
                error,
                record: from.0,
            },
        })
    }
}

/// The answer to a request.
pub(super) type Answer = Result<Reply, Refused>;

/// What an answer says. What its request does not ask for is empty.
#[derive(Debug, Clone, Default)]
pub(super) struct Reply {
    /// The path that was created.
    pub(super) path: String,
    pub(super) data: Vec<u8>,
    /// Of children; of ephemerals their paths.
    pub(super) names: Vec<String>,
    pub(super) stat: Stat,
    /// Rights, and the scheme of those who have them.
    pub(super) acl: Vec<(i32, String)>,
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

/// A record whose lengths or texts are invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Malformed;

/// A record being written.
#[derive(Debug, Default)]
struct Out(Vec<u8>);

impl Out {
    fn int(&mut self, value: i32) -> &mut Self {
        self.0.extend_from_slice(&value.to_be_bytes());
        self
    }

    fn long(&mut self, value: i64) -> &mut Self {
        self.0.extend_from_slice(&value.to_be_bytes());
        self
    }

    fn flag(&mut self, value: bool) -> &mut Self {
        self.0.push(u8::from(value));
        self
    }

    fn bytes(&mut self, value: &[u8]) -> &mut Self {
        // Nothing of ours is near 2 GiB; a server accepts 1 MiB.
        self.int(i32::try_from(value.len()).unwrap_or(i32::MAX));
        self.0.extend_from_slice(value);
        self
    }

    fn text(&mut self, value: &str) -> &mut Self {
        self.bytes(value.as_bytes())
    }
}

/// A record being read.
#[derive(Debug, Clone, Copy)]
struct In<'a>(&'a [u8]);

impl<'a> In<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8], Malformed> {
        let (head, rest) = self.0.split_at_checked(length).ok_or(Malformed)?;
        self.0 = rest;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        self.take(N)?.try_into().map_err(|_| Malformed)
    }

    fn int(&mut self) -> Result<i32, Malformed> {
        self.array().map(i32::from_be_bytes)
    }

    fn long(&mut self) -> Result<i64, Malformed> {
        self.array().map(i64::from_be_bytes)
    }

    fn flag(&mut self) -> Result<bool, Malformed> {
        self.array().map(|[byte]| byte != 0)
    }

    /// A length of -1 means null, which is the same as empty here.
    fn bytes(&mut self) -> Result<&'a [u8], Malformed> {
        match self.int()? {
            -1 => Ok(&[]),
            length => self.take(usize::try_from(length).map_err(|_| Malformed)?),
        }
    }

    fn text(&mut self) -> Result<String, Malformed> {
        String::from_utf8(self.bytes()?.to_vec()).map_err(|_| Malformed)
    }

    fn texts(&mut self) -> Result<Vec<String>, Malformed> {
        // Nothing is reserved by the server's count: each text takes at least four bytes.
        let count = self.int()?.max(0);
        (0..count).map(|_| self.text()).collect()
    }

    fn stat(&mut self) -> Result<Stat, Malformed> {
        let (created, modified) = (self.long()?, self.long()?);
        let _times = (self.long()?, self.long()?);
        let (version, children_version) = (self.int()?, self.int()?);
        let _acl_version = self.int()?;
        let owner = self.long()?;
        let _sizes = (self.int()?, self.int()?, self.long()?);
        Ok(Stat {
            created,
            modified,
            version,
            children_version,
            owner,
        })
    }

    fn acl(&mut self) -> Result<Vec<(i32, String)>, Malformed> {
        let count = self.int()?.max(0);
        let mut one = || {
            let (rights, scheme) = (self.int()?, self.text()?);
            let _id = self.text()?;
            Ok((rights, scheme))
        };
        (0..count).map(|_| one()).collect()
    }

    /// Whether a multi was applied; otherwise its first error.
    fn multi(&mut self) -> Result<(), Refused> {
        loop {
            let (operation, done, error) = (self.int()?, self.flag()?, self.int()?);
            match operation {
                _ if done => return Ok(()),
                // Operations before the failed one have 0 here.
                -1 => match self.int()? {
                    0 => {}
                    code => return Err(Refused::Code(code)),
                },
                _ if error != 0 && error != -1 => return Err(Refused::Code(error)),
                CREATE_PLAIN => drop(self.text()?),
                SET_DATA => drop(self.stat()?),
                DELETE | CHECK => {}
                _ => return Err(Refused::Malformed),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(write: impl FnOnce(&mut Out) -> &mut Out) -> Vec<u8> {
        packet(write).split_off(4)
    }

    #[test]
    fn what_is_written_is_read() {
        let out = record(|out| out.int(-7).long(1 << 40).flag(true).text("ü"));
        let mut read = In(&out);
        assert_eq!(read.int(), Ok(-7));
        assert_eq!(read.long(), Ok(1 << 40));
        assert_eq!(read.flag(), Ok(true));
        assert_eq!(read.text().as_deref(), Ok("ü"));
        assert_eq!(read.int(), Err(Malformed));
    }

    #[test]
    fn lengths_that_lie_are_refused() {
        let int = |value| record(|out| out.int(value));
        for lie in [i32::MAX, -2, 5] {
            assert_eq!(In(&int(lie)).bytes(), Err(Malformed));
        }
        assert_eq!(In(&int(-1)).bytes(), Ok(&[][..]));
        assert_eq!(In(&int(i32::MAX)).texts(), Err(Malformed));
        let text = record(|out| out.bytes(&[0xff]));
        assert_eq!(In(&text).text(), Err(Malformed));
        let cut = Request::Exists(String::new()).answer(0, &[0; 67]);
        assert_eq!(cut.err(), Some(Refused::Malformed));
    }

    #[test]
    fn a_multi_tells_its_first_failure() {
        let multi = |write: &dyn Fn(&mut Out), end: bool| {
            let record = record(|out| {
                write(out);
                if end {
                    out.int(-1).flag(true).int(-1)
                } else {
                    out
                }
            });
            Request::Multi(vec![]).answer(0, &record).map(drop)
        };
        let done = |out: &mut Out| {
            out.int(DELETE).flag(false).int(0);
            out.int(CHECK).flag(false).int(0);
        };
        assert_eq!(multi(&done, true), Ok(()));
        let failed = |out: &mut Out| {
            out.int(-1).flag(false).int(0).int(0);
            out.int(-1)
                .flag(false)
                .int(code::NO_NODE)
                .int(code::NO_NODE);
        };
        assert_eq!(multi(&failed, true), Err(Refused::Code(code::NO_NODE)));
        assert_eq!(multi(&done, false), Err(Refused::Malformed));
    }

    #[test]
    fn packets_are_told_apart() {
        let packet = |xid: i32| record(|out| out.int(xid).long(9).int(0));
        let event = record(|out| {
            out.int(-1).long(9).int(0);
            out.int(event::DELETED).int(3).text("/a")
        });
        assert!(matches!(
            Packet::read(&event),
            Ok(Packet::Event { kind: event::DELETED, path }) if path == "/a"
        ));
        assert!(matches!(Packet::read(&packet(-2)), Ok(Packet::Pong)));
        assert!(matches!(
            Packet::read(&packet(-4)),
            Ok(Packet::LoggedIn(true))
        ));
        assert!(matches!(
            Packet::read(&packet(7)),
            Ok(Packet::Answer {
                xid: 7,
                zxid: 9,
                ..
            })
        ));
        assert!(Packet::read(&[0; 15]).is_err());
    }
}
