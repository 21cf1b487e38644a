//! `Spans`: the spans of `run`, `elect` and `queue work`, if there is a tracer.
//!
//! Each wait and each hold or message has a span, a child of the span that `TRACEPARENT` names.
//! Without that variable a hold is a child of its wait, so that the two are one trace. A command gets
//! the span of its hold or message as `TRACEPARENT`.

use std::collections::HashMap;
use std::sync::Arc;

use opentelemetry::global::{BoxedSpan, BoxedTracer};
use opentelemetry::propagation::TextMapPropagator;
use opentelemetry::trace::{Span, SpanBuilder, Status, TraceContextExt, Tracer};
use opentelemetry::{Context, KeyValue, Value};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use palisade::queue::Message;
use palisade::{Client, Hold, LossReason, Name};

use crate::exit::Failure;

const PARENT: &str = "TRACEPARENT";
const STATE: &str = "TRACESTATE";

/// See the module's documentation.
#[derive(Clone, Default)]
pub(crate) struct Spans(Option<Arc<Trace>>);

struct Trace {
    tracer: BoxedTracer,
    /// The span that the environment names, if any.
    outer: Context,
}

/// A span in progress, which ends when it is dropped; empty without a tracer.
#[derive(Default)]
pub(crate) struct Open(Option<BoxedSpan>);

impl Spans {
    /// Spans of this tracer, as children of the one that the environment names.
    pub(crate) fn by(tracer: BoxedTracer) -> Self {
        let told = [PARENT, STATE].map(|name| (name.to_lowercase(), std::env::var(name).ok()));
        let told = told
            .into_iter()
            .filter_map(|(name, value)| Some((name, value?)));
        let told: HashMap<String, String> = told.collect();
        let outer = TraceContextPropagator::new().extract_with_context(&Context::new(), &told);
        Self(Some(Arc::new(Trace { tracer, outer })))
    }

    /// Opens the span of a wait for a lock.
    pub(crate) fn wait(&self, name: &Name) -> Open {
        let lock = KeyValue::new("palisade.lock", name.to_string());
        self.open("acquire", None, || vec![lock])
    }

    /// Opens the span of a hold, after its wait.
    pub(crate) fn hold(&self, wait: &Open, hold: &Hold, client: &Client) -> Open {
        self.open("hold", Some(wait), || {
            vec![
                KeyValue::new("palisade.lock", hold.name().to_string()),
                KeyValue::new("palisade.claim", hold.claim().to_string()),
                // As text: it may exceed what a double holds.
                KeyValue::new("palisade.token", hold.token().to_string()),
                KeyValue::new("palisade.engine", client.describe()),
            ]
        })
    }

    /// Opens the span of a claimed message.
    pub(crate) fn message(&self, queue: &str, message: &Message, client: &Client) -> Open {
        self.open("message", None, || {
            vec![
                KeyValue::new("palisade.queue", queue.to_owned()),
                KeyValue::new("palisade.message", message.id().to_owned()),
                KeyValue::new("palisade.attempt", i64::from(message.attempt())),
                KeyValue::new("palisade.token", message.token().to_string()),
                KeyValue::new("palisade.engine", client.describe()),
            ]
        })
    }

    fn open(
        &self,
        name: &'static str,
        before: Option<&Open>,
        attributes: impl FnOnce() -> Vec<KeyValue>,
    ) -> Open {
        let Some(trace) = &self.0 else {
            return Open(None);
        };
        let before = before.and_then(|before| before.0.as_ref());
        let parent = match before {
            Some(before) if !trace.outer.has_active_span() => within(before),
            _ => trace.outer.clone(),
        };
        let builder = SpanBuilder::from_name(name).with_attributes(attributes());
        Open(Some(trace.tracer.build_with_context(builder, &parent)))
    }

    /// The environment variables that make `span` the parent of a command's spans.
    pub(crate) fn environment(&self, span: &Open) -> Vec<(String, String)> {
        let Some((trace, parent)) = self.0.as_ref().zip(span.traceparent()) else {
            return Vec::new();
        };
        let mut variables = vec![(PARENT.to_owned(), parent)];
        // The state of the outer trace is inherited. Without an outer trace the variable belongs to
        // no trace of ours.
        if !trace.outer.has_active_span() && std::env::var_os(STATE).is_some() {
            variables.push((STATE.to_owned(), String::new()));
        }
        variables
    }
}

/// A context in which `span` is the parent.
fn within(span: &BoxedSpan) -> Context {
    Context::new().with_remote_span_context(span.span_context().clone())
}

impl Open {
    /// The span as a W3C `traceparent`.
    pub(crate) fn traceparent(&self) -> Option<String> {
        let mut told = HashMap::new();
        TraceContextPropagator::new().inject_context(&within(self.0.as_ref()?), &mut told);
        told.remove("traceparent")
    }

    fn set(&mut self, key: &'static str, value: impl Into<Value>) {
        if let Some(span) = &mut self.0 {
            span.set_attribute(KeyValue::new(key, value));
        }
    }

    /// Records the command's exit code.
    pub(crate) fn exited(&mut self, code: u8) {
        self.set("process.exit.code", i64::from(code));
    }

    /// Ends the span.
    pub(crate) fn end(mut self, outcome: &'static str) {
        self.set("palisade.outcome", outcome);
    }

    /// Ends the span with an error.
    pub(crate) fn fail(mut self, outcome: &'static str, why: &'static str) {
        self.set("error.type", why);
        if let Some(span) = &mut self.0 {
            span.set_status(Status::error(""));
        }
        self.end(outcome);
    }

    /// Ends the span of a wait, which may have failed.
    pub(crate) fn waited(self, failure: Option<&Failure>) {
        match failure {
            None => self.end("held"),
            Some(Failure::NotAcquired { .. }) => self.end("busy"),
            Some(Failure::Interrupted(_)) => self.end("cancelled"),
            Some(failure) => self.fail("failed", failure.word()),
        }
    }

    /// Ends the span of a lost hold or message, with the reason if it is known.
    pub(crate) fn lost(self, reason: Option<LossReason>) {
        let outcome = match reason {
            Some(LossReason::Evicted) => "evicted",
            _ => "lost",
        };
        self.fail(outcome, reason.map_or("lost", LossReason::code));
    }
}
