//! The command's JSON, checked strictly: every key is required, no other is allowed, and each value
//! has its type. `docs/command.md` documents the keys.

use serde_json::Value;

/// What a value must be: an object (`key:type …`), a list (`[type]`), one of some words (`a|b`), a
/// type of `breach`, or the name of a constant below; with a `?` it may be null.
pub(crate) type Is = &'static str;

const HOLDER: Is = "id:text owner:text? host:text? pid:number? label:text? weight:number \
    mode:exclusive|shared|permits token:digits? since:time? expires_in_ms:number?";
/// A holder's keys, and its place in line.
const WAITER: Is = "id:text owner:text? host:text? pid:number? label:text? weight:number \
    mode:exclusive|shared|permits token:digits? since:time? expires_in_ms:number? position:number";
pub(crate) const LINE: Is =
    "name:text kind:lock|permits capacity:number holders:[HOLDER] waiters:[WAITER]";
pub(crate) const LINES: Is = "[LINE]";
pub(crate) const DEADLOCKS: Is = "[DEADLOCK]";
const DEADLOCK: Is = "likely:bool gives_way:text? circle:number agents:[AGENT]";
const AGENT: Is = "agent:text owner:text host:text pid:number label:text? holds:[STUCK] \
    waits:[STUCK] behind:[number] children:[number]";
const STUCK: Is = "name:text id:text mode:exclusive|shared|permits since:time?";
pub(crate) const EVICTED: Is = "name:text forced:bool evicted:[HOLDER]";
pub(crate) const LEADER: Is = "name:text leader:LEADING?";
const LEADING: Is = "value:text? owner:text? host:text? pid:number? token:digits since:time?";
pub(crate) const HELD: Is = "name:text token:digits owner:text engine:text key:text? shell:number \
    holder:number";
pub(crate) const RELEASED: Is = "name:text released:bool";
pub(crate) const RESIZED: Is = "name:text capacity:number resized:bool";
pub(crate) const FENCE: Is =
    "name:text token:digits verdict:current|stale highest:digits? accepted:bool";
pub(crate) const CONFIG: Is = "path:text? url:SETTING ttl:SETTING wait:SETTING label:SETTING \
    for_correctness:SETTING";
const SETTING: Is = "value:text? from:flag|environment|url|file|default";
pub(crate) const CONFIG_PATH: Is = "path:text? searched:[text]";
pub(crate) const COMPLETIONS: Is = "shell:text script:text";
pub(crate) const PAGE: Is = "page:text text:text";
pub(crate) const WRITTEN: Is = "written:[text]";
pub(crate) const FIGURES: Is = "[FIGURE]";
const FIGURE: Is = "engine:text scenario:text who:palisade|raw ops_s:figure p50_us:figure \
    p99_us:figure ratio_to_raw:figure?";
pub(crate) const DEMO: Is = "ttl_ms:number first_token:digits second_token:digits \
    unfenced:BALANCE fenced:BALANCE timeline:[MOMENT]";
const BALANCE: Is = "expected:number found:number intact:bool";
const MOMENT: Is = "at_ms:number who:WHO? what:text";
const WHO: Is = "first|second";
pub(crate) const HEALTH: Is = "engine:text version:text? class:A|B|C capability:CAPABILITY \
    round_trip_us:figure? clock_ahead_us:figure? findings:[FINDING]";
const CAPABILITY: Is = "shared:bool permits:weighted|slots|none resize:bool fair:bool \
    waiters_visible:bool tokens:durable|floored|none early_loss:bool detached:bool \
    ends_with:lease|process reentrant_session:bool ttl_ms:TTL";
const TTL: Is = "min:number max:number step:number";
const FINDING: Is = "severity:info|warning|danger code:text message:text remedy:text";
pub(crate) const ADVICE: Is =
    "needs:[text] have:[text] lacking:[text] advice:ADVISED? others:[OTHER]";
const ADVISED: Is = "engine:text url:text ttl_ms:number class:A|B|C? why:[text]";
const OTHER: Is = "engine:text fits:bool why:[text]";
pub(crate) const PUSHED: Is = "queue:text id:text duplicate:bool";
pub(crate) const QUEUES: Is = "[QUEUE]";
pub(crate) const QUEUE: Is = "name:text ready:number delayed:number claimed:number blocked:number \
    dead:number oldest_ms:number?";
pub(crate) const MESSAGES: Is = "[MESSAGE]";
pub(crate) const MESSAGE: Is = "id:text key:text? state:ready|delayed|claimed|blocked|dead attempts:number \
    pushed:time changes_in_ms:number? token:digits? owner:text? host:text? pid:number? why:text? \
    size:number";
/// A message's keys, and its body.
pub(crate) const MESSAGE_AND_BODY: Is = "id:text key:text? \
    state:ready|delayed|claimed|blocked|dead attempts:number \
    pushed:time changes_in_ms:number? token:digits? owner:text? host:text? pid:number? why:text? \
    size:number body:text? body_base64:text?";
pub(crate) const ERROR: Is = "error:CAUSE";
const CAUSE: Is = "code:text message:text";

fn named(name: &str) -> Is {
    match name {
        "HOLDER" => HOLDER,
        "WAITER" => WAITER,
        "LINE" => LINE,
        "DEADLOCK" => DEADLOCK,
        "AGENT" => AGENT,
        "STUCK" => STUCK,
        "LEADING" => LEADING,
        "SETTING" => SETTING,
        "FIGURE" => FIGURE,
        "BALANCE" => BALANCE,
        "MOMENT" => MOMENT,
        "WHO" => WHO,
        "CAPABILITY" => CAPABILITY,
        "TTL" => TTL,
        "FINDING" => FINDING,
        "ADVISED" => ADVISED,
        "OTHER" => OTHER,
        "QUEUE" => QUEUE,
        "MESSAGE" => MESSAGE,
        "CAUSE" => CAUSE,
        other => panic!("there is no type {other}"),
    }
}

/// Events on stderr, by their word.
pub(crate) fn event(word: &str) -> Is {
    match word {
        "unreachable" | "not_released" => "event:text name:text message:text",
        "waiting" => "event:text name:text holders:[HOLDER] message:text?",
        "acquired" => "event:text name:text token:digits owner:text engine:text waited_ms:number",
        "ttl_rounded" => "event:text name:text asked_ms:figure ttl_ms:number",
        "exposed_password" | "no_traces" | "visible_password" => "event:text message:text",
        "released" => "event:text name:text code:number",
        "deadlock" => "event:text name:text likely:bool circle:text",
        "lost" => "event:text name:text reason:expired|evicted|taken",
        other => panic!("there is no event {other}"),
    }
}

/// Events of `queue work` on stderr, by their word.
pub(crate) fn queue_event(word: &str) -> Is {
    match word {
        "unreachable" => "event:text queue:text message:text",
        "claimed" => "event:text queue:text id:text key:text? attempt:number token:digits",
        "done" | "released" => "event:text queue:text id:text",
        "failed" => "event:text queue:text id:text code:number again_in_ms:number? dead:bool",
        "lost" => "event:text queue:text id:text reason:expired|evicted|taken",
        "not_settled" => "event:text queue:text id:text message:text",
        "draining" => "event:text queue:text running:number",
        "left" => {
            "event:text queue:text ready:number delayed:number claimed:number blocked:number \
             dead:number"
        }
        other => panic!("there is no event {other}"),
    }
}

/// What is wrong with a value, if anything is.
fn breach(value: &Value, is: &str, at: &str) -> Option<String> {
    let wrong = |what: &str| Some(format!("{at} is not {what}: {value}"));
    let text = value.as_str();
    if is.contains(':') {
        let Some(object) = value.as_object() else {
            return wrong("an object");
        };
        let keys = is.split_whitespace().filter_map(|key| key.split_once(':'));
        if let Some(key) = object
            .keys()
            .find(|key| keys.clone().all(|(known, _)| known != *key))
        {
            return Some(format!("{at}.{key} is unknown"));
        }
        return keys.clone().find_map(|(key, is)| match object.get(key) {
            None => Some(format!("{at}.{key} is missing")),
            Some(value) => breach(value, is, &format!("{at}.{key}")),
        });
    }
    if let Some(is) = is.strip_suffix('?') {
        return breach(value, is, at).filter(|_| !value.is_null());
    }
    if let Some(is) = is.strip_prefix('[').and_then(|is| is.strip_suffix(']')) {
        let Some(items) = value.as_array() else {
            return wrong("a list");
        };
        let mut items = items.iter().enumerate();
        return items.find_map(|(nr, item)| breach(item, is, &format!("{at}[{nr}]")));
    }
    let fits = match is {
        "text" => text.is_some(),
        // A decimal number as text, as tokens are.
        "digits" => text.is_some_and(|text| text.parse::<u64>().is_ok()),
        "time" => text.is_some_and(|text| humantime::parse_rfc3339(text).is_ok()),
        // Whole and not negative.
        "number" => value.is_u64(),
        "figure" => value.is_number(),
        "bool" => value.is_boolean(),
        words if words.contains('|') => {
            text.is_some_and(|text| words.split('|').any(|w| w == text))
        }
        name => return breach(value, named(name), at),
    };
    if fits { None } else { wrong(is) }
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
    read(r#"{"name":"x","leader":null}"#, LEADER);
    for (bad, is) in [
        (r#"{"name":"x"}"#, LEADER),
        (r#"{"name":"x","leader":null,"more":1}"#, LEADER),
        (r#"{"name":1,"leader":null}"#, LEADER),
        (r#"{"name":"x","leader":{}}"#, LEADER),
        ("[]", LEADER),
        ("[1]", LINES),
        ("{}", LINES),
        (r#""third""#, WHO),
        (r#""x""#, "digits"),
        (r#""tomorrow""#, "time"),
        ("-1", "number"),
        ("null", "text"),
    ] {
        let value: Value = serde_json::from_str(bad).unwrap();
        assert!(breach(&value, is, "$").is_some(), "{bad}");
    }
}
