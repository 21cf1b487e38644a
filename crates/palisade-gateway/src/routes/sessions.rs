//! The routes of sessions: open, keep alive, listen, close.

use std::sync::Arc;

use hyper::StatusCode;
use serde_json::{Value, json};

use super::body::duration;
use super::{Answered, Asking, Routes};
use crate::answer::reply;
use crate::events;
use crate::problem::Problem;
use crate::session::{Known, Session};
use crate::wire;

/// The header with a session's secret.
pub(super) const SESSION: &str = "palisade-session";

impl Routes {
    pub(super) fn open_session(&self, asking: &Asking, asked: wire::OpenSession) -> Answered {
        let ttl = match asked.ttl.as_deref() {
            Some(ttl) => duration("ttl", ttl)?,
            None => self.client.ttl(),
        };
        let ttl = self.client.capability().explicit_ttl(ttl)?;
        if let Some(secret) = &asked.secret
            && !(secret.len() == 64 && secret.bytes().all(|byte| byte.is_ascii_hexdigit()))
        {
            return Err(Problem::bad_request(
                "a secret is 256 random bits as 64 hex digits; omit it to be given one",
            ));
        }
        let (principal, chosen) = (&asking.principal, asked.secret);
        let (session, secret) = self.sessions.open(principal, &self.client, ttl, chosen)?;
        self.sessions.extend(&session, asking.arrival)?;
        let opened = self.opened(asking, &session, &secret);
        Ok(reply(StatusCode::CREATED, &opened))
    }

    pub(super) fn opened(&self, asking: &Asking, session: &Session, secret: &str) -> Value {
        json!({
            "id": session.id,
            "secret": secret,
            "ttl_ms": session.ttl.as_millis() as u64,
            "url": self.names.url(asking.door),
        })
    }

    pub(super) fn session(&self, asking: &Asking) -> Result<Arc<Session>, Problem> {
        let secret = asking
            .headers
            .get(SESSION)
            .and_then(|secret| secret.to_str().ok());
        let Some(secret) = secret else {
            return Err(Problem::bad_request(
                "name the session by its secret in the header Palisade-Session",
            ));
        };
        self.sessions.find(&asking.principal, secret)
    }

    pub(super) fn keep_alive(&self, asking: &Asking, asked: wire::KeepAlive) -> Answered {
        let session = self.session(asking)?;
        let until = self.sessions.extend(&session, asking.arrival)?;
        let answers = asked.claims.iter().map(|id| match session.claim(id) {
            None => json!({"id": id, "state": "no_claim"}),
            Some(Known::Over(over)) => json!({"id": id, "state": over.stage.word()}),
            Some(Known::Live(claim)) => {
                // A claim whose right was taken away is not extended.
                if let Some(until) = until
                    && asking.principal.may_use(claim.asked.name.as_str())
                {
                    claim.extend(until);
                }
                self.claim_answer(asking, &session, &claim).1
            }
        });
        let answer = json!({
            "id": session.id,
            "claims": answers.collect::<Vec<_>>(),
            "draining": self.sessions.is_draining(),
            "url": self.names.url(asking.door),
        });
        Ok(reply(StatusCode::OK, &answer))
    }

    pub(super) fn session_events(&self, asking: &Asking) -> Answered {
        let session = self.session(asking)?;
        let counted = self.sessions.counters.waiting(&asking.principal)?;
        Ok(events::of_session(&session, counted))
    }

    /// Releases everything. It continues even if the client does not wait.
    pub(super) async fn close_session(&self, asking: &Asking) -> Answered {
        let session = self.session(asking)?;
        let answer = json!({"id": session.id});
        let all = Arc::clone(&self.sessions);
        let closing = tokio::spawn(async move { all.end(&session, "closed").await });
        // It can't panic, and ends with the engine's own timeouts.
        let _ = closing.await;
        Ok(reply(StatusCode::OK, &answer))
    }
}
