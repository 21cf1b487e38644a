//! The command's JSON, checked strictly: every key must be there, no other may be, and each value
//! has its type. What the keys are is `docs/command.md`'s.

use serde_json::Value;

/// What a value must be.
#[derive(Clone, Copy)]
pub(crate) enum Is {
    Text,
    /// A decimal number as text, as tokens are.
    Digits,
    /// Whole and not negative.
    Number,
    /// Any number.
    Figure,
    Bool,
    /// RFC 3339.
    Time,
    OneOf(&'static [&'static str]),
    /// Null, or this.
    Maybe(&'static Is),
    List(&'static Is),
    Object(&'static [(&'static str, Is)]),
    /// An object with one key more.
    With(&'static Is, &'static str, &'static Is),
}

use Is::*;

const MODE: Is = OneOf(&["exclusive", "shared", "permits"]);

const HOLDER: Is = Object(&[
    ("id", Text),
    ("owner", Maybe(&Text)),
    ("host", Maybe(&Text)),
    ("pid", Maybe(&Number)),
    ("label", Maybe(&Text)),
    ("weight", Number),
    ("mode", MODE),
    ("token", Maybe(&Digits)),
    ("since", Maybe(&Time)),
    ("expires_in_ms", Maybe(&Number)),
]);

/// A holder's keys, and its place in line.
const WAITER: Is = With(&HOLDER, "position", &Number);

pub(crate) const LINE: Is = Object(&[
    ("name", Text),
    ("kind", OneOf(&["lock", "permits"])),
    ("capacity", Number),
    ("holders", List(&HOLDER)),
    ("waiters", List(&WAITER)),
]);

pub(crate) const LINES: Is = List(&LINE);

pub(crate) const EVICTED: Is =
    Object(&[("name", Text), ("forced", Bool), ("evicted", List(&HOLDER))]);

pub(crate) const LEADER: Is = Object(&[
    ("name", Text),
    (
        "leader",
        Maybe(&Object(&[
            ("value", Maybe(&Text)),
            ("owner", Maybe(&Text)),
            ("host", Maybe(&Text)),
            ("pid", Maybe(&Number)),
            ("token", Digits),
            ("since", Maybe(&Time)),
        ])),
    ),
]);

pub(crate) const FENCE: Is = Object(&[
    ("name", Text),
    ("token", Digits),
    ("verdict", OneOf(&["current", "stale"])),
    ("highest", Maybe(&Digits)),
    ("accepted", Bool),
]);

const SETTING: Is = Object(&[
    ("value", Maybe(&Text)),
    (
        "from",
        OneOf(&["flag", "environment", "url", "file", "default"]),
    ),
]);

pub(crate) const CONFIG: Is = Object(&[
    ("path", Maybe(&Text)),
    ("url", SETTING),
    ("ttl", SETTING),
    ("wait", SETTING),
    ("label", SETTING),
    ("for_correctness", SETTING),
]);

pub(crate) const CONFIG_PATH: Is = Object(&[("path", Maybe(&Text)), ("searched", List(&Text))]);

pub(crate) const COMPLETIONS: Is = Object(&[("shell", Text), ("script", Text)]);

pub(crate) const PAGE: Is = Object(&[("page", Text), ("text", Text)]);

pub(crate) const WRITTEN: Is = Object(&[("written", List(&Text))]);

/// What `bench` prints.
pub(crate) const FIGURES: Is = List(&Object(&[
    ("engine", Text),
    ("scenario", Text),
    ("who", OneOf(&["palisade", "raw"])),
    ("ops_s", Figure),
    ("p50_us", Figure),
    ("p99_us", Figure),
    ("ratio_to_raw", Maybe(&Figure)),
]));

const ACCOUNT: Is = Object(&[("expected", Number), ("found", Number), ("intact", Bool)]);

/// What `demo` ends with.
pub(crate) const DEMO: Is = Object(&[
    ("ttl_ms", Number),
    ("first_token", Digits),
    ("second_token", Digits),
    ("unfenced", ACCOUNT),
    ("fenced", ACCOUNT),
    (
        "timeline",
        List(&Object(&[
            ("at_ms", Number),
            ("who", Maybe(&OneOf(&["first", "second"]))),
            ("what", Text),
        ])),
    ),
]);

const CLASS: Is = OneOf(&["A", "B", "C"]);

const CAPABILITY: Is = Object(&[
    ("shared", Bool),
    ("permits", OneOf(&["weighted", "slots", "none"])),
    ("resize", Bool),
    ("fair", Bool),
    ("waiters_visible", Bool),
    ("tokens", OneOf(&["durable", "floored", "none"])),
    ("early_loss", Bool),
    ("detached", Bool),
    ("reentrant_session", Bool),
    (
        "ttl_ms",
        Object(&[("min", Number), ("max", Number), ("step", Number)]),
    ),
]);

const FINDING: Is = Object(&[
    ("severity", OneOf(&["info", "warning", "danger"])),
    ("code", Text),
    ("message", Text),
    ("remedy", Text),
]);

/// What `doctor` prints.
pub(crate) const HEALTH: Is = Object(&[
    ("engine", Text),
    ("version", Maybe(&Text)),
    ("class", CLASS),
    ("capability", CAPABILITY),
    ("round_trip_us", Maybe(&Figure)),
    ("clock_ahead_us", Maybe(&Figure)),
    ("findings", List(&FINDING)),
]);

/// What `guide` answers.
pub(crate) const ADVICE: Is = Object(&[
    ("needs", List(&Text)),
    ("have", List(&Text)),
    ("lacking", List(&Text)),
    (
        "advice",
        Maybe(&Object(&[
            ("engine", Text),
            ("url", Text),
            ("ttl_ms", Number),
            ("class", CLASS),
            ("why", List(&Text)),
        ])),
    ),
    (
        "others",
        List(&Object(&[
            ("engine", Text),
            ("fits", Bool),
            ("why", List(&Text)),
        ])),
    ),
]);

pub(crate) const ERROR: Is = Object(&[("error", Object(&[("code", Text), ("message", Text)]))]);

/// Events on stderr, by their word.
pub(crate) fn event(word: &str) -> Is {
    const WORD: Is = Text;
    match word {
        "unreachable" | "not_released" => {
            Object(&[("event", WORD), ("name", Text), ("message", Text)])
        }
        "waiting" => Object(&[("event", WORD), ("name", Text), ("holders", List(&HOLDER))]),
        "acquired" => Object(&[
            ("event", WORD),
            ("name", Text),
            ("token", Digits),
            ("owner", Text),
            ("engine", Text),
            ("waited_ms", Number),
        ]),
        "ttl_rounded" => Object(&[
            ("event", WORD),
            ("name", Text),
            ("asked_ms", Figure),
            ("ttl_ms", Number),
        ]),
        "exposed_password" | "visible_password" => Object(&[("event", WORD), ("message", Text)]),
        "released" => Object(&[("event", WORD), ("name", Text), ("code", Number)]),
        "lost" => Object(&[
            ("event", WORD),
            ("name", Text),
            ("reason", OneOf(&["expired", "evicted", "taken"])),
        ]),
        other => panic!("there is no event {other}"),
    }
}

/// What is wrong with a value, if anything is.
pub(crate) fn breach(value: &Value, is: Is, at: &str) -> Option<String> {
    let wrong = |what: &str| Some(format!("{at} is not {what}: {value}"));
    let fits = match is {
        Text => value.is_string(),
        Number => value.is_u64(),
        Figure => value.is_number(),
        Bool => value.is_boolean(),
        Digits => value
            .as_str()
            .is_some_and(|text| text.parse::<u64>().is_ok()),
        Time => value
            .as_str()
            .is_some_and(|text| humantime::parse_rfc3339(text).is_ok()),
        OneOf(words) => value.as_str().is_some_and(|word| words.contains(&word)),
        Maybe(_) if value.is_null() => true,
        Maybe(is) => return breach(value, *is, at),
        List(is) => {
            let Some(items) = value.as_array() else {
                return wrong("a list");
            };
            let mut items = items.iter().enumerate();
            return items.find_map(|(nr, item)| breach(item, *is, &format!("{at}[{nr}]")));
        }
        With(is, key, more) => {
            let mut value = value.clone();
            let position = value.as_object_mut().and_then(|object| object.remove(key));
            let position = position.unwrap_or_default();
            let wrong = breach(&position, *more, &format!("{at}.{key}"));
            return wrong.or_else(|| breach(&value, *is, at));
        }
        Object(keys) => {
            let Some(object) = value.as_object() else {
                return wrong("an object");
            };
            if let Some(key) = object.keys().find(|key| !keys.iter().any(|k| k.0 == **key)) {
                return Some(format!("{at}.{key} is unknown"));
            }
            return keys.iter().find_map(|(key, is)| match object.get(*key) {
                None => Some(format!("{at}.{key} is missing")),
                Some(value) => breach(value, *is, &format!("{at}.{key}")),
            });
        }
    };
    match fits {
        true => None,
        false => wrong("what it must be"),
    }
}

/// Reads one JSON document, which must fit.
#[track_caller]
pub(crate) fn read(text: &str, is: Is) -> Value {
    let value: Value =
        serde_json::from_str(text).unwrap_or_else(|error| panic!("{error} in {text:?}"));
    assert_eq!(breach(&value, is, "$"), None);
    value
}

#[test]
fn the_checker_sees_what_is_missing_unknown_or_wrong() {
    let text = r#"{"name":"x","leader":null}"#;
    read(text, LEADER);
    for bad in [
        r#"{"name":"x"}"#,
        r#"{"name":"x","leader":null,"more":1}"#,
        r#"{"name":1,"leader":null}"#,
        r#"{"name":"x","leader":{}}"#,
        r#"[]"#,
    ] {
        let value: Value = serde_json::from_str(bad).unwrap();
        assert!(breach(&value, LEADER, "$").is_some(), "{bad}");
    }
    let token = |text: &str| breach(&Value::from(text), Digits, "$").is_none();
    assert!(token("7") && !token("x"));
}
