//! The parts of transactions: conditions, writes and reads.

use super::keys::{self, Values};
use super::proto::{
    ASCEND, BY_CREATE, CREATE, Compare, DESCEND, DeleteRangeRequest, EQUAL, GREATER, KeyValue,
    LESS, MODIFY, PutRequest, RangeRequest, RequestOp, TxnRequest, TxnResponse,
};

/// True if the key was created at this revision; revision 0 means that it is absent.
pub(super) fn created_at(key: &[u8], revision: i64) -> Compare {
    Compare {
        result: EQUAL,
        target: CREATE,
        key: key.to_vec(),
        create_revision: Some(revision),
        ..Default::default()
    }
}

/// True if the key exists.
pub(super) fn exists(key: &[u8]) -> Compare {
    Compare {
        result: GREATER,
        ..created_at(key, 0)
    }
}

/// True if the key was last modified at this revision.
pub(super) fn unchanged(key: &[u8], revision: i64) -> Compare {
    Compare {
        result: EQUAL,
        target: MODIFY,
        key: key.to_vec(),
        mod_revision: Some(revision),
        ..Default::default()
    }
}

/// The range of keys that begin with `prefix`: its first key, and the first key after it.
pub(super) fn prefix_range(prefix: &str) -> (Vec<u8>, Vec<u8>) {
    let mut end = prefix.as_bytes().to_vec();
    match end.last_mut() {
        // UTF-8 has no byte 0xff, so the last byte can always be incremented.
        Some(last) => *last += 1,
        // etcd's encoding of all keys.
        None => return (vec![0], vec![0]),
    }
    (prefix.as_bytes().to_vec(), end)
}

/// True if no key begins with `prefix`.
pub(super) fn is_empty(prefix: &str) -> Compare {
    let (start, range_end) = prefix_range(prefix);
    Compare {
        range_end,
        ..created_at(&start, 0)
    }
}

/// True if no key that begins with `prefix` was put after `revision`. It does not notice deletes.
pub(super) fn nothing_put_since(prefix: &str, revision: i64) -> Compare {
    let (start, range_end) = prefix_range(prefix);
    Compare {
        result: LESS,
        range_end,
        ..unchanged(&start, revision + 1)
    }
}

pub(super) fn put(key: impl Into<Vec<u8>>, value: Vec<u8>, lease: i64) -> RequestOp {
    RequestOp {
        put: Some(PutRequest {
            key: key.into(),
            value,
            lease,
        }),
        ..Default::default()
    }
}

/// Writes a place's key, and its owner record where that is kept apart.
pub(super) fn put_place(key: &[u8], (value, owner): Values, lease: i64) -> Vec<RequestOp> {
    let owner = owner.map(|record| put(keys::owner_key(key), record, lease));
    std::iter::once(put(key, value, lease))
        .chain(owner)
        .collect()
}

pub(super) fn delete(key: impl Into<Vec<u8>>) -> RequestOp {
    RequestOp {
        delete: Some(DeleteRangeRequest { key: key.into() }),
        ..Default::default()
    }
}

pub(super) fn read(range: RangeRequest) -> RequestOp {
    RequestOp {
        range: Some(range),
        ..Default::default()
    }
}

/// Reads one key.
pub(super) fn one(key: &[u8]) -> RangeRequest {
    RangeRequest {
        key: key.to_vec(),
        ..Default::default()
    }
}

/// Reads all keys that begin with `prefix`, oldest first.
pub(super) fn all(prefix: &str) -> RangeRequest {
    let (key, range_end) = prefix_range(prefix);
    RangeRequest {
        key,
        range_end,
        sort_order: ASCEND,
        sort_target: BY_CREATE,
        ..Default::default()
    }
}

/// Reads what decides a claim's place. Every place ahead excludes a claim to the `whole` line, so
/// the two youngest keys, without values, are enough: its own, and the nearest ahead.
pub(super) fn ahead(prefix: &str, whole: bool) -> RangeRequest {
    if !whole {
        return all(prefix);
    }
    RangeRequest {
        sort_order: DESCEND,
        limit: 2,
        keys_only: true,
        ..all(prefix)
    }
}

/// A transaction without a condition.
pub(super) fn plain(success: Vec<RequestOp>) -> TxnRequest {
    TxnRequest {
        success,
        ..Default::default()
    }
}

/// A transaction that does nothing unless all conditions are true.
pub(super) fn only_if(compare: Vec<Compare>, success: Vec<RequestOp>) -> TxnRequest {
    TxnRequest {
        compare,
        success,
        failure: Vec::new(),
    }
}

/// The results of a transaction's reads, in order.
pub(super) fn found(response: TxnResponse) -> impl Iterator<Item = Vec<KeyValue>> {
    response
        .responses
        .into_iter()
        .filter_map(|answer| Some(answer.range?.kvs))
}
