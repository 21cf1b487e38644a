//! PostgreSQL's framing: an untyped startup packet, then a type byte and a length.
//!
//! A request for TLS or GSS encryption is answered by one bare byte. If it is granted, the
//! connection is raw from there on; otherwise the startup packet follows.

use super::message::{Direction, Frame, Framing, Kind, Step, be_i32};

const PACKET_MAX: usize = 64 << 20;
/// The server itself accepts no longer startup packet.
const STARTUP_MAX: usize = 10_000;

const CANCEL: i32 = 80_877_102;
const SSL: i32 = 80_877_103;
const GSS: i32 = 80_877_104;

#[derive(Default)]
pub(super) struct Postgres {
    started: bool,
    /// A request for encryption waits for its one-byte answer.
    asked: bool,
    encrypted: bool,
}

impl Framing for Postgres {
    fn next(&mut self, direction: Direction, bytes: &[u8]) -> Step {
        if self.encrypted {
            return Step::Raw;
        }
        match direction {
            Direction::ToEngine if !self.started => self.startup(bytes),
            Direction::ToEngine => typed(bytes, frontend),
            Direction::ToClient if self.asked && bytes[0] != b'E' => {
                self.asked = false;
                self.encrypted = bytes[0] != b'N';
                let label = Some("EncryptionResponse".into());
                Step::Frame(Frame::new(1, Kind::Control, label))
            }
            Direction::ToClient => typed(bytes, backend),
        }
    }

    fn copies(&mut self, _: u64, _: u32) {}
}

impl Postgres {
    fn startup(&mut self, bytes: &[u8]) -> Step {
        let Some(length) = be_i32(bytes, 0) else {
            return Step::More;
        };
        let length = match usize::try_from(length) {
            Ok(length @ 8..=STARTUP_MAX) => length,
            _ => return Step::Raw,
        };
        let (Some(packet), Some(code)) = (bytes.get(..length), be_i32(bytes, 4)) else {
            return Step::More;
        };
        let label = match code {
            CANCEL => "CancelRequest",
            SSL | GSS => {
                self.asked = true;
                if code == SSL {
                    "SSLRequest"
                } else {
                    "GSSENCRequest"
                }
            }
            code if code >> 16 == 3 => {
                self.started = true;
                "StartupMessage"
            }
            _ => return Step::Raw,
        };
        Step::Frame(Frame::new(packet.len(), Kind::Control, Some(label.into())))
    }
}

fn typed(bytes: &[u8], name: fn(u8) -> Option<(&'static str, Kind)>) -> Step {
    let Some((label, kind)) = name(bytes[0]) else {
        return Step::Raw;
    };
    let Some(length) = be_i32(bytes, 1) else {
        return Step::More;
    };
    match usize::try_from(length) {
        Ok(length @ 4..=PACKET_MAX) if bytes.len() > length => {
            Step::Frame(Frame::new(1 + length, kind, Some(label.into())))
        }
        Ok(4..=PACKET_MAX) => Step::More,
        _ => Step::Raw,
    }
}

fn frontend(kind: u8) -> Option<(&'static str, Kind)> {
    let name = match kind {
        b'B' => "Bind",
        b'C' => "Close",
        b'D' => "Describe",
        b'E' => "Execute",
        b'F' => "FunctionCall",
        b'H' => "Flush",
        b'P' => "Parse",
        b'Q' => "Query",
        b'S' => "Sync",
        b'X' => "Terminate",
        b'c' => "CopyDone",
        b'd' => "CopyData",
        b'f' => "CopyFail",
        b'p' => return Some(("Password", Kind::Control)),
        _ => return None,
    };
    Some((name, Kind::Request))
}

fn backend(kind: u8) -> Option<(&'static str, Kind)> {
    let name = match kind {
        b'A' => return Some(("NotificationResponse", Kind::Push)),
        b'N' => return Some(("NoticeResponse", Kind::Push)),
        b'S' => return Some(("ParameterStatus", Kind::Control)),
        b'R' => return Some(("Authentication", Kind::Control)),
        b'K' => return Some(("BackendKeyData", Kind::Control)),
        b'v' => return Some(("NegotiateProtocolVersion", Kind::Control)),
        b'Z' => "ReadyForQuery",
        b'T' => "RowDescription",
        b'D' => "DataRow",
        b'C' => "CommandComplete",
        b'I' => "EmptyQueryResponse",
        b'E' => "ErrorResponse",
        b'1' => "ParseComplete",
        b'2' => "BindComplete",
        b'3' => "CloseComplete",
        b's' => "PortalSuspended",
        b't' => "ParameterDescription",
        b'n' => "NoData",
        b'G' => "CopyInResponse",
        b'H' => "CopyOutResponse",
        b'W' => "CopyBothResponse",
        b'd' => "CopyData",
        b'c' => "CopyDone",
        b'V' => "FunctionCallResponse",
        _ => return None,
    };
    Some((name, Kind::Reply))
}
