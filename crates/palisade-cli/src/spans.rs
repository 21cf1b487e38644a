//! `Spans`: what `run`, `elect` and `queue work` tell a tracer, where there is one.
//!
//! One span for each wait, and one for each hold or message, below the span that `TRACEPARENT`
//! names. Without such a variable a hold is below its wait, so that the two are one trace. What
//! runs under a hold gets the hold's span as its own `TRACEPARENT`.

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

/// See the module's text.
#[derive(Clone, Default)]
pub(crate) struct Spans(Option<Arc<Trace>>);

struct Trace {
    tracer: BoxedTracer,
    /// The span that the environment names, if any.
    outer: Context,
}

/// A span that has not ended; dropped, it ends. Without a tracer it is none.
#[derive(Default)]
pub(crate) struct Open(Option<BoxedSpan>);

impl Spans {
    /// Spans by this tracer, below the one that the environment names.
    pub(crate) fn by(tracer: BoxedTracer) -> Self {
        let told = [PARENT, STATE].map(|name| (name.to_lowercase(), std::env::var(name).ok()));
        let told = told
            .into_iter()
            .filter_map(|(name, value)| Some((name, value?)));
        let told: HashMap<String, String> = told.collect();
        let outer = TraceContextPropagator::new().extract_with_context(&Context::new(), &told);
        Self(Some(Arc::new(Trace { tracer, outer })))
    }

    /// That of a wait for a lock.
    pub(crate) fn wait(&self, name: &Name) -> Open {
        let lock = KeyValue::new("palisade.lock", name.to_string());
        self.open("acquire", None, || vec![lock])
    }

    /// That of a hold, after a wait.
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

    /// That of a message that was claimed.
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

    /// The variables by which a command finds that it runs below `span`.
    pub(crate) fn environment(&self, span: &Open) -> Vec<(String, String)> {
        let Some((trace, parent)) = self.0.as_ref().zip(span.traceparent()) else {
            return Vec::new();
        };
        let mut variables = vec![(PARENT.to_owned(), parent)];
        // It is the trace's own, and inherited with it. One that came without belongs to none.
        if !trace.outer.has_active_span() && std::env::var_os(STATE).is_some() {
            variables.push((STATE.to_owned(), String::new()));
        }
        variables
    }
}

/// Where a span is the parent.
fn within(span: &BoxedSpan) -> Context {
    Context::new().with_remote_span_context(span.span_context().clone())
}

impl Open {
    /// It as a W3C `traceparent`.
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

    /// Says what the command ended with.
    pub(crate) fn exited(&mut self, code: u8) {
        self.set("process.exit.code", i64::from(code));
    }

    /// Ends it.
    pub(crate) fn end(mut self, outcome: &'static str) {
        self.set("palisade.outcome", outcome);
    }

    /// Ends it with a failure.
    pub(crate) fn fail(mut self, outcome: &'static str, why: &'static str) {
        self.set("error.type", why);
        if let Some(span) = &mut self.0 {
            span.set_status(Status::error(""));
        }
        self.end(outcome);
    }

    /// Ends that of a wait, which may have failed.
    pub(crate) fn waited(self, failure: Option<&Failure>) {
        match failure {
            None => self.end("held"),
            Some(Failure::NotAcquired { .. }) => self.end("busy"),
            Some(Failure::Interrupted(_)) => self.end("cancelled"),
            Some(failure) => self.fail("failed", failure.word()),
        }
    }

    /// Ends that of what was lost, for this reason where it is known.
    pub(crate) fn lost(self, reason: Option<LossReason>) {
        let outcome = match reason {
            Some(LossReason::Evicted) => "evicted",
            _ => "lost",
        };
        self.fail(outcome, reason.map_or("lost", LossReason::code));
    }
}
