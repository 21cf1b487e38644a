//! One direction of a connection: takes the messages from `read`, applies the rules, and writes.
//!
//! Reading continues while a message is held or delayed, so that a delay counts from the arrival of
//! each message. Messages are written one after another, so that none overtakes. Rules are applied
//! when it is a message's turn. The queue in between is bounded, which slows a fast sender.

use std::collections::HashSet;
use std::io;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

use super::connection::{Connection, End};
use super::guard::Live;
use super::message::{Direction, Frame};
use super::read::{self, Message, Piece};
use super::rule::{Action, Place};
use super::seen::Seen;

const QUEUE: usize = 1024;

/// Runs until the source has ended and its end has been passed on.
pub(super) async fn run(connection: &Connection, direction: Direction) {
    let (queue, pieces) = mpsc::channel(QUEUE);
    let pump = Pump {
        connection,
        direction,
        messages: 0,
        offset: 0,
        portable: false,
        mute: false,
        split_by: HashSet::new(),
    };
    tokio::join!(read::run(connection, direction, queue), pump.run(pieces));
}

/// What remains to be done when a message is written.
#[derive(Default)]
struct Delivery {
    copies: u32,
    cut: bool,
    trickle: Option<(usize, Duration, Arc<Live>)>,
}

enum Verdict {
    Pass,
    Lost,
    /// The connection ends.
    Over,
}

struct Pump<'a> {
    connection: &'a Connection,
    direction: Direction,
    messages: u64,
    /// The number of bytes received.
    offset: u64,
    /// The sink's header table is behind the source's, so header blocks are sent in full.
    portable: bool,
    /// The sink is gone but its peer must not notice: everything is discarded.
    mute: bool,
    /// The rules by byte that have already applied.
    split_by: HashSet<u64>,
}

impl Pump<'_> {
    async fn run(mut self, mut pieces: mpsc::Receiver<Piece>) {
        while let Some(piece) = pieces.recv().await {
            match piece {
                Piece::Message(message) => {
                    if self.handle(message).await.is_break() {
                        return;
                    }
                }
                Piece::End(end) => {
                    self.connection.healed(self.direction).await;
                    if end == End::Reset {
                        self.connection.end(End::Reset);
                    }
                    let sink = self.connection.sink(self.direction);
                    let _ = rustix::net::shutdown(sink, rustix::net::Shutdown::Write);
                }
            }
        }
    }

    async fn handle(&mut self, mut message: Message) -> ControlFlow<()> {
        self.messages += 1;
        let place = Place {
            direction: self.direction,
            connection: self.connection.number,
            message: self.messages,
        };
        let came = message.bytes.len();
        let start = self.offset;
        self.offset += came as u64;
        if self.connection.swallows(self.direction, message.frame.unit) {
            self.lose(&message);
            self.note(&message.frame, came, 0);
            return ControlFlow::Continue(());
        }
        if self.portable
            && let Some(block) = &message.frame.block
        {
            message.bytes = block.in_full();
        }
        let mut delivery = Delivery {
            copies: 1,
            ..Delivery::default()
        };
        let verdict = self.judge(&place, start, &mut message, &mut delivery).await;
        match verdict {
            Verdict::Over => {
                self.note(&message.frame, came, 0);
                return ControlFlow::Break(());
            }
            Verdict::Lost => {
                self.lose(&message);
                self.note(&message.frame, came, 0);
                return ControlFlow::Continue(());
            }
            Verdict::Pass => self.note(&message.frame, came, delivery.copies),
        }
        if delivery.copies > 1 {
            self.connection
                .splitter
                .lock()
                .copies(&message.frame, delivery.copies);
            if let Some(block) = &message.frame.block {
                // Decoding the same block twice would add its fields to the sink's table twice.
                self.portable = true;
                message.bytes = block.in_full();
            }
        }
        for _ in 0..delivery.copies {
            self.deliver(&message.bytes, &delivery).await?;
        }
        if delivery.cut {
            self.connection.end(End::Close);
            return ControlFlow::Break(());
        }
        ControlFlow::Continue(())
    }

    /// Applies all rules, those by byte first: they pass on the part before their byte.
    async fn judge(
        &mut self,
        place: &Place,
        mut start: u64,
        message: &mut Message,
        delivery: &mut Delivery,
    ) -> Verdict {
        let rules = self.connection.shared.rules.lock().clone();
        let end = start + message.bytes.len() as u64;
        let mut by_byte: Vec<_> = rules
            .iter()
            .filter_map(|live| {
                let reached = live.rule.when.reached(&live.rule.action, start, end)?;
                (!self.split_by.contains(&live.id)).then_some((reached, live))
            })
            .collect();
        by_byte.sort_by_key(|(byte, live)| (*byte, live.id));
        let by_message = rules.iter().filter(|live| live.rule.when.byte.is_none());
        let in_order = by_byte
            .into_iter()
            .map(|(byte, live)| (Some(byte), live))
            .chain(by_message.map(|live| (None, live)));
        for (byte, live) in in_order {
            if !live.rule.when.meets(place, &message.frame, &message.bytes) {
                continue;
            }
            if byte.is_some() {
                self.split_by.insert(live.id);
            }
            if !live.take(self.connection.shared.seed, place) {
                continue;
            }
            if let Some(byte) = byte {
                let rest = message.bytes.split_off((byte - start) as usize);
                let before = std::mem::replace(&mut message.bytes, rest);
                start = byte;
                if self.deliver(&before, &Delivery::default()).await.is_break() {
                    return Verdict::Over;
                }
            }
            match self.act(live, place, message, delivery).await {
                Verdict::Pass => {}
                other => return other,
            }
        }
        Verdict::Pass
    }

    async fn act(
        &mut self,
        live: &Arc<Live>,
        place: &Place,
        message: &mut Message,
        delivery: &mut Delivery,
    ) -> Verdict {
        let draw = |purpose| place.draw(self.connection.shared.seed, live.id, purpose);
        match &live.rule.action {
            Action::CutAfter if live.rule.when.byte.is_none() => delivery.cut = true,
            Action::CutBefore | Action::CutAfter => {
                self.connection.end(End::Close);
                return Verdict::Over;
            }
            Action::Reset => {
                self.connection.end(End::Reset);
                return Verdict::Over;
            }
            Action::Eat => return Verdict::Lost,
            Action::BlackHole(extent) => {
                let unit = message.frame.unit;
                self.connection.swallow(live, *extent, self.direction, unit);
                return Verdict::Lost;
            }
            Action::Delay { by, jitter } => {
                let more = jitter.mul_f64(super::rule::fraction(draw(1)));
                tokio::select! {
                    _ = sleep_until(message.arrived + *by + more) => {}
                    _ = live.ended() => {}
                }
            }
            Action::Hold => live.ended().await,
            Action::Trickle { bytes, every } => {
                delivery.trickle = Some((*bytes, *every, live.clone()));
            }
            Action::Duplicate => delivery.copies += 1,
            Action::Corrupt => {
                let at = match live.rule.when.byte {
                    Some(_) => 0,
                    None => (draw(2) % message.bytes.len().max(1) as u64) as usize,
                };
                if let Some(byte) = message.bytes.get_mut(at) {
                    *byte ^= 1 << (draw(3) % 8);
                }
            }
        }
        Verdict::Pass
    }

    /// Keeps the peers in step after a message that the sink does not receive.
    fn lose(&mut self, message: &Message) {
        self.connection.splitter.lock().copies(&message.frame, 0);
        self.portable |= message.frame.block.is_some();
        if message.frame.opens
            && let Some(unit) = message.frame.unit
        {
            self.connection.behead(self.direction, unit);
        }
    }

    fn note(&self, frame: &Frame, bytes: usize, copies: u32) {
        self.connection.shared.log.lock().add(Seen {
            direction: self.direction,
            connection: self.connection.number,
            kind: frame.kind,
            label: frame.label.clone(),
            bytes,
            copies,
        });
    }

    async fn deliver(&mut self, bytes: &[u8], delivery: &Delivery) -> ControlFlow<()> {
        let written = match &delivery.trickle {
            None => self.write(bytes).await,
            Some((size, every, live)) => self.trickle(bytes, *size, *every, live).await,
        };
        match written {
            Ok(()) => ControlFlow::Continue(()),
            // The sink has closed. Its peer is told, unless that direction is swallowed.
            Err(_) if self.connection.holed(self.direction.back()) => {
                self.mute = true;
                ControlFlow::Continue(())
            }
            Err(_) => {
                self.connection.end(End::Close);
                ControlFlow::Break(())
            }
        }
    }

    async fn trickle(
        &self,
        bytes: &[u8],
        size: usize,
        every: Duration,
        live: &Live,
    ) -> io::Result<()> {
        for part in bytes.chunks(size) {
            let next = Instant::now() + every;
            self.write(part).await?;
            tokio::select! {
                _ = sleep_until(next) => {}
                _ = live.ended() => {}
            }
        }
        Ok(())
    }

    async fn write(&self, mut bytes: &[u8]) -> io::Result<()> {
        let sink = self.connection.sink(self.direction);
        while !self.mute && !bytes.is_empty() {
            sink.writable().await?;
            match sink.try_write(bytes) {
                Ok(length) => bytes = &bytes[length..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
