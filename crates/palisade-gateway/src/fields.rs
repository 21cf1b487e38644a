//! Names the field of a document that is not as expected, without a word of what was sent: a secret
//! may be in the wrong place.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// The longest name of an unknown field that is repeated: shorter than any secret.
const LONGEST: usize = 24;

/// What is wrong with `document`, which is no `T`.
pub(crate) fn explain<T: DeserializeOwned>(document: &Value) -> String {
    let Value::Object(fields) = document else {
        return "the document must be an object".into();
    };
    for (name, value) in fields {
        let alone = Value::Object(Map::from_iter([(name.clone(), value.clone())]));
        let Some(error) = error::<T>(alone) else {
            continue;
        };
        if error.starts_with("unknown field") {
            let name = if is_plain(name) {
                format!("`{name}` is no field")
            } else {
                "there is an unknown field".into()
            };
            return match expected(&error) {
                Some(known) => format!("{name} of this document, which has {known}"),
                None => format!("{name} of this document"),
            };
        }
        // The fields that are missing here may be among the others.
        if !error.starts_with("missing field") {
            return match expected(&error) {
                Some("u32") => format!("the field `{name}` must be a whole number"),
                Some("a sequence") => format!("the field `{name}` must be a list"),
                Some(expected) => format!("the field `{name}` must be {expected}"),
                None => format!("the field `{name}` is not as described"),
            };
        }
    }
    match error::<T>(document.clone()) {
        // "missing field `name`", in the parser's words.
        Some(error) if error.starts_with("missing field") => format!("there is a {error}"),
        _ => "a field is there twice, or two do not fit together".into(),
    }
}

fn error<T: DeserializeOwned>(document: Value) -> Option<String> {
    let error = serde_json::from_value::<T>(document).err();
    error.map(|error| error.to_string())
}

/// What the parser expected; these words are the last of its message, after those that may repeat
/// what was sent.
fn expected(error: &str) -> Option<&str> {
    let (_, expected) = error.rsplit_once(", expected ")?;
    Some(expected)
}

fn is_plain(name: &str) -> bool {
    name.len() <= LONGEST
        && name
            .bytes()
            .all(|byte| byte.is_ascii_lowercase() || byte == b'_')
}
