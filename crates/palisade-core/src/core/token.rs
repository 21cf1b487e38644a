//! `Token`: the fencing token, and `Era`, which keeps tokens rising when the engine is replaced.

use std::fmt;

use super::error::{Error, ErrorKind, Result, config_error};

/// A fencing token: strictly greater for every later exclusive grant of the same name.
///
/// Pass it to the store with every write. A store that remembers the highest token it accepted
/// refuses the writes of a holder that was replaced without noticing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(pub u64);

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// The number of bits for the engine's sequence; the era is above them.
const ERA_SHIFT: u32 = 56;

/// The era of a deployment (`era=N`, 0 to 127). Raise it by one when moving to another engine, so
/// that all new tokens are greater than all old ones.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Era(u8);

impl Era {
    /// The greatest era.
    pub const MAX: u8 = 127;

    /// Validates `era`.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] above [`Era::MAX`].
    pub fn new(era: u64) -> Result<Self> {
        match u8::try_from(era) {
            Ok(era) if era <= Self::MAX => Ok(Self(era)),
            _ => Err(config_error("era must be 0 to 127")),
        }
    }

    /// The token that users see for an engine's sequence. In era 0 it is the sequence itself, which
    /// from a gateway already includes the gateway's era.
    ///
    /// # Errors
    /// [`ErrorKind::Unusable`] when the sequence exceeds the 56 bits below the era: such tokens
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
