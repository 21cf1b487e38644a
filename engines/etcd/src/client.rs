//! `Client`: the calls of the engine, over a [`Connection`] to any member that answers.
//!
//! Every call is bounded by `timeout`. If a reply does not arrive in time and there is another
//! member, the connection is dropped at once.

use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, StreamExt};
use parking_lot::Mutex;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::metadata::{Ascii, MetadataMap, MetadataValue};
use tonic::transport::Channel;
use tonic::{Code, Extensions, Request, Status, Streaming};
use tonic_prost::ProstCodec;

use super::error;
use super::keys;
use super::proto::{Call, Header, LeaseKeepAliveRequest, LeaseResponse};
use super::txn;
use super::watch::{Range, Watch, Watcher};
use palisade_core::{Error, ErrorKind, Result};
use palisade_kit::replies::{LISTING, REPLY};
use palisade_kit::{Link, PerRuntime, timed};

/// The most that a reply to an operation may have. An audit lists what a lease owns, and a fenced
/// value may be as large as etcd takes.
pub(super) fn most(operation: &str) -> usize {
    match operation {
        "survey" | "audit" | "fence" => LISTING,
        _ => REPLY,
    }
}

/// A connection to one member.
#[derive(Clone)]
pub(super) struct Connection {
    grpc: tonic::client::Grpc<Channel>,
    /// The token from the login, which every request carries.
    metadata: MetadataMap,
    watcher: Arc<Mutex<Option<Arc<Watcher>>>>,
}

impl Connection {
    pub(super) fn new(channel: Channel, token: Option<MetadataValue<Ascii>>) -> Self {
        let mut metadata = MetadataMap::new();
        if let Some(token) = token {
            metadata.insert("token", token);
        }
        Self {
            grpc: tonic::client::Grpc::new(channel).max_decoding_message_size(REPLY),
            metadata,
            watcher: Arc::default(),
        }
    }

    /// The same, for replies of at most `most` bytes.
    fn with_most(mut self, most: usize) -> Self {
        self.grpc = self.grpc.max_decoding_message_size(most);
        self
    }

    /// A unary call.
    pub(super) async fn call<C: Call>(
        mut self,
        message: C,
    ) -> std::result::Result<C::Answer, Status> {
        self.grpc.ready().await.map_err(error::not_sent)?;
        let request = Request::from_parts(self.metadata, Extensions::default(), message);
        let path = PathAndQuery::from_static(C::PATH);
        let answer = self.grpc.unary(request, path, ProstCodec::default());
        Ok(answer.await?.into_inner())
    }

    /// A bidirectional stream.
    pub(super) async fn stream<C: Call>(
        mut self,
        requests: impl Stream<Item = C> + Send + 'static,
    ) -> std::result::Result<Streaming<C::Answer>, Status> {
        self.grpc.ready().await.map_err(error::not_sent)?;
        let requests = Request::from_parts(self.metadata, Extensions::default(), requests);
        let path = PathAndQuery::from_static(C::PATH);
        let answers = self.grpc.streaming(requests, path, ProstCodec::default());
        Ok(answers.await?.into_inner())
    }

    /// The single watch stream of this connection, opened on demand.
    fn watcher(&self) -> Arc<Watcher> {
        let mut watcher = self.watcher.lock();
        match &*watcher {
            Some(open) if !open.is_over() => Arc::clone(open),
            // The watcher's task gets a connection without a reference back to the watcher, which
            // would otherwise never be dropped.
            _ => Arc::clone(watcher.insert(Watcher::open(Self {
                watcher: Arc::default(),
                ..self.clone()
            }))),
        }
    }
}

/// The calls of one engine.
pub(super) struct Client {
    pub(super) links: PerRuntime<Connection>,
    pub(super) timeout: Duration,
    /// Whether there is another member to try when one does not answer.
    pub(super) several: bool,
    /// Whether requests carry a login token, which expires.
    pub(super) logs_in: bool,
}

impl Client {
    /// Calls any member that answers.
    pub(super) async fn call<C: Call>(
        &self,
        operation: &'static str,
        message: C,
    ) -> Result<C::Answer> {
        self.call_over(None, operation, |connection| connection.call(message))
            .await
    }

    /// Renews leases, all on a new stream, so that a late reply to an earlier call can't be taken
    /// for one to this call and be counted from the wrong time. Returns the replies, and the header
    /// of a write that a majority confirmed afterwards.
    pub(super) async fn keep_alive(&self, leases: &[i64]) -> Result<(Vec<LeaseResponse>, Header)> {
        let requests = leases.iter().map(|&id| LeaseKeepAliveRequest { id });
        let requests: Vec<LeaseKeepAliveRequest> = requests.collect();
        let calls = |connection: Connection| async move {
            let requests = futures_util::stream::iter(requests);
            let mut answers = connection.clone().stream(requests).await?;
            let mut answered = Vec::new();
            while let Some(answer) = answers.next().await {
                answered.push(answer?);
                if answered.len() > leases.len() {
                    let why = "more answers than requests";
                    return Err(Status::new(Code::Internal, why));
                }
            }
            // A write that changes nothing: etcd's reads are known to be stale during a change of
            // leader.
            let nothing = txn::plain(vec![txn::delete(keys::NOTHING)]);
            let confirmed = connection.call(nothing).await?;
            Ok((answered, confirmed.header.unwrap_or_default()))
        };
        self.call_over(None, "renew", calls).await
    }

    /// Starts a watch, and returns once every further change is reported; also returns the link to
    /// the member that reports.
    pub(super) async fn watch(
        &self,
        operation: &'static str,
        range: Range,
    ) -> Result<(Watch, Link<Connection>)> {
        let link = self.links.get().await?;
        let mut watch = link.connection.watcher().watch(range);
        let why = match tokio::time::timeout(self.timeout, watch.changed_since(0)).await {
            Ok(Some(_)) => return Ok((watch, link)),
            Ok(None) => "etcd has ended the watch",
            Err(_) => "the watch did not start in time",
        };
        self.links.broken(&link).await;
        Err(Error::new(ErrorKind::Unreachable, operation, why))
    }

    /// Makes calls to the member behind `link`, or to any that answers, and drops a connection that
    /// is broken.
    pub(super) async fn call_over<T, F>(
        &self,
        link: Option<&Link<Connection>>,
        operation: &'static str,
        calls: impl FnOnce(Connection) -> F,
    ) -> Result<T>
    where
        F: Future<Output = std::result::Result<T, Status>>,
    {
        let link = match link {
            Some(link) => link.clone(),
            None => self.links.get().await?,
        };
        let connection = link.connection.clone().with_most(most(operation));
        match timed(operation, self.timeout, calls(connection)).await {
            Ok(Ok(answer)) => {
                self.links.answered(&link);
                Ok(answer)
            }
            Ok(Err(status)) => {
                if self.is_over(&status) {
                    self.links.broken(&link).await;
                } else {
                    self.links.answered(&link);
                }
                Err(error::of(operation, &status, self.logs_in))
            }
            Err(late) => {
                if self.several {
                    self.links.broken(&link).await;
                } else {
                    self.links.unanswered(operation, &link).await;
                }
                Err(late)
            }
        }
    }

    /// Whether the connection is no longer usable.
    fn is_over(&self, status: &Status) -> bool {
        match status.code() {
            Code::Unavailable | Code::Unknown | Code::Internal | Code::Cancelled => true,
            Code::DeadlineExceeded => self.several,
            Code::Unauthenticated => self.logs_in,
            _ => false,
        }
    }
}

/// The revision in a reply's header.
pub(super) fn revision(header: &Option<Header>) -> i64 {
    header.as_ref().map_or(0, |header| header.revision)
}
