//! The routes: from a request to a response.
//!
//! Names and ids are in bodies or queries, never in paths; secrets are in headers, never in URLs. A
//! GET changes nothing. Access is checked before a name is looked up, so that a refusal does not
//! reveal whether the name exists. A handler may be dropped at any await, when its client has gone:
//! work that must be finished is spawned.

mod body;
mod claims;
mod guard;
mod lines;
mod operate;
mod page;
mod sessions;

use std::collections::HashMap;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use hyper::body::Incoming;
use hyper::header::HeaderMap;
use hyper::{Method, Request, StatusCode};
use opentelemetry::trace::SpanContext;
use palisade::{BootTime, Client};
use serde_json::json;

use self::body::duration;
pub(crate) use self::guard::Names;
pub(crate) use self::operate::Views;
use crate::access::{Access, Door, Principal};
use crate::answer::{Answer, reply};
use crate::audit::{Audit, Source};
use crate::connections::Via;
use crate::metrics::Metrics;
use crate::problem::Problem;
use crate::sessions::Sessions;
use crate::spans::{Open, Spans};
use crate::tls::Tls;

/// All routes. A test finds a route of this list that `route` does not handle.
pub(crate) const ROUTES: &[(&str, &str)] = &[
    ("POST", "/v1/sessions"),
    ("DELETE", "/v1/sessions"),
    ("POST", "/v1/sessions/keepalive"),
    ("GET", "/v1/sessions/events"),
    ("POST", "/v1/claims"),
    ("POST", "/v1/claims/wait"),
    ("POST", "/v1/claims/amend"),
    ("POST", "/v1/claims/release"),
    ("GET", "/v1/lines"),
    ("GET", "/v1/leaders"),
    ("GET", "/v1/events"),
    ("POST", "/v1/evictions"),
    ("GET", "/v1/deadlocks"),
    ("GET", "/v1/engine"),
    ("GET", "/metrics"),
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("GET", "/openapi.json"),
    // This includes the files of the dashboard.
    ("GET", "/"),
];

/// The header with the time that the client waits for a response.
const TIMEOUT: &str = "palisade-timeout";

type Answered = Result<Answer, Problem>;

/// What all requests share.
pub(crate) struct Routes {
    pub(crate) client: Client,
    pub(crate) access: Access,
    pub(crate) sessions: Arc<Sessions>,
    pub(crate) audit: Audit,
    pub(crate) names: Names,
    pub(crate) metrics: Metrics,
    pub(crate) views: Views,
    pub(crate) spans: Spans,
    pub(crate) tls: Option<Tls>,
    /// The connections without a valid token that a peer may have.
    pub(crate) per_peer: usize,
}

/// A request of a known principal.
struct Asking {
    via: Via,
    principal: Arc<Principal>,
    /// The headers that a handler reads.
    headers: HeaderMap,
    query: HashMap<String, String>,
    arrival: BootTime,
    /// The request's own span, if it has one.
    span: Option<Box<SpanContext>>,
}

/// Counts an answer.
fn count(path: &'static str, answer: &Answer, arrival: BootTime) {
    let status = answer.status().as_u16().to_string();
    metrics::counter!("palisade_gateway_requests_total", "route" => path, "status" => status)
        .increment(1);
    metrics::histogram!("palisade_gateway_request_seconds")
        .record(BootTime::now().saturating_since(arrival));
}

impl Routes {
    /// The response to a request. The request's buffers are freed before anything is awaited.
    pub(crate) fn answer(
        self: Arc<Self>,
        via: Via,
        request: Request<Incoming>,
    ) -> BoxFuture<'static, Answer> {
        let arrival = BootTime::now();
        // An unknown path may be anything, even a secret.
        let method = request.method().clone();
        let known = |path: &str| ROUTES.iter().find(|(_, known)| *known == path);
        let path = match known(request.uri().path()) {
            Some((_, path)) => path,
            None if page::file(request.uri().path()).is_some() => "/",
            None => "other",
        };
        let mut span = self.spans.request(&method, path, request.headers());
        let mut source = via.peer.map_or(Source::Socket, Source::Peer);
        let peer = via.peer;
        let routed = Arc::clone(&self).route(via, arrival, request, &mut span, &mut source);
        Box::pin(async move {
            let answered = match routed {
                Ok(answer) => answer.await,
                Err(problem) => Err(problem),
            };
            let answer = answered.unwrap_or_else(|problem| {
                if matches!(problem.status.as_u16(), 401 | 403 | 421) {
                    let (method, code) = (method.as_str(), problem.code);
                    let mut details = json!({"method": method, "path": path, "code": code});
                    if let Some(lock) = &problem.lock {
                        details["lock"] = lock.as_str().into();
                    }
                    details["peer"] = peer.map_or("socket".into(), |peer| peer.to_string().into());
                    self.audit.refused(&source, details);
                }
                crate::answer::problem(&problem)
            });
            count(path, &answer, arrival);
            if let Some(span) = span {
                span.answered(answer.status().as_u16());
            }
            answer
        })
    }

    /// Finds the principal and the handler. The future of the response is boxed at its own size,
    /// since thousands of requests may wait.
    ///
    /// # Errors
    /// Requests that are refused before their route is looked up.
    fn route(
        self: Arc<Self>,
        via: Via,
        arrival: BootTime,
        request: Request<Incoming>,
        span: &mut Option<Open>,
        source: &mut Source,
    ) -> Result<BoxFuture<'static, Answered>, Problem> {
        let (head, body) = request.into_parts();
        // Kubelets and load balancers probe health under any host name.
        let health = matches!(head.uri.path(), "/healthz" | "/readyz");
        guard::check_one_host(&head.headers)?;
        if via.door == Door::Port && !health {
            self.names.check_host(&head.headers)?;
        }
        let query = guard::query(head.uri.query().unwrap_or_default())?;
        let (method, path) = (head.method.as_str(), head.uri.path());
        if let Some(file) = page::file(path).filter(|_| method == "GET") {
            if via.place.is_hurried() {
                return Err(Problem::crowded());
            }
            return Ok(Box::pin(std::future::ready(Ok(file))));
        }
        let known = ROUTES.iter().find(|known| **known == (method, path));
        let Some(&known) = known else {
            let at_path = ROUTES.iter().filter(|(_, known)| *known == path);
            let methods: Vec<_> = at_path.map(|(method, _)| *method).collect();
            return Err(if methods.is_empty() {
                let detail = "there is nothing at this address; see docs/gateway.md";
                Problem::new(StatusCode::NOT_FOUND, "not_found", detail)
            } else {
                Problem::method_not_allowed(methods.join(", "))
            });
        };
        match path {
            "/healthz" => {
                let answer = reply(StatusCode::OK, &json!({"status": "ok"}));
                return Ok(Box::pin(std::future::ready(Ok(answer))));
            }
            "/readyz" => return Ok(Box::pin(async move { self.ready().await })),
            _ => {}
        }
        let token = guard::bearer(&head.headers);
        let Some(principal) = self.access.principal(via.door, token) else {
            via.place.unknown();
            return Err(Problem::unauthorized());
        };
        *source = Source::Principal(principal.name.clone());
        via.place.known(&principal.name)?;
        if let Some(span) = span {
            span.asked_by(&principal.name);
        }
        if head.method != Method::GET {
            self.names.check_origin(via.door, &head.headers)?;
        }
        let deadline = match head.headers.get(TIMEOUT).map(|text| text.to_str()) {
            None => BootTime::NEVER,
            Some(Ok(text)) => arrival + duration("Palisade-Timeout", text)?.mul_f64(0.9),
            Some(Err(_)) => return Err(Problem::bad_request("Palisade-Timeout is not text")),
        };
        let asking = Asking {
            via,
            principal,
            query,
            arrival,
            headers: guard::copied(&head.headers),
            span: span.as_ref().map(|span| Box::new(span.context())),
        };
        Ok(Box::pin(async move {
            let handled = self.handle(&asking, known, body);
            let handled = tokio::time::timeout(deadline.remaining(), handled).await;
            handled.unwrap_or_else(|_| {
                let detail = "the engine did not answer within your own timeout; ask again, with \
                              the same id";
                Err(Problem::too_late(detail))
            })
        }))
    }

    async fn handle(&self, asking: &Asking, route: (&str, &str), body: Incoming) -> Answered {
        match route {
            ("POST", "/v1/sessions") => self.open_session(asking, self.read(asking, body).await?),
            ("DELETE", "/v1/sessions") => self.close_session(asking).await,
            ("POST", "/v1/sessions/keepalive") => {
                let asked = self.read(asking, body).await?;
                self.keep_alive(asking, asked).await
            }
            ("GET", "/v1/sessions/events") => self.session_events(asking),
            ("POST", "/v1/claims") => {
                let asked = self.read(asking, body).await?;
                self.claim(asking, asked).await
            }
            ("POST", "/v1/claims/wait") => {
                let asked = self.read(asking, body).await?;
                self.wait_on(asking, asked).await
            }
            ("POST", "/v1/claims/amend") => {
                let asked = self.read(asking, body).await?;
                self.amend(asking, asked).await
            }
            ("POST", "/v1/claims/release") => {
                let asked = self.read(asking, body).await?;
                self.release(asking, asked).await
            }
            ("GET", "/v1/lines") => self.lines(asking).await,
            ("GET", "/v1/leaders") => self.leader(asking).await,
            ("GET", "/v1/events") => self.line_events(asking),
            ("POST", "/v1/evictions") => {
                let asked = self.read(asking, body).await?;
                self.evict(asking, asked).await
            }
            ("GET", "/v1/deadlocks") => self.deadlocks(asking).await,
            ("GET", "/v1/engine") => self.engine(asking).await,
            ("GET", "/metrics") => self.metrics(asking),
            // Every listed route is handled above.
            _ => Err(Problem::new(StatusCode::NOT_FOUND, "not_found", "")),
        }
    }
}
