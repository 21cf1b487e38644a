//! Spans that a gateway sends to a collector, which implements the real protocol.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value as Any;
use opentelemetry_proto::tonic::trace::v1::Span;
use palisade_testkit::lab::launch;
use parking_lot::Mutex;
use prost::Message;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::serving::Served;
use crate::webdriver::LIMIT;

/// Collects what is sent to `/v1/traces`.
struct Collector {
    url: String,
    got: Arc<Mutex<Vec<Batch>>>,
}

struct Batch {
    head: String,
    body: Vec<u8>,
    request: ExportTraceServiceRequest,
}

impl Collector {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let got: Arc<Mutex<Vec<Batch>>> = Arc::default();
        let takes = Arc::clone(&got);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                takes.lock().push(take(stream.unwrap()));
            }
        });
        Self { url, got }
    }

    fn spans(&self) -> Vec<Span> {
        let got = self.got.lock();
        let resources = got.iter().flat_map(|batch| &batch.request.resource_spans);
        let scopes = resources.flat_map(|resource| &resource.scope_spans);
        scopes.flat_map(|scope| scope.spans.clone()).collect()
    }

    /// The span with this name and attribute.
    #[track_caller]
    fn span(&self, name: &str, (key, value): (&str, &str)) -> Span {
        let look = || {
            let mut spans = self.spans().into_iter();
            let found = spans.find(|it| it.name == name && text(it, key) == value);
            found.ok_or_else(|| format!("{name} among {:#?}", self.spans()))
        };
        launch::until(LIMIT, look).unwrap()
    }
}

fn take(mut stream: TcpStream) -> Batch {
    let mut bytes = Vec::new();
    let mut part = [0; 4096];
    let (head, body) = loop {
        let count = stream.read(&mut part).unwrap();
        assert!(count > 0, "{}", String::from_utf8_lossy(&bytes));
        bytes.extend_from_slice(&part[..count]);
        let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") else {
            continue;
        };
        let head = String::from_utf8_lossy(&bytes[..end]).to_ascii_lowercase();
        let length = head
            .lines()
            .find_map(|line| line.strip_prefix("content-length: "));
        let length: usize = length.unwrap().parse().unwrap();
        if bytes.len() >= end + 4 + length {
            break (head, bytes[end + 4..].to_vec());
        }
    };
    let answer = "HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\n\
                  content-length: 0\r\nconnection: close\r\n\r\n";
    stream.write_all(answer.as_bytes()).unwrap();
    let request = ExportTraceServiceRequest::decode(&*body).unwrap();
    Batch {
        head,
        body,
        request,
    }
}

/// An attribute as text; empty if there is none.
fn text(span: &Span, key: &str) -> String {
    let mut attributes = span.attributes.iter();
    let found = attributes.find(|attribute| attribute.key == key);
    let value = found.and_then(|attribute| attribute.value.clone()?.value);
    match value {
        Some(Any::StringValue(text)) => text,
        Some(Any::IntValue(number)) => number.to_string(),
        _ => String::new(),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b7ad6b7169203331";

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
