//! The names of the files in `lines/`: namespace and name, encoded so that a prefix of a name is
//! a prefix of its file's name. What would be too long for a file ends in a hash.

use crate::core::report::Scope;

/// The longest name of a file that is not cut; most file systems take 255 bytes.
const LONGEST: usize = 230;

/// The file of a line.
pub(super) fn file_name(namespace: &str, name: &str) -> String {
    let mut file = prefix(namespace, name);
    if file.len() > LONGEST {
        let hash = checksum(file.as_bytes());
        file.truncate(LONGEST - 17);
        file.push('~');
        file.push_str(&format!("{hash:016x}"));
    }
    file
}

/// Whether the file may be one of a line in the scope; one that was cut has to be opened to know.
pub(super) fn may_include(namespace: &str, scope: &Scope, file: &str) -> bool {
    match scope {
        Scope::Line(name) => file == file_name(namespace, name.as_str()),
        Scope::Prefix(start) => {
            let mut start = prefix(namespace, start);
            start.truncate(LONGEST - 17);
            file.starts_with(&start)
        }
    }
}

/// `namespace,name`, with `%xx` for what is neither letter, digit, `-` nor `_`.
fn prefix(namespace: &str, name: &str) -> String {
    const HEX: &[u8; 16] = b"0123456789abcdef";
    let mut file = String::with_capacity(namespace.len() + name.len() + 8);
    for (text, end) in [(namespace, ","), (name, "")] {
        for byte in text.bytes() {
            if byte.is_ascii_alphanumeric() || b"-_".contains(&byte) {
                file.push(char::from(byte));
            } else {
                file.push('%');
                file.push(char::from(HEX[usize::from(byte >> 4)]));
                file.push(char::from(HEX[usize::from(byte & 15)]));
            }
        }
        file.push_str(end);
    }
    file
}

/// FNV-1a by words: tells a torn or edited file from a whole one.
pub(super) fn checksum(bytes: &[u8]) -> u64 {
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325 ^ bytes.len() as u64;
    let mut mix = |word: u64| {
        hash = (hash ^ word).wrapping_mul(0x0100_0000_01b3);
        hash ^= hash >> 29;
    };
    let (words, rest) = bytes.as_chunks::<8>();
    words.iter().for_each(|word| mix(u64::from_le_bytes(*word)));
    rest.iter().for_each(|byte| mix(u64::from(*byte)));
    hash
}
