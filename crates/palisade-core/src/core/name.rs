//! `Name`: the name of a line, valid by construction.

use std::fmt;
use std::sync::Arc;

use super::error::{Error, ErrorKind, Result};

/// The longest name, in bytes of UTF-8.
pub const MAX_NAME: usize = 255;

/// The name of a line: 1 to 255 bytes of UTF-8 without control characters.
///
/// Cloning is cheap. Each engine reversibly encodes the characters that it can't store (`/`, `{`,
/// …).
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(Arc<str>);

impl Name {
    /// Validates `name`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidName`] when it is empty, too long or contains a control character.
    pub fn new(name: impl AsRef<str>) -> Result<Self> {
        let name = name.as_ref();
        let refuse = |why: String| Err(Error::new(ErrorKind::InvalidName, "name", why));
        if name.is_empty() {
            return refuse("a name can't be empty; give one such as `nightly-report`".into());
        }
        if name.len() > MAX_NAME {
            return refuse(format!(
                "a name has at most {MAX_NAME} bytes, this one has {}; shorten or hash it",
                name.len()
            ));
        }
        if let Some((at, found)) = name.char_indices().find(|(_, c)| c.is_control()) {
            return refuse(format!(
                "a name can't contain control characters, this one has U+{:04X} at byte {at}",
                u32::from(found)
            ));
        }
        Ok(Self(name.into()))
    }

    /// A placeholder for a name that was refused; such a request is never sent.
    pub(crate) fn refused() -> Self {
        Self("".into())
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl AsRef<str> for Name {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", &*self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn good_names_are_taken_as_they_are() {
        for good in ["a", "nightly report", "α/β{γ}", &"x".repeat(255)] {
            assert_eq!(Name::new(good).unwrap().as_str(), good);
        }
    }

    #[test]
    fn bad_names_are_refused_with_the_reason() {
        for (bad, word) in [
            (String::new(), "empty"),
            ("x".repeat(256), "256"),
            ("é".repeat(128), "256"),
            ("a\0b".into(), "U+0000"),
            ("a\nb".into(), "U+000A"),
            ("a\u{85}b".into(), "U+0085"),
        ] {
            let error = Name::new(&bad).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidName);
            assert!(error.to_string().contains(word), "{error}");
        }
    }
}
