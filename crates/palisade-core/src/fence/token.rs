//! The kinds of tokens. A [`WriteToken`] of an exclusive hold writes and raises the highest token.
//! A [`ReadToken`] is compared and changes nothing. Permits have neither, because several may
//! write.

use std::fmt;

use crate::core::claim::Mode;
use crate::core::error::{Error, ErrorKind, Result};
use crate::core::hold::Hold;
use crate::core::token::Token;

/// The token of an exclusive hold (mutex, write lock, leadership). A bare number or [`Token`] can
/// be converted: the caller then vouches that it was granted exclusively.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WriteToken(Token);

/// The token of a reader: compared, never remembered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReadToken(Token);

/// A token of either kind, to compare.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Presented {
    /// The token of an exclusive hold.
    Write(WriteToken),
    /// The token of a reader.
    Read(ReadToken),
}

impl WriteToken {
    /// The bare number.
    pub fn number(self) -> u64 {
        self.0.0
    }

    /// The number.
    pub fn token(self) -> Token {
        self.0
    }

    /// The number as stores keep it: 63 bits, never zero.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for a number that no engine grants.
    pub fn stored(self) -> Result<i64> {
        stored(self.0)
    }
}

impl ReadToken {
    /// The bare number.
    pub fn number(self) -> u64 {
        self.0.0
    }

    /// The number.
    pub fn token(self) -> Token {
        self.0
    }
}

impl Presented {
    /// The number.
    pub fn token(self) -> Token {
        match self {
            Self::Write(token) => token.0,
            Self::Read(token) => token.0,
        }
    }

    /// # Errors
    /// As [`WriteToken::stored`].
    pub(super) fn stored(self) -> Result<i64> {
        stored(self.token())
    }
}

/// Eras end at 127 and start at bit 56, so every token fits into 63 bits. 0 means an unknown token.
fn stored(token: Token) -> Result<i64> {
    i64::try_from(token.0)
        .ok()
        .filter(|token| *token > 0)
        .ok_or_else(|| {
            let message = "this is not the token of a hold: tokens are 1 to 2^63 - 1";
            Error::new(ErrorKind::InvalidArgument, "fence", message)
        })
}

/// A token for stores that compare text: 20 digits, so that text order equals number order.
pub fn digits(token: i64) -> String {
    format!("{token:020}")
}

/// Reads [`digits`]; `None` for anything else.
pub fn read_digits(text: &[u8]) -> Option<Token> {
    let text = std::str::from_utf8(text).ok()?;
    let is_whole = text.len() == 20 && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| is_whole).map(Token)
}

impl From<Token> for WriteToken {
    fn from(token: Token) -> Self {
        Self(token)
    }
}

impl From<u64> for WriteToken {
    fn from(token: u64) -> Self {
        Self(Token(token))
    }
}

impl From<Token> for ReadToken {
    fn from(token: Token) -> Self {
        Self(token)
    }
}

impl From<WriteToken> for ReadToken {
    /// A writer may also read.
    fn from(token: WriteToken) -> Self {
        Self(token.0)
    }
}

impl From<WriteToken> for Presented {
    fn from(token: WriteToken) -> Self {
        Self::Write(token)
    }
}

impl From<ReadToken> for Presented {
    fn from(token: ReadToken) -> Self {
        Self::Read(token)
    }
}

impl From<Token> for Presented {
    fn from(token: Token) -> Self {
        Self::Write(token.into())
    }
}

impl fmt::Display for WriteToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl fmt::Display for ReadToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// The tokens that holds present to a fenced store.
impl Hold {
    /// The token to write with. A reader that was upgraded has one; a writer that was downgraded no
    /// longer does.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for a reader and for permits, because others may hold too.
    pub fn write_token(&self) -> Result<WriteToken> {
        let message = match self.mode() {
            Mode::Exclusive => return Ok(self.token().into()),
            Mode::Shared => "a reader has no token to write with; take the write lock",
            Mode::Permits => {
                "permits have no token to write with: several may hold at once; use a mutex"
            }
        };
        Err(Error::new(ErrorKind::InvalidArgument, "fence", message))
    }

    /// The token to read with, of a reader or a writer.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for permits, which are not fenced.
    pub fn read_token(&self) -> Result<ReadToken> {
        match self.mode() {
            Mode::Exclusive | Mode::Shared => Ok(self.token().into()),
            Mode::Permits => Err(Error::new(
                ErrorKind::InvalidArgument,
                "fence",
                "permits are not fenced: their tokens are not ordered with those of writers",
            )),
        }
    }
}

#[cfg(feature = "http")]
impl From<WriteToken> for http::HeaderValue {
    fn from(token: WriteToken) -> Self {
        token.token().0.into()
    }
}

#[cfg(feature = "http")]
impl From<ReadToken> for http::HeaderValue {
    fn from(token: ReadToken) -> Self {
        token.token().0.into()
    }
}
