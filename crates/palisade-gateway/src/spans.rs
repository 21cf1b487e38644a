//! `Spans`: the spans of a gateway, if it has a tracer.
//!
//! There is a span for every request, in the trace that its `traceparent` names. Each claim that a
//! request makes has a child span, from the request until the claim is granted or over: the wait
//! for the lock, even across several requests. Health, metrics and the page's files have no spans.

use std::sync::Arc;

use hyper::Method;
use hyper::header::HeaderMap;
use opentelemetry::global::{BoxedSpan, BoxedTracer};
use opentelemetry::trace::{
    Span, SpanBuilder, SpanContext, SpanId, SpanKind, Status, TraceContextExt, TraceFlags, TraceId,
    TraceState, Tracer,
};
use opentelemetry::{Context, KeyValue};
use palisade::Name;
use palisade::engine::ClaimId;

use crate::claim::Stage;
use crate::wire;

/// See the module's documentation.
#[derive(Clone, Default)]
pub(crate) struct Spans(Option<Arc<BoxedTracer>>);

/// An open span; it ends when dropped.
pub(crate) struct Open(BoxedSpan);

/// The header that names a trace.
pub(crate) const TRACE: &str = "traceparent";

impl Spans {
    pub(crate) fn by(tracer: Option<BoxedTracer>) -> Self {
        Self(tracer.map(Arc::new))
    }

    /// The span of a request for a route.
    pub(crate) fn request(
        &self,
        method: &Method,
        route: &'static str,
        headers: &HeaderMap,
    ) -> Option<Open> {
        if self.0.is_none() || !route.starts_with("/v1/") {
            return None;
        }
        let told = headers.get(TRACE).and_then(|trace| trace.to_str().ok());
        let parent = told.and_then(remote);
        let attributes = [
            KeyValue::new("http.request.method", method.to_string()),
            KeyValue::new("http.route", route),
        ];
        let name = format!("{method} {route}");
        self.open(name, SpanKind::Server, parent.as_ref(), attributes)
    }

    /// The span of a claim that a request makes.
    pub(crate) fn claim(
        &self,
        request: Option<&SpanContext>,
        name: &Name,
        claim: ClaimId,
    ) -> Option<Open> {
        self.0.as_ref()?;
        let attributes = [
            KeyValue::new("palisade.lock", name.to_string()),
            KeyValue::new("palisade.claim", claim.to_string()),
        ];
        self.open("acquire".into(), SpanKind::Internal, request, attributes)
    }

    fn open(
        &self,
        name: String,
        kind: SpanKind,
        parent: Option<&SpanContext>,
        attributes: impl IntoIterator<Item = KeyValue>,
    ) -> Option<Open> {
        let tracer = self.0.as_ref()?;
        let mut context = Context::new();
        if let Some(parent) = parent {
            context = context.with_remote_span_context(parent.clone());
        }
        let builder = SpanBuilder::from_name(name).with_kind(kind);
        let builder = builder.with_attributes(attributes);
        Some(Open(tracer.build_with_context(builder, &context)))
    }
}

impl Open {
    pub(crate) fn context(&self) -> SpanContext {
        self.0.span_context().clone()
    }

    /// Records the principal.
    pub(crate) fn asked_by(&mut self, principal: &str) {
        let principal = KeyValue::new("palisade.principal", principal.to_owned());
        self.0.set_attribute(principal);
    }

    /// Ends the span of a request.
    pub(crate) fn answered(mut self, status: u16) {
        let code = KeyValue::new("http.response.status_code", i64::from(status));
        self.0.set_attribute(code);
        if status >= 500 {
            self.0.set_status(Status::error(""));
        }
        self.0.end();
    }

    /// Ends the span of a claim.
    pub(crate) fn settled(mut self, stage: &Stage) {
        self.0
            .set_attribute(KeyValue::new("palisade.outcome", stage.word()));
        if let Stage::Held { token, .. } = stage {
            // A string: the token may exceed the precision of a double.
            self.0
                .set_attribute(KeyValue::new("palisade.token", token.to_string()));
        }
        if let Stage::Lost(_) | Stage::Failed(_) = stage {
            self.0.set_status(Status::error(""));
        }
        self.0.end();
    }
}

/// The span that a `traceparent` names, if it is valid.
fn remote(text: &str) -> Option<SpanContext> {
    let mut parts = text.split('-').skip(1);
    let (trace, span, flags) = (parts.next()?, parts.next()?, parts.next()?);
    wire::is_traceparent(text).then_some(())?;
    Some(SpanContext::new(
        TraceId::from_hex(trace).ok()?,
        SpanId::from_hex(span).ok()?,
        TraceFlags::new(u8::from_str_radix(flags, 16).ok()?),
        true,
        TraceState::NONE,
    ))
}
