//! `alarms` and `watch`: server-sent events of each session, and of lines.

use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt, stream};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

use super::Gateway;
use super::client::Events;
use super::sessions::Session;
use palisade_core::Result;
use palisade_core::engine::{Alarm, BoxStream};
use palisade_core::report::Scope;
use palisade_kit as kit;

/// The pause before events are requested again, so that a gateway that is down is not flooded.
const PAUSE: Duration = Duration::from_millis(250);

/// The alarms for claims of this client, from the events of its sessions.
pub(super) fn alarms(engine: &Arc<Gateway>) -> BoxStream<Alarm> {
    let (known, opened) = engine.sessions.listen();
    let opened = kit::alarms::hints(opened, |session| session);
    let raised = kit::alarms::alarms(engine.sessions.raised());
    let engine = Arc::clone(engine);
    let told = stream::iter(known)
        .chain(opened)
        .flat_map_unordered(None, move |session| listen(Arc::clone(&engine), session));
    stream::select(raised, told).boxed()
}

/// The alarms of one session, until it ends.
fn listen(engine: Arc<Gateway>, session: Arc<Session>) -> BoxStream<Alarm> {
    let state = (engine, session, None::<Events>);
    let heard = stream::unfold(state, |(engine, session, events)| async move {
        if session.is_over() {
            return None;
        }
        let (events, alarms) = match events {
            Some(mut events) => match events.next().await {
                Ok((event, data)) => {
                    let alarms = told(&engine, &session, &event, &data);
                    (Some(events), alarms)
                }
                Err(_) => (None, Vec::new()),
            },
            None => {
                let path = "/v1/sessions/events";
                match engine.client.events(path, Some(&session)).await {
                    // Earlier events were missed, so all claims of the session are checked.
                    Ok(events) => (Some(events), engine.sessions.alarms(&session, None)),
                    Err(_) => {
                        tokio::time::sleep(PAUSE).await;
                        (None, Vec::new())
                    }
                }
            }
        };
        Some((stream::iter(alarms), (engine, session, events)))
    });
    heard.flatten().boxed()
}

/// The alarms that an event causes.
fn told(
    engine: &Gateway,
    session: &Arc<Session>,
    event: &str,
    data: &serde_json::Value,
) -> Vec<Alarm> {
    if event == "gap" {
        return engine.sessions.alarms(session, None);
    }
    let over = matches!(data["state"].as_str(), Some("evicted" | "lost"));
    let claim = data["id"].as_str().and_then(|id| id.parse().ok());
    match claim {
        Some(claim) if over => engine.sessions.alarms(session, Some(claim)),
        _ => Vec::new(),
    }
}

pub(super) fn watch(engine: &Arc<Gateway>, scope: &Scope) -> BoxStream<Result<()>> {
    // For one line the prefix may match other lines too; superfluous hints do no harm.
    let prefix = match scope {
        Scope::Prefix(prefix) => engine.names.prefix(prefix),
        Scope::Line(name) => engine.names.prefix(name.as_str()),
    };
    let path = format!("/v1/events?prefix={}", query(&prefix));
    let state = (Arc::clone(engine), path, None::<Events>);
    stream::unfold(state, |(engine, path, events)| async move {
        let (events, hint) = match events {
            Some(mut events) => match events.next().await {
                Ok(_) => (Some(events), Ok(())),
                Err(error) => (None, Err(error)),
            },
            // The first hint covers changes before the watch began, and in a gap.
            None => match engine.client.events(&path, None).await {
                Ok(events) => (Some(events), Ok(())),
                Err(error) => {
                    tokio::time::sleep(PAUSE).await;
                    (None, Err(error))
                }
            },
        };
        Some((hint, (engine, path, events)))
    })
    .boxed()
}

/// Encodes a value for a query.
pub(super) fn query(value: &str) -> String {
    utf8_percent_encode(value, NON_ALPHANUMERIC).to_string()
}
