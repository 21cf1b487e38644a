//! The fake API server answers as kube-apiserver does: a test for every row of the table that was
//! measured on v1.36.4 (the main rows also on v1.20.2).

use std::collections::BTreeMap;

use palisade_testkit::lab::launch::apiserver::{ApiServer, Fault, Grant, NAMESPACE, Rule};
use serde_json::{Value, json};

use crate::util::server;

fn path(name: &str) -> String {
    let slash = if name.is_empty() { "" } else { "/" };
    format!("/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases{slash}{name}")
}

/// Sends a request: returns status, reason and body.
fn ask(server: &ApiServer, method: &str, name: &str, body: &Value) -> (u16, String, Value) {
    let (code, _, body) = server.ask(method, &path(name), body);
    let reason = body["reason"].as_str().unwrap_or("").to_owned();
    (code, reason, body)
}

fn post(server: &ApiServer, body: &Value) -> (u16, String, Value) {
    ask(server, "POST", "", body)
}

fn put(server: &ApiServer, body: &Value) -> (u16, String, Value) {
    let name = body["metadata"]["name"].as_str().unwrap();
    ask(server, "PUT", name, body)
}

fn get(server: &ApiServer, name: &str) -> Value {
    ask(server, "GET", name, &Value::Null).2
}

fn fresh(name: &str) -> Value {
    json!({ "metadata": { "name": name }, "spec": { "holderIdentity": "a", "leaseDurationSeconds": 15 } })
}

fn created(server: &ApiServer, name: &str) -> Value {
    let (code, _, lease) = post(server, &fresh(name));
    assert_eq!(code, 201);
    lease
}

/// The same object with another holder.
fn held_by(lease: &Value, holder: &str) -> Value {
    let mut lease = lease.clone();
    lease["spec"]["holderIdentity"] = holder.into();
    lease
}

fn without(lease: &Value, field: &str) -> Value {
    let mut lease = lease.clone();
    lease["metadata"].as_object_mut().unwrap().remove(field);
    lease
}

fn version(lease: &Value) -> u64 {
    lease["metadata"]["resourceVersion"]
        .as_str()
        .unwrap()
        .parse()
        .unwrap()
}

fn is(answer: &(u16, String, Value), code: u16, reason: &str) {
    assert_eq!(
        (answer.0, answer.1.as_str()),
        (code, reason),
        "{}",
        answer.2
    );
}

#[test]
fn get_missing_is_not_found() {
    let server = server();
    is(&ask(&server, "GET", "x", &Value::Null), 404, "NotFound");
}

#[test]
fn post_new_is_created_with_the_object() {
    let server = server();
    let lease = created(&server, "x");
    assert!(version(&lease) > 0 && lease["metadata"]["uid"].is_string());
    assert!(lease["metadata"]["managedFields"].is_array());
    assert!(lease["metadata"].get("generation").is_none());
}

#[test]
fn post_existing_already_exists() {
    let server = server();
    created(&server, "x");
    is(&post(&server, &fresh("x")), 409, "AlreadyExists");
}

#[test]
fn put_with_the_right_version_has_a_new_one() {
    let server = server();
    let lease = created(&server, "x");
    let answer = put(&server, &held_by(&lease, "b"));
    is(&answer, 200, "");
    assert!(version(&answer.2) > version(&lease));
}

#[test]
fn put_with_a_stale_version_is_a_conflict() {
    let server = server();
    let lease = created(&server, "x");
    put(&server, &held_by(&lease, "b"));
    is(&put(&server, &held_by(&lease, "c")), 409, "Conflict");
}

#[test]
fn put_without_a_version_is_invalid_if_there_is_a_lease() {
    let server = server();
    let lease = created(&server, "x");
    is(
        &put(&server, &without(&lease, "resourceVersion")),
        422,
        "Invalid",
    );
    let mut zero = lease;
    zero["metadata"]["resourceVersion"] = "0".into();
    is(&put(&server, &zero), 422, "Invalid");
}

#[test]
fn put_without_a_version_creates_what_is_missing() {
    let server = server();
    is(&put(&server, &fresh("x")), 201, "");
}

#[test]
fn put_with_an_old_version_and_no_uid_resurrects() {
    let server = server();
    let lease = created(&server, "x");
    server.delete("x");
    let answer = put(&server, &without(&held_by(&lease, "b"), "uid"));
    is(&answer, 201, "");
    assert_ne!(answer.2["metadata"]["uid"], lease["metadata"]["uid"]);
}

#[test]
fn put_with_uid_on_a_deleted_lease_is_a_conflict() {
    let server = server();
    let lease = created(&server, "x");
    server.delete("x");
    is(&put(&server, &held_by(&lease, "b")), 409, "Conflict");
    is(&ask(&server, "GET", "x", &Value::Null), 404, "NotFound");
}

#[test]
fn put_on_a_recreated_lease_is_a_conflict_with_or_without_uid() {
    let server = server();
    let lease = created(&server, "x");
    server.delete("x");
    created(&server, "x");
    is(&put(&server, &lease), 409, "Conflict");
    is(&put(&server, &without(&lease, "uid")), 409, "Conflict");
}

#[test]
fn put_with_the_right_version_and_a_wrong_uid_is_a_conflict() {
    let server = server();
    let mut lease = created(&server, "x");
    lease["metadata"]["uid"] = "00000000-0000-4000-8000-00000000dead".into();
    is(&put(&server, &lease), 409, "Conflict");
}

#[test]
fn put_of_the_same_content_changes_nothing() {
    let server = server();
    let lease = created(&server, "x");
    let answer = put(&server, &lease);
    is(&answer, 200, "");
    assert_eq!(version(&answer.2), version(&lease));
    // This also applies without the fields that the server fills in.
    let answer = put(&server, &without(&lease, "managedFields"));
    assert_eq!(version(&answer.2), version(&lease));
}

#[test]
fn a_version_that_is_no_number_and_a_post_with_one_are_client_bugs() {
    let server = server();
    let mut lease = created(&server, "x");
    lease["metadata"]["resourceVersion"] = "abc".into();
    is(&put(&server, &lease), 500, "");
    let mut new = fresh("y");
    new["metadata"]["resourceVersion"] = "7".into();
    is(&post(&server, &new), 500, "");
}

#[test]
fn put_under_another_name_is_a_bad_request() {
    let server = server();
    let lease = created(&server, "x");
    assert_eq!(ask(&server, "PUT", "y", &lease).0, 400);
}

fn patch(server: &ApiServer, media: &str, body: &Value) -> (u16, String, Value) {
    let media = format!("application/{media}");
    let (code, _, body) = server.ask_as(None, &media, "PATCH", &path("x"), body);
    let reason = body["reason"].as_str().unwrap_or("").to_owned();
    (code, reason, body)
}

#[test]
fn a_merge_patch_without_a_version_wins() {
    let server = server();
    created(&server, "x");
    let answer = patch(
        &server,
        "merge-patch+json",
        &json!({ "spec": { "holderIdentity": "c" } }),
    );
    is(&answer, 200, "");
    assert_eq!(get(&server, "x")["spec"]["holderIdentity"], "c");
}

#[test]
fn a_merge_patch_with_a_stale_version_is_a_conflict() {
    let server = server();
    let lease = created(&server, "x");
    put(&server, &held_by(&lease, "b"));
    let stale = json!({ "metadata": { "resourceVersion": lease["metadata"]["resourceVersion"] } });
    is(&patch(&server, "merge-patch+json", &stale), 409, "Conflict");
}

#[test]
fn a_json_patch_whose_test_fails_is_invalid() {
    let server = server();
    created(&server, "x");
    let test = json!([{ "op": "test", "path": "/spec/holderIdentity", "value": "z" }]);
    is(&patch(&server, "json-patch+json", &test), 422, "Invalid");
}

#[test]
fn patching_what_is_missing_is_not_found_but_applying_creates() {
    let server = server();
    let spec = json!({ "spec": { "holderIdentity": "c" } });
    is(&patch(&server, "merge-patch+json", &spec), 404, "NotFound");
    is(&patch(&server, "apply-patch+yaml", &spec), 201, "");
}

#[test]
fn delete_with_wrong_preconditions_is_a_conflict() {
    let server = server();
    let lease = created(&server, "x");
    for (field, wrong) in [
        ("uid", "00000000-0000-4000-8000-00000000dead"),
        ("resourceVersion", "1"),
    ] {
        let body = json!({ "preconditions": { field: wrong } });
        is(&ask(&server, "DELETE", "x", &body), 409, "Conflict");
    }
    let metadata = &lease["metadata"];
    let right = json!({ "preconditions": { "uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"] } });
    assert_eq!(ask(&server, "DELETE", "x", &right).0, 200);
}

#[test]
fn delete_answers_with_a_status_and_then_not_found() {
    let server = server();
    created(&server, "x");
    let (code, _, body) = ask(&server, "DELETE", "x", &json!({}));
    assert_eq!((code, &body["kind"]), (200, &json!("Status")));
    is(&ask(&server, "DELETE", "x", &json!({})), 404, "NotFound");
}

#[test]
fn delete_with_finalizers_leaves_the_object() {
    let server = server();
    let mut lease = fresh("x");
    lease["metadata"]["finalizers"] = json!(["example.org/hold"]);
    assert_eq!(post(&server, &lease).0, 201);
    let (code, _, body) = ask(&server, "DELETE", "x", &json!({}));
    assert_eq!((code, &body["kind"]), (200, &json!("Lease")));
    assert!(body["metadata"]["deletionTimestamp"].is_string());
    // Renewals still work, but creation does not.
    is(&put(&server, &held_by(&get(&server, "x"), "b")), 200, "");
    is(&post(&server, &fresh("x")), 409, "AlreadyExists");
}

/// Four concurrent requests, sixty times: how often each pair of code and reason was answered.
fn race(
    request: impl Fn(&ApiServer, &str) -> (u16, String, Value) + Sync,
) -> Vec<BTreeMap<(u16, String), usize>> {
    let server = server();
    let rounds = 0..60;
    let round = |round| {
        let (server, request) = (&server, &request);
        let name = format!("x{round}");
        std::thread::scope(|scope| {
            let one = || {
                let (code, reason, _) = request(server, &name);
                (code, reason)
            };
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(one)).collect();
            let mut answers = BTreeMap::new();
            for thread in threads {
                *answers.entry(thread.join().unwrap()).or_default() += 1;
            }
            answers
        })
    };
    rounds.map(round).collect()
}

#[test]
fn of_four_posts_one_creates() {
    let expected = [
        ((201, String::new()), 1),
        ((409, "AlreadyExists".to_owned()), 3),
    ];
    for answers in race(|server, name| post(server, &fresh(name))) {
        assert_eq!(answers, expected.clone().into());
    }
}

#[test]
fn of_four_puts_without_a_version_one_creates() {
    let expected = [((201, String::new()), 1), ((422, "Invalid".to_owned()), 3)];
    for answers in race(|server, name| put(server, &fresh(name))) {
        assert_eq!(answers, expected.clone().into());
    }
}

#[test]
fn times_have_six_digits() {
    let server = server();
    let time = |time: &str| {
        let mut lease = fresh(&format!("t{}", server.leases().len()));
        lease["spec"]["renewTime"] = time.into();
        let (code, _, body) = post(&server, &lease);
        (code, body["spec"]["renewTime"].clone())
    };
    let right = "2026-01-02T03:04:05.123456Z";
    assert_eq!(time(right), (201, right.into()));
    assert_eq!(
        time("2026-01-02T05:04:05.123456+02:00"),
        (201, right.into())
    );
    for bad in [
        "2026-01-02T03:04:05Z",
        "2026-01-02T03:04:05.123Z",
        "2026-01-02T03:04:05.123456789Z",
        "2026-01-02t03:04:05.123456z",
        "",
    ] {
        assert_eq!(time(bad).0, 400, "{bad}");
    }
    let mut lease = fresh("absent");
    lease["spec"]["renewTime"] = Value::Null;
    let (code, _, body) = post(&server, &lease);
    assert_eq!((code, body["spec"].get("renewTime")), (201, None));
}

#[test]
fn numbers_names_and_annotations_have_bounds() {
    let server = server();
    let number = |field: &str, number: Value| {
        let mut lease = fresh(&format!("n{}", server.leases().len()));
        lease["spec"][field] = number;
        post(&server, &lease).0
    };
    for (value, code) in [
        (json!(1), 201),
        (json!(0), 422),
        (json!(-1), 422),
        (json!(1.5), 400),
        (json!(2_147_483_648_i64), 400),
    ] {
        assert_eq!(
            number("leaseDurationSeconds", value.clone()),
            code,
            "{value}"
        );
    }
    assert_eq!(number("leaseTransitions", json!(-1)), 422);
    for bad in ["A", "a_b", "a:b", "a/b", "-a", &"a".repeat(254)] {
        assert_eq!(post(&server, &fresh(bad)).0, 422, "{bad}");
    }
    let mut lease = fresh("long-holder");
    lease["spec"]["holderIdentity"] = "x".repeat(100_000).into();
    assert_eq!(post(&server, &lease).0, 201);
    let mut lease = fresh("annotated");
    lease["metadata"]["annotations"] = json!({ "a": "x".repeat(256 * 1024) });
    assert_eq!(post(&server, &lease).0, 422);
    // Unknown fields of a Lease are dropped, and another API version is refused.
    let mut lease = fresh("odd");
    lease["spec"]["strategy"] = "OldestEmulationVersion".into();
    lease["apiVersion"] = "coordination.k8s.io/v1".into();
    assert!(post(&server, &lease).2["spec"].get("strategy").is_none());
    lease["apiVersion"] = "coordination.k8s.io/v1beta1".into();
    assert_eq!(post(&server, &lease).0, 400);
}

#[test]
fn throttling_is_plain_text_and_nothing_is_executed() {
    let server = server();
    server.inject(Rule::always(Fault::TooMany { retry_after: 4 }).times(1));
    let (code, head, body) = server.ask("POST", &path(""), &fresh("x"));
    assert_eq!(code, 429);
    assert!(
        head.contains("retry-after: 4") && head.contains("text/plain"),
        "{head}"
    );
    assert_eq!(body, "Too many requests, please try again later.\n");
    assert_eq!(server.lease("x"), None);
}

#[test]
fn ambiguous_answers_have_no_kind_and_may_have_been_applied() {
    let server = server();
    for (name, code, applied) in [("a", 504, true), ("b", 504, false), ("c", 500, true)] {
        server.inject(Rule::always(Fault::Ambiguous { code, applied }).times(1));
        let (answered, _, body) = server.ask("POST", &path(""), &fresh(name));
        assert_eq!((answered, body.get("kind")), (code, None));
        assert_eq!(server.lease(name).is_some(), applied);
    }
}

#[test]
fn namespaces_that_are_missing_or_dying_are_told_apart() {
    let server = server();
    let elsewhere = "/apis/coordination.k8s.io/v1/namespaces/nosuch/leases";
    let (code, _, body) = server.ask("POST", elsewhere, &fresh("x"));
    assert_eq!(
        (code, &body["details"]["kind"]),
        (404, &json!("namespaces"))
    );
    let lease = created(&server, "x");
    server.terminate_namespace();
    let (code, reason, body) = post(&server, &fresh("y"));
    assert_eq!((code, reason.as_str()), (403, "Forbidden"));
    assert_eq!(
        body["details"]["causes"][0]["reason"],
        "NamespaceTerminating"
    );
    is(&put(&server, &held_by(&lease, "b")), 200, "");
}

#[test]
fn tokens_and_roles_are_asked_for() {
    let server = server();
    let mut one = Grant::of("one", &["get", "create", "update"]);
    one.names = vec!["x".into()];
    let updates = Grant::of("updates", &["update"]);
    server.grant(vec![Grant::all("root"), one, updates]);
    let ask = |token: Option<&str>, method: &str, name: &str, body: &Value| {
        server
            .ask_as(token, "application/json", method, &path(name), body)
            .0
    };
    let none = Value::Null;
    assert_eq!(ask(Some("unknown"), "GET", "x", &none), 401);
    // An anonymous request may do nothing.
    assert_eq!(ask(None, "GET", "x", &none), 403);
    assert_eq!(ask(Some("root"), "GET", "x", &none), 404);
    // A role for a single name can't POST, but PUT creates by name, with both permissions.
    assert_eq!(ask(Some("one"), "POST", "", &fresh("x")), 403);
    assert_eq!(ask(Some("updates"), "PUT", "x", &fresh("x")), 403);
    assert_eq!(ask(Some("one"), "PUT", "x", &fresh("x")), 201);
    assert_eq!(ask(Some("one"), "PUT", "y", &fresh("y")), 403);
    assert_eq!(ask(Some("one"), "GET", "", &none), 403);
    let review = json!({ "spec": { "resourceAttributes": { "verb": "delete" } } });
    let path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
    for (token, allowed) in [("root", true), ("updates", false)] {
        let (code, _, body) = server.ask_as(Some(token), "application/json", "POST", path, &review);
        assert_eq!((code, &body["status"]["allowed"]), (201, &json!(allowed)));
    }
}

#[test]
fn lists_have_pages_and_items_without_kind() {
    let server = server();
    for name in ["a", "b", "c"] {
        created(&server, name);
    }
    let list = |query: &str| {
        server
            .ask("GET", &format!("{}?{query}", path("")), &Value::Null)
            .2
    };
    let first = list("limit=2");
    assert_eq!(first["items"].as_array().unwrap().len(), 2);
    assert!(first["items"][0].get("kind").is_none());
    let more = first["metadata"]["continue"].as_str().unwrap();
    let rest = list(&format!("limit=2&continue={more}"));
    assert_eq!(rest["items"][0]["metadata"]["name"], "c");
    assert_eq!(rest["metadata"]["continue"], "");
    let one = list("fieldSelector=metadata.name%3Db");
    assert_eq!(one["items"].as_array().unwrap().len(), 1);
    let (code, ..) = server.ask(
        "GET",
        &format!("{}?fieldSelector=spec.holderIdentity%3Da", path("")),
        &Value::Null,
    );
    assert_eq!(code, 400);
}

#[test]
fn a_version_that_is_not_reached_is_too_large() {
    let server = server();
    let lease = created(&server, "x");
    let ahead = format!("{}?resourceVersion={}", path("x"), version(&lease) + 100);
    let (code, head, body) = server.ask("GET", &ahead, &Value::Null);
    assert_eq!((code, &body["reason"]), (504, &json!("Timeout")));
    assert!(head.contains("retry-after: 1"), "{head}");
}
