//! Spans that a gateway sends to a collector.

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::collector::{Collector, PARENT, TRACE, hex, text};
use crate::serving::Served;

/// Claims `name`, and returns the answer.
fn claim(served: &Served, name: &str, trace: &str) -> Value {
    let body = json!({"name": name}).to_string();
    let head = format!("traceparent: {trace}\r\n");
    let (status, said) = served.ask("operator", "POST", "/v1/claims", &head, &body);
    assert_eq!(status, 200, "{said}");
    serde_json::from_str(&said).unwrap()
}

/// Ends the session of a claim, so that there is nothing to drain.
fn end(served: &Served, claim: &Value) {
    let secret = claim["session"]["secret"].as_str().unwrap();
    let head = format!("palisade-session: {secret}\r\n");
    let (status, said) = served.ask("operator", "DELETE", "/v1/sessions", &head, "");
    assert_eq!(status, 200, "{said}");
}

#[test]
fn a_request_is_a_span_of_the_trace_that_it_came_in() {
    let collector = Collector::start();
    let served = Served::start_with(&[
        ("OTEL_EXPORTER_OTLP_ENDPOINT", &collector.url),
        ("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=shop"),
        ("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test"),
        ("OTEL_BSP_SCHEDULE_DELAY", "50"),
    ]);
    let held = claim(&served, "billing/a", &format!("00-{TRACE}-{PARENT}-01"));
    let acquire = collector.span("acquire", ("palisade.lock", "billing/a"));
    let request = collector.span("POST /v1/claims", ("http.route", "/v1/claims"));
    assert_eq!(hex(&request.trace_id), TRACE);
    assert_eq!(hex(&request.parent_span_id), PARENT);
    assert_eq!(text(&request, "http.response.status_code"), "200");
    assert_eq!(text(&request, "palisade.principal"), "operator");
    assert_eq!(request.kind, 2, "a server's");
    assert_eq!(hex(&acquire.trace_id), TRACE);
    assert_eq!(acquire.parent_span_id, request.span_id);
    assert_eq!(text(&acquire, "palisade.outcome"), "held");
    assert_eq!(text(&acquire, "palisade.token"), held["token"]);

    // A request without a valid trace starts a new one.
    for (name, trace) in [("none", ""), ("false", "00-0-0-01")] {
        claim(&served, name, trace);
        let acquire = collector.span("acquire", ("palisade.lock", name));
        assert_ne!(hex(&acquire.trace_id), TRACE);
        let spans = collector.spans();
        let request = spans.iter().find(|it| it.span_id == acquire.parent_span_id);
        assert!(request.is_none_or(|it| it.parent_span_id.is_empty()));
    }
    // A request that is not sampled is not sent, and health checks are not traced.
    claim(&served, "unsampled", &format!("00-{TRACE}-{PARENT}-00"));
    served.ask("operator", "GET", "/healthz", "", "");
    let missing = "/v1/lines?name=a&prefix=b";
    assert_eq!(served.ask("operator", "GET", missing, "", "").0, 400);
    collector.span("GET /v1/lines", ("http.response.status_code", "400"));
    for span in collector.spans() {
        assert_ne!(text(&span, "palisade.lock"), "unsampled");
        assert!(!span.name.contains("healthz"), "{}", span.name);
    }
    for batch in collector.got.lock().iter() {
        assert!(batch.head.starts_with("post /v1/traces http/1.1"));
        assert!(batch.head.contains("x-tenant: shop"), "{}", batch.head);
        let resource = batch.request.resource_spans[0].resource.as_ref().unwrap();
        let resource = format!("{resource:?}");
        assert!(resource.contains("\"palisade\""), "{resource}");
        assert!(resource.contains("deployment.environment"), "{resource}");
        let sent = String::from_utf8_lossy(&batch.body);
        let secret = held["session"]["secret"].as_str().unwrap();
        assert!(!sent.contains(secret) && !sent.contains(served.token("operator")));
    }
}

#[test]
fn the_last_spans_are_sent_at_the_end_and_a_collector_that_is_away_harms_nobody() {
    let collector = Collector::start();
    let mut served = Served::start_with(&[
        (
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
            &format!("{}/v1/traces", collector.url),
        ),
        ("OTEL_BSP_SCHEDULE_DELAY", "600000"),
    ]);
    end(&served, &claim(&served, "a", ""));
    assert!(collector.spans().is_empty(), "sent before their time");
    served.signal(Signal::TERM);
    assert_eq!(served.ended(), Some(0));
    collector.span("acquire", ("palisade.lock", "a"));

    let away = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9"),
        ("OTEL_BSP_SCHEDULE_DELAY", "10"),
    ];
    let mut served = Served::start_with(&away);
    end(&served, &claim(&served, "a", ""));
    end(&served, &claim(&served, "b", ""));
    served.signal(Signal::TERM);
    assert_eq!(served.ended(), Some(0));
}
