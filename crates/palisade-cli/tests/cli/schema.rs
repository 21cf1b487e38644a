//! A strict check of JSON against its shape: an unknown key, a missing key or a value of another
//! type fails. A shape is JSON too: a word such as `"string"` or `"null|integer"` for a value,
//! an array with one shape for all of its elements, an object for an object.

use serde_json::Value;

/// Fails unless `value` has this shape.
#[track_caller]
pub(crate) fn assert_shape(value: &Value, shape: &Value) {
    if let Err(wrong) = check(value, shape, "$") {
        panic!("{wrong} in {value}");
    }
}

fn check(value: &Value, shape: &Value, at: &str) -> Result<(), String> {
    match (value, shape) {
        (Value::Object(value), Value::Object(shape)) => {
            if let Some(unknown) = value.keys().find(|key| !shape.contains_key(*key)) {
                return Err(format!("{at} has the unknown key {unknown}"));
            }
            for (key, shape) in shape {
                let value = value.get(key).ok_or(format!("{at} lacks {key}"))?;
                check(value, shape, &format!("{at}.{key}"))?;
            }
            Ok(())
        }
        (Value::Array(values), Value::Array(shape)) => {
            let mut values = values.iter().enumerate();
            values.try_for_each(|(i, value)| check(value, &shape[0], &format!("{at}[{i}]")))
        }
        (value, Value::String(words)) if words.split('|').any(|word| is(value, word)) => Ok(()),
        _ => Err(format!("{at} is not {shape}")),
    }
}

fn is(value: &Value, word: &str) -> bool {
    match word {
        "null" => value.is_null(),
        "bool" => value.is_boolean(),
        "string" => value.is_string(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        // A decimal number as text.
        "token" => value
            .as_str()
            .is_some_and(|text| text.parse::<u64>().is_ok()),
        constant => value.as_str() == constant.strip_prefix('='),
    }
}

#[test]
fn the_check_can_fail() {
    use serde_json::json;
    let shape = json!({"a": "null|integer", "b": [{"c": "=x|=y"}]});
    assert_shape(&json!({"a": null, "b": [{"c": "x"}, {"c": "y"}]}), &shape);
    for wrong in [
        json!({"a": 1, "b": [], "d": 1}),
        json!({"a": 1}),
        json!({"a": 1.5, "b": []}),
        json!({"a": 1, "b": [{"c": "z"}]}),
        json!([]),
    ] {
        assert!(check(&wrong, &shape, "$").is_err(), "{wrong}");
    }
}
