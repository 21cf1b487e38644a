//! `Frames`: where the frames of HTTP/2 begin and end in what a client writes, however it is cut.
//! What `Wire` needs to know of them, and no more.

/// What a client says before its first frame.
pub(super) const PREFACE: usize = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".len();
/// Length, type, flags, stream.
const HEAD: usize = 9;
const HEADERS: u8 = 1;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const PING: u8 = 6;
const CONTINUATION: u8 = 9;
const ACK: u8 = 1;
/// The length of an answer to a ping.
pub(super) const PONG: usize = HEAD + 8;

/// Follows the frames of what is written, however it is cut.
pub(super) struct Frames {
    head: [u8; HEAD],
    /// How much of the next head is there.
    got: usize,
    /// How much of the current frame, or of the preface, is still to come.
    rest: usize,
}

impl Default for Frames {
    fn default() -> Self {
        Self {
            head: [0; HEAD],
            got: 0,
            rest: PREFACE,
        }
    }
}

impl Frames {
    /// Reads to the end of a frame at the most, and says how much that is.
    pub(super) fn read(&mut self, bytes: &[u8]) -> usize {
        let mut read = 0;
        while read < bytes.len() {
            if self.rest > 0 {
                let now = self.rest.min(bytes.len() - read);
                self.rest -= now;
                read += now;
            } else {
                if self.got == HEAD {
                    self.got = 0;
                }
                let now = (HEAD - self.got).min(bytes.len() - read);
                self.head[self.got..self.got + now].copy_from_slice(&bytes[read..read + now]);
                self.got += now;
                read += now;
                if self.got == HEAD {
                    let [a, b, c, ..] = self.head;
                    self.rest = u32::from_be_bytes([0, a, b, c]) as usize;
                }
            }
            if self.whole().is_some() {
                break;
            }
        }
        read
    }

    /// Kind and flags of the last frame, if it is whole.
    fn whole(&self) -> Option<(u8, u8)> {
        let whole = self.got == HEAD && self.rest == 0;
        whole.then_some((self.head[3], self.head[4]))
    }

    /// Whether the last frame is the head of a request whose body follows.
    pub(super) fn end_in_a_head(&self) -> bool {
        self.whole().is_some_and(|(kind, flags)| {
            kind == HEADERS && flags & (END_HEADERS | END_STREAM) == END_HEADERS
        })
    }

    /// Whether another frame may come in between: frames are not cut, nor heads from their rest.
    pub(super) fn end_whole(&self) -> bool {
        self.whole().is_some_and(|(kind, flags)| {
            !matches!(kind, HEADERS | CONTINUATION) || flags & END_HEADERS != 0
        })
    }

    /// Whether the last frame answers a ping.
    pub(super) fn end_in_a_pong(&self) -> bool {
        self.whole()
            .is_some_and(|(kind, flags)| kind == PING && flags & ACK != 0)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in super::super) fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
        let length = (payload.len() as u32).to_be_bytes();
        let mut frame = vec![length[1], length[2], length[3], kind, flags, 0, 0, 0, 1];
        frame.extend_from_slice(payload);
        frame
    }

    fn read(frames: &mut Frames, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            bytes = &bytes[frames.read(bytes)..];
        }
    }

    #[test]
    fn only_the_head_of_a_request_whose_body_follows_is_kept() {
        let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        let (settings, ping) = (frame(4, 0, b""), frame(6, 1, b"12345678"));
        let (head, body) = (frame(1, 4, b"path"), frame(0, 1, b"message"));
        let alone = frame(1, 5, b"path");
        // A message that looks like a head.
        let sly = frame(0, 1, &head);
        for (said, kept) in [
            (vec![], false),
            (vec![&settings], false),
            (vec![&head], true),
            (vec![&head, &body], false),
            (vec![&ping, &head], true),
            (vec![&head, &ping], false),
            (vec![&alone], false),
            (vec![&head, &sly], false),
            (vec![&head, &sly, &head], true),
            (vec![&frame(1, 0, b"longer")], false),
        ] {
            let said: Vec<u8> = [&preface]
                .into_iter()
                .chain(said)
                .flatten()
                .copied()
                .collect();
            for cut in [1, 3, 10, 4096] {
                let mut frames = Frames::default();
                said.chunks(cut).for_each(|bytes| read(&mut frames, bytes));
                assert_eq!(frames.end_in_a_head(), kept, "{said:?} by {cut}");
            }
            // Cut anywhere else, it is not whole.
            if kept {
                let mut frames = Frames::default();
                read(&mut frames, &said[..said.len() - 1]);
                assert!(!frames.end_in_a_head());
            }
        }
    }
    #[test]
    fn answers_to_pings_cut_no_frame_and_no_head() {
        let whole = |said: &[u8]| {
            let mut frames = Frames {
                rest: 0,
                ..Frames::default()
            };
            read(&mut frames, said);
            frames.end_whole()
        };
        let (begun, more) = (frame(1, 0, b"path"), frame(9, 0, b"more"));
        let (ended, body) = (frame(9, 4, b"most"), frame(0, 1, b"message"));
        assert!(!whole(&begun));
        assert!(!whole(&[&begun[..], &more].concat()));
        assert!(whole(&[&begun[..], &more, &ended].concat()));
        assert!(whole(&frame(1, 4, b"path")));
        assert!(whole(&body));
        assert!((0..body.len()).all(|length| !whole(&body[..length])));
    }
}
