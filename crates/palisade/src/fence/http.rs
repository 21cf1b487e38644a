//! A fence in front of an HTTP service: a tower layer for axum, hyper and other users of `http`,
//! and the header on the client's side.
//!
//! The layer reads the token from the header `Fencing-Token`, holds a lock per resource from the
//! comparison until the handler has answered, and passes the token to the handler for its own
//! store. A client whose next write depends on what it reads takes first: a GET with `Fencing-Take`
//! raises the highest token, and is answered afterwards.
//!
//! Within one process no stale request is handled after a newer one. **Across replicas of a
//! service it is advisory**: each replica has its own locks, so a handler that is paused in one can
//! write after a newer one in another. There the handler's store must compare the token as well.
//!
//! ```
//! use palisade::fence::{http::FenceLayer, MemoryFence};
//! # use std::sync::Arc;
//! // The resource is named by the path: PUT /stock/7 is fenced as "/stock/7".
//! let layer = FenceLayer::by_path(Arc::new(MemoryFence::default()));
//! # let _ = layer; // axum: Router::new().route(…).layer(layer)
//! ```

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};

use ::http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderName, HeaderValue};
use ::http::request::{Builder, Parts};
use ::http::{HeaderMap, Method, Request, Response, StatusCode};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::{Mutex as Turn, OwnedMutexGuard};
use tower_layer::Layer;
use tower_service::Service;

use super::{FenceExt, Presented, ReadToken, Rule, SharedFence, Verdict, WriteToken};
use palisade_core::engine::BoxFuture;
use palisade_core::{ErrorKind, Hold, Name, Result, Token};

/// The header that carries a token, in decimal digits.
pub const FENCING_TOKEN: HeaderName = HeaderName::from_static("fencing-token");

/// The header of a request that reads in order to write: the token of an exclusive hold, in decimal
/// digits. Its answer contains every write that was accepted, and no older holder can write after
/// it.
pub const FENCING_TAKE: HeaderName = HeaderName::from_static("fencing-take");

/// The resource of a request; `None` if it concerns no fenced resource.
type ResourceOf = dyn Fn(&Parts) -> Result<Option<Name>> + Send + Sync;

/// Fences a service. Clones, and the services they create, share their locks per resource.
#[derive(Clone)]
pub struct FenceLayer {
    shared: Arc<Shared>,
}

struct Shared {
    fence: SharedFence,
    resource_of: Box<ResourceOf>,
    /// The locks per resource, kept while somebody holds or waits for them.
    turns: Mutex<HashMap<Name, Weak<Turn<()>>>>,
}

impl FenceLayer {
    /// Records tokens in `fence`; `resource_of` names the resource of a request. `None` lets the
    /// request pass unfenced, an error refuses it (400).
    pub fn new(
        fence: SharedFence,
        resource_of: impl Fn(&Parts) -> Result<Option<Name>> + Send + Sync + 'static,
    ) -> Self {
        Self {
            shared: Arc::new(Shared {
                fence,
                resource_of: Box::new(resource_of),
                turns: Mutex::default(),
            }),
        }
    }

    /// Every path is a resource. A path that is too long for a name is refused (400).
    pub fn by_path(fence: SharedFence) -> Self {
        Self::new(fence, |request| Name::new(request.uri.path()).map(Some))
    }
}

impl std::fmt::Debug for FenceLayer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FenceLayer").finish_non_exhaustive()
    }
}

impl<S> Layer<S> for FenceLayer {
    type Service = FenceService<S>;

    fn layer(&self, inner: S) -> FenceService<S> {
        FenceService {
            inner,
            shared: Arc::clone(&self.shared),
        }
    }
}

/// A service behind a [`FenceLayer`].
///
/// # Behavior
/// - A request that may write (any method but GET, HEAD, OPTIONS and TRACE) needs a token: 428
///   `token_missing` without, 400 `invalid_token` for what is none, 409 `stale_token` for one that
///   is older than one accepted before. Refusals are `application/problem+json`.
/// - An accepted token is remembered before the handler runs, and is in the request's extensions
///   as a [`WriteToken`].
/// - A request that reads may carry a token: it is compared, not remembered, and handed on as a
///   [`ReadToken`]. It takes no turn.
/// - A request that reads in order to write carries its token as `Fencing-Take` instead: it waits
///   for its turn, the token is remembered as by [`Fence::take`](super::Fence::take) before the
///   handler runs, and handed on as a [`WriteToken`], for the handler's own store. The answer is
///   `Cache-Control: no-store`. On a request that may write, or beside `Fencing-Token`, it is
///   refused (400).
/// - One request per resource writes at a time, until its handler has answered or was dropped.
#[derive(Clone)]
pub struct FenceService<S> {
    inner: S,
    shared: Arc<Shared>,
}

impl<S: std::fmt::Debug> std::fmt::Debug for FenceService<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let inner = &self.inner;
        f.debug_struct("FenceService")
            .field("inner", inner)
            .finish()
    }
}

impl<S, Body, Answer> Service<Request<Body>> for FenceService<S>
where
    S: Service<Request<Body>, Response = Response<Answer>> + Clone + Send + 'static,
    S::Future: Send,
    Body: Send + 'static,
    Answer: From<String> + Send + 'static,
{
    type Response = Response<Answer>;
    type Error = S::Error;
    type Future = BoxFuture<std::result::Result<Response<Answer>, S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<std::result::Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        // Use the instance that reported ready, and keep the clone.
        let clone = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, clone);
        let shared = Arc::clone(&self.shared);
        Box::pin(async move {
            let (mut parts, body) = request.into_parts();
            let takes = parts.headers.contains_key(FENCING_TAKE);
            // Held until the handler has answered.
            let mut answer = match shared.admit(&mut parts).await {
                Ok(turn) => {
                    let answer = inner.call(Request::from_parts(parts, body)).await?;
                    drop(turn);
                    answer
                }
                Err(refusal) => refusal.response(),
            };
            if takes {
                let no_store = HeaderValue::from_static("no-store");
                answer.headers_mut().insert(CACHE_CONTROL, no_store);
            }
            Ok(answer)
        })
    }
}

impl Shared {
    /// Admits a request, with the lock of its resource if it writes.
    async fn admit(
        &self,
        parts: &mut Parts,
    ) -> std::result::Result<Option<OwnedMutexGuard<()>>, Refusal> {
        let resource = (self.resource_of)(parts).map_err(|_| Refusal::NoName)?;
        let Some(resource) = resource else {
            return Ok(None);
        };
        let token = token_of(&parts.headers, &FENCING_TOKEN)?;
        if let Some(taking) = token_of(&parts.headers, &FENCING_TAKE)? {
            if token.is_some() || !reads(&parts.method) {
                return Err(Refusal::Misplaced);
            }
            let taking = WriteToken::from(taking);
            let turn = self.turn(&resource).lock_owned().await;
            judged(self.take(&resource, taking).await)?;
            parts.extensions.insert(taking);
            return Ok(Some(turn));
        }
        if reads(&parts.method) {
            if let Some(token) = token {
                let token = ReadToken::from(token);
                self.judge(&resource, token.into()).await?;
                parts.extensions.insert(token);
            }
            return Ok(None);
        }
        let token = WriteToken::from(token.ok_or(Refusal::Missing)?);
        let turn = self.turn(&resource).lock_owned().await;
        self.judge(&resource, token.into()).await?;
        parts.extensions.insert(token);
        Ok(Some(turn))
    }

    async fn judge(&self, resource: &Name, token: Presented) -> std::result::Result<(), Refusal> {
        let verdict = match token {
            Presented::Write(token) => self.fence.accept(resource, token).await,
            Presented::Read(_) => self.fence.check(resource, token).await,
        };
        judged(verdict)
    }

    /// Raises the mark. A strict fence keeps the token itself for the write.
    async fn take(&self, resource: &Name, token: WriteToken) -> Result<Verdict> {
        if self.fence.rule() != Rule::Strict {
            return self.fence.accept(resource, token).await;
        }
        let taken = self.fence.take(resource, token).await;
        taken.map(|taken| taken.verdict())
    }

    /// The lock of a resource. Locks that nobody holds or waits for are removed.
    fn turn(&self, resource: &Name) -> Arc<Turn<()>> {
        let mut turns = self.turns.lock();
        if let Some(turn) = turns.get(resource).and_then(Weak::upgrade) {
            return turn;
        }
        // Sweep only when the map is full, so that the cost per request stays constant on average.
        if turns.len() == turns.capacity() {
            turns.retain(|_, turn| turn.strong_count() > 0);
        }
        let turn = Arc::new(Turn::new(()));
        turns.insert(resource.clone(), Arc::downgrade(&turn));
        turn
    }
}

fn judged(verdict: Result<Verdict>) -> std::result::Result<(), Refusal> {
    match verdict {
        Ok(Verdict::Accepted) => Ok(()),
        Ok(Verdict::Stale { highest }) => Err(Refusal::Stale { highest }),
        Err(error) if error.kind() == ErrorKind::InvalidArgument => Err(Refusal::Invalid),
        Err(_) => Err(Refusal::NoFence),
    }
}

fn reads(method: &Method) -> bool {
    let safe = [Method::GET, Method::HEAD, Method::OPTIONS, Method::TRACE];
    safe.contains(method)
}

/// The token of a request, which may carry only one.
fn token_of(
    headers: &HeaderMap,
    header: &HeaderName,
) -> std::result::Result<Option<Token>, Refusal> {
    let mut tokens = headers.get_all(header).iter();
    let Some(first) = tokens.next() else {
        return Ok(None);
    };
    let text = first.to_str().ok().filter(|_| tokens.next().is_none());
    let digits = text.filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
    let token = digits.and_then(|text| text.parse().ok()).map(Token);
    token.map(Some).ok_or(Refusal::Invalid)
}

/// Why a request is refused.
enum Refusal {
    NoName,
    Missing,
    Invalid,
    Misplaced,
    Stale { highest: Token },
    NoFence,
}

impl Refusal {
    fn response<Answer: From<String>>(&self) -> Response<Answer> {
        let (status, code, title) = match self {
            Self::NoName => (
                StatusCode::BAD_REQUEST,
                "invalid_resource",
                "what this request is about can't be the name of a resource",
            ),
            Self::Missing => (
                StatusCode::PRECONDITION_REQUIRED,
                "token_missing",
                "this resource is fenced: send the token of your lock as Fencing-Token",
            ),
            Self::Invalid => (
                StatusCode::BAD_REQUEST,
                "invalid_token",
                "a token is one whole number, that of a lock",
            ),
            Self::Misplaced => (
                StatusCode::BAD_REQUEST,
                "misplaced_take",
                "Fencing-Take belongs to a GET, without Fencing-Token",
            ),
            Self::Stale { .. } => (
                StatusCode::CONFLICT,
                "stale_token",
                "a newer holder of the lock has been here",
            ),
            Self::NoFence => (
                StatusCode::SERVICE_UNAVAILABLE,
                "fence_unavailable",
                "the tokens accepted so far can't be read",
            ),
        };
        let mut problem = json!({"code": code, "title": title, "status": status.as_u16()});
        if let Self::Stale { highest } = self {
            // As text, because it may exceed the precision of a double.
            problem["highest"] = Value::from(highest.to_string());
        }
        let mut response = Response::new(Answer::from(problem.to_string()));
        *response.status_mut() = status;
        let content = HeaderValue::from_static("application/problem+json");
        response.headers_mut().insert(CONTENT_TYPE, content);
        response
    }
}

/// Adds a hold's token to a request.
///
/// A client with its own builder sets the header directly:
/// `client.put(url).header(FENCING_TOKEN, hold.write_token()?)`.
pub trait FencedRequest: Sized {
    /// Adds the header. A request that may write needs an exclusive hold; one that reads needs any
    /// hold but permits.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for a hold without such a token; [`ErrorKind::Lost`] when the
    /// hold is known to be lost.
    fn fenced_by(self, hold: &Hold) -> Result<Self>;

    /// Adds the header `Fencing-Take` to a request that reads, because a write will depend on its
    /// answer.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for a hold that is not exclusive; [`ErrorKind::Lost`] when
    /// the hold is known to be lost.
    fn taken_by(self, hold: &Hold) -> Result<Self>;
}

fn header(hold: &Hold, method: &Method) -> Result<HeaderValue> {
    if !hold.is_valid() {
        return Err(hold.lost_error("fence"));
    }
    Ok(if reads(method) {
        hold.read_token()?.into()
    } else {
        hold.write_token()?.into()
    })
}

fn taking(hold: &Hold) -> Result<HeaderValue> {
    if !hold.is_valid() {
        return Err(hold.lost_error("fence"));
    }
    Ok(hold.write_token()?.into())
}

impl FencedRequest for Builder {
    fn fenced_by(self, hold: &Hold) -> Result<Self> {
        let token = header(hold, self.method_ref().unwrap_or(&Method::GET))?;
        Ok(self.header(FENCING_TOKEN, token))
    }

    fn taken_by(self, hold: &Hold) -> Result<Self> {
        Ok(self.header(FENCING_TAKE, taking(hold)?))
    }
}

impl<Body> FencedRequest for Request<Body> {
    fn fenced_by(mut self, hold: &Hold) -> Result<Self> {
        let token = header(hold, self.method())?;
        self.headers_mut().insert(FENCING_TOKEN, token);
        Ok(self)
    }

    fn taken_by(mut self, hold: &Hold) -> Result<Self> {
        self.headers_mut().insert(FENCING_TAKE, taking(hold)?);
        Ok(self)
    }
}
