//! The messages of etcd's gRPC API that the engine uses, written by hand for prost's derive, so
//! that building palisade does not need `protoc`.
//!
//! Field numbers are those of etcd's `rpc.proto` and `kv.proto` (Apache-2.0, the etcd authors),
//! stable since 3.0. Unused fields are left out; prost skips them in replies. A oneof is written as
//! optional fields, which are the same on the wire.

use prost::Message;

/// Declares messages as a `.proto` file does: the type on the wire, the field, its number.
macro_rules! messages {
    ($($(#[$about:meta])* $message:ident {
        $($(#[$what:meta])* [$($wire:tt)*] $field:ident: $type:ty = $number:tt;)*
    })*) => {$(
        $(#[$about])*
        #[derive(Clone, PartialEq, Message)]
        pub(super) struct $message {
            $($(#[$what])* #[prost($($wire)*, tag = $number)] pub $field: $type,)*
        }
    )*};
}

messages! {
    Header {
        [uint64] cluster_id: u64 = "1";
        [int64] revision: i64 = "3";
        [uint64] raft_term: u64 = "4";
    }

    KeyValue {
        [bytes = "vec"] key: Vec<u8> = "1";
        [int64] create_revision: i64 = "2";
        [int64] mod_revision: i64 = "3";
        [bytes = "vec"] value: Vec<u8> = "5";
        [int64] lease: i64 = "6";
    }

    RangeRequest {
        [bytes = "vec"] key: Vec<u8> = "1";
        [bytes = "vec"] range_end: Vec<u8> = "2";
        [int64] limit: i64 = "3";
        /// The state at this revision; zero for the latest.
        [int64] revision: i64 = "4";
        [int32] sort_order: i32 = "5";
        [int32] sort_target: i32 = "6";
        /// A read from this member alone, without a quorum.
        [bool] serializable: bool = "7";
        [bool] keys_only: bool = "8";
        [int64] max_create_revision: i64 = "13";
    }

    RangeResponse {
        [message, optional] header: Option<Header> = "1";
        [message, repeated] kvs: Vec<KeyValue> = "2";
    }

    PutRequest {
        [bytes = "vec"] key: Vec<u8> = "1";
        [bytes = "vec"] value: Vec<u8> = "2";
        [int64] lease: i64 = "3";
    }

    DeleteRangeRequest {
        [bytes = "vec"] key: Vec<u8> = "1";
    }

    /// Exactly one is set.
    RequestOp {
        [message, optional] range: Option<RangeRequest> = "1";
        [message, optional] put: Option<PutRequest> = "2";
        [message, optional] delete: Option<DeleteRangeRequest> = "3";
    }

    ResponseOp {
        [message, optional] range: Option<RangeResponse> = "1";
    }

    Compare {
        [int32] result: i32 = "1";
        [int32] target: i32 = "2";
        [bytes = "vec"] key: Vec<u8> = "3";
        /// With the target `CREATE`.
        [int64, optional] create_revision: Option<i64> = "5";
        /// With the target `MODIFY`.
        [int64, optional] mod_revision: Option<i64> = "6";
        /// With the target `VALUE`.
        [bytes = "vec", optional] value: Option<Vec<u8>> = "7";
        [bytes = "vec"] range_end: Vec<u8> = "64";
    }

    TxnRequest {
        [message, repeated] compare: Vec<Compare> = "1";
        [message, repeated] success: Vec<RequestOp> = "2";
        [message, repeated] failure: Vec<RequestOp> = "3";
    }

    TxnResponse {
        [message, optional] header: Option<Header> = "1";
        [bool] succeeded: bool = "2";
        [message, repeated] responses: Vec<ResponseOp> = "3";
    }

    LeaseGrantRequest {
        [int64] ttl: i64 = "1";
        [int64] id: i64 = "2";
    }

    LeaseKeepAliveRequest {
        [int64] id: i64 = "1";
    }

    LeaseRevokeRequest {
        [int64] id: i64 = "1";
    }

    LeaseTimeToLiveRequest {
        [int64] id: i64 = "1";
        [bool] keys: bool = "2";
    }

    /// The reply to a grant, and to a keepalive.
    LeaseResponse {
        [message, optional] header: Option<Header> = "1";
        [int64] id: i64 = "2";
        [int64] ttl: i64 = "3";
    }

    LeaseRevokeResponse {}

    LeaseTimeToLiveResponse {
        [int64] ttl: i64 = "3";
        [int64] granted_ttl: i64 = "4";
        [bytes = "vec", repeated] keys: Vec<Vec<u8>> = "5";
    }

    /// Exactly one is set.
    WatchRequest {
        [message, optional] create: Option<WatchCreateRequest> = "1";
        [message, optional] cancel: Option<WatchCancelRequest> = "2";
    }

    WatchCreateRequest {
        [bytes = "vec"] key: Vec<u8> = "1";
        [bytes = "vec"] range_end: Vec<u8> = "2";
        [int32, repeated] filters: Vec<i32> = "5";
        /// Chosen by the client, so that the watch is known before the reply; 3.4 and newer.
        [int64] watch_id: i64 = "7";
    }

    WatchCancelRequest {
        [int64] watch_id: i64 = "1";
    }

    WatchResponse {
        [message, optional] header: Option<Header> = "1";
        [int64] watch_id: i64 = "2";
        [bool] created: bool = "3";
        [bool] canceled: bool = "4";
        [message, repeated] events: Vec<Event> = "11";
    }

    Event {
        [message, optional] kv: Option<KeyValue> = "2";
    }

    AuthenticateRequest {
        [string] name: String = "1";
        [string] password: String = "2";
    }

    AuthenticateResponse {
        [string] token: String = "2";
    }

    StatusRequest {}

    StatusResponse {
        [message, optional] header: Option<Header> = "1";
        [string] version: String = "2";
        [int64] size: i64 = "3";
        [uint64] leader: u64 = "4";
        [int64] size_in_use: i64 = "9";
        /// Since 3.6.
        [int64] quota: i64 = "12";
    }

    /// Without fields it lists the alarms that are raised.
    AlarmRequest {}

    AlarmResponse {
        [message, repeated] alarms: Vec<AlarmMember> = "2";
    }

    AlarmMember {
        [int32] alarm: i32 = "2";
    }
}

/// A request message, with its gRPC method.
pub(super) trait Call: Message + 'static {
    const PATH: &'static str;
    type Answer: Message + Default + 'static;
}

macro_rules! calls {
    ($($request:ident: $path:literal -> $answer:ident;)*) => {$(
        impl Call for $request {
            const PATH: &'static str = concat!("/etcdserverpb.", $path);
            type Answer = $answer;
        }
    )*};
}

calls! {
    AlarmRequest: "Maintenance/Alarm" -> AlarmResponse;
    AuthenticateRequest: "Auth/Authenticate" -> AuthenticateResponse;
    LeaseGrantRequest: "Lease/LeaseGrant" -> LeaseResponse;
    LeaseKeepAliveRequest: "Lease/LeaseKeepAlive" -> LeaseResponse;
    LeaseRevokeRequest: "Lease/LeaseRevoke" -> LeaseRevokeResponse;
    LeaseTimeToLiveRequest: "Lease/LeaseTimeToLive" -> LeaseTimeToLiveResponse;
    RangeRequest: "KV/Range" -> RangeResponse;
    StatusRequest: "Maintenance/Status" -> StatusResponse;
    TxnRequest: "KV/Txn" -> TxnResponse;
    WatchRequest: "Watch/Watch" -> WatchResponse;
}

/// `RangeRequest.sort_order`.
pub(super) const ASCEND: i32 = 1;
pub(super) const DESCEND: i32 = 2;
/// `RangeRequest.sort_target`: the create revision.
pub(super) const BY_CREATE: i32 = 2;
/// `Compare.result`.
pub(super) const EQUAL: i32 = 0;
pub(super) const GREATER: i32 = 1;
pub(super) const LESS: i32 = 2;
/// `Compare.target`.
pub(super) const CREATE: i32 = 1;
pub(super) const MODIFY: i32 = 2;
/// The value, compared as bytes.
pub(super) const VALUE: i32 = 3;
/// `WatchCreateRequest.filters`: no puts.
pub(super) const NO_PUT: i32 = 0;
/// `AlarmMember.alarm`: the quota is exhausted; the members' data differ.
pub(super) const NO_SPACE: i32 = 1;
pub(super) const CORRUPT: i32 = 2;
