//! `Client`: requests to gateways. Each has a timeout, and each error says whether the change may
//! have been applied.
//!
//! There is one HTTP client per runtime. Of several gateways the first one that answers and is not
//! draining is used; when it fails, all are asked again. Requests of a session go to the session's
//! own gateway, past any load balancer. A request is never sent twice here: the caller decides what
//! an unknown outcome means.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use reqwest::header::{AUTHORIZATION, HeaderName};
use reqwest::{Method, Response};
use serde_json::{Value, json};

use super::api::{Described, Opened};
use super::error::{Problem, WHO, broken, parse, speaks_tls};
use super::sessions::Session;
use palisade_core::engine::{config_error, no_connection, rounded, unreachable};
use palisade_core::{BootTime, Error, Result};
use palisade_kit::replies::{LISTING, REPLY};
use palisade_kit::{
    Answer, Asked, Broke, Link, PerRuntime, SecretFile, Tls, ask_http, body_of, http_client_with,
    timed,
};

/// The header with a session's secret.
const SESSION: HeaderName = HeaderName::from_static("palisade-session");
/// The header with the client's timeout.
const TIMEOUT: HeaderName = HeaderName::from_static("palisade-timeout");
/// Idle connections are closed after this. A gateway closes them after 90 s, a load balancer
/// sooner, and some drop them silently: the outcome of a request on a dead connection would be
/// unknown.
const IDLE: Duration = Duration::from_secs(5);
/// Event streams send a keep-alive every 15 s.
const SILENCE: Duration = Duration::from_secs(40);

/// The part of the URL that concerns requests.
pub(super) struct Access {
    /// `http://host:port` of each gateway; for a socket only the `Host` header.
    pub(super) bases: Vec<Arc<str>>,
    pub(super) socket: Option<PathBuf>,
    pub(super) tls: Option<Tls>,
    pub(super) asked: Asked,
    pub(super) token: Token,
    pub(super) timeout: Duration,
    pub(super) connect_timeout: Duration,
}

/// The source of the token.
#[derive(Clone)]
pub(super) enum Token {
    None,
    /// A secret.
    Given(String),
    File(SecretFile),
}

impl Token {
    /// The current token, because files are rotated.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](palisade_core::ErrorKind::Config) when its file can't be read.
    pub(super) fn read(&self) -> Result<Option<String>> {
        match self {
            Self::None => Ok(None),
            Self::Given(token) => Ok(Some(token.clone())),
            Self::File(file) => file.read().map(Some),
        }
    }
}

/// An HTTP client, and the gateway that it uses for requests without a session.
#[derive(Clone)]
struct Connection {
    http: reqwest::Client,
    base: Arc<str>,
    /// The token that it sends; a secret.
    token: Option<Arc<str>>,
    described: Arc<Described>,
}

impl Access {
    /// An HTTP client for this runtime, with the token and certificates as their files are now.
    fn http(&self, token: Option<&str>) -> Result<reqwest::Client> {
        let token = token.map(|token| (AUTHORIZATION, format!("Bearer {token}")));
        let mut builder = http_client_with(self.tls.as_ref(), &self.asked, "token", token)?
            .connect_timeout(self.connect_timeout)
            .pool_idle_timeout(IDLE);
        if let Some(socket) = &self.socket {
            builder = builder.unix_socket(socket.as_path());
        }
        let http = builder.build();
        http.map_err(|error| config_error("an HTTP client can't be set up").because(error))
    }

    /// The name of a gateway in messages.
    fn shown(&self, base: &str) -> String {
        match &self.socket {
            Some(path) => path.display().to_string(),
            None => base.to_owned(),
        }
    }

    /// Asks all gateways for their engine, and uses the first that answers; one that is draining
    /// only if there is no other.
    async fn connect(&self) -> Result<Connection> {
        let token: Option<Arc<str>> = self.token.read()?.map(Into::into);
        let http = self.http(token.as_deref())?;
        let bases = self.bases.iter();
        let mut asked: FuturesUnordered<_> = bases
            .map(|base| self.ask(http.clone(), Arc::clone(base), token.clone()))
            .collect();
        let mut last = Err(no_connection("no gateway was named"));
        while let Some(answer) = asked.next().await {
            match answer {
                Ok(connection) if !connection.described.draining => return Ok(connection),
                Ok(draining) => last = Ok(draining),
                Err(error) if last.is_err() => last = Err(error),
                Err(_) => {}
            }
        }
        last
    }

    async fn ask(
        &self,
        http: reqwest::Client,
        base: Arc<str>,
        token: Option<Arc<str>>,
    ) -> Result<Connection> {
        // A little before the caller's own timeout, which can't name the hosts.
        let limit = self.connect_timeout - self.connect_timeout / 20;
        let failed = |broke: Broke| {
            let error = broken("connect", &self.shown(&base), &broke);
            self.asked.judge(WHO, error)
        };
        let request = http.get(format!("{base}/v1/engine?check=false"));
        let answered = tokio::time::timeout(limit, ask_http(request, REPLY)).await;
        let answer = answered
            .map_err(|_| {
                let (base, limit) = (self.shown(&base), self.connect_timeout);
                no_connection(format!("no answer from {base} within {}", rounded(limit)))
            })?
            .map_err(failed)?;
        self.asked.served();
        if let Some(error) = speaks_tls(&base, &answer) {
            return Err(error);
        }
        if !answer.status.is_success() {
            return Err(Problem::of(&answer).error("connect").not_applied());
        }
        let described = parse("connect", &answer.body).map_err(Error::not_applied)?;
        Ok(Connection {
            http,
            base,
            token,
            described: Arc::new(described),
        })
    }

    /// Where the requests of a session go, which the gateway at `base` opened with this `url`. A
    /// socket has nothing in between, so it stays. A connection with TLS is never replaced by one
    /// without.
    fn follow(&self, base: &Arc<str>, url: Option<&str>) -> Arc<str> {
        let followed = url.filter(|_| self.socket.is_none()).and_then(|url| {
            let url = reqwest::Url::parse(url).ok()?;
            let fit = match url.scheme() {
                "https" => true,
                "http" => self.tls.is_none(),
                _ => false,
            };
            let plain = url.username().is_empty() && url.password().is_none();
            (fit && plain && url.has_host()).then(|| url.origin().ascii_serialization().into())
        });
        followed.unwrap_or_else(|| Arc::clone(base))
    }
}

/// A request: the operation, its session's gateway, and its time limit.
pub(super) struct Call<'a> {
    pub(super) operation: &'static str,
    pub(super) method: Method,
    pub(super) path: &'a str,
    pub(super) session: Option<&'a Session>,
    pub(super) body: Option<Value>,
    pub(super) within: Duration,
}

pub(super) enum Reply {
    Done(Vec<u8>),
    Refused(Problem),
}

impl Reply {
    /// The body, or the refusal as an error.
    pub(super) fn done(self, operation: &'static str) -> Result<Vec<u8>> {
        match self {
            Self::Done(body) => Ok(body),
            Self::Refused(problem) => Err(problem.error(operation)),
        }
    }
}

pub(super) struct Client {
    access: Arc<Access>,
    connections: PerRuntime<Connection>,
    pub(super) timeout: Duration,
}

impl Client {
    pub(super) fn new(access: Access) -> Result<Self> {
        // Fails now and not at the first request.
        access.http(access.token.read()?.as_deref())?;
        let access = Arc::new(access);
        let connects = Arc::clone(&access);
        let connections = PerRuntime::new(access.connect_timeout, move || {
            let access = Arc::clone(&connects);
            Box::pin(async move { access.connect().await })
        });
        let shown: Vec<String> = access.bases.iter().map(|base| access.shown(base)).collect();
        Ok(Self {
            connections: connections.to(shown.join(", ")),
            timeout: access.timeout,
            access,
        })
    }

    /// Connects, if this runtime has no connection yet, and returns what the gateway reports about
    /// its engine.
    pub(super) async fn describe(&self) -> Result<Arc<Described>> {
        Ok(self.connections.get().await?.connection.described)
    }

    /// Whether a claim can move to another gateway.
    pub(super) fn has_others(&self) -> bool {
        self.access.bases.len() > 1
    }

    pub(super) fn close(&self) {
        self.connections.close();
    }

    /// Sends one request.
    pub(super) async fn send(&self, call: Call<'_>) -> Result<Reply> {
        let until = BootTime::now() + call.within;
        let link = self.link(call.operation, call.within).await?;
        self.send_by(&link, call, until).await
    }

    async fn send_by(
        &self,
        link: &Link<Connection>,
        call: Call<'_>,
        until: BootTime,
    ) -> Result<Reply> {
        let (operation, sent) = (call.operation, BootTime::now());
        let request = self.request(link, &call);
        let most = if operation == "survey" {
            LISTING
        } else {
            REPLY
        };
        let reply = ask_http(request, most);
        let answer = match timed(operation, until.remaining(), reply).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(broke)) => {
                self.connections.broken(link).await;
                let place = self.access.shown(place(link, call.session));
                return Err(broken(operation, &place, &broke));
            }
            Err(late) => {
                self.connections.unanswered(operation, link).await;
                return Err(late);
            }
        };
        self.connections.answered(link);
        let problem = (!answer.status.is_success()).then(|| Problem::of(&answer));
        if let Some(session) = call.session {
            match &problem {
                None => session.answered(sent),
                Some(problem) if problem.code == "no_session" => session.is_unknown(),
                // The gateway may have refused it before it checked the session.
                Some(_) => {}
            }
        }
        match problem {
            None => Ok(Reply::Done(answer.body)),
            Some(problem) => Ok(Reply::Refused(self.judge(link, problem).await?)),
        }
    }

    async fn link(&self, operation: &'static str, within: Duration) -> Result<Link<Connection>> {
        timed(operation, within, self.connections.get())
            .await
            .map_err(Error::not_applied)?
    }

    fn request(&self, link: &Link<Connection>, call: &Call<'_>) -> reqwest::RequestBuilder {
        let url = format!("{}{}", place(link, call.session), call.path);
        let mut request = link.connection.http.request(call.method.clone(), url);
        if let Some(session) = call.session {
            request = request.header(SESSION, session.secret.clone());
        }
        // A request that waits has its own time limit in its body.
        if call.operation != "wait" {
            let within = call.within.as_millis().max(1);
            request = request.header(TIMEOUT, format!("{within}ms"));
        }
        match &call.body {
            None => request,
            Some(body) => request.json(body),
        }
    }

    /// Drops the connection, for later requests, when the gateway is draining or our token was
    /// replaced.
    async fn judge(&self, link: &Link<Connection>, problem: Problem) -> Result<Problem> {
        if problem.code == "draining" {
            self.connections.broken(link).await;
        }
        if problem.code == "unauthorized"
            && let Ok(token) = self.access.token.read()
            && token.as_deref() != link.connection.token.as_deref()
        {
            self.connections.broken(link).await;
            let message = "the token was replaced; the new one is used from now on";
            return Err(no_connection(message));
        }
        Ok(problem)
    }

    /// Sends a read-only request.
    pub(super) async fn get(&self, operation: &'static str, path: &str) -> Result<Vec<u8>> {
        let call = Call {
            operation,
            method: Method::GET,
            path,
            session: None,
            body: None,
            within: self.timeout,
        };
        let reply = self.send(call).await.map_err(Error::not_applied)?;
        reply.done(operation)
    }

    /// Opens a session. One whose reply is lost is empty and expires after its ttl, so the error
    /// always says that nothing was applied.
    pub(super) async fn open(&self, ttl: Duration) -> Result<Session> {
        let secret = format!(
            "{:032x}{:032x}",
            rand::random::<u128>(),
            rand::random::<u128>()
        );
        let sent = BootTime::now();
        let link = self.link("session", self.timeout).await?;
        let call = Call {
            operation: "session",
            method: Method::POST,
            path: "/v1/sessions",
            session: None,
            body: Some(json!({"ttl": format!("{}ms", ttl.as_millis()), "secret": secret})),
            within: self.timeout,
        };
        let reply = self.send_by(&link, call, sent + self.timeout).await;
        let reply = reply.map_err(Error::not_applied)?;
        let body = reply.done("session").map_err(Error::not_applied)?;
        let opened: Opened = parse("session", &body).map_err(Error::not_applied)?;
        let base = &link.connection.base;
        let base = self.access.follow(base, opened.url.as_deref());
        let ttl = Duration::from_millis(opened.ttl_ms).min(ttl);
        Ok(Session::new(&secret, ttl, base, sent))
    }

    /// Ends a session, which releases its claims. Best effort.
    pub(super) async fn end(&self, session: &Session) {
        let call = Call {
            operation: "session",
            method: Method::DELETE,
            path: "/v1/sessions",
            session: Some(session),
            body: None,
            within: self.timeout,
        };
        let _ = self.send(call).await;
    }

    /// Opens a stream of server-sent events.
    pub(super) async fn events(&self, path: &str, session: Option<&Session>) -> Result<Events> {
        let call = Call {
            operation: "watch",
            method: Method::GET,
            path,
            session,
            body: None,
            within: self.timeout,
        };
        let link = self.link("watch", self.timeout).await?;
        let response = timed("watch", self.timeout, self.request(&link, &call).send()).await;
        let mut response = response.map_err(Error::not_applied)?.map_err(|error| {
            let place = self.access.shown(place(&link, session));
            broken("watch", &place, &error.into()).not_applied()
        })?;
        let status = response.status();
        if !status.is_success() {
            let headers = std::mem::take(response.headers_mut());
            let body = timed("watch", self.timeout, body_of(response, REPLY)).await;
            let body = body.map_err(Error::not_applied)?.unwrap_or_default();
            let problem = Problem::of(&Answer {
                status,
                headers,
                body,
            });
            if let Some(session) = session.filter(|_| problem.code == "no_session") {
                session.is_unknown();
            }
            return Err(problem.error("watch"));
        }
        Ok(Events {
            response,
            unread: Vec::new(),
        })
    }
}

/// The base URL of a request.
fn place<'a>(link: &'a Link<Connection>, session: Option<&'a Session>) -> &'a str {
    session.map_or(&link.connection.base, |session| &session.base)
}

/// A stream of server-sent events.
pub(super) struct Events {
    response: Response,
    unread: Vec<u8>,
}

/// The longest event that is accepted; a gateway's events have a few hundred bytes.
const LONGEST_EVENT: usize = 64 * 1024;

impl Events {
    /// The next event and its data.
    ///
    /// # Errors
    /// [`ErrorKind::Unreachable`](palisade_core::ErrorKind::Unreachable) when the gateway has closed the stream or falls silent.
    pub(super) async fn next(&mut self) -> Result<(String, Value)> {
        let ended = || unreachable("watch", "the gateway's events have ended");
        loop {
            while let Some(end) = self.unread.windows(2).position(|pair| pair == b"\n\n") {
                let event: Vec<u8> = self.unread.drain(..end + 2).collect();
                if let Some(event) = read_event(&String::from_utf8_lossy(&event)) {
                    return Ok(event);
                }
            }
            let chunk = tokio::time::timeout(SILENCE, self.response.chunk()).await;
            let Ok(Ok(Some(chunk))) = chunk else {
                return Err(ended());
            };
            self.unread.extend_from_slice(&chunk);
            if self.unread.len() > LONGEST_EVENT {
                return Err(ended());
            }
        }
    }
}

/// The name and data of an event; `None` for a comment.
fn read_event(text: &str) -> Option<(String, Value)> {
    let field = |name: &str| {
        let mut lines = text.lines();
        lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
    };
    let data = field("data").and_then(|data| serde_json::from_str(data).ok());
    Some((field("event")?.to_owned(), data.unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_is_followed_but_never_out_of_tls() {
        let access = |tls: Option<Tls>, socket: Option<PathBuf>| Access {
            bases: Vec::new(),
            socket,
            tls,
            asked: Asked::default(),
            token: Token::None,
            timeout: Duration::from_secs(2),
            connect_timeout: Duration::from_secs(2),
        };
        let base: Arc<str> = "http://balancer:1".into();
        let plain = access(None, None);
        let encrypted = access(Some(Tls::default()), None);
        for (access, url, followed) in [
            (&plain, "http://one:7420", Some("http://one:7420")),
            (&plain, "https://one", Some("https://one")),
            (&encrypted, "https://one:7/x", Some("https://one:7")),
            (&encrypted, "http://one:7420", None),
            (&plain, "http://me:secret@one", None),
            (&plain, "file:/x", None),
            (&plain, "nothing", None),
            (&access(None, Some("/s".into())), "http://one:7420", None),
        ] {
            let expected = followed.unwrap_or(&base);
            assert_eq!(&*access.follow(&base, Some(url)), expected, "{url}");
        }
        assert_eq!(plain.follow(&base, None), base);
    }

    #[test]
    fn events_are_read_and_comments_are_not() {
        let (name, data) = read_event("event: claim\ndata: {\"id\":\"x\"}\n\n").unwrap();
        assert_eq!((name.as_str(), data["id"].as_str()), ("claim", Some("x")));
        assert!(read_event(": alive\n\n").is_none());
    }
}
