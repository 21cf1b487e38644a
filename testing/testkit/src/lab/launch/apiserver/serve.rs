//! The HTTP side of the fake API server: authentication, routes, watches, faults.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, DATE, RETRY_AFTER};
use hyper::{Method, Request, Response};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::fault::Fault;
use super::store::Answer;
use super::{Mode, State};

type Body = BoxBody<Bytes, Infallible>;
type Reply = Result<Response<Body>, Hangup>;

/// Ends the connection without an answer.
#[derive(Debug)]
pub(super) struct Hangup;

impl std::fmt::Display for Hangup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("hung up")
    }
}

impl std::error::Error for Hangup {}

/// How often an idle watch receives a bookmark with the current version.
const BOOKMARK: Duration = Duration::from_secs(60);

/// A parsed request.
struct Asked {
    method: Method,
    path: String,
    query: HashMap<String, String>,
    media: String,
    token: Option<String>,
    body: Bytes,
}

pub(super) async fn serve(state: Arc<State>, request: Request<Incoming>, certified: bool) -> Reply {
    let header = |name| request.headers().get(name).and_then(|v| v.to_str().ok());
    let token = header(AUTHORIZATION).and_then(|value| value.strip_prefix("Bearer "));
    let token = token.or(certified.then_some(super::CERTIFICATE));
    let (token, media) = (token.map(str::to_owned), header(CONTENT_TYPE).unwrap_or(""));
    let media = media.to_owned();
    let query = request
        .uri()
        .query()
        .unwrap_or("")
        .split('&')
        .filter(|pair| !pair.is_empty());
    let query = query.map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    let query = query
        .map(|(key, value)| (key.to_owned(), decode(value)))
        .collect();
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let body = request
        .into_body()
        .collect()
        .await
        .map_err(|_| Hangup)?
        .to_bytes();
    let asked = Asked {
        method,
        path,
        query,
        media,
        token,
        body,
    };
    state.count(&asked.method);
    // A frozen server processes a request when it is continued, if its client is still there.
    let mut mode = state.mode.subscribe();
    let _ = mode.wait_for(|mode| *mode != Mode::Frozen).await;
    let fault = state.fault(&asked.method, &asked.path, &asked.body);
    let mut reply = match fault {
        Some(Fault::RequestLost) => return Err(Hangup),
        Some(Fault::ReplyLost) => {
            let _ = answer(&state, &asked).await;
            return Err(Hangup);
        }
        Some(Fault::TooMany { retry_after }) => too_many(retry_after),
        Some(Fault::Refused(code)) => whole(&Answer::status(code, "", "refused")),
        Some(Fault::Ambiguous { code, applied }) => {
            if applied {
                let _ = answer(&state, &asked).await;
            }
            // 1.36 answers like this: with neither kind nor apiVersion.
            plain(
                code,
                &json!({ "metadata": {}, "status": "Failure", "code": code }),
            )
        }
        Some(Fault::AppliedLate(after)) => {
            let (state, asked) = (Arc::clone(&state), asked);
            tokio::spawn(async move {
                tokio::time::sleep(after).await;
                let _ = answer(&state, &asked).await;
            });
            plain(
                504,
                &json!({ "metadata": {}, "status": "Failure", "code": 504 }),
            )
        }
        Some(Fault::Delayed(time)) => {
            tokio::time::sleep(time).await;
            answer(&state, &asked).await
        }
        None => answer(&state, &asked).await,
    };
    if let Some(date) = state.date() {
        reply.headers_mut().insert(DATE, date);
    }
    Ok(reply)
}

fn decode(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        rest = tail;
        let digits = (*first == b'%')
            .then(|| std::str::from_utf8(tail.get(..2)?).ok())
            .flatten();
        match digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &tail[2..];
            }
            None => bytes.push(*first),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn plain(code: u16, body: &Value) -> Response<Body> {
    let body = Full::new(Bytes::from(body.to_string())).boxed();
    let mut response = Response::new(body);
    *response.status_mut() = code.try_into().unwrap_or_default();
    let json = hyper::header::HeaderValue::from_static("application/json");
    response.headers_mut().insert(CONTENT_TYPE, json);
    response
}

fn whole(answer: &Answer) -> Response<Body> {
    plain(answer.code, &answer.body)
}

fn too_many(retry_after: u64) -> Response<Body> {
    let text = "Too many requests, please try again later.\n";
    let mut response = Response::new(Full::new(Bytes::from(text)).boxed());
    *response.status_mut() = hyper::StatusCode::TOO_MANY_REQUESTS;
    let headers = response.headers_mut();
    headers.insert(RETRY_AFTER, retry_after.into());
    let plain = hyper::header::HeaderValue::from_static("text/plain; charset=utf-8");
    headers.insert(CONTENT_TYPE, plain);
    response
}

const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/";
const REVIEWS: &str = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";

async fn answer(state: &Arc<State>, asked: &Asked) -> Response<Body> {
    let grants = state.grants.lock().clone();
    let bearer = asked.token.as_deref();
    let known = grants
        .iter()
        .find(|grant| Some(grant.token.as_str()) == bearer);
    if grants.is_empty() {
        // Everything is allowed.
    } else if bearer.is_some() && known.is_none() {
        return whole(&Answer::status(401, "Unauthorized", "Unauthorized"));
    }
    let may = |verb: &str, name: &str| {
        grants.is_empty() || known.is_some_and(|grant| grant.allows(verb, name))
    };
    if asked.path == "/version" {
        return plain(
            200,
            &json!({ "major": "1", "minor": "36", "gitVersion": "v1.36.4-standin" }),
        );
    }
    if asked.path == REVIEWS {
        let mut review: Value = serde_json::from_slice(&asked.body).unwrap_or_default();
        let verb = review
            .pointer("/spec/resourceAttributes/verb")
            .and_then(Value::as_str);
        let allowed = may(verb.unwrap_or(""), "");
        review["status"] = json!({ "allowed": allowed });
        return plain(201, &review);
    }
    let found = asked
        .path
        .strip_prefix(LEASES)
        .and_then(|rest| rest.split_once("/leases"));
    let Some((namespace, name)) = found else {
        return plain(404, &json!({ "message": "404 page not found" }));
    };
    let name = name.trim_start_matches('/');
    let watch = matches!(
        asked.query.get("watch").map(String::as_str),
        Some("1" | "true")
    );
    let selected = asked.query.get("fieldSelector").map_or("", String::as_str);
    let selected = selected.strip_prefix("metadata.name=").unwrap_or("");
    let (verb, whose) = match (&asked.method, name) {
        (&Method::GET, "") if watch => ("watch", selected),
        (&Method::GET, "") => ("list", selected),
        (&Method::GET, name) => ("get", name),
        (&Method::POST, _) => ("create", ""),
        (&Method::PUT, name) => ("update", name),
        (&Method::PATCH, name) => ("patch", name),
        (_, name) => ("delete", name),
    };
    let forbidden = |verb: &str| {
        let message = format!("cannot {verb} resource \"leases\"");
        whole(&Answer::status(403, "Forbidden", &message))
    };
    if !may(verb, whose) {
        return forbidden(verb);
    }
    if verb == "watch" {
        return watch_from(state, asked, namespace);
    }
    // A version in the future is waited for, and then the request times out.
    let version = asked
        .query
        .get("resourceVersion")
        .and_then(|v| v.parse::<u64>().ok());
    let reached = state.store.lock().version;
    if verb == "get" && version.is_some_and(|version| version > reached) {
        tokio::time::sleep(Duration::from_secs(3)).await;
        let answer = Answer::status(504, "Timeout", "Too large resource version");
        let mut late = whole(&answer);
        late.headers_mut().insert(RETRY_AFTER, 1.into());
        return late;
    }
    let mut store = state.store.lock();
    let answer = match verb {
        verb if verb != "list" && namespace != store.namespace => {
            store.elsewhere(verb, namespace, name)
        }
        "list" => list(&store, asked, namespace),
        "get" => store.get(name),
        "create" => store.create(namespace, &asked.body),
        "update" => {
            // A PUT that creates also needs the permission to create, by name.
            let creates = store.get(name).code == 404;
            if creates && !may("create", name) {
                return forbidden("create");
            }
            store.replace(namespace, name, &asked.body)
        }
        "patch" => store.patch(namespace, name, &asked.media, &asked.body),
        _ => store.delete(name, &asked.body),
    };
    drop(store);
    state.changed.notify_waiters();
    whole(&answer)
}

/// Whether an object matches the selectors.
fn selects(asked: &Asked, lease: &Value) -> Result<bool, Answer> {
    let mut through = true;
    if let Some(field) = asked
        .query
        .get("fieldSelector")
        .filter(|field| !field.is_empty())
    {
        match field.split_once('=') {
            Some(("metadata.name", name)) => through &= lease["metadata"]["name"] == name,
            Some(("metadata.namespace", name)) => through &= lease["metadata"]["namespace"] == name,
            _ => {
                return Err(Answer::status(
                    400,
                    "BadRequest",
                    "field label not supported",
                ));
            }
        }
    }
    if let Some(label) = asked
        .query
        .get("labelSelector")
        .filter(|label| !label.is_empty())
    {
        let labels = &lease["metadata"]["labels"];
        through &= match label.split_once('=') {
            Some((key, value)) => labels[key] == value,
            None => labels.get(label.as_str()).is_some(),
        };
    }
    Ok(through)
}

fn list(store: &super::store::Store, asked: &Asked, namespace: &str) -> Answer {
    let limit = asked
        .query
        .get("limit")
        .and_then(|limit| limit.parse().ok());
    let from = asked.query.get("continue").map_or("", String::as_str);
    let mut items = Vec::new();
    let mut more = String::new();
    for lease in store.all().filter(|_| namespace == store.namespace) {
        let name = lease["metadata"]["name"].as_str().unwrap_or("");
        match selects(asked, lease) {
            Err(refused) => return refused,
            Ok(through) if !through || name <= from => continue,
            Ok(_) => {}
        }
        if limit.is_some_and(|limit: usize| limit > 0 && items.len() == limit) {
            let last: Option<&Value> = items.last();
            more = last
                .and_then(|l| l["metadata"]["name"].as_str())
                .unwrap_or("")
                .to_owned();
            break;
        }
        let mut item = lease.clone();
        // Items of a list have neither kind nor apiVersion.
        if let Some(item) = item.as_object_mut() {
            item.remove("kind");
            item.remove("apiVersion");
        }
        items.push(item);
    }
    let metadata = json!({ "resourceVersion": store.version.to_string(), "continue": more });
    let body = json!({
        "kind": "LeaseList", "apiVersion": "coordination.k8s.io/v1",
        "metadata": metadata, "items": items,
    });
    Answer { code: 200, body }
}

/// A watch in progress.
struct Watching {
    state: Arc<State>,
    asked: Asked,
    namespace: String,
    /// The last version that was sent.
    at: u64,
    pending: std::collections::VecDeque<String>,
    ends: Instant,
    bookmark: Instant,
    epoch: u64,
    over: bool,
}

fn line(kind: &str, object: &Value) -> String {
    format!("{}\n", json!({ "type": kind, "object": object }))
}

fn watch_from(state: &Arc<State>, asked: &Asked, namespace: &str) -> Response<Body> {
    let seconds = asked
        .query
        .get("timeoutSeconds")
        .and_then(|text| text.parse().ok());
    let lasts = Duration::from_secs(seconds.unwrap_or(1800));
    let store = state.store.lock();
    let version = asked
        .query
        .get("resourceVersion")
        .and_then(|text| text.parse().ok());
    let from = version.filter(|version: &u64| *version > 0);
    let mut watching = Watching {
        state: Arc::clone(state),
        asked: Asked {
            method: asked.method.clone(),
            path: asked.path.clone(),
            query: asked.query.clone(),
            media: String::new(),
            token: None,
            body: Bytes::new(),
        },
        namespace: namespace.to_owned(),
        at: from.unwrap_or(store.version),
        pending: Default::default(),
        ends: Instant::now() + lasts,
        bookmark: Instant::now() + BOOKMARK,
        epoch: state.epoch(),
        over: false,
    };
    match from {
        // Sent as an event, after a 200.
        Some(from) if from < store.oldest => {
            let gone = Answer::status(410, "Expired", "too old resource version");
            watching.pending.push_back(line("ERROR", &gone.body));
            watching.over = true;
        }
        Some(_) => {}
        None => {
            for lease in store.all().filter(|_| namespace == store.namespace) {
                match selects(&watching.asked, lease) {
                    Err(refused) => return whole(&refused),
                    Ok(true) => watching.pending.push_back(line("ADDED", lease)),
                    Ok(false) => {}
                }
            }
        }
    }
    drop(store);
    let events = stream::unfold(watching, |mut watching| async move {
        let text = watching.next().await?;
        let frame = Frame::data(Bytes::from(text));
        Some((Ok::<_, Infallible>(frame), watching))
    });
    let mut response = Response::new(StreamBody::new(Box::pin(events)).boxed());
    let json = hyper::header::HeaderValue::from_static("application/json");
    response.headers_mut().insert(CONTENT_TYPE, json);
    response
}

impl Watching {
    async fn next(&mut self) -> Option<String> {
        loop {
            let state = Arc::clone(&self.state);
            let changed = state.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let mut mode = state.mode.subscribe();
            // A frozen server sends nothing at all.
            let _ = mode.wait_for(|mode| *mode != Mode::Frozen).await;
            if let Some(text) = self.pending.pop_front() {
                return Some(text);
            }
            if self.over || self.epoch != state.epoch() {
                return None;
            }
            self.take_in();
            if !self.pending.is_empty() {
                continue;
            }
            let now = Instant::now();
            if now >= self.ends {
                return None;
            }
            if now >= self.bookmark {
                self.bookmark = now + BOOKMARK;
                return Some(self.bookmarked());
            }
            tokio::select! {
                () = &mut changed => {}
                _ = mode.changed() => {}
                () = tokio::time::sleep_until(self.ends.min(self.bookmark)) => {}
            }
        }
    }

    fn bookmarked(&self) -> String {
        let version = self.state.store.lock().version.to_string();
        let object = json!({
            "kind": "Lease", "apiVersion": "coordination.k8s.io/v1",
            "metadata": { "resourceVersion": version },
        });
        line("BOOKMARK", &object)
    }

    /// Collects events since the last one; those below a version from the future are dropped
    /// silently.
    fn take_in(&mut self) {
        let store = self.state.store.lock();
        if self.namespace != store.namespace {
            return;
        }
        for event in store.log.iter().filter(|event| event.version > self.at) {
            let fits = |object: &Value| selects(&self.asked, object).unwrap_or(false);
            // To this watch, an object that starts or stops matching the selector is added or
            // deleted.
            let before = event.before.as_ref().is_some_and(fits);
            let kind = match (before, event.kind != "DELETED" && fits(&event.object)) {
                (false, false) => continue,
                (false, true) => "ADDED",
                (true, true) => "MODIFIED",
                (true, false) => "DELETED",
            };
            self.pending.push_back(line(kind, &event.object));
        }
        self.at = self.at.max(store.version);
    }
}
