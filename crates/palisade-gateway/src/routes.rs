//! The routes: from a request to an answer.
//!
//! Names and ids travel in bodies or queries, never in paths; secrets in headers, never in
//! addresses. A GET changes nothing. What a request asks for is refused before it is looked up,
//! so that a refusal does not tell whether a name exists.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use http_body_util::{BodyExt, Limited};
use hyper::body::{Body as _, Incoming};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderMap, ORIGIN};
use hyper::{Method, Request, StatusCode};
use palisade::command::parse_duration;
use palisade::engine::{Amended, Amendment, Ask, Engine};
use palisade::report::{Owner, Scope};
use palisade::{BootTime, Client, ErrorKind, Eviction, Name, Which};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::oneshot;

use crate::access::{Access, Door, Principal, secret};
use crate::answer::{Answer, reply};
use crate::audit::Audit;
use crate::claim::{Asked, Claim, Order, Stage};
use crate::events;
use crate::metrics::Metrics;
use crate::problem::Problem;
use crate::session::{Session, Sessions, tell};
use crate::wire::{self, How};

/// The header with a session's secret.
const SESSION: &str = "palisade-session";
/// The greatest body.
const BODY: usize = 1024 * 1024;
/// How long a body may take.
const BODY_TIME: Duration = Duration::from_secs(10);
/// What a session lasts that a claim opens by itself, at the least.
const CURL_TTL: Duration = Duration::from_secs(30);
/// How many lines one answer has, unless it is asked for fewer.
const LINES: usize = 1000;
/// The longest id that a client may give a claim.
const LONGEST_ID: usize = 128;
/// What must not be in an address, because addresses are logged.
const SECRETS: &[&str] = &[
    "token",
    "access_token",
    "secret",
    "session",
    "authorization",
];

/// All routes.
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
    ("GET", "/v1/engine"),
    ("GET", "/metrics"),
    ("GET", "/healthz"),
    ("GET", "/readyz"),
];

type Answered = Result<Answer, Problem>;

/// What all requests share.
pub(crate) struct Routes {
    pub(crate) client: Client,
    pub(crate) access: Access,
    pub(crate) sessions: Arc<Sessions>,
    pub(crate) audit: Audit,
    /// What `Host` must be on the port; anything where there is only a socket.
    pub(crate) hosts: Vec<String>,
    /// Where a session's client asks from now on.
    pub(crate) url: String,
    pub(crate) metrics: Metrics,
}

/// A request of somebody known.
struct Asking {
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
        let path = known.map_or("other", |(_, path)| path);
        let answer = self
            .answer_known(door, arrival, &method, path, request)
            .await;
        let status = answer.status().as_u16().to_string();
        metrics::counter!("palisade_gateway_requests_total", "route" => path, "status" => status)
            .increment(1);
        metrics::histogram!("palisade_gateway_request_seconds")
            .record(BootTime::now().saturating_since(arrival));
        answer
    }

    async fn answer_known(
        &self,
        door: Door,
        arrival: BootTime,
        method: &Method,
        path: &str,
        request: Request<Incoming>,
    ) -> Answer {
        match self.route(door, arrival, request).await {
            Ok(answer) => answer,
            Err(problem) => {
                if matches!(problem.status.as_u16(), 401 | 403 | 421) {
                    let (method, code) = (method.as_str(), problem.code);
                    self.audit.tell(
                        "refused",
                        json!({"method": method, "path": path, "code": code}),
                    );
                }
                crate::answer::problem(&problem)
            }
        }
    }

    async fn route(&self, door: Door, arrival: BootTime, request: Request<Incoming>) -> Answered {
        let (head, body) = request.into_parts();
        if door == Door::Port {
            self.check_host(&head.headers)?;
        }
        let query = query(head.uri.query().unwrap_or_default())?;
        let path = head.uri.path();
        let method = head.method.as_str();
        if !ROUTES.contains(&(method, path)) {
            let known = ROUTES.iter().any(|(_, known)| *known == path);
            return Err(if known {
                let detail = "this address takes another method";
                Problem::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", detail)
            } else {
                let detail = "there is nothing at this address; see docs/gateway.md";
                Problem::new(StatusCode::NOT_FOUND, "not_found", detail)
            });
        }
        match path {
            "/healthz" => return Ok(reply(StatusCode::OK, &json!({"status": "ok"}))),
            "/readyz" => return self.ready().await,
            _ => {}
        }
        let token = bearer(&head.headers);
        let principal = self.access.principal(door, token);
        let principal = principal.ok_or_else(Problem::unauthorized)?;
        if head.method != Method::GET {
            self.check_origin(door, &head.headers)?;
        }
        let asking = Asking {
            principal,
            query,
            arrival,
            headers: head.headers,
        };
        match (method, path) {
            ("POST", "/v1/sessions") => self.open(&asking, read(&asking, body).await?),
            ("DELETE", "/v1/sessions") => {
                let session = self.session(&asking)?;
                self.sessions.end(&session, "closed").await;
                Ok(reply(StatusCode::OK, &json!({"id": session.id})))
            }
            ("POST", "/v1/sessions/keepalive") => {
                self.keep_alive(&asking, read(&asking, body).await?)
            }
            ("GET", "/v1/sessions/events") => {
                let session = self.session(&asking)?;
                Ok(events::of_session(&session))
            }
            ("POST", "/v1/claims") => {
                let asked = read(&asking, body).await?;
                self.claim(&asking, asked).await
            }
            ("POST", "/v1/claims/wait") => {
                let asked: wire::WaitFor = read(&asking, body).await?;
                let (session, claim) = self.known(&asking, &asked.id)?;
                let wait = wait(&session, asked.wait.as_deref())?;
                self.wait(&asking, &session, &claim, wait).await
            }
            ("POST", "/v1/claims/amend") => {
                let asked = read(&asking, body).await?;
                self.amend(&asking, asked).await
            }
            ("POST", "/v1/claims/release") => {
                let asked = read(&asking, body).await?;
                self.release(&asking, asked).await
            }
            ("GET", "/v1/lines") => self.lines(&asking).await,
            ("GET", "/v1/leaders") => self.leader(&asking).await,
            ("GET", "/v1/events") => {
                let prefix = asking.query.get("prefix").cloned().unwrap_or_default();
                if !asking.principal.may_see(&prefix) {
                    return Err(Problem::forbidden("you may not see this prefix"));
                }
                let changes = self.client.engine().watch(Scope::Prefix(prefix));
                Ok(events::of_lines(changes))
            }
            ("POST", "/v1/evictions") => {
                let asked = read(&asking, body).await?;
                self.evict(&asking, asked).await
            }
            ("GET", "/v1/engine") => self.engine(&asking).await,
            ("GET", "/metrics") => {
                if !asking.principal.sees_anything() {
                    return Err(Problem::forbidden("you may see nothing here"));
                }
                let draining = u64::from(self.sessions.is_draining());
                Ok(crate::answer::metrics(self.metrics.text(&[
                    ("palisade_gateway_sessions", self.sessions.count() as u64),
                    ("palisade_gateway_claims", self.sessions.live() as u64),
                    ("palisade_gateway_draining", draining),
                ])))
            }
            // Every route of the list is above.
            _ => Err(Problem::new(StatusCode::NOT_FOUND, "not_found", "")),
        }
    }

    /// Another name for this address means that a page elsewhere had it resolved here.
    fn check_host(&self, headers: &HeaderMap) -> Result<(), Problem> {
        let host = headers.get(HOST).and_then(|host| host.to_str().ok());
        if host.is_some_and(|host| {
            self.hosts
                .iter()
                .any(|known| known.eq_ignore_ascii_case(host))
        }) {
            return Ok(());
        }
        let detail = "this gateway is not called so; set --public-url to what clients call it";
        Err(Problem::new(
            StatusCode::MISDIRECTED_REQUEST,
            "wrong_host",
            detail,
        ))
    }

    /// A browser says where a page that writes comes from: only ours may.
    fn check_origin(&self, door: Door, headers: &HeaderMap) -> Result<(), Problem> {
        let Some(origin) = headers.get(ORIGIN) else {
            return Ok(());
        };
        let host = origin
            .to_str()
            .ok()
            .and_then(|origin| origin.split_once("://"));
        let own = |(_, host): (&str, &str)| {
            self.hosts
                .iter()
                .any(|known| known.eq_ignore_ascii_case(host))
        };
        if door == Door::Port && host.is_some_and(own) {
            return Ok(());
        }
        Err(Problem::forbidden(
            "a page of another origin may not change anything here",
        ))
    }

    async fn ready(&self) -> Answered {
        if self.sessions.is_draining() {
            return Err(Problem::draining());
        }
        let nothing = Scope::Line(Name::new("palisade-readyz")?);
        let looked = tokio::time::timeout(Duration::from_secs(2), self.client.survey(nothing));
        match looked.await {
            Ok(Ok(_)) => Ok(reply(StatusCode::OK, &json!({"status": "ready"}))),
            Ok(Err(error)) => {
                let mut problem = Problem::from(error);
                problem.status = StatusCode::SERVICE_UNAVAILABLE;
                Err(problem)
            }
            Err(_) => {
                let detail = "the engine does not answer";
                let code = ErrorKind::Unreachable.code();
                Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, code, detail))
            }
        }
    }

    fn open(&self, asking: &Asking, asked: wire::OpenSession) -> Answered {
        let ttl = match asked.ttl.as_deref() {
            Some(ttl) => duration("ttl", ttl)?,
            None => self.client.ttl(),
        };
        let ttl = self.client.capability().explicit_ttl(ttl)?;
        if let Some(secret) = &asked.secret
            && !(secret.len() == 64 && secret.bytes().all(|byte| byte.is_ascii_hexdigit()))
        {
            return Err(Problem::bad_request(
                "a secret is 256 random bits as 64 hex digits; omit it to be given one",
            ));
        }
        let (session, secret) = self.sessions.open(&asking.principal, ttl, asked.secret)?;
        self.sessions.extend(&session, asking.arrival);
        Ok(reply(StatusCode::CREATED, &self.opened(&session, &secret)))
    }

    fn opened(&self, session: &Session, secret: &str) -> Value {
        json!({
            "id": session.id,
            "secret": secret,
            "ttl_ms": session.ttl.as_millis() as u64,
            "url": self.url,
        })
    }

    fn session(&self, asking: &Asking) -> Result<Arc<Session>, Problem> {
        let secret = asking
            .headers
            .get(SESSION)
            .and_then(|secret| secret.to_str().ok());
        let Some(secret) = secret else {
            return Err(Problem::bad_request(
                "name the session by its secret in the header Palisade-Session",
            ));
        };
        self.sessions.find(&asking.principal, secret)
    }

    fn known(&self, asking: &Asking, id: &str) -> Result<(Arc<Session>, Arc<Claim>), Problem> {
        let session = self.session(asking)?;
        let Some(claim) = session.claim(id) else {
            let detail = "this session has no claim of this id, or it was over long ago";
            return Err(Problem::new(StatusCode::GONE, "no_claim", detail));
        };
        Ok((session, claim))
    }

    fn keep_alive(&self, asking: &Asking, asked: wire::KeepAlive) -> Answered {
        let session = self.session(asking)?;
        let until = self.sessions.extend(&session, asking.arrival);
        session.prune();
        let claims: Vec<Value> = asked
            .claims
            .iter()
            .map(|id| {
                let Some(claim) = session.claim(id) else {
                    return json!({"id": id, "state": "no_claim"});
                };
                if let Some(until) = until {
                    claim.extend(until);
                }
                self.claim_answer(&session, &claim, asking.arrival)
            })
            .collect();
        Ok(reply(
            StatusCode::OK,
            &json!({
                "id": session.id,
                "claims": claims,
                "draining": self.sessions.is_draining(),
                "url": self.url,
            }),
        ))
    }

    /// What stands of a claim, with the promise.
    fn claim_answer(&self, session: &Session, claim: &Claim, arrival: BootTime) -> Value {
        let mut stage = claim.stage();
        let valid = session.promise(claim, arrival);
        if valid.is_zero() && matches!(stage, Stage::Held { .. }) {
            // The clock knows before the keeper tells.
            stage = Stage::Lost("its lease was not renewed in time".into());
        }
        let mut answer = json!({
            "id": claim.id,
            "claim": claim.claim.to_string(),
            "name": claim.asked.name.as_str(),
            "state": stage.word(),
            "url": self.url,
        });
        let Some(fields) = answer.as_object_mut() else {
            return answer;
        };
        if let Stage::Held { token, sequence } = stage {
            fields.insert("token".into(), token.to_string().into());
            fields.insert("sequence".into(), sequence.to_string().into());
        }
        if !stage.is_over() {
            fields.insert("valid_ms".into(), (valid.as_millis() as u64).into());
        }
        answer
    }

    /// The answer about a claim by itself: its state decides the status.
    fn answer_about(&self, session: &Session, claim: &Claim, arrival: BootTime) -> Answered {
        let answer = self.claim_answer(session, claim, arrival);
        let gone = |code, detail: String| Err(Problem::new(StatusCode::GONE, code, detail));
        match (claim.stage(), answer["state"].as_str()) {
            (Stage::Held { .. }, Some("lost")) => {
                gone("lost", "the lease was not renewed in time".into())
            }
            (Stage::Held { .. }, _) => Ok(reply(StatusCode::OK, &answer)),
            (Stage::Waiting | Stage::Entering(None), _) => Ok(reply(StatusCode::ACCEPTED, &answer)),
            (Stage::Entering(Some(error)), _) | (Stage::Failed(error), _) => Err(error.into()),
            (Stage::Busy, _) => {
                let detail = "others hold it, and nothing was left behind; ask with queue, a \
                              longer wait or later, under a new id";
                Err(Problem::new(StatusCode::CONFLICT, "busy", detail))
            }
            (Stage::Lost(why), _) => gone("lost", why),
            (Stage::Evicted, _) => gone("evicted", "an operator took it away".into()),
            (Stage::Released, _) => gone(
                "released",
                "it was released; claim it under a new id".into(),
            ),
        }
    }

    async fn claim(&self, asking: &Asking, asked: wire::MakeClaim) -> Answered {
        let name = Name::new(&asked.name)?;
        if !asking.principal.may_use(name.as_str()) {
            return Err(Problem::forbidden("you may not use this name"));
        }
        wire::passable(&self.client.capability())?;
        let ask =
            wire::ask(asked.mode, asked.weight, asked.capacity).map_err(Problem::bad_request)?;
        let id = asked
            .id
            .clone()
            .unwrap_or_else(|| secret()[..32].to_owned());
        if id.is_empty() || id.len() > LONGEST_ID || id.chars().any(char::is_control) {
            return Err(Problem::bad_request(
                "an id has 1 to 128 bytes without control characters",
            ));
        }
        if asking.headers.contains_key(SESSION) {
            let session = self.session(asking)?;
            let wait = wait(&session, asked.wait.as_deref())?;
            return self
                .enter(asking, &session, id, name, ask, asked, wait)
                .await;
        }
        // For a client without a session: one of its own, which it is told the secret of.
        let wait = asked
            .wait
            .as_deref()
            .map_or(Ok(Duration::ZERO), |wait| duration("wait", wait))?;
        let ttl = self
            .client
            .capability()
            .explicit_ttl(CURL_TTL.max(3 * wait));
        let (session, secret) = self.sessions.open(&asking.principal, ttl?, None)?;
        let wait = self::wait(&session, asked.wait.as_deref());
        let entered = match wait {
            Ok(wait) => {
                self.enter(asking, &session, id, name, ask, asked, wait)
                    .await
            }
            Err(problem) => Err(problem),
        };
        match entered {
            Ok(mut answer) => {
                answer.add("session", self.opened(&session, &secret));
                Ok(answer)
            }
            Err(problem) => {
                self.sessions.end(&session, "claim refused").await;
                Err(problem)
            }
        }
    }

    #[allow(clippy::too_many_arguments)]
    async fn enter(
        &self,
        asking: &Asking,
        session: &Arc<Session>,
        id: String,
        name: Name,
        ask: Ask,
        document: wire::MakeClaim,
        wait: Duration,
    ) -> Answered {
        let asked = Asked {
            name,
            ask,
            queue: document.queue,
            value: document.value.clone(),
        };
        let until = self.sessions.extend(session, asking.arrival);
        session.prune();
        let claim = {
            let mut claims = session.claims.lock();
            match claims.get(&id) {
                Some(known) if known.asked != asked => {
                    let detail = "this id stands for another claim of this session";
                    return Err(Problem::new(StatusCode::CONFLICT, "id_reused", detail));
                }
                Some(known) => Arc::clone(known),
                None => {
                    let Some(until) = until else {
                        return Err(Problem::draining());
                    };
                    let counted = self.sessions.count_claim(&asking.principal)?;
                    let owner = owner(asking, session, &document);
                    let claim_id = session.claim_id(&id);
                    let mut request = self.client.line(&asked.name, ask).ttl(session.ttl);
                    if let Some(value) = &asked.value {
                        request = request.value(value.clone());
                    }
                    let queue = asked.queue != Some(false);
                    let entry = request.entry(claim_id, owner, queue)?;
                    let changes = session.changes.clone();
                    let told = move |claim: &Claim, stage: &Stage| {
                        // Counted until the task is over.
                        let _ = &counted;
                        tell(&changes, claim, stage);
                    };
                    let key = id.clone();
                    let started =
                        Claim::start(&self.client, id, claim_id, asked, entry, until, told);
                    claims.insert(key, Arc::clone(&started));
                    started
                }
            }
        };
        self.wait(asking, session, &claim, wait).await
    }

    async fn wait(
        &self,
        asking: &Asking,
        session: &Session,
        claim: &Claim,
        wait: Duration,
    ) -> Answered {
        let _counted = self.sessions.count_waiting(&asking.principal)?;
        if let Some(until) = self.sessions.extend(session, asking.arrival) {
            claim.extend(until);
        }
        let until = asking.arrival + wait;
        let mut stage = claim.settled(until).await;
        if matches!(stage, Stage::Entering(None)) {
            // Not waited for others yet: the engine's answer is on its way.
            let _ = tokio::time::timeout(ENGINE_TIME, claim.answered()).await;
            stage = claim.stage();
        }
        if matches!(stage, Stage::Waiting) && claim.asked.queue.is_none() {
            claim.order(Order::GiveUp).await;
            claim.settled(BootTime::now() + ENGINE_TIME).await;
        }
        self.answer_about(session, claim, asking.arrival)
    }

    async fn amend(&self, asking: &Asking, asked: wire::Amend) -> Answered {
        let (session, claim) = self.known(asking, &asked.id)?;
        let amendment = match (asked.mode, asked.value) {
            (Some(mode @ (wire::Mode::Exclusive | wire::Mode::Shared)), None) => {
                let ask = wire::ask(Some(mode), None, None).map_err(Problem::bad_request)?;
                self.client.capability().allows(ask)?;
                Amendment::Ask(ask)
            }
            (None, Some(value)) => Amendment::Value(value),
            _ => {
                let detail = "give a value, or the mode exclusive or shared";
                return Err(Problem::bad_request(detail));
            }
        };
        if !matches!(claim.stage(), Stage::Held { .. }) {
            if claim.stage().is_over() {
                return self.answer_about(&session, &claim, asking.arrival);
            }
            let detail = "only what is held can be amended";
            return Err(Problem::new(StatusCode::CONFLICT, "not_held", detail));
        }
        if let Some(until) = self.sessions.extend(&session, asking.arrival) {
            claim.extend(until);
        }
        let (answer, answered) = oneshot::channel();
        claim.order(Order::Amend(amendment, answer)).await;
        match answered.await {
            Ok(Ok(Amended::Busy)) => {
                let detail = "others hold too; nothing was changed";
                Err(Problem::new(StatusCode::CONFLICT, "busy", detail))
            }
            Ok(Ok(Amended::Gone)) => {
                let detail = "it is not in the line any more".to_owned();
                Err(Problem::new(StatusCode::GONE, "lost", detail))
            }
            Ok(Err(error)) => Err(error.into()),
            // Done, or over meanwhile.
            Ok(Ok(Amended::Done)) | Err(_) => self.answer_about(&session, &claim, asking.arrival),
        }
    }

    async fn release(&self, asking: &Asking, asked: wire::Release) -> Answered {
        let (session, claim) = self.known(asking, &asked.id)?;
        self.sessions.extend(&session, asking.arrival);
        let (answer, answered) = oneshot::channel();
        claim.order(Order::Release(answer)).await;
        // Without an answer it was over before.
        if let Ok(released) = answered.await {
            released?;
        }
        match claim.over().await {
            Stage::Lost(_) | Stage::Evicted => self.answer_about(&session, &claim, asking.arrival),
            _ => {
                let answer = json!({"id": claim.id, "state": "released"});
                Ok(reply(StatusCode::OK, &answer))
            }
        }
    }

    async fn lines(&self, asking: &Asking) -> Answered {
        let query = &asking.query;
        let scope = match (query.get("name"), query.get("prefix")) {
            (Some(_), Some(_)) => {
                return Err(Problem::bad_request("give a name or a prefix, not both"));
            }
            (Some(name), None) => Scope::Line(self.seen(asking, name)?),
            (None, prefix) => Scope::Prefix(prefix.cloned().unwrap_or_default()),
        };
        let limit = match query.get("limit").map(|limit| limit.parse::<usize>()) {
            None => LINES,
            Some(Ok(limit)) if limit > 0 => limit.min(LINES),
            Some(_) => return Err(Problem::bad_request("limit must be a whole number from 1")),
        };
        let after = query.get("after").map_or("", String::as_str);
        let mut found = self.client.survey(scope).await?;
        found.retain(|line| line.name.as_str() > after && asking.principal.may_see(&line.name));
        found.sort_by(|one, other| one.name.cmp(&other.name));
        let more = found.len() > limit;
        found.truncate(limit);
        let next = found.last().filter(|_| more).map(|line| line.name.clone());
        let lines: Result<Vec<_>, _> = found
            .iter()
            .map(|line| wire::line(&self.client, line))
            .collect();
        Ok(reply(
            StatusCode::OK,
            &json!({"lines": lines?, "next": next}),
        ))
    }

    fn seen(&self, asking: &Asking, name: &str) -> Result<Name, Problem> {
        let name = Name::new(name)?;
        if !asking.principal.may_see(name.as_str()) {
            return Err(Problem::forbidden("you may not see this name"));
        }
        Ok(name)
    }

    /// Who leads; with `wait`, waits for somebody to.
    async fn leader(&self, asking: &Asking) -> Answered {
        let Some(name) = asking.query.get("name") else {
            return Err(Problem::bad_request("name the election: ?name=NAME"));
        };
        let name = self.seen(asking, name)?;
        let wait = asking
            .query
            .get("wait")
            .map_or(Ok(Duration::ZERO), |wait| duration("wait", wait))?;
        let _counted = self.sessions.count_waiting(&asking.principal)?;
        let until = asking.arrival + wait.min(Duration::from_secs(50));
        let election = self.client.election(&name);
        let mut changes = self.client.engine().watch(Scope::Line(name.clone()));
        let leader = loop {
            let leader = election.leader().await?;
            if leader.is_some() || until.has_passed() {
                break leader;
            }
            // A hint can be lost; one look a second is cheap.
            let recheck = until.remaining().min(Duration::from_secs(1));
            let _ = tokio::time::timeout(recheck, changes.next()).await;
        };
        let shown = leader.map(|leader| {
            let owner = leader.owner.as_ref();
            json!({
                "value": leader.value,
                "owner": owner.map(|owner| &owner.owner),
                "host": owner.map(|owner| &owner.host),
                "pid": owner.map(|owner| owner.pid),
                "token": leader.token.to_string(),
                "since": owner.map(|owner| wire::time(owner.since)),
            })
        });
        let answer = json!({"name": name.as_str(), "leader": shown});
        Ok(reply(StatusCode::OK, &answer))
    }

    async fn evict(&self, asking: &Asking, asked: wire::Evict) -> Answered {
        let name = Name::new(&asked.name)?;
        let how = match asked.how {
            How::Ask => Eviction::Mark,
            How::Force => Eviction::Remove,
        };
        if !asking.principal.may_operate(name.as_str()) {
            return Err(Problem::forbidden("you may not evict from this name"));
        }
        if asked.reason.trim().is_empty() {
            return Err(Problem::bad_request(
                "give a reason: it is kept in the audit events",
            ));
        }
        let details = json!({
            "principal": asking.principal.name,
            "name": name.as_str(),
            "claim": asked.claim,
            "how": asked.how,
            "reason": asked.reason,
        });
        self.audit.tell("eviction", details);
        // Goes on though the operator has gone: what was begun is finished.
        let client = self.client.clone();
        let evicting = tokio::spawn(async move {
            let which = asked.claim.as_deref().map_or(Which::Holders, Which::Claim);
            client.evict(&name, which, how).await
        });
        let evicted = evicting.await.map_err(|_| {
            Problem::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                "internal",
                "the eviction failed (bug)",
            )
        })??;
        if evicted {
            return Ok(reply(StatusCode::OK, &json!({"evicted": true})));
        }
        let detail = "there is nobody to evict";
        Err(Problem::new(StatusCode::NOT_FOUND, "absent", detail))
    }

    async fn engine(&self, asking: &Asking) -> Answered {
        if !asking.principal.sees_anything() {
            return Err(Problem::forbidden("you may see nothing here"));
        }
        let checkup = self.client.check().await?;
        let findings: Vec<Value> = checkup
            .findings
            .iter()
            .map(|finding| {
                json!({
                    "severity": wire::severity(finding.severity),
                    "code": finding.code,
                    "message": finding.message,
                    "remedy": finding.remedy,
                })
            })
            .collect();
        let answer = json!({
            "engine": self.client.describe(),
            "capability": wire::capability(&self.client.capability()),
            "passable": wire::passable(&self.client.capability()).is_ok(),
            "version": checkup.version,
            "clock_ahead_us": checkup.clock_ahead_us,
            "findings": findings,
            "sessions": self.sessions.count(),
            "draining": self.sessions.is_draining(),
        });
        Ok(reply(StatusCode::OK, &answer))
    }
}

/// How long an engine may take to answer once before a request says that it is away: more than
/// the engine's own timeout by default.
const ENGINE_TIME: Duration = Duration::from_secs(5);

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

fn duration(what: &str, text: &str) -> Result<Duration, Problem> {
    parse_duration(text).map_err(|why| Problem::bad_request(format!("{what}: {why}")))
}

fn wait(session: &Session, wait: Option<&str>) -> Result<Duration, Problem> {
    let wait = wait.map_or(Ok(Duration::ZERO), |wait| duration("wait", wait))?;
    let longest = session.longest_wait();
    if wait > longest {
        return Err(Problem::bad_request(format!(
            "a request may wait for {longest:?} in this session (a third of its ttl, at most 50s); \
             ask with queue, then wait again"
        )));
    }
    Ok(wait)
}

/// Who asks, as the engine keeps it: what the client says, and the principal.
fn owner(asking: &Asking, session: &Session, asked: &wire::MakeClaim) -> Owner {
    let mut owner = match &asked.owner {
        Some(wire::OwnerField::Record(record)) => record.asking_now(),
        Some(wire::OwnerField::Handle(handle)) => Owner::here(handle, None),
        None => Owner::here(&session.id, None),
    };
    let label = asked.label.clone().or(owner.label.take());
    let principal = &asking.principal.name;
    owner.label = Some(match label {
        Some(label) => format!("{label} ({principal})"),
        None => principal.clone(),
    });
    let traced = asking
        .headers
        .get("traceparent")
        .and_then(|trace| trace.to_str().ok());
    if let Some(trace) = traced.filter(|trace| trace.len() <= 128) {
        owner.traceparent = Some(trace.to_owned());
    }
    owner
}

fn query(text: &str) -> Result<HashMap<String, String>, Problem> {
    let mut found = HashMap::new();
    for pair in text.split('&').filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        let decode = |text: &str| {
            let text = text.replace('+', " ");
            let decoded = percent_encoding::percent_decode_str(&text).decode_utf8();
            decoded.map(|text| text.into_owned())
        };
        let (Ok(key), Ok(value)) = (decode(key), decode(value)) else {
            return Err(Problem::bad_request("the query is not UTF-8"));
        };
        if SECRETS.contains(&key.to_ascii_lowercase().as_str()) {
            let detail = "a secret must not be in an address, because addresses are logged; send \
                          it in a header, and take another one now";
            return Err(Problem::new(
                StatusCode::BAD_REQUEST,
                "secret_in_query",
                detail,
            ));
        }
        found.insert(key, value);
    }
    Ok(found)
}

/// Reads the document of a request.
async fn read<T: DeserializeOwned>(asking: &Asking, body: Incoming) -> Result<T, Problem> {
    let kind = asking
        .headers
        .get(CONTENT_TYPE)
        .and_then(|kind| kind.to_str().ok());
    let kind = kind
        .and_then(|kind| kind.split(';').next())
        .unwrap_or_default();
    if !kind.trim().eq_ignore_ascii_case("application/json") {
        let detail = "send a document of `Content-Type: application/json`";
        let status = StatusCode::UNSUPPORTED_MEDIA_TYPE;
        return Err(Problem::new(status, "not_json", detail));
    }
    let too_large = || {
        let detail = "a body has at most 1 MiB";
        Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", detail)
    };
    if body.size_hint().lower() > BODY as u64 {
        return Err(too_large());
    }
    let collected = tokio::time::timeout(BODY_TIME, Limited::new(body, BODY).collect()).await;
    let bytes = match collected {
        Ok(Ok(bytes)) => bytes.to_bytes(),
        Ok(Err(error)) if error.is::<http_body_util::LengthLimitError>() => {
            return Err(too_large());
        }
        Ok(Err(_)) => return Err(Problem::bad_request("the body was cut off")),
        Err(_) => {
            let detail = "the body took too long";
            return Err(Problem::new(
                StatusCode::REQUEST_TIMEOUT,
                "too_slow",
                detail,
            ));
        }
    };
    // An empty body is an empty document: `curl -X POST` sends none.
    let bytes = if bytes.is_empty() {
        &b"{}"[..]
    } else {
        &bytes[..]
    };
    serde_json::from_slice(bytes).map_err(|error| {
        // What the parser says may repeat what was sent, a secret in the wrong field too.
        let (line, column) = (error.line(), error.column());
        Problem::bad_request(format!(
            "the document is not as expected at line {line}, column {column}; see docs/gateway.md \
             for its fields"
        ))
    })
}
