//! The parts that transactions are made of.

use super::keys::{prefix_end, prefix_start};
use super::wire::{
    ASCEND, BY_CREATE, CREATE, Compare, DESCEND, DeleteRangeRequest, Done, EQUAL, GREATER,
    KeyValue, LESS, MODIFY, Op, PutRequest, RangeRequest, RequestOp, Revision, TxnRequest,
    TxnResponse,
};

/// True if the key was created at this revision; 0 for one that is not there.
pub(super) fn created_at(key: &[u8], revision: i64) -> Compare {
    Compare {
        result: EQUAL,
        target: CREATE,
        key: key.to_vec(),
        revision: Some(Revision::Create(revision)),
        range_end: Vec::new(),
    }
}

/// True if the key is there.
pub(super) fn exists(key: &[u8]) -> Compare {
    Compare {
        result: GREATER,
        ..created_at(key, 0)
    }
}

/// True if the key, when it is of an incarnation that is known, is that one; else if it is there.
pub(super) fn is_incarnation(key: &[u8], sequence: u64) -> Compare {
    match i64::try_from(sequence) {
        Ok(0) => exists(key),
        Ok(revision) => created_at(key, revision),
        // No revision is so large: nothing matches.
        Err(_) => created_at(key, -1),
    }
}

/// True if the key was last changed at this revision.
pub(super) fn unchanged(key: &[u8], revision: i64) -> Compare {
    Compare {
        target: MODIFY,
        revision: Some(Revision::Modify(revision)),
        ..created_at(key, 0)
    }
}

/// True if no key begins with `prefix`.
pub(super) fn is_empty(prefix: &str) -> Compare {
    Compare {
        range_end: prefix_end(prefix),
        ..created_at(&prefix_start(prefix), 0)
    }
}

/// True if nothing that begins with `prefix` was put after `revision`. Says nothing of deletes.
pub(super) fn nothing_put_since(prefix: &str, revision: i64) -> Compare {
    Compare {
        result: LESS,
        target: MODIFY,
        revision: Some(Revision::Modify(revision + 1)),
        ..is_empty(prefix)
    }
}

pub(super) fn put(key: impl Into<Vec<u8>>, value: Vec<u8>, lease: i64) -> RequestOp {
    let put = PutRequest {
        key: key.into(),
        value,
        lease,
        ignore_lease: false,
    };
    Op::Put(put).into()
}

pub(super) fn delete(key: impl Into<Vec<u8>>) -> RequestOp {
    let delete = DeleteRangeRequest {
        key: key.into(),
        range_end: Vec::new(),
    };
    Op::Delete(delete).into()
}

/// One key, or nothing.
pub(super) fn one(key: &[u8]) -> RangeRequest {
    RangeRequest {
        key: key.to_vec(),
        ..Default::default()
    }
}

/// All that begins with `prefix`, oldest first.
pub(super) fn all(prefix: &str) -> RangeRequest {
    RangeRequest {
        key: prefix_start(prefix),
        range_end: prefix_end(prefix),
        sort_order: ASCEND,
        sort_target: BY_CREATE,
        ..Default::default()
    }
}

/// The `count` youngest of those that begin with `prefix`, youngest first, without values.
pub(super) fn youngest(prefix: &str, count: i64) -> RangeRequest {
    RangeRequest {
        sort_order: DESCEND,
        limit: count,
        keys_only: true,
        ..all(prefix)
    }
}

pub(super) fn range(range: RangeRequest) -> RequestOp {
    Op::Range(range).into()
}

/// A transaction inside of another.
pub(super) fn txn(txn: TxnRequest) -> RequestOp {
    Op::Txn(txn).into()
}

/// The answer to the transaction inside of another.
pub(super) fn inner(response: TxnResponse) -> Option<TxnResponse> {
    let mut responses = response.responses.into_iter();
    responses.find_map(|response| match response.done {
        Some(Done::Txn(inner)) => Some(inner),
        _ => None,
    })
}

/// What the ranges of a transaction found, in order.
pub(super) fn found(response: TxnResponse) -> Vec<Vec<KeyValue>> {
    let ranges = response.responses.into_iter();
    ranges
        .filter_map(|response| match response.done {
            Some(Done::Range(range)) => Some(range.kvs),
            _ => None,
        })
        .collect()
}
