//! The reading half of a pump: splits bytes from a socket into messages with their arrival time.
//!
//! An incomplete message waits here. It is passed on as it is when the source ends, or when the
//! other direction has made the connection raw.

use std::io;

use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::connection::{Connection, End};
use super::message::{Direction, Frame, Kind};

const READ: usize = 64 << 10;

pub(super) enum Piece {
    Message(Message),
    /// The source has ended, regularly or by a reset.
    End(End),
}

pub(super) struct Message {
    pub(super) bytes: Vec<u8>,
    pub(super) frame: Frame,
    pub(super) arrived: Instant,
}

/// Reads until the source ends or nobody takes the messages.
pub(super) async fn run(connection: &Connection, direction: Direction, queue: mpsc::Sender<Piece>) {
    let source = connection.source(direction);
    let mut raw = connection.raw.subscribe();
    let mut buffer = Vec::new();
    let end = loop {
        let came = tokio::select! {
            came = read_some(source, &mut buffer) => came,
            // If the other direction has made the connection raw, an incomplete message must not
            // wait for its rest any longer.
            Ok(_) = raw.wait_for(|raw| *raw), if !buffer.is_empty() => Ok(1),
        };
        match came {
            Ok(0) => break End::Close,
            Err(_) => break End::Reset,
            Ok(_) => {}
        }
        let arrived = Instant::now();
        let mut taken = 0;
        while let Some(frame) = split(connection, direction, &buffer[taken..]) {
            let bytes = buffer[taken..taken + frame.length].to_vec();
            taken += frame.length;
            let message = Message {
                bytes,
                frame,
                arrived,
            };
            if queue.send(Piece::Message(message)).await.is_err() {
                return;
            }
        }
        buffer.drain(..taken);
    };
    if !buffer.is_empty() {
        let message = Message {
            frame: Frame::new(buffer.len(), Kind::Bytes, None),
            bytes: buffer,
            arrived: Instant::now(),
        };
        let _ = queue.send(Piece::Message(message)).await;
    }
    let _ = queue.send(Piece::End(end)).await;
}

fn split(connection: &Connection, direction: Direction, bytes: &[u8]) -> Option<Frame> {
    if bytes.is_empty() {
        return None;
    }
    let mut splitter = connection.splitter.lock();
    let frame = splitter.next(direction, bytes);
    if splitter.is_raw() {
        connection
            .raw
            .send_if_modified(|raw| !std::mem::replace(raw, true));
    }
    frame
}

async fn read_some(source: &TcpStream, buffer: &mut Vec<u8>) -> io::Result<usize> {
    loop {
        source.readable().await?;
        let mut chunk = [0; READ];
        match source.try_read(&mut chunk) {
            Ok(length) => {
                buffer.extend_from_slice(&chunk[..length]);
                return Ok(length);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
}
