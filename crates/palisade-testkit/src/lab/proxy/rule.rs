//! Rules: which messages (where and when), and what happens to them.
//!
//! A rule is a value: [`to_engine`] or [`to_client`], narrowed by conditions that all must hold,
//! counted, and finished by an action. It does nothing until a proxy is given it.

use std::time::Duration;

use super::message::{Direction, Frame, Kind};

/// Messages on their way to the engine.
pub fn to_engine() -> Match {
    Match::new(Some(Direction::ToEngine))
}

/// Messages on their way to the client.
pub fn to_client() -> Match {
    Match::new(Some(Direction::ToClient))
}

/// Messages in both directions.
pub fn both_ways() -> Match {
    Match::new(None)
}

/// How much a black hole swallows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// The stream of the message, in both directions; others go on. Where a protocol
    /// has no streams: the direction.
    Stream,
    /// All of this connection in the direction of the message.
    Direction,
    /// All of this connection, both directions.
    Connection,
}

#[derive(Clone, Debug)]
pub(super) enum Action {
    CutBefore,
    CutAfter,
    Reset,
    Eat,
    Delay { by: Duration, jitter: Duration },
    Trickle { bytes: usize, every: Duration },
    Duplicate,
    BlackHole(Extent),
    Hold,
    Corrupt,
}

#[derive(Clone, Debug)]
enum Label {
    Is(String),
    Contains(String),
}

/// The conditions of a rule. All of them must hold; without any, every message matches, always.
#[derive(Clone, Debug)]
#[must_use = "conditions are not a rule without an action"]
pub struct Match {
    direction: Option<Direction>,
    kind: Option<Kind>,
    label: Option<Label>,
    containing: Option<Vec<u8>>,
    message: Option<u64>,
    pub(super) byte: Option<u64>,
    connection: Option<u64>,
    pub(super) skip: u64,
    pub(super) times: Option<u64>,
    pub(super) chance: Option<f64>,
}

/// A fault: what is matched, and what is done to it. Given to `Proxy::inject`.
#[derive(Clone, Debug)]
#[must_use = "a rule does nothing until it is injected"]
pub struct Rule {
    pub(super) when: Match,
    pub(super) action: Action,
}

impl Match {
    fn new(direction: Option<Direction>) -> Match {
        Match {
            direction,
            kind: None,
            label: None,
            containing: None,
            message: None,
            byte: None,
            connection: None,
            skip: 0,
            times: None,
            chance: None,
        }
    }

    /// Messages with exactly this label.
    pub fn label(mut self, label: impl Into<String>) -> Match {
        self.label = Some(Label::Is(label.into()));
        self
    }

    /// Messages whose label contains this.
    pub fn label_contains(mut self, part: impl Into<String>) -> Match {
        self.label = Some(Label::Contains(part.into()));
        self
    }

    /// Messages of this kind.
    pub fn kind(mut self, kind: Kind) -> Match {
        self.kind = Some(kind);
        self
    }

    /// Messages that the engine sends unasked.
    pub fn push(self) -> Match {
        self.kind(Kind::Push)
    }

    /// Messages with these bytes somewhere in them.
    pub fn containing(mut self, bytes: impl AsRef<[u8]>) -> Match {
        self.containing = Some(bytes.as_ref().to_vec());
        self
    }

    /// The `k`-th message (from 1) of a connection in its direction, whatever it is.
    pub fn message(mut self, k: u64) -> Match {
        self.message = Some(k);
        self
    }

    /// After `n` bytes of a connection in its direction, once per connection. The message there
    /// is split: its first part passes, the action is for the rest.
    pub fn byte(mut self, n: u64) -> Match {
        self.byte = Some(n);
        self
    }

    /// Messages of the `n`-th connection (from 1) since the proxy started.
    pub fn connection(mut self, n: u64) -> Match {
        self.connection = Some(n);
        self
    }

    /// Only the `k`-th message (from 1) that meets all other conditions, over all connections.
    pub fn nth(mut self, k: u64) -> Match {
        self.skip = k.saturating_sub(1);
        self.times = Some(1);
        self
    }

    /// Only the first match.
    pub fn once(self) -> Match {
        self.times(1)
    }

    /// Only the first `n` matches.
    pub fn times(mut self, n: u64) -> Match {
        self.times = Some(n);
        self
    }

    /// Each match with probability `p` (0 to 1), drawn from the proxy's seed: the same message
    /// of the same connection meets the same fate in every run.
    pub fn chance(mut self, p: f64) -> Match {
        self.chance = Some(p);
        self
    }

    /// Close both sides; the message does not arrive.
    pub fn cut_before(self) -> Rule {
        self.rule(Action::CutBefore)
    }

    /// Close both sides as soon as the message has been passed on.
    pub fn cut_after(self) -> Rule {
        self.rule(Action::CutAfter)
    }

    /// Reset both sides (RST); the message does not arrive.
    pub fn reset(self) -> Rule {
        self.rule(Action::Reset)
    }

    /// Lose the message. Losing the first message of a unit (request or reply headers of a
    /// gRPC stream, the head of a chunked HTTP message) loses the rest of it in that direction.
    pub fn eat(self) -> Rule {
        self.rule(Action::Eat)
    }

    /// Deliver the message `by` later than it came. Later messages stay behind it.
    pub fn delay(self, by: Duration) -> Rule {
        self.delay_jitter(by, Duration::ZERO)
    }

    /// As [`Match::delay`], with up to `jitter` more, drawn from the proxy's seed.
    pub fn delay_jitter(self, by: Duration, jitter: Duration) -> Rule {
        self.rule(Action::Delay { by, jitter })
    }

    /// Deliver the message in pieces of `bytes`, one per interval.
    pub fn trickle(self, bytes: usize, every: Duration) -> Rule {
        let bytes = bytes.max(1);
        self.rule(Action::Trickle { bytes, every })
    }

    /// Deliver the message twice.
    pub fn duplicate(self) -> Rule {
        self.rule(Action::Duplicate)
    }

    /// Swallow this message and all after it, the end of the stream too; sockets stay open.
    /// What was swallowed stays lost when the fault ends.
    pub fn black_hole(self, extent: Extent) -> Rule {
        self.rule(Action::BlackHole(extent))
    }

    /// Keep the message, and all behind it, until the guard is released or dropped.
    pub fn hold(self) -> Rule {
        self.rule(Action::Hold)
    }

    /// Flip one bit of one byte, both drawn from the proxy's seed; with [`Match::byte`], of that byte.
    pub fn corrupt(self) -> Rule {
        self.rule(Action::Corrupt)
    }

    fn rule(self, action: Action) -> Rule {
        Rule { when: self, action }
    }

    /// Whether a message meets all conditions but those about bytes and counts.
    pub(super) fn meets(&self, at: &Place, frame: &Frame, bytes: &[u8]) -> bool {
        let label = frame.label.as_deref();
        self.direction
            .is_none_or(|direction| direction == at.direction)
            && self.connection.is_none_or(|n| n == at.connection)
            && self.message.is_none_or(|k| k == at.message)
            && self.kind.is_none_or(|kind| kind == frame.kind)
            && match &self.label {
                None => true,
                Some(Label::Is(wanted)) => label == Some(wanted),
                Some(Label::Contains(part)) => label.is_some_and(|it| it.contains(part.as_str())),
            }
            && self.containing.as_ref().is_none_or(|part| {
                part.is_empty() || bytes.windows(part.len()).any(|window| window == part)
            })
    }

    /// Whether the point after byte `n` lies in a message of bytes `start..end`. An action that
    /// needs the byte behind the point waits for it; one that does not acts as soon as `n` have come.
    pub(super) fn reached(&self, action: &Action, start: u64, end: u64) -> Option<u64> {
        let needs_more = matches!(
            action,
            Action::Eat | Action::Duplicate | Action::Corrupt | Action::Trickle { .. }
        );
        self.byte
            .filter(|n| *n >= start && (*n < end || (*n == end && !needs_more)))
    }
}

/// Where a message was met.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) direction: Direction,
    pub(super) connection: u64,
    pub(super) message: u64,
}

impl Place {
    /// A number that depends on the seed, the rule and this place, and on nothing else.
    pub(super) fn draw(&self, seed: u64, rule: u64, purpose: u64) -> u64 {
        let parts = [
            rule,
            self.connection,
            self.direction as u64,
            self.message,
            purpose,
        ];
        parts
            .iter()
            .fold(mix(seed), |so_far, part| mix(so_far ^ mix(*part)))
    }
}

/// SplitMix64's step: a fixed function, so that seeds mean the same in every version.
fn mix(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A drawn number as a fraction from 0 (included) to 1 (excluded).
pub(super) fn fraction(drawn: u64) -> f64 {
    (drawn >> 11) as f64 / (1u64 << 53) as f64
}
