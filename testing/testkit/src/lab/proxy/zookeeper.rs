//! ZooKeeper's framing: a length of four bytes, then a record.
//!
//! The first record of each direction is the handshake. After that, requests start with xid and
//! opcode, replies with the xid that they answer; watch events have xid -1, pings -2.

use std::collections::HashMap;
use std::sync::Arc;

use super::message::{Direction, Frame, Framing, Kind, Step, be_i32};

/// Longer than any packet that a server accepts (`jute.maxbuffer`, 1 MiB by default). The
/// four-letter commands, read as a length, are far beyond it.
const PACKET_MAX: usize = 64 << 20;

/// How long the label of a request is kept for its replies: a duplicated request has two.
const KEPT: i32 = 10_000;

const WATCH: i32 = -1;
const PING: i32 = -2;

#[derive(Default)]
pub(super) struct ZooKeeper {
    greeted: [bool; 2],
    asked: HashMap<i32, Arc<str>>,
}

impl Framing for ZooKeeper {
    fn next(&mut self, direction: Direction, bytes: &[u8]) -> Step {
        let Some(length) = be_i32(bytes, 0) else {
            return Step::More;
        };
        let whole = match usize::try_from(length) {
            Ok(length @ 4..=PACKET_MAX) => 4 + length,
            _ => return Step::Raw,
        };
        let Some(packet) = bytes.get(..whole) else {
            return Step::More;
        };
        let frame = |kind, label: Arc<str>| Step::Frame(Frame::new(whole, kind, Some(label)));
        if !std::mem::replace(&mut self.greeted[direction.index()], true) {
            return frame(Kind::Control, "connect".into());
        }
        let Some(xid) = be_i32(packet, 4) else {
            return Step::Raw;
        };
        match direction {
            _ if xid == PING => frame(Kind::Control, "ping".into()),
            Direction::ToEngine => {
                let Some(opcode) = be_i32(packet, 8) else {
                    return Step::Raw;
                };
                let label: Arc<str> = format!("{} {xid}", opcode_name(opcode)).into();
                self.asked.insert(xid, label.clone());
                self.asked.remove(&xid.wrapping_sub(KEPT));
                frame(Kind::Request, label)
            }
            Direction::ToClient if xid == WATCH => frame(Kind::Push, "watch".into()),
            Direction::ToClient => {
                let label = self.asked.get(&xid).cloned();
                Step::Frame(Frame::new(whole, Kind::Reply, label))
            }
        }
    }

    fn copies(&mut self, _: u64, _: u32) {}
}

fn opcode_name(opcode: i32) -> &'static str {
    match opcode {
        1 => "create",
        2 => "delete",
        3 => "exists",
        4 => "getData",
        5 => "setData",
        6 => "getACL",
        7 => "setACL",
        8 => "getChildren",
        9 => "sync",
        11 => "ping",
        12 => "getChildren2",
        13 => "check",
        14 => "multi",
        15 => "create2",
        16 => "reconfig",
        17 => "checkWatches",
        18 => "removeWatches",
        19 => "createContainer",
        20 => "deleteContainer",
        21 => "createTTL",
        22 => "multiRead",
        100 => "auth",
        101 => "setWatches",
        102 => "sasl",
        103 => "getEphemerals",
        104 => "getAllChildrenNumber",
        105 => "setWatches2",
        106 => "addWatch",
        107 => "whoAmI",
        -10 => "createSession",
        -11 => "closeSession",
        _ => "unknown",
    }
}
