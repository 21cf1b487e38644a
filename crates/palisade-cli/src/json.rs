//! JSON output: characters that could control a terminal or hide text are escaped, so that a
//! document shows in a terminal what it contains. A parser reads the same text.

use std::io;

use serde::Serialize;
use serde_json::Serializer;
use serde_json::ser::Formatter;

use crate::view::misleads;

/// `document` as one line, without its end.
pub(crate) fn line<T: Serialize + ?Sized>(document: &T) -> io::Result<String> {
    let mut bytes = Vec::new();
    document.serialize(&mut Serializer::with_formatter(&mut bytes, Escaping))?;
    String::from_utf8(bytes).map_err(io::Error::other)
}

struct Escaping;

impl Formatter for Escaping {
    fn write_string_fragment<W: io::Write + ?Sized>(
        &mut self,
        writer: &mut W,
        fragment: &str,
    ) -> io::Result<()> {
        let mut rest = fragment;
        while let Some((at, c)) = rest.char_indices().find(|(_, c)| misleads(*c)) {
            writer.write_all(&rest.as_bytes()[..at])?;
            for unit in c.encode_utf16(&mut [0; 2]) {
                write!(writer, "\\u{unit:04x}")?;
            }
            rest = &rest[at + c.len_utf8()..];
        }
        writer.write_all(rest.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_misleads_is_escaped_and_read_back() {
        let text = "a\u{202e}b\u{e0041}\u{200b}é\n\u{85}";
        let line = line(text).unwrap();
        assert_eq!(line, r#""a\u202eb\udb40\udc41\u200bé\n\u0085""#);
        assert_eq!(serde_json::from_str::<String>(&line).unwrap(), text);
    }
}
