//! The routes: from a request to an answer.
//!
//! Names and ids travel in bodies or queries, never in paths; secrets in headers, never in
//! addresses. A GET changes nothing. What a request asks for is refused before it is looked up,
//! so that a refusal does not tell whether a name exists. A handler may be dropped at any await,
//! because its client has gone: what must be finished is spawned.

mod body;
mod claims;
mod guard;
mod lines;
mod operate;
mod page;
mod sessions;

use std::collections::HashMap;
use std::sync::Arc;

use hyper::body::Incoming;
use hyper::header::HeaderMap;
use hyper::{Method, Request, StatusCode};
use palisade::{BootTime, Client};
use serde_json::json;

use self::body::{duration, read};
pub(crate) use self::guard::Names;
pub(crate) use self::operate::Views;
use crate::access::{Access, Door, Principal};
use crate::answer::{Answer, reply};
use crate::audit::Audit;
use crate::metrics::Metrics;
use crate::problem::Problem;
use crate::sessions::Sessions;

/// All routes. What `route` does not know of them is a bug that a test finds.
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
    // With it the files that the page is made of.
    ("GET", "/"),
];

/// How long the client waits for an answer, by its own account.
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
}

/// A request of somebody known.
struct Asking {
    door: Door,
    principal: Arc<Principal>,
    headers: HeaderMap,
    query: HashMap<String, String>,
    arrival: BootTime,
}

impl Routes {
    /// Answers a request, whatever becomes of it.
    pub(crate) async fn answer(self: Arc<Self>, door: Door, request: Request<Incoming>) -> Answer {
        let arrival = BootTime::now();
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        // A path that is none of ours may be anything, a secret too.
        let known = ROUTES.iter().find(|(_, known)| *known == path);
        let path = match known {
            Some((_, path)) => path,
            None if page::file(&path).is_some() => "/",
            None => "other",
        };
        let answer = match self.route(door, arrival, request).await {
            Ok(answer) => answer,
            Err(problem) => {
                if matches!(problem.status.as_u16(), 401 | 403 | 421) {
                    let (method, code) = (method.as_str(), problem.code);
                    let details = json!({"method": method, "path": path, "code": code});
                    self.audit.refused(details);
                }
                crate::answer::problem(&problem)
            }
        };
        let status = answer.status().as_u16().to_string();
        metrics::counter!("palisade_gateway_requests_total", "route" => path, "status" => status)
            .increment(1);
        metrics::histogram!("palisade_gateway_request_seconds")
            .record(BootTime::now().saturating_since(arrival));
        answer
    }

    async fn route(&self, door: Door, arrival: BootTime, request: Request<Incoming>) -> Answered {
        let (head, body) = request.into_parts();
        // Kubelets and balancers ask for health by whatever address they have.
        let health = matches!(head.uri.path(), "/healthz" | "/readyz");
        if door == Door::Port && !health {
            self.names.check_host(&head.headers)?;
        }
        let query = guard::query(head.uri.query().unwrap_or_default())?;
        let path = head.uri.path();
        let method = head.method.as_str();
        if let Some(file) = page::file(path).filter(|_| method == "GET") {
            return Ok(file);
        }
        if !ROUTES.contains(&(method, path)) {
            let at_path = ROUTES.iter().filter(|(_, known)| *known == path);
            let methods: Vec<_> = at_path.map(|(method, _)| *method).collect();
            return Err(if methods.is_empty() {
                let detail = "there is nothing at this address; see docs/gateway.md";
                Problem::new(StatusCode::NOT_FOUND, "not_found", detail)
            } else {
                Problem::method_not_allowed(methods.join(", "))
            });
        }
        match path {
            "/healthz" => return Ok(reply(StatusCode::OK, &json!({"status": "ok"}))),
            "/readyz" => return self.ready().await,
            _ => {}
        }
        let token = guard::bearer(&head.headers);
        let principal = self.access.principal(door, token);
        let principal = principal.ok_or_else(Problem::unauthorized)?;
        if head.method != Method::GET {
            self.names.check_origin(door, &head.headers)?;
        }
        let deadline = match head.headers.get(TIMEOUT).map(|text| text.to_str()) {
            None => BootTime::NEVER,
            Some(Ok(text)) => arrival + duration("Palisade-Timeout", text)?.mul_f64(0.9),
            Some(Err(_)) => return Err(Problem::bad_request("Palisade-Timeout is not text")),
        };
        let (method, path) = (method.to_owned(), path.to_owned());
        let asking = Asking {
            door,
            principal,
            query,
            arrival,
            headers: head.headers,
        };
        let handled = self.handle(&asking, &method, &path, body);
        match tokio::time::timeout(deadline.remaining(), handled).await {
            Ok(answered) => answered,
            Err(_) => Err(Problem::too_late(
                "the engine did not answer within your own timeout; ask again, with the same id",
            )),
        }
    }

    async fn handle(&self, asking: &Asking, method: &str, path: &str, body: Incoming) -> Answered {
        match (method, path) {
            ("POST", "/v1/sessions") => self.open_session(asking, read(asking, body).await?),
            ("DELETE", "/v1/sessions") => self.close_session(asking).await,
            ("POST", "/v1/sessions/keepalive") => {
                self.keep_alive(asking, read(asking, body).await?)
            }
            ("GET", "/v1/sessions/events") => self.session_events(asking),
            ("POST", "/v1/claims") => {
                let asked = read(asking, body).await?;
                self.claim(asking, asked).await
            }
            ("POST", "/v1/claims/wait") => {
                let asked = read(asking, body).await?;
                self.wait_on(asking, asked).await
            }
            ("POST", "/v1/claims/amend") => {
                let asked = read(asking, body).await?;
                self.amend(asking, asked).await
            }
            ("POST", "/v1/claims/release") => {
                let asked = read(asking, body).await?;
                self.release(asking, asked).await
            }
            ("GET", "/v1/lines") => self.lines(asking).await,
            ("GET", "/v1/leaders") => self.leader(asking).await,
            ("GET", "/v1/events") => self.line_events(asking),
            ("POST", "/v1/evictions") => {
                let asked = read(asking, body).await?;
                self.evict(asking, asked).await
            }
            ("GET", "/v1/deadlocks") => self.deadlocks(asking).await,
            ("GET", "/v1/engine") => self.engine(asking).await,
            ("GET", "/metrics") => self.metrics(asking),
            // Every route of the list is above.
            _ => Err(Problem::new(StatusCode::NOT_FOUND, "not_found", "")),
        }
    }
}
