//! jute, ZooKeeper's serialization: big-endian numbers, and length-prefixed byte strings. Every
//! length that a server sends is checked.

/// A record whose lengths or texts are invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Malformed;

/// A record being written.
#[derive(Debug, Clone, Default)]
pub(super) struct Out(pub(super) Vec<u8>);

impl Out {
    pub(super) fn int(mut self, value: i32) -> Self {
        self.0.extend_from_slice(&value.to_be_bytes());
        self
    }

    pub(super) fn long(mut self, value: i64) -> Self {
        self.0.extend_from_slice(&value.to_be_bytes());
        self
    }

    pub(super) fn flag(mut self, value: bool) -> Self {
        self.0.push(u8::from(value));
        self
    }

    pub(super) fn bytes(self, value: &[u8]) -> Self {
        // Nothing of ours is near 2 GiB; a server accepts 1 MiB.
        let mut out = self.int(i32::try_from(value.len()).unwrap_or(i32::MAX));
        out.0.extend_from_slice(value);
        out
    }

    pub(super) fn text(self, value: &str) -> Self {
        self.bytes(value.as_bytes())
    }

    pub(super) fn then(mut self, record: &[u8]) -> Self {
        self.0.extend_from_slice(record);
        self
    }
}

/// A record being read.
#[derive(Debug, Clone, Copy)]
pub(super) struct In<'a>(pub(super) &'a [u8]);

impl<'a> In<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8], Malformed> {
        let (head, rest) = self.0.split_at_checked(length).ok_or(Malformed)?;
        self.0 = rest;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        self.take(N)?.try_into().map_err(|_| Malformed)
    }

    pub(super) fn int(&mut self) -> Result<i32, Malformed> {
        self.array().map(i32::from_be_bytes)
    }

    pub(super) fn long(&mut self) -> Result<i64, Malformed> {
        self.array().map(i64::from_be_bytes)
    }

    pub(super) fn flag(&mut self) -> Result<bool, Malformed> {
        self.array().map(|[byte]| byte != 0)
    }

    /// A length of -1 means null, which is the same as empty here.
    pub(super) fn bytes(&mut self) -> Result<&'a [u8], Malformed> {
        match self.int()? {
            -1 => Ok(&[]),
            length => self.take(usize::try_from(length).map_err(|_| Malformed)?),
        }
    }

    pub(super) fn text(&mut self) -> Result<String, Malformed> {
        let bytes = self.bytes()?;
        String::from_utf8(bytes.to_vec()).map_err(|_| Malformed)
    }

    pub(super) fn texts(&mut self) -> Result<Vec<String>, Malformed> {
        // Nothing is reserved by the server's count: each text takes at least four bytes.
        let count = self.int()?.max(0);
        (0..count).map(|_| self.text()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let out = Out::default().int(-7).long(1 << 40).flag(true).text("ü");
        let mut read = In(&out.0);
        assert_eq!(read.int(), Ok(-7));
        assert_eq!(read.long(), Ok(1 << 40));
        assert_eq!(read.flag(), Ok(true));
        assert_eq!(read.text().as_deref(), Ok("ü"));
        assert_eq!(read.int(), Err(Malformed));
    }

    #[test]
    fn lengths_that_lie_are_refused() {
        for lie in [i32::MAX, -2, 5] {
            assert_eq!(In(&Out::default().int(lie).0).bytes(), Err(Malformed));
        }
        assert_eq!(In(&Out::default().int(-1).0).bytes(), Ok(&[][..]));
        assert_eq!(In(&Out::default().int(i32::MAX).0).texts(), Err(Malformed));
        assert_eq!(In(&Out::default().bytes(&[0xff]).0).text(), Err(Malformed));
    }
}
