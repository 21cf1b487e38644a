//! `Connection`: one member of the cluster, and the calls that are made of it.
//!
//! Every call is bounded by `timeout`; an answer that does not come gives the connection up as
//! soon as there is another member to turn to. Errors say whether the change may have been
//! applied, in our own words: those of the library may hold addresses.

use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, StreamExt};
use prost::Message;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::Channel;
use tonic::{Code, Request, Status, Streaming};
use tonic_prost::ProstCodec;

use super::keys;
use super::watching::Watcher;
use super::wire::{
    DeleteRangeRequest, DeleteRangeResponse, Header, LeaseKeepAliveResponse, LeaseRequest,
    RangeRequest, RangeResponse, TxnRequest, TxnResponse,
};
use crate::core::error::{Error, Kind, Result};
use crate::engines::remote::{Link, Links, timed};

/// The largest answer that is taken: a survey of very many lines.
const LARGEST: usize = 64 << 20;

/// A connection to one member.
#[derive(Clone)]
pub(super) struct Connection {
    grpc: tonic::client::Grpc<Channel>,
    token: Option<MetadataValue<Ascii>>,
    watcher: Arc<parking_lot::Mutex<Option<Arc<Watcher>>>>,
}

impl Connection {
    pub(super) fn new(channel: Channel) -> Self {
        Self {
            grpc: tonic::client::Grpc::new(channel).max_decoding_message_size(LARGEST),
            token: None,
            watcher: Arc::default(),
        }
    }

    /// The same connection, on which every request carries what the login was answered with.
    pub(super) fn with_token(self, token: MetadataValue<Ascii>) -> Self {
        Self {
            token: Some(token),
            ..self
        }
    }

    fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        if let Some(token) = &self.token {
            request.metadata_mut().insert("token", token.clone());
        }
        request
    }

    /// One question, one answer.
    pub(super) async fn ask<Q, A>(
        &self,
        path: &'static str,
        message: Q,
    ) -> std::result::Result<A, Status>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        let mut grpc = self.grpc.clone();
        grpc.ready().await.map_err(not_sent)?;
        let path = PathAndQuery::from_static(path);
        let answer = grpc.unary(self.request(message), path, ProstCodec::<Q, A>::default());
        Ok(answer.await?.into_inner())
    }

    /// A stream of questions and one of answers.
    pub(super) async fn stream<Q, A>(
        &self,
        path: &'static str,
        questions: impl Stream<Item = Q> + Send + 'static,
    ) -> std::result::Result<Streaming<A>, Status>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        let mut grpc = self.grpc.clone();
        grpc.ready().await.map_err(not_sent)?;
        let path = PathAndQuery::from_static(path);
        let request = self.request(questions);
        let answer = grpc.streaming(request, path, ProstCodec::<Q, A>::default());
        Ok(answer.await?.into_inner())
    }

    /// The one stream of watches on this connection, opened when it is needed.
    pub(super) fn watcher(&self) -> Arc<Watcher> {
        let mut watcher = self.watcher.lock();
        match &*watcher {
            Some(open) if !open.is_over() => Arc::clone(open),
            _ => Arc::clone(watcher.insert(Watcher::open(self.without_watcher()))),
        }
    }

    /// For the task of the watcher, which must not keep the watcher.
    fn without_watcher(&self) -> Self {
        Self {
            watcher: Arc::default(),
            ..self.clone()
        }
    }
}

/// The message for a user whose role lacks a right.
pub(super) const NO_RIGHT: &str = "etcd denies this user the keys; grant its role readwrite on \
                                   the prefix of the namespace and on .palisade/";

/// Marks a status of a request that never left.
const NOT_SENT: &str = "not sent";

fn not_sent(_: tonic::transport::Error) -> Status {
    Status::new(Code::Unavailable, NOT_SENT)
}

/// The calls of one engine, over whatever member answers.
pub(super) struct Rpc {
    pub(super) links: Links<Connection>,
    pub(super) timeout: Duration,
    /// Whether there is another member to turn to when one does not answer.
    pub(super) several: bool,
    /// Whether requests carry a login, which ends after a while.
    pub(super) logs_in: bool,
}

impl Rpc {
    /// Asks over `link`, and judges the link by how it goes.
    async fn judged<T>(
        &self,
        operation: &'static str,
        link: &Link<Connection>,
        asked: impl Future<Output = std::result::Result<T, Status>>,
    ) -> Result<T> {
        match timed(operation, self.timeout, asked).await {
            Ok(Ok(answer)) => {
                self.links.answered(link);
                Ok(answer)
            }
            Ok(Err(status)) => {
                if self.is_over(&status) {
                    self.links.broken(link).await;
                } else {
                    self.links.answered(link);
                }
                Err(self.error(operation, &status))
            }
            Err(late) => {
                // A renewal can't wait for a second one to be late, and a leave is sent again.
                if self.several || matches!(operation, "renew" | "leave") {
                    self.links.broken(link).await;
                } else {
                    self.links.late(link).await;
                }
                Err(late)
            }
        }
    }

    pub(super) async fn ask<Q, A>(
        &self,
        operation: &'static str,
        path: &'static str,
        message: Q,
    ) -> Result<A>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        let link = self.links.get().await?;
        self.ask_over(&link, operation, path, message).await
    }

    /// Asks the member that `link` leads to, and no other.
    pub(super) async fn ask_over<Q, A>(
        &self,
        link: &Link<Connection>,
        operation: &'static str,
        path: &'static str,
        message: Q,
    ) -> Result<A>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        let asked = link.connection.ask(path, message);
        self.judged(operation, link, asked).await
    }

    pub(super) async fn range(
        &self,
        operation: &'static str,
        request: RangeRequest,
    ) -> Result<RangeResponse> {
        self.ask(operation, "/etcdserverpb.KV/Range", request).await
    }

    pub(super) async fn txn(
        &self,
        operation: &'static str,
        request: TxnRequest,
    ) -> Result<TxnResponse> {
        self.ask(operation, "/etcdserverpb.KV/Txn", request).await
    }

    /// Keeps leases alive: all on one stream of their own, so that no late answer to an earlier
    /// call can be taken for one to this, and counted from the wrong time. Answers with what
    /// came, and with the header of a write that a majority confirmed afterwards.
    pub(super) async fn keep_alive(
        &self,
        leases: &[i64],
    ) -> Result<(Vec<LeaseKeepAliveResponse>, Header)> {
        let link = self.links.get().await?;
        let questions: Vec<LeaseRequest> = leases.iter().map(|&id| LeaseRequest { id }).collect();
        let asked = async {
            let connection = &link.connection;
            let questions = futures_util::stream::iter(questions);
            let mut answers = connection
                .stream("/etcdserverpb.Lease/LeaseKeepAlive", questions)
                .await?;
            let mut answered = Vec::new();
            while let Some(answer) = answers.next().await {
                answered.push(answer?);
            }
            // A write, though of nothing: reads are known to be stale while leaders change.
            let nothing = DeleteRangeRequest {
                key: keys::NOTHING.into(),
                ..Default::default()
            };
            let path = "/etcdserverpb.KV/DeleteRange";
            let confirmed: DeleteRangeResponse = connection.ask(path, nothing).await?;
            Ok((answered, confirmed.header.unwrap_or_default()))
        };
        self.judged("renew", &link, asked).await
    }

    /// Whether the connection is of no use any more.
    fn is_over(&self, status: &Status) -> bool {
        match status.code() {
            Code::Unavailable | Code::Unknown | Code::Internal | Code::Cancelled => true,
            Code::DeadlineExceeded => self.several,
            Code::Unauthenticated => self.logs_in,
            _ => false,
        }
    }

    /// Our own sentence for a refusal or a failure.
    pub(super) fn error(&self, operation: &'static str, status: &Status) -> Error {
        let said = status.message();
        let fail = |kind, message: &str| Error::new(kind, operation, message);
        match status.code() {
            Code::PermissionDenied => fail(Kind::Denied, NO_RIGHT),
            Code::InvalidArgument if said.contains("user name is empty") => fail(
                Kind::Denied,
                "etcd asks for a login; give user and password_file, or a client certificate",
            ),
            Code::InvalidArgument if said.contains("authentication failed") => {
                fail(Kind::Denied, "etcd refuses the user or the password")
            }
            // The login ended, or a member that was restarted has forgotten it: the next
            // connection logs in again. Checked before anything is done.
            Code::Unauthenticated if self.logs_in => {
                fail(Kind::Unreachable, "the login has ended; logging in again")
            }
            Code::Unauthenticated => fail(Kind::Denied, "etcd refuses the login"),
            Code::NotFound if said.contains("lease not found") => {
                fail(Kind::Lost, "the lease has ended")
            }
            Code::ResourceExhausted if said.contains("space exceeded") => fail(
                Kind::Unusable,
                "etcd has used up its quota and takes no writes; compact, defragment, and disarm \
                 the alarm",
            ),
            Code::ResourceExhausted => fail(Kind::Unreachable, "etcd is too busy to take requests"),
            Code::Unavailable if said == NOT_SENT => {
                fail(Kind::Unreachable, "the connection is down")
            }
            Code::Unavailable if said.contains("no leader") => {
                fail(Kind::Unreachable, "the cluster has no leader")
            }
            Code::Unavailable
            | Code::Unknown
            | Code::Internal
            | Code::Cancelled
            | Code::DeadlineExceeded => fail(
                Kind::Unreachable,
                "the connection broke, or the cluster could not agree in time",
            )
            .maybe_applied(),
            Code::FailedPrecondition if said.contains("space") || said.contains("corrupt") => {
                fail(Kind::Unusable, "etcd has raised an alarm and refuses")
            }
            Code::Unimplemented => fail(
                Kind::Unusable,
                "the server does not know this request; etcd 3.4 or newer is needed",
            ),
            _ => fail(Kind::Internal, "etcd refuses a request of the engine")
                .maybe_applied()
                .with("code", status.code() as i32),
        }
    }
}

/// The term in which a member answered.
pub(super) fn term(header: Option<&Header>) -> u64 {
    header.map_or(0, |header| header.raft_term)
}

/// The revision of an answer.
pub(super) fn revision(header: Option<&Header>) -> i64 {
    header.map_or(0, |header| header.revision)
}
