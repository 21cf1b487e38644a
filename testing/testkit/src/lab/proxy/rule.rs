//! Rules: which messages (where and when), and what happens to them.
//!
//! A rule is a value: [`to_engine`] or [`to_client`], narrowed by conditions that must all hold,
//! counted, and completed by an action. It has no effect until it is injected into a proxy.

use std::time::Duration;

use super::message::{Direction, Frame, Kind};

/// Messages to the engine.
pub fn to_engine() -> Match {
    Match::new(Some(Direction::ToEngine))
}

/// Messages to the client.
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
    /// The stream of the message, in both directions; others continue. In protocols without
    /// streams: the direction.
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

/// The conditions of a rule. All of them must hold; without any, every message matches.
#[derive(Clone, Debug, Default)]
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

/// A fault: what is matched, and what is done to it. Passed to `Proxy::inject`.
#[derive(Clone, Debug)]
#[must_use = "a rule does nothing until it is injected"]
pub struct Rule {
    pub(super) when: Match,
    pub(super) action: Action,
}

/// Generates the conditions, each of which sets a field, and the actions, each of which builds a
/// rule.
macro_rules! words {
    (
        conditions { $($(#[$about:meta])* $word:ident($given:ident: $type:ty) { $($field:ident = $value:expr),* })* }
        actions { $($(#[$does:meta])* $act:ident($($arg:ident: $of:ty),*) { $action:expr })* }
    ) => {
        $(
            $(#[$about])*
            pub fn $word(mut self, $given: $type) -> Match {
                $(self.$field = $value;)*
                self
            }
        )*
        $(
            $(#[$does])*
            pub fn $act(self $(, $arg: $of)*) -> Rule {
                self.rule($action)
            }
        )*
    };
}

impl Match {
    fn new(direction: Option<Direction>) -> Match {
        Match {
            direction,
            ..Match::default()
        }
    }

    words! {
        conditions {
            /// Messages with exactly this label.
            label(label: impl Into<String>) { label = Some(Label::Is(label.into())) }

            /// Messages whose label contains this.
            label_contains(part: impl Into<String>) { label = Some(Label::Contains(part.into())) }

            /// Messages of this kind.
            kind(kind: Kind) { kind = Some(kind) }

            /// Messages with these bytes somewhere in them.
            containing(bytes: impl AsRef<[u8]>) { containing = Some(bytes.as_ref().to_vec()) }

            /// The `k`-th message (from 1) of a connection in its direction, of any kind.
            message(k: u64) { message = Some(k) }

            /// After `n` bytes of a connection in its direction, once per connection. The message
            /// there is split: its first part passes, and the action applies to the rest.
            byte(n: u64) { byte = Some(n) }

            /// Messages of the `n`-th connection (from 1) since the proxy started.
            connection(n: u64) { connection = Some(n) }

            /// Only the `k`-th message (from 1) that meets all other conditions, over all
            /// connections.
            nth(k: u64) { skip = k.saturating_sub(1), times = Some(1) }

            /// Only the first `n` matches.
            times(n: u64) { times = Some(n) }

            /// Each match with probability `p` (0 to 1), drawn from the proxy's seed: the result
            /// for the same message of the same connection is the same in every run.
            chance(p: f64) { chance = Some(p) }
        }
        actions {
            /// Close both sides; the message does not arrive.
            cut_before() { Action::CutBefore }

            /// Close both sides as soon as the message has been passed on.
            cut_after() { Action::CutAfter }

            /// Reset both sides (RST); the message does not arrive.
            reset() { Action::Reset }

            /// Lose the message. Losing the first message of a unit (request or reply headers of a
            /// gRPC stream, the head of a chunked HTTP message) loses the rest of it in that
            /// direction.
            eat() { Action::Eat }

            /// Deliver the message `by` later than it arrived. Later messages stay behind it.
            delay(by: Duration) { Action::Delay { by, jitter: Duration::ZERO } }

            /// As [`Match::delay`], with up to `jitter` more, drawn from the proxy's seed.
            delay_jitter(by: Duration, jitter: Duration) { Action::Delay { by, jitter } }

            /// Deliver the message in pieces of `bytes`, one per interval.
            trickle(bytes: usize, every: Duration) { Action::Trickle { bytes: bytes.max(1), every } }

            /// Deliver the message twice.
            duplicate() { Action::Duplicate }

            /// Swallow this message and all after it, including the end of the stream; sockets stay
            /// open. What was swallowed stays lost when the fault ends.
            black_hole(extent: Extent) { Action::BlackHole(extent) }

            /// Hold the message, and all behind it, until the guard is released or dropped.
            hold() { Action::Hold }

            /// Flip one bit of one byte, both drawn from the proxy's seed; with [`Match::byte`], of
            /// that byte.
            corrupt() { Action::Corrupt }
        }
    }

    /// Messages that the engine sends unsolicited.
    pub fn push(self) -> Match {
        self.kind(Kind::Push)
    }

    /// Only the first match.
    pub fn once(self) -> Match {
        self.times(1)
    }

    fn rule(self, action: Action) -> Rule {
        Rule { when: self, action }
    }

    /// Whether a message meets all conditions except those about bytes and counts.
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
    /// needs the next byte waits for it; others act as soon as `n` bytes have arrived.
    pub(super) fn reached(&self, action: &Action, start: u64, end: u64) -> Option<u64> {
        let needs_more = matches!(
            action,
            Action::Eat | Action::Duplicate | Action::Corrupt | Action::Trickle { .. }
        );
        self.byte
            .filter(|n| *n >= start && (*n < end || (*n == end && !needs_more)))
    }
}

/// The position of a message.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) direction: Direction,
    pub(super) connection: u64,
    pub(super) message: u64,
}

impl Place {
    /// A number that depends only on the seed, the rule and this position.
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

/// The step of SplitMix64: a fixed function, so that seeds give the same results in every version.
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
