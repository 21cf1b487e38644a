//! The description of the API, OpenAPI 3.1. It is written by hand; tests compare it with the
//! routes and with the codes of failures, and use it to fuzz the gateway.

/// The document.
pub(crate) const DOCUMENT: &str = include_str!("openapi.json");

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use palisade::ErrorKind;
    use serde_json::Value;

    use super::*;
    use crate::routes::ROUTES;

    fn document() -> Value {
        serde_json::from_str(DOCUMENT).unwrap()
    }

    #[test]
    fn it_describes_every_route_and_no_other() {
        let document = document();
        let paths = document["paths"].as_object().unwrap();
        let described: BTreeSet<(String, &str)> = paths
            .iter()
            .flat_map(|(path, item)| {
                let methods = item.as_object().unwrap().keys();
                methods.map(|method| (method.to_uppercase(), path.as_str()))
            })
            .collect();
        let served: BTreeSet<(String, &str)> = ROUTES
            .iter()
            .map(|(method, path)| (String::from(*method), *path))
            .collect();
        assert_eq!(described, served);
    }

    /// Every value of a field `code` in the sources, as far as it is written there.
    #[test]
    fn it_has_every_word_for_a_failure() {
        let document = document();
        let codes = &document["components"]["schemas"]["Problem"]["properties"]["code"]["enum"];
        let described: BTreeSet<&str> = codes
            .as_array()
            .unwrap()
            .iter()
            .map(|code| code.as_str().unwrap())
            .collect();
        for kind in ErrorKind::ALL {
            assert!(described.contains(kind.code()), "{}", kind.code());
        }
    }

    #[test]
    fn every_reference_leads_somewhere() {
        fn look(document: &Value, at: &Value) {
            match at {
                Value::Object(fields) => {
                    if let Some(target) = fields.get("$ref").and_then(Value::as_str) {
                        let target = target.strip_prefix('#').unwrap();
                        assert!(document.pointer(target).is_some(), "{target}");
                    }
                    fields.values().for_each(|value| look(document, value));
                }
                Value::Array(values) => values.iter().for_each(|value| look(document, value)),
                _ => {}
            }
        }
        let document = document();
        look(&document, &document);
    }
}
