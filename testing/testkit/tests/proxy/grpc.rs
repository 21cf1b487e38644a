//! gRPC streams through the proxy: one is lost while the others of the connection continue.
//!
//! Client and server here compress their headers with a table, as real ones do: a proxy that
//! carelessly loses a header block breaks all later streams.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};

use loona_hpack::{Decoder, Encoder};
use palisade_testkit::lab::proxy::{
    Direction, Extent, Kind, Protocol, Proxy, both_ways, to_client, to_engine,
};

use super::util::{LIMIT, connect, quiet, serve, until};

const PUT: &str = "/etcdserverpb.KV/Put";
const ALIVE: &str = "/etcdserverpb.Lease/LeaseKeepAlive";

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

type Fields = Vec<(Vec<u8>, Vec<u8>)>;

/// One end of an HTTP/2 connection.
pub(super) struct Peer {
    pub(super) stream: TcpStream,
    encoder: Encoder<'static>,
    decoder: Decoder<'static>,
}

struct Frame {
    kind: u8,
    flags: u8,
    stream: u32,
    payload: Vec<u8>,
}

impl Peer {
    fn new(stream: TcpStream) -> Peer {
        Peer {
            stream,
            encoder: Encoder::new(),
            decoder: Decoder::new(),
        }
    }

    fn send(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) -> io::Result<()> {
        let mut frame = (payload.len() as u32).to_be_bytes()[1..].to_vec();
        frame.extend([kind, flags]);
        frame.extend(stream.to_be_bytes());
        frame.extend(payload);
        self.stream.write_all(&frame)
    }

    fn send_headers(&mut self, flags: u8, id: u32, fields: &[(&str, &str)]) -> io::Result<()> {
        let fields = fields
            .iter()
            .map(|(name, value)| (name.as_bytes(), value.as_bytes()));
        let block = self.encoder.encode(fields);
        self.send(HEADERS, flags | END_HEADERS, id, &block)
    }

    fn frame(&mut self) -> io::Result<Frame> {
        let mut head = [0; 9];
        self.stream.read_exact(&mut head)?;
        let [a, b, c, kind, flags, rest @ ..] = head;
        let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
        self.stream.read_exact(&mut payload)?;
        Ok(Frame {
            kind,
            flags,
            stream: u32::from_be_bytes(rest),
            payload,
        })
    }

    /// A block that can't be decoded ends the connection, as in real peers.
    fn decode(&mut self, frame: &Frame) -> io::Result<Fields> {
        self.decoder
            .decode(&frame.payload)
            .map_err(io::Error::other)
    }
}

/// Answers every DATA frame with one that names the path and repeats the payload. Keep-alive
/// streams stay open, others end with trailers.
fn server() -> SocketAddr {
    serve(|mut stream| {
        stream.read_exact(&mut [0; 24]).unwrap();
        let mut peer = Peer::new(stream);
        peer.send(SETTINGS, 0, 0, &[]).unwrap();
        let mut open: HashMap<u32, (String, bool)> = HashMap::new();
        while let Ok(frame) = peer.frame() {
            if answer(&mut peer, &mut open, frame).is_err() {
                return;
            }
        }
    })
}

fn answer(
    peer: &mut Peer,
    open: &mut HashMap<u32, (String, bool)>,
    frame: Frame,
) -> io::Result<()> {
    let id = frame.stream;
    match frame.kind {
        HEADERS => {
            let fields = peer.decode(&frame)?;
            let shared = fields
                .iter()
                .any(|(name, value)| name == b"te" && value == b"trailers");
            let path = fields
                .into_iter()
                .find(|(name, _)| name == b":path" && shared);
            let (_, path) = path.ok_or(io::ErrorKind::InvalidData)?;
            open.insert(id, (String::from_utf8(path).unwrap(), false));
        }
        DATA => {
            let (path, answered) = open.get_mut(&id).ok_or(io::ErrorKind::InvalidData)?;
            let path = path.clone();
            if !std::mem::replace(answered, true) {
                peer.send_headers(0, id, &[(":status", "200"), ("x-path", &path)])?;
            }
            let text = [path.as_bytes(), b" ", &frame.payload].concat();
            peer.send(DATA, 0, id, &text)?;
            if path != ALIVE {
                peer.send_headers(END_STREAM, id, &[("grpc-status", "0"), ("x-end", &path)])?;
            }
        }
        _ => {}
    }
    Ok(())
}

pub(super) struct Client {
    pub(super) peer: Peer,
    next: u32,
}

impl Client {
    pub(super) fn new(addr: SocketAddr) -> Client {
        let mut stream = connect(addr);
        stream
            .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            .unwrap();
        let mut peer = Peer::new(stream);
        peer.send(SETTINGS, 0, 0, &[]).unwrap();
        assert_eq!(peer.frame().unwrap().kind, SETTINGS);
        peer.send(SETTINGS, 1, 0, &[]).unwrap();
        Client { peer, next: 1 }
    }

    pub(super) fn open(&mut self, path: &str) -> u32 {
        let id = self.next;
        self.next += 2;
        // A unique name goes into the table, on top of the field that all streams share: a peer
        // that misses it looks for the shared field below the end of its table.
        let own = format!("x-{id}");
        let fields = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", "localhost"),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
            (&own, "1"),
        ];
        self.peer.send_headers(0, id, &fields).unwrap();
        id
    }

    pub(super) fn say(&mut self, id: u32, text: &str) {
        self.peer.send(DATA, 0, id, text.as_bytes()).unwrap();
    }

    /// Sends a request of one gRPC message, and ends the client's side.
    pub(super) fn request(&mut self, path: &str, message: &[u8]) -> u32 {
        let id = self.open(path);
        let length = (message.len() as u32).to_be_bytes();
        let data = [&[0][..], &length, message].concat();
        self.peer.send(DATA, END_STREAM, id, &data).unwrap();
        id
    }

    /// The next DATA frame; headers before it are decoded and checked.
    pub(super) fn data(&mut self) -> (u32, String) {
        let (id, payload) = self.payload();
        (id, String::from_utf8(payload).unwrap())
    }

    pub(super) fn payload(&mut self) -> (u32, Vec<u8>) {
        loop {
            let frame = self.peer.frame().unwrap();
            match frame.kind {
                DATA => return (frame.stream, frame.payload),
                HEADERS => {
                    let fields = self.peer.decode(&frame).unwrap();
                    assert!(
                        fields
                            .iter()
                            .any(|(_, value)| value == b"200" || value == b"0")
                    );
                }
                _ => {}
            }
        }
    }

    /// A unary call, to the end of its stream.
    fn call(&mut self, path: &str, text: &str) -> String {
        let id = self.open(path);
        self.say(id, text);
        let (stream, data) = self.data();
        assert_eq!(stream, id);
        loop {
            let frame = self.peer.frame().unwrap();
            assert_eq!((frame.kind, frame.stream), (HEADERS, id));
            self.peer.decode(&frame).unwrap();
            if frame.flags & END_STREAM != 0 {
                return data;
            }
        }
    }
}

/// A server behind a proxy, and its client.
fn proxied() -> (Proxy, Client) {
    let proxy = Proxy::start(server(), Protocol::Grpc).unwrap();
    let client = Client::new(proxy.addr());
    (proxy, client)
}

#[test]
fn one_stream_is_swallowed_while_another_goes_on() {
    let (proxy, mut client) = proxied();
    assert_eq!(client.call(PUT, "1"), format!("{PUT} 1"));
    let hole = proxy.inject(to_engine().label(ALIVE).once().black_hole(Extent::Stream));
    let lost = client.open(ALIVE);
    client.say(lost, "a");
    for round in 0..5 {
        let text = round.to_string();
        assert_eq!(client.call(PUT, &text), format!("{PUT} {text}"));
    }
    assert_eq!(hole.hits(), 1);
    assert_eq!(proxy.passed(Direction::ToEngine, ALIVE), 0);
    drop(hole);
    // The engine never saw that stream, so it stays lost. A new one is served.
    client.say(lost, "b");
    let fresh = client.open(ALIVE);
    client.say(fresh, "c");
    assert_eq!(client.data(), (fresh, format!("{ALIVE} c")));
    assert_eq!(client.call(PUT, "2"), format!("{PUT} 2"));
}

#[test]
fn an_open_stream_is_swallowed_and_comes_back() {
    let (proxy, mut client) = proxied();
    let alive = client.open(ALIVE);
    client.say(alive, "1");
    assert_eq!(client.data(), (alive, format!("{ALIVE} 1")));
    let hole = proxy.inject(both_ways().label(ALIVE).black_hole(Extent::Stream));
    client.say(alive, "2");
    assert!(hole.fired_within(LIMIT));
    assert_eq!(client.call(PUT, "x"), format!("{PUT} x"));
    drop(hole);
    client.say(alive, "3");
    assert_eq!(client.data(), (alive, format!("{ALIVE} 3")));
}

#[test]
fn a_lost_reply_leaves_the_other_streams_alone() {
    let (proxy, mut client) = proxied();
    let eaten = proxy.inject(to_client().label(PUT).kind(Kind::Reply).once().eat());
    let id = client.open(PUT);
    client.say(id, "lost");
    assert!(eaten.fired_within(LIMIT));
    let lost = || proxy.seen().iter().filter(|it| it.copies == 0).count();
    until("headers, data and trailers are gone", || lost() == 3);
    assert!(quiet(&client.peer.stream));
    assert_eq!(client.call(PUT, "next"), format!("{PUT} next"));
    let alive = client.open(ALIVE);
    client.say(alive, "1");
    assert_eq!(client.data(), (alive, format!("{ALIVE} 1")));
}

#[test]
fn a_data_frame_is_doubled() {
    let (proxy, mut client) = proxied();
    let alive = client.open(ALIVE);
    let _twice = proxy.inject(to_engine().label(ALIVE).kind(Kind::Data).once().duplicate());
    for said in ["1", "2"] {
        client.say(alive, said);
    }
    for heard in ["1", "1", "2"] {
        assert_eq!(client.data(), (alive, format!("{ALIVE} {heard}")));
    }
}

#[test]
fn a_doubled_header_block_does_not_spoil_the_table() {
    let (proxy, mut client) = proxied();
    let twice = proxy.inject(to_client().label(PUT).kind(Kind::Reply).once().duplicate());
    let id = client.open(PUT);
    client.say(id, "1");
    assert_eq!(client.data(), (id, format!("{PUT} 1")));
    client.peer.frame().unwrap(); // the trailers, sent in full
    assert_eq!(twice.hits(), 1);
    assert_eq!(client.call(PUT, "2"), format!("{PUT} 2"));
}
