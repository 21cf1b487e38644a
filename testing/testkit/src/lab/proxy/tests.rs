//! Properties of the framings: whatever bytes come, in whatever pieces, nothing is added, lost or
//! changed; and the split into messages does not depend on the pieces.

use proptest::prelude::*;

use super::message::{Direction, Protocol, Splitter};

const FRAMED: [Protocol; 5] = [
    Protocol::Resp,
    Protocol::Http1,
    Protocol::Grpc,
    Protocol::ZooKeeper,
    Protocol::Postgres,
];

/// The length and label of every message.
type Messages = Vec<(usize, Option<String>)>;

/// Reads one direction after the other in pieces of the given sizes, as the pump does.
struct Reader {
    splitter: Splitter,
    buffers: [Vec<u8>; 2],
    passed: [Vec<u8>; 2],
    messages: [Messages; 2],
}

impl Reader {
    fn new(protocol: Protocol) -> Reader {
        Reader {
            splitter: Splitter::new(protocol),
            buffers: Default::default(),
            passed: Default::default(),
            messages: Default::default(),
        }
    }

    fn feed(&mut self, direction: Direction, bytes: &[u8]) {
        let index = direction.index();
        self.buffers[index].extend(bytes);
        while !self.buffers[index].is_empty() {
            let Some(frame) = self.splitter.next(direction, &self.buffers[index]) else {
                break;
            };
            self.passed[index].extend(self.buffers[index].drain(..frame.length));
            let label = frame.label.map(|label| label.to_string());
            self.messages[index].push((frame.length, label));
        }
    }

    fn all(mut self) -> [Vec<u8>; 2] {
        for (passed, rest) in self.passed.iter_mut().zip(&self.buffers) {
            passed.extend(rest);
        }
        self.passed
    }
}

/// A conversation in each protocol: what the client sends, and what the engine answers.
fn conversation(protocol: Protocol) -> [Vec<u8>; 2] {
    let (asked, answered): (Vec<u8>, Vec<u8>) = match protocol {
        Protocol::Raw => (b"abc".to_vec(), b"def".to_vec()),
        Protocol::Resp => (
            b"PING\r\n*3\r\n$7\r\nEVALSHA\r\n$4\r\nc0de\r\n$1\r\n0\r\n*2\r\n$9\r\nSUBSCRIBE\r\n$1\r\nc\r\n*1\r\n$4\r\nTIME\r\n".to_vec(),
            b"+PONG\r\n*2\r\n:1\r\n%1\r\n+k\r\n$2\r\n\r\n\r\n>3\r\n$9\r\nsubscribe\r\n$1\r\nc\r\n:1\r\n|1\r\n+a\r\n#t\r\n_\r\n".to_vec(),
        ),
        Protocol::Http1 => (
            b"PUT /a HTTP/1.1\r\nContent-Length: 3\r\n\r\nxyzHEAD /b HTTP/1.1\r\n\r\nGET /c HTTP/1.1\r\n\r\n".to_vec(),
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokHTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n0\r\nT: v\r\n\r\n".to_vec(),
        ),
        Protocol::Grpc => {
            let mut asked = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
            asked.extend(b"\0\0\0\x04\0\0\0\0\0");
            // :method POST, then a :path in a CONTINUATION frame.
            asked.extend(b"\0\0\x01\x01\0\0\0\0\x01\x83\0\0\x06\x09\x04\0\0\0\x01\x44\x04/a/b");
            asked.extend(b"\0\0\x02\0\x01\0\0\0\x01hi");
            let mut answered = b"\0\0\0\x04\0\0\0\0\0\0\0\x01\x01\x04\0\0\0\x01\x88".to_vec();
            answered.extend(b"\0\0\x02\0\0\0\0\0\x01yo\0\0\x01\x01\x05\0\0\0\x01\x88");
            (asked, answered)
        }
        Protocol::ZooKeeper => (
            b"\0\0\0\x05hello\0\0\0\x09\0\0\0\x01\0\0\0\x0fx\0\0\0\x08\xff\xff\xff\xfe\0\0\0\x0b".to_vec(),
            b"\0\0\0\x05hello\0\0\0\x05\xff\xff\xff\xffw\0\0\0\x04\0\0\0\x01\0\0\0\x04\xff\xff\xff\xfe".to_vec(),
        ),
        Protocol::Postgres => (
            b"\0\0\0\x08\x04\xd2\x16\x2f\0\0\0\x09\0\x03\0\0\0Q\0\0\0\x05\0X\0\0\0\x04".to_vec(),
            b"NR\0\0\0\x08\0\0\0\0Z\0\0\0\x05IA\0\0\0\x04Z\0\0\0\x05I".to_vec(),
        ),
    };
    [asked, answered]
}

fn pieces<'a>(bytes: &'a [u8], sizes: &'a [usize]) -> impl Iterator<Item = &'a [u8]> {
    let mut rest = bytes;
    let sizes = sizes.iter().copied().chain(std::iter::repeat(usize::MAX));
    sizes.map_while(move |size| {
        let (piece, after) = rest.split_at(size.min(rest.len()));
        rest = after;
        (!piece.is_empty()).then_some(piece)
    })
}

fn talk(protocol: Protocol, said: &[Vec<u8>; 2], sizes: &[usize]) -> Reader {
    let mut reader = Reader::new(protocol);
    for direction in Direction::ALL {
        for piece in pieces(&said[direction.index()], sizes) {
            reader.feed(direction, piece);
        }
    }
    reader
}

fn framed() -> impl Strategy<Value = Protocol> {
    prop::sample::select(FRAMED.to_vec())
}

#[test]
fn messages_are_found_and_labelled() {
    use Direction::{ToClient, ToEngine};
    use Protocol::{Grpc, Http1, Postgres, Resp, ZooKeeper};
    for (protocol, direction, expected) in [
        (Resp, ToEngine, "PING, EVALSHA c0de, SUBSCRIBE, TIME"),
        (Resp, ToClient, "PING, EVALSHA c0de, subscribe, TIME"),
        (Http1, ToEngine, "PUT /a, HEAD /b, GET /c"),
        (
            Http1,
            ToClient,
            "PUT /a, PUT /a, HEAD /b, GET /c, GET /c, GET /c",
        ),
        (Grpc, ToEngine, "PREFACE, SETTINGS, /a/b, /a/b"),
        (Grpc, ToClient, "SETTINGS, /a/b, /a/b, /a/b"),
        (ZooKeeper, ToEngine, "connect, create2 1, ping"),
        (ZooKeeper, ToClient, "connect, watch, create2 1, ping"),
        (
            Postgres,
            ToEngine,
            "SSLRequest, StartupMessage, Query, Terminate",
        ),
    ] {
        let reader = talk(protocol, &conversation(protocol), &[]);
        assert!(!reader.splitter.is_raw(), "{protocol:?}");
        let messages = reader.messages[direction.index()].iter();
        let labels = messages.map(|(_, label)| label.clone().unwrap_or_default());
        let labels: Vec<_> = labels.collect();
        assert_eq!(labels.join(", "), expected, "{protocol:?}");
    }
}

#[test]
fn a_granted_encryption_makes_the_connection_raw() {
    let [asked, _] = conversation(Protocol::Postgres);
    let mut reader = Reader::new(Protocol::Postgres);
    reader.feed(Direction::ToEngine, &asked[..8]);
    reader.feed(Direction::ToClient, b"S");
    assert!(!reader.splitter.is_raw());
    reader.feed(Direction::ToEngine, b"\x16\x03\x01");
    assert!(reader.splitter.is_raw());
    assert_eq!(
        reader.all(),
        [[&asked[..8], b"\x16\x03\x01"].concat(), b"S".to_vec()]
    );
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn pieces_do_not_change_messages(
        protocol in framed(),
        sizes in prop::collection::vec(1usize..40, 0..60),
    ) {
        let said = conversation(protocol);
        let whole = talk(protocol, &said, &[]);
        let pieced = talk(protocol, &said, &sizes);
        prop_assert_eq!(&whole.messages[0], &pieced.messages[0]);
        // The engine answers after the request; pieces of one direction are in order.
        prop_assert_eq!(&whole.messages[1], &pieced.messages[1]);
        prop_assert_eq!(pieced.all(), said);
    }

    #[test]
    fn garbage_passes_unchanged(
        protocol in framed(),
        said in prop::collection::vec((any::<bool>(), prop::collection::vec(any::<u8>(), 1..60)), 0..20),
    ) {
        let mut reader = Reader::new(protocol);
        let mut sent: [Vec<u8>; 2] = Default::default();
        for (back, bytes) in &said {
            let direction = Direction::ALL[usize::from(*back)];
            sent[direction.index()].extend(bytes);
            reader.feed(direction, bytes);
        }
        prop_assert_eq!(reader.all(), sent);
    }

    #[test]
    fn damaged_conversations_pass_unchanged(
        protocol in framed(),
        damage in prop::collection::vec((any::<bool>(), any::<prop::sample::Index>(), any::<u8>()), 1..6),
        sizes in prop::collection::vec(1usize..40, 0..60),
        repeat in 1usize..4,
    ) {
        let mut said = conversation(protocol).map(|bytes| bytes.repeat(repeat));
        for (back, at, byte) in damage {
            let bytes = &mut said[usize::from(back)];
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        prop_assert_eq!(talk(protocol, &said, &sizes).all(), said);
    }
}
