//! The names of the files in `lines/`: namespace and name, encoded so that a prefix of a name is a
//! prefix of its file's name. A name that is too long for a file is truncated and ends in a hash.

use super::line_file::checksum;
use crate::fence::encode_to;
use palisade_core::report::Scope;

/// The longest file name that is not truncated; most file systems allow 255 bytes.
const LONGEST: usize = 230;
/// How much of a truncated name precedes its hash.
const KEPT: usize = LONGEST - 17;

/// The file of a line: `namespace,name`, with `%xx` for what is neither letter, digit, `-` nor `_`.
pub(super) fn file_name(namespace: &str, name: &str) -> String {
    let mut file = String::with_capacity(namespace.len() + name.len() + 8);
    encode_to(&mut file, namespace);
    file.push(',');
    encode_to(&mut file, name);
    if file.len() > LONGEST {
        let hash = checksum(file.as_bytes());
        file.truncate(KEPT);
        file.push_str(&format!("~{hash:016x}"));
    }
    file
}

/// Whether the file may belong to a line in the scope; a truncated name must be opened to know.
pub(super) fn may_include(namespace: &str, scope: &Scope, file: &str) -> bool {
    match scope {
        Scope::Line(name) => file == file_name(namespace, name.as_str()),
        Scope::Prefix(start) => {
            let start = file_name(namespace, start);
            file.starts_with(&start[..start.len().min(KEPT)])
        }
    }
}
