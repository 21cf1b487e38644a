//! Notifications: the alarms and changes of all servers, merged into one stream.

use std::sync::Arc;

use futures_util::{StreamExt, stream};

use super::Redlock;
use crate::notify;
use palisade_core::Result;
use palisade_core::engine::{Alarm, BoxStream};
use palisade_core::report::Scope;

/// The alarms of all servers; each of them announces an eviction.
pub(super) fn alarms(engine: &Arc<Redlock>) -> BoxStream<Alarm> {
    let nodes = engine.nodes.iter();
    stream::select_all(nodes.map(|node| notify::alarms(&node.client))).boxed()
}

/// Changes at any server. Servers that can't be watched are no error while a majority can: a change
/// that a survey shows happens at a majority.
pub(super) fn watch(engine: &Arc<Redlock>, scope: &Scope) -> BoxStream<Result<()>> {
    let changes = engine.nodes.iter().map(|node| {
        let at = node.at;
        let changes = notify::watch(&node.client, scope);
        changes.map(move |change| (at, change)).boxed()
    });
    let (mut down, most) = (
        vec![false; engine.nodes.len()],
        engine.nodes.len() - engine.quorum,
    );
    let told = stream::select_all(changes).filter_map(move |(at, change)| {
        down[at] = change.is_err();
        let blind = down.iter().filter(|down| **down).count() > most;
        let told = match change {
            Err(_) if !blind => None,
            change => Some(change),
        };
        std::future::ready(told)
    });
    told.boxed()
}
