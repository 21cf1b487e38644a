//! `Token`: the fencing token, and `Era`, which keeps tokens rising across a move.

use std::fmt;

use super::error::{Error, ErrorKind, Result, config_error};

/// A fencing token: strictly greater for every later exclusive grant of the same name.
///
/// Hand it to the storage with every write; storage that remembers the highest token it has
/// accepted refuses the write of a holder that was replaced without noticing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(pub u64);

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// The bits of a token that an engine counts in; the era sits above them.
const ERA_SHIFT: u32 = 56;

/// The era of a deployment (`era=N`, 0 to 127), raised by one when moving to another engine, so
/// that tokens of the new one are greater than all tokens of the old one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Era(u8);

impl Era {
    /// The greatest era.
    pub const MAX: u8 = 127;

    /// Checks `era` and takes it.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] above 127.
    pub fn new(era: u64) -> Result<Self> {
        match u8::try_from(era) {
            Ok(era) if era <= Self::MAX => Ok(Self(era)),
            _ => Err(config_error("era must be 0 to 127")),
        }
    }

    /// The token that users see for what the engine counted. Without an era it is just that: what
    /// a gateway counts has the gateway's era in it.
    ///
    /// # Errors
    /// [`ErrorKind::Unusable`] when the engine counts beyond the 56 bits below the era: such a token
    /// could not be compared.
    pub fn stamp(self, sequence: u64) -> Result<Token> {
        if self.0 != 0 && sequence >> ERA_SHIFT != 0 {
            return Err(Error::new(
                ErrorKind::Unusable,
                "token",
                "the engine's counter no longer fits below the era (56 bits)",
            ));
        }
        Ok(Token(u64::from(self.0) << ERA_SHIFT | sequence))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_later_era_is_above_every_token_of_an_earlier_one() {
        let old = Era::new(0).unwrap().stamp((1 << 56) - 1).unwrap();
        let new = Era::new(1).unwrap().stamp(1).unwrap();
        assert!(new > old);
        assert!(Era::new(128).is_err());
        assert!(Era::new(127).unwrap().stamp(1 << 56).is_err());
        assert!(Era::new(127).unwrap().stamp(1).unwrap().0 < u64::MAX);
        assert_eq!(Era::default().stamp(new.0).unwrap(), new, "of a gateway");
    }
}
