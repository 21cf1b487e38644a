//! `Traces`: spans of this process, sent to a collector by OTLP over HTTP.
//!
//! Off unless the usual `OTEL_*` variables name a collector. A thread of the SDK sends spans in
//! batches and delays nothing else; spans that can't be sent are dropped, and one line reports that.
//! The thread is started after the guardian, because a process with threads can't be forked safely.
//! The last spans are sent when all locks of the process are released.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use opentelemetry::global::{self, BoxedTracer};
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{Protocol, RetryPolicy, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SdkTracerProvider;
use serde_json::json;

use crate::exit::Verdict;
use crate::print::Printer;
use crate::spans::Spans;

/// How long the end of the process may wait for the last spans.
const FAREWELL: Duration = Duration::from_secs(2);

/// See the module's documentation.
pub(crate) struct Traces {
    provider: SdkTracerProvider,
    complaint: Complaint,
}

/// Runs `work`, which must not fork, and sends its spans if the environment asks for that. Without a
/// printer nothing reports spans that can't be sent.
pub(crate) fn traced(printer: Option<Printer>, work: impl FnOnce(Spans) -> Verdict) -> Verdict {
    // A caller that waits for the command to end is not delayed by retries.
    let Some(traces) = Traces::begin(printer, RetryPolicy::disabled()) else {
        return work(Spans::default());
    };
    let verdict = work(Spans::by(traces.tracer()));
    traces.end();
    verdict
}

/// The value of a variable; the one for traces takes precedence over the general one.
fn setting(name: &str) -> Option<String> {
    let of = |prefix: &str| std::env::var(format!("{prefix}_{name}")).ok();
    let found = of("OTEL_EXPORTER_OTLP_TRACES").filter(|text| !text.is_empty());
    found.or_else(|| of("OTEL_EXPORTER_OTLP").filter(|text| !text.is_empty()))
}

impl Traces {
    /// Starts if the environment asks for it. An unusable collector is reported, and is no error.
    pub(crate) fn begin(printer: Option<Printer>, retry: RetryPolicy) -> Option<Self> {
        let is = |name: &str, text: &str| std::env::var(name).is_ok_and(|set| set == text);
        let endpoint = setting("ENDPOINT")?;
        if is("OTEL_SDK_DISABLED", "true") || is("OTEL_TRACES_EXPORTER", "none") {
            return None;
        }
        let told = Arc::default();
        let complaint = Complaint { printer, told };
        let begun = Self::to(&endpoint, &complaint, retry);
        begun.map_err(|why| complaint.tell(&why)).ok()
    }

    fn to(endpoint: &str, complaint: &Complaint, retry: RetryPolicy) -> Result<Self, String> {
        if let Some(other) = setting("PROTOCOL").filter(|protocol| protocol != "http/protobuf") {
            return Err(format!(
                "OTEL_EXPORTER_OTLP_PROTOCOL is {other}, and palisade speaks http/protobuf"
            ));
        }
        let read = |name: &str| {
            let path = setting(name);
            let read =
                path.map(|path| std::fs::read(&path).map_err(|error| format!("{path}: {error}")));
            read.transpose()
        };
        let identity = read("CLIENT_CERTIFICATE")?.zip(read("CLIENT_KEY")?);
        let encrypted = endpoint.starts_with("https:");
        let http = palisade::command::plain_http_client(encrypted, read("CERTIFICATE")?, identity);
        let http = http.map_err(|error| error.to_string())?;
        let timeout = setting("TIMEOUT").and_then(|millis| millis.parse().ok());
        let http = http
            .timeout(Duration::from_millis(timeout.unwrap_or(10_000)))
            // Each batch has its own runtime, so a pooled connection would outlive its runtime.
            .pool_max_idle_per_host(0)
            .build()
            .map_err(|error| error.to_string())?;
        let send = move |request: Request<Bytes>| {
            let (head, body) = request.into_parts();
            let url = head.uri.to_string();
            let request = http
                .request(head.method, url)
                .headers(head.headers)
                .body(body);
            async move {
                let answer = request.send().await?;
                let mut response = Response::builder().status(answer.status());
                if let Some(headers) = response.headers_mut() {
                    headers.clone_from(answer.headers());
                }
                Ok(response.body(answer.bytes().await?)?)
            }
        };
        let collector = Collector {
            send: Box::new(move |request| Box::pin(send(request))),
            complaint: complaint.clone(),
        };
        let exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(collector)
            .with_protocol(Protocol::HttpBinary)
            .with_retry_policy(retry)
            .build()
            .map_err(|error| error.to_string())?;
        let mut resource = Resource::builder();
        if std::env::var_os("OTEL_SERVICE_NAME").is_none() {
            resource = resource.with_service_name("palisade");
        }
        let provider = SdkTracerProvider::builder()
            .with_resource(resource.build())
            .with_batch_exporter(exporter)
            .build();
        let complaint = complaint.clone();
        Ok(Self {
            provider,
            complaint,
        })
    }

    /// The tracer that creates spans.
    pub(crate) fn tracer(&self) -> BoxedTracer {
        global::set_tracer_provider(self.provider.clone());
        global::tracer("palisade")
    }

    /// Sends the remaining spans.
    pub(crate) fn end(self) {
        if self.provider.shutdown_with_timeout(FAREWELL).is_err() {
            let why = format!("the collector did not take the last spans within {FAREWELL:?}");
            self.complaint.tell(&why);
        }
    }
}

/// Reports once that spans are dropped.
#[derive(Clone)]
struct Complaint {
    printer: Option<Printer>,
    told: Arc<AtomicBool>,
}

impl Complaint {
    fn tell(&self, why: &str) {
        if let Some(printer) = self.printer
            && !self.told.swap(true, Ordering::Relaxed)
        {
            let event = json!({"event": "no_traces", "message": why});
            printer.event(event, || Some(format!("traces are not exported: {why}")));
        }
    }
}

type Sent = Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send>>;

/// Sends a batch, on the SDK's own thread.
struct Collector {
    send: Box<dyn Fn(Request<Bytes>) -> Sent + Send + Sync>,
    complaint: Complaint,
}

impl Collector {
    fn send_here(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        // That thread has no runtime, and batches are rare.
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let sent = runtime.block_on(async { (self.send)(request).await });
        let why = match &sent {
            Ok(answer) if answer.status().is_success() => return sent,
            Ok(answer) => format!("the collector answered {}", answer.status()),
            Err(error) => format!("the collector can't be reached: {error}"),
        };
        self.complaint.tell(&why);
        sent
    }
}

impl HttpClient for Collector {
    fn send_bytes<'a, 'sent>(
        &'a self,
        request: Request<Bytes>,
    ) -> Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send + 'sent>>
    where
        'a: 'sent,
    {
        Box::pin(std::future::ready(self.send_here(request)))
    }
}

impl std::fmt::Debug for Collector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Collector")
    }
}
